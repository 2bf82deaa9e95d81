"""A device is given its configuration (`enroll`) and looked over (`check`); not while it serves.

::

    finding.py       one line of a report
    enrollment.py    what a device is to be told: from flags, a file, or questions
    questions.py     those questions
    template.py      values into the explained configuration, comments kept
    credentials.py   what a key, a certificate and a password must be
    placing.py       files into their places, whole, with their owners and modes
    enroll.py        all of that in order, with a real connection before anything changes
    reach.py         a connection to the broker, or why there is none
    rights.py        what the broker lets this device do, and how long a message takes
    machine.py, identity.py, models.py, service.py    the parts of a report
    doctor.py        the report
    commands.py      the command line of both
"""
