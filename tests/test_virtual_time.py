"""The event loop with a clock of its own."""

from __future__ import annotations

import asyncio
import socket

import pytest

from tests import virtual_time
from tests.virtual_time import VirtualLoop


def test_what_happens_between_two_looks_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()

    def the_last_call_ends_now() -> int:
        theirs.send(b"x")
        return 0

    async def wait_until_readable() -> None:
        is_readable = asyncio.Event()
        asyncio.get_running_loop().add_reader(ours, is_readable.set)
        await asyncio.sleep(0)
        monkeypatch.setattr(virtual_time, "calls_under_way", the_last_call_ends_now)
        await is_readable.wait()

    with ours, theirs, asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(wait_until_readable())
