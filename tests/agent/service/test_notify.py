"""Notifications to systemd."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from pathlib import Path

import pytest

from agent.service import notify
from agent.service.notify import READY, Notifier
from tests.patience import PATIENCE_S, until


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


async def test_watchdog_is_fed_while_the_event_loop_runs(tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(address)
        sock.setblocking(False)
        pulse = asyncio.create_task(Notifier({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "30000"}).pulse())
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(3):
                assert await asyncio.get_running_loop().sock_recv(sock, 100) == b"WATCHDOG=1"
        pulse.cancel()


async def test_blocked_event_loop_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notify, "_LATE_S", 0.05)
    pulse = asyncio.create_task(Notifier({"WATCHDOG_USEC": "30000"}).pulse())
    await asyncio.sleep(0)  # it starts to wait
    time.sleep(0.1)
    await until(lambda: bool(caplog.messages))
    pulse.cancel()
    assert caplog.messages[0].startswith("the event loop was blocked for ")
