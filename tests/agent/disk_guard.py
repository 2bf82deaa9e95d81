"""Calls that may wait for the disk and that the agent makes on its event loop: there must be none.

The guard knows the functions below, and SQLite. It reports a call that code of `agent` makes in a task of its
own or in a callback of the loop; what a test calls itself is the test's business. It does not count

- imports, the lines of a traceback, and what the kernel answers from memory (/proc, /sys, /dev)
- the answers' database, which is in memory (`docs/decisions/0017-reduced-service.md`)
"""

from __future__ import annotations

import functools
import io
import os
import sqlite3
import ssl
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).parents[2]
_AGENT: Final = f"{ROOT / 'agent'}{os.sep}"
_TESTS: Final = f"{ROOT / 'tests'}{os.sep}"
_NO_DISK: Final = ("/proc", "/sys", "/dev", ":memory:")
_EXEMPT: Final = ("agent/service/requests/answers.py",)
_OF_OS: Final = (
    *("open", "stat", "lstat", "listdir", "scandir", "replace", "rename", "unlink", "remove", "mkdir"),
    *("statvfs", "access", "fsync"),
)
_FUNCTIONS: Final = (*((os, name) for name in _OF_OS), (io, "open"))
_METHODS: Final = (
    *((sqlite3.Connection, name) for name in ("execute", "executemany", "executescript", "backup", "close")),
    *((ssl.SSLContext, name) for name in ("load_cert_chain", "load_verify_locations", "load_default_certs")),
)


class DiskGuard:
    """Records the calls.

    Attributes
    ----------
    calls
        One line for each: the function, its first argument, and where in `agent` it was called.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []

    def watch(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that notes the call, and calls `function`."""

        @functools.wraps(function)
        def watched(*arguments: Any, **options: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                self.note(name, arguments[0] if arguments else "")
            return function(*arguments, **options)

        return watched

    def note(self, name: str, target: object) -> None:
        """Record a call on the main thread, if the agent made it by itself."""
        if isinstance(target, str | Path) and str(target).startswith(_NO_DISK):
            return
        place: str | None = None
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            file = frame.f_code.co_filename
            if file.startswith(_TESTS) or "importlib" in file or file.endswith("linecache.py"):
                return
            if place is None and file.startswith(_AGENT):
                place = f"{file.removeprefix(f'{ROOT}{os.sep}')}:{frame.f_lineno} {frame.f_code.co_name}"
            if file.endswith("asyncio/events.py"):
                break
            frame = frame.f_back
        if frame is not None and place is not None and not place.startswith(_EXEMPT):
            self.calls.append(f"{name}({target}) in {place}")


class _Watched(sqlite3.Connection):
    """A connection whose methods can be replaced."""


@pytest.fixture(autouse=True)
def disk_guard(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Fail a test in which the agent waits for the disk on its event loop."""
    guard = DiskGuard()
    for place, name in _FUNCTIONS:
        monkeypatch.setattr(place, name, guard.watch(name, getattr(place, name)))
    monkeypatch.setattr("builtins.open", io.open)
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", functools.partial(connect, factory=_Watched))
    for owner, name in _METHODS:
        target = _Watched if owner is sqlite3.Connection else owner
        monkeypatch.setattr(target, name, guard.watch(name, getattr(owner, name)))
    yield guard
    assert guard.calls == []
