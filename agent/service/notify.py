"""Notifies systemd (sd_notify(3)) that the agent is ready, alive or stopping.

Promises: sends a datagram to the socket that systemd names in the environment; without one, nothing is sent.
The agent counts as alive only while its event loop runs; systemd's watchdog restarts one that is blocked.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Mapping
from typing import Final

_log = logging.getLogger(__name__)

READY: Final = "READY=1"
STOPPING: Final = "STOPPING=1"
_WATCHDOG: Final = "WATCHDOG=1"
# While the event loop is blocked no answer is sent; this long is worth a warning.
_LATE_S: Final = 0.5
_PULSE_S: Final = 1.0


class Notifier:
    """Sends notifications to systemd.

    Parameters
    ----------
    environment
        The process's environment; NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID are read.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        # sd_notify(3): "@" stands for the zero byte of an abstract socket.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        usec, pid = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", "")
        ours = not pid or pid == str(os.getpid())
        self.watchdog_s: float | None = int(usec) / 1e6 if usec.isdigit() and int(usec) and ours else None

    def notify(self, *lines: str) -> None:
        """Send assignments, each `NAME=value`."""
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
                sock.setblocking(False)
                sock.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            _log.warning("cannot notify systemd of %s: %s", lines[0], error)

    async def pulse(self) -> None:
        """Report to systemd, from within the event loop, that the loop runs; warn if it was blocked."""
        pulse_s = _PULSE_S if self.watchdog_s is None else min(_PULSE_S, self.watchdog_s / 3)
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(pulse_s)
            late_s = time.monotonic() - before_s - pulse_s
            if late_s > _LATE_S:
                _log.warning("the event loop was blocked for %.1f s", late_s)
            if self.watchdog_s is not None:
                self.notify(_WATCHDOG)
