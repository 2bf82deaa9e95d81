"""Calls that read or write the disk, away from the event loop.

Promises: the event loop goes on while the disk is slow or does not respond, and so does every other call. A
call that never returns costs one thread, and does not keep the process from ending. There are never more than
`MAX_THREADS` of them.
Leaves to others: how long to wait, and the order of calls that depend on each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, ParamSpec, TypeVar

from agent.errors import DiskError, StoreError

# Each part of the agent waits for its own last call, so a disk that works has a few threads at a time.
MAX_THREADS: Final = 128
_NAME: Final = "disk "

_P = ParamSpec("_P")
_T = TypeVar("_T")


def within(limit_s: float, function: Callable[_P, _T], *arguments: _P.args, **options: _P.kwargs) -> _T:
    """Call a function in a thread of its own before there is an event loop, and return what it returns.

    Raises
    ------
    DiskError
        If it does not return within `limit_s`.
    Exception
        If the function raises it.
    """
    outcome: Future[_T] = Future()

    def work() -> None:
        try:
            result = function(*arguments, **options)
        except BaseException as error:  # noqa: BLE001 - the outermost frame of a thread; the caller gets it
            outcome.set_exception(error)
        else:
            outcome.set_result(result)

    threading.Thread(target=work, name=_name_of(function), daemon=True).start()
    try:
        return outcome.result(limit_s)
    except TimeoutError as error:
        if outcome.done():
            raise  # of the function
        raise DiskError(f"the disk does not respond within {limit_s:g} s") from error


async def in_disk_thread(function: Callable[_P, _T], *arguments: _P.args, **options: _P.kwargs) -> _T:
    """Call a function in a thread of its own, and return what it returns.

    `asyncio.to_thread` has few threads for everything, which calls that hang would use up, and the process
    waits for them at its end.

    Raises
    ------
    StoreError
        If no thread can be started.
    DiskError
        If as many calls as there may be wait for the disk.
    Exception
        If the function raises it.
    """
    if calls_under_way() >= MAX_THREADS:
        raise DiskError(f"the disk does not respond: {MAX_THREADS} calls wait for it")
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[_T] = loop.create_future()

    def settle(result: _T | None, error: BaseException | None) -> None:
        if outcome.cancelled():
            return
        if error is None:
            outcome.set_result(result)  # type: ignore[arg-type]  # without an error it is the result
        else:
            outcome.set_exception(error)

    def work() -> None:
        result, raised = None, None
        try:
            result = function(*arguments, **options)
        except BaseException as error:  # noqa: BLE001 - the outermost frame of a thread; the caller gets it
            raised = error
        with contextlib.suppress(RuntimeError):  # the loop was closed in the meantime
            loop.call_soon_threadsafe(settle, result, raised)

    try:
        threading.Thread(target=work, name=_name_of(function), daemon=True).start()
    except RuntimeError as error:
        raise StoreError(f"no thread can be started: {error}") from error
    return await outcome


def calls_under_way() -> int:
    """Return how many calls have not returned."""
    return sum(thread.name.startswith(_NAME) for thread in threading.enumerate())


def _name_of(function: Callable[..., object]) -> str:
    return _NAME + getattr(function, "__name__", type(function).__name__)
