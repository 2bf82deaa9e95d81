"""The report of `edge-agent check`.

::

    machine.py, identity.py, models.py, service.py    what is on the device
    reach.py         a connection to the broker, or why there is none
    rights.py        what the broker lets this device do, and how long a message takes
    doctor.py        runs all of them
"""
