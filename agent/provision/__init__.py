"""Setting up a device (`enroll`) and checking it (`check`); nothing here runs while the agent serves.

::

    enrollment.py    the values that a device is enrolled with: from flags, a file, or questions
    questions.py     those questions
    template.py      writes values into the commented configuration and keeps its comments
    credentials.py   checks keys, certificates and passwords
    files.py         writes files whole, with their owners and modes
    enroll.py        all of that in order, with a real connection before anything changes
    checks/          the report on a device, and its parts
    finding.py       one line of that report
    commands.py      the command line of both
"""
