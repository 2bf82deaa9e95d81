"""Ctrl-C while a model is compiled: the process ends at once, and leaves nothing.

TVM calls Python functions. KeyboardInterrupt that leaves one of them passes through C++, which makes another
exception of it, loses it, or damages its memory. So while TVM works, Ctrl-C does not raise: temporary folders
are removed and the process ends. Elsewhere it raises, and files that are being written are taken back.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Final, NoReturn

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

EXIT_INTERRUPTED: Final = 128 + signal.SIGINT

_TVM: Final = frozenset({"tvm", "tvm_ffi"})


@contextlib.contextmanager
def ending_at_once(clean_up: Callable[[], None]) -> Iterator[None]:
    """Let Ctrl-C end the process inside the block; does nothing outside the main thread.

    `clean_up`: called before the process ends while TVM works; otherwise KeyboardInterrupt leaves the block.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave() -> NoReturn:
        try:
            clean_up()
            atexit._run_exitfuncs()  # removes temporary folders, as `sys.exit` would
        finally:
            os._exit(EXIT_INTERRUPTED)

    def on_signal(_number: int, frame: FrameType | None) -> None:
        if _is_in_tvm(frame):
            leave()
        raise KeyboardInterrupt

    def on_unraisable(lost: UnraisableHookArgs) -> None:
        # Python goes on after an exception in a finaliser.
        if issubclass(lost.exc_type, KeyboardInterrupt):
            leave()
        reported(lost)

    handler, reported = signal.signal(signal.SIGINT, on_signal), sys.unraisablehook
    sys.unraisablehook = on_unraisable
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        sys.unraisablehook = reported


def _is_in_tvm(frame: FrameType | None) -> bool:
    """Return whether a function of TVM's is running, itself or through what it calls."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] in _TVM:
            return True
        frame = frame.f_back
    return False
