"""Child processes that are killed just before a system call that changes the disk."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from typing import Any

# Not fsync: a kill before it leaves the disk as a kill before the next of these does.
MUTATING = ("write", "pwrite", "replace", "unlink", "ftruncate", "mkdir")


def in_child(scenario: Callable[[], object]) -> int:
    """Run a scenario in a child process; return the signal that ended it, 0 for none."""
    pid = os.fork()
    if pid == 0:
        try:
            scenario()
        except BaseException:  # noqa: BLE001 - the outermost frame of this process
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status)
    assert os.WEXITSTATUS(status) == 0, "the scenario failed"
    return 0


def kill_at_system_call(at: int) -> None:
    """Kill this process before its call number `at` that changes the disk; the first has number 0."""
    seen: list[str] = []

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*arguments: Any, **options: Any) -> Any:
            seen.append(name)
            if len(seen) > at:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return checked

    for name in MUTATING:
        setattr(os, name, counted(name, getattr(os, name)))
