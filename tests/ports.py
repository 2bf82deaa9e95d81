"""Ports for the servers that tests start.

They are below those that Linux gives to clients (`ip_local_port_range` begins at 32768), and each of xdist's
workers has a range of its own, so two tests never pick the same one.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

FIRST_PORT = 10_000
PORTS_PER_WORKER = 1_000
WORKERS = 20


def _ports() -> Iterator[int]:
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = FIRST_PORT + worker % WORKERS * PORTS_PER_WORKER
    start = os.getpid() % PORTS_PER_WORKER  # another run may be going on beside this one
    while True:
        for step in range(PORTS_PER_WORKER):
            yield first + (start + step) % PORTS_PER_WORKER


_next_port = _ports()


def free_port() -> int:
    """Return a port of the loopback interface that no process listens on."""
    for port in _next_port:
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("unreachable: ports are handed out in a circle")
