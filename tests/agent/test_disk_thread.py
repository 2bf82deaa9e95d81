"""Calls to a disk that is slow, fails, or does not respond."""

from __future__ import annotations

import asyncio
import threading

import pytest

from agent.disk_thread import MAX_THREADS, in_disk_thread
from agent.errors import DiskError, StoreError


async def test_result_and_exception_reach_the_caller() -> None:
    assert await in_disk_thread(int, "7") == 7
    with pytest.raises(ValueError, match="invalid literal"):
        await in_disk_thread(int, "x")


async def test_calls_that_hang_do_not_hold_up_others() -> None:
    back = threading.Event()
    hanging = [asyncio.ensure_future(in_disk_thread(back.wait)) for _ in range(50)]
    assert await in_disk_thread(int, "7") == 7
    assert not any(call.done() for call in hanging)
    back.set()
    assert all(await asyncio.gather(*hanging))


async def test_disk_that_does_not_respond_costs_a_bounded_number_of_threads() -> None:
    back = threading.Event()
    hanging = [asyncio.ensure_future(in_disk_thread(back.wait)) for _ in range(MAX_THREADS)]
    await asyncio.sleep(0)
    with pytest.raises(DiskError, match="the disk does not respond"):
        await in_disk_thread(int, "7")
    back.set()
    assert all(await asyncio.gather(*hanging))


async def test_result_that_nobody_waits_for_is_dropped() -> None:
    back = threading.Event()
    call = asyncio.ensure_future(in_disk_thread(back.wait))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    back.set()
    assert await in_disk_thread(int, "7") == 7


async def test_without_threads_the_call_fails_and_the_agent_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(StoreError, match="no thread can be started"):
        await in_disk_thread(int, "7")
