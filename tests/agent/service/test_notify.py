"""Notifications to systemd."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from agent.service.notify import READY, Notifier


@pytest.mark.parametrize("abstract", [True, False])
def test_lines_arrive_at_the_named_socket(tmp_path: Path, abstract: bool) -> None:
    address = f"@edge-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind("\0" + address[1:] if abstract else address)
        Notifier({"NOTIFY_SOCKET": address}).notify(READY, "STATUS=here")
        assert sock.recv(100) == b"READY=1\nSTATUS=here"


def test_without_systemd_nothing_happens() -> None:
    notifier = Notifier({})
    notifier.notify(READY)
    assert notifier.watchdog_s is None


def test_socket_that_is_gone_does_not_stop_the_agent(tmp_path: Path) -> None:
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "none")}).notify(READY)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "nonsense"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
    ],
)
def test_watchdog_is_fed_only_when_it_is_ours(environment: dict[str, str], expected: float | None) -> None:
    assert Notifier(environment).watchdog_s == expected
