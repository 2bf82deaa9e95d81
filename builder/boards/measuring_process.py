"""Measuring: a process of its own that times candidates, here or on a board, and that can be killed.

A kernel may hang, crash or write where it should not; all of that happens in this process or on the board,
and
the process that conducts waits with a time limit. The two speak length-prefixed pickles over pipes: both ends
are ours.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from builder.boards.remote_functions import BoardState
from builder.errors import BoardError, CandidateError, MeasureFault

MAX_FRAME_BYTES: Final = 1 << 31  # two bundles of half a gigabyte and their inputs
KERNEL: Final = "kernel"  # the name of a candidate's function in its shared object
START_TIMEOUT_S: Final = 120.0  # loading TVM takes a second or two, and a minute on a machine that is busy
MAX_PLAUSIBLE_S: Final = 600.0  # no kernel takes ten minutes a call
MIN_PLAUSIBLE_S: Final = 1e-9  # nor less than a cycle or so


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """How candidates are timed, by the names that TVMC's users know.

    Attributes
    ----------
    number, repeat, min_repeat_ms
        Calls a measurement, measurements, and the least duration of one, for which `number` grows.
    cooldown_ms
        Pause after each measurement, for boards that get hot.
    timeout_s
        For one candidate, its upload and cooldowns included.
    cache_flush
        Whether the arguments are out of the caches before each measurement (number becomes 1).
    threads
        Kernel threads, None for the board's CPUs.
    """

    number: int = 4
    repeat: int = 3
    min_repeat_ms: float = 5.0
    cooldown_ms: float = 0.0
    timeout_s: float = 20.0
    cache_flush: bool = False
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class BoardAddress:
    """Where a session goes: a server that a tracker named, or this machine (host None)."""

    host: str | None = None
    port: int = 0
    matchkey: str = ""
    session_s: float = 0.0

    @property
    def name(self) -> str:
        """The board's name."""
        return "local" if self.host is None else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class BuiltKernel:
    """A kernel as a shared object, and the dtypes and shapes of its arguments."""

    content: bytes
    arguments: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class Timing:
    """What timing gave: seconds of a call in each repeat, and how the board fared just after."""

    seconds: tuple[float, ...]
    state: BoardState


class MeasuringProcess:
    """The process, as who conducts sees it. Not for two threads at once.

    Parameters
    ----------
    session
        The module that it runs: `builder.boards.measuring_session`, or one that serves a session of another
        kind, which measures something else than time.
    """

    def __init__(self, session: str = "builder.boards.measuring_session") -> None:
        self._session = session
        self._process: subprocess.Popen[bytes] | None = None
        self._place: BoardAddress | None = None

    @property
    def place(self) -> BoardAddress | None:
        """Where the open session goes."""
        return self._place

    def open(self, place: BoardAddress, timeout_s: float) -> BoardState:
        """Connect to a board.

        Raises
        ------
        BoardError
            If it does not answer in time.
        """
        self.close()
        state: BoardState = self._ask("open", (place,), START_TIMEOUT_S + timeout_s)
        self._place = place
        return state

    def measure(self, code: BuiltKernel, options: RunnerOptions) -> Timing:
        """Time a kernel.

        Raises
        ------
        CandidateError
            If it does not load or run there.
        BoardError
            If the board hangs, is gone, or answers nonsense.
        """
        timing: Timing = self._ask("measure", (code, options), options.timeout_s)
        check_plausible(timing.seconds)
        return timing

    def compare(
        self, untuned: BuiltKernel, tuned: BuiltKernel, pairs: int, options: RunnerOptions
    ) -> tuple[tuple[float, float], ...]:
        """Time two kernels in turn; seconds of each pair."""
        result: tuple[tuple[float, float], ...] = self._ask(
            "compare", (untuned, tuned, pairs, options), options.timeout_s * 4
        )
        check_plausible([s for pair in result for s in pair])
        return result

    def call(
        self,
        name: str,
        request: str,
        files: Sequence[tuple[str, bytes]],
        wanted: Sequence[str],
        timeout_s: float,
    ) -> tuple[str, tuple[bytes, ...]]:
        """Call one of `builder.boards.remote_functions`, sending files first and fetching others after.

        Paths in `request` are written `{path:NAME}` and become those on the board.
        """
        answer: tuple[str, tuple[bytes, ...]] = self._ask(
            "call", (name, request, tuple(files), tuple(wanted)), timeout_s
        )
        return answer

    def kill(self) -> None:
        """End the process, whatever it does; the next `open` starts another."""
        process, self._process, self._place = self._process, None, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        process.kill()
        process.wait()

    def close(self) -> None:
        """Close the session; the process stays for the next."""
        if self._place is not None:
            try:
                self._ask("close", (), 10.0)
            except MeasureFault:
                self.kill()
        self._place = None

    def _ask(self, verb: str, arguments: tuple[Any, ...], timeout_s: float) -> Any:  # noqa: ANN401
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        deadline = time.monotonic() + timeout_s
        try:
            write_frame(process.stdin.fileno(), (verb, arguments), deadline)
            kind, value = read_frame(process.stdout.fileno(), deadline)
        except TimeoutError as error:
            self.kill()
            raise BoardError(f"no answer within {timeout_s:g} s") from error
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            code = process.poll()
            self.kill()
            raise BoardError(f"the measuring process ended ({code})") from error
        if kind == "candidate":
            raise CandidateError(value)
        if kind == "board":
            self.kill()
            raise BoardError(value)
        return value

    def _start(self) -> subprocess.Popen[bytes]:
        # A session of its own: Ctrl-C goes to who conducts, which ends this one when all is recorded.
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and modules
            [sys.executable, "-m", self._session],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        return self._process


def check_plausible(seconds: Sequence[float]) -> None:
    """Refuse times that no kernel has.

    Raises
    ------
    BoardError
        If one is negative, zero, not a number, or longer than ten minutes.
    """
    for value in seconds:
        if not MIN_PLAUSIBLE_S <= value <= MAX_PLAUSIBLE_S:
            raise BoardError(f"expected a kernel's time, got {value!r} s")
    if not seconds:
        raise BoardError("expected a kernel's times, got none")


def write_frame(fd: int, message: object, deadline: float) -> None:
    """Send a message."""
    data = pickle.dumps(message)
    view = memoryview(struct.pack("<Q", len(data)) + data)
    while view:
        if not select.select([], [fd], [], max(0.0, deadline - time.monotonic()))[1]:
            raise TimeoutError
        with contextlib.suppress(BlockingIOError):
            view = view[os.write(fd, view[: 1 << 16]) :]


def read_frame(fd: int, deadline: float | None) -> Any:  # noqa: ANN401
    """Receive a message."""
    (size,) = struct.unpack("<Q", _bytes(fd, 8, deadline))
    if size > MAX_FRAME_BYTES:
        raise EOFError("a frame that is too large")
    return pickle.loads(_bytes(fd, size, deadline))  # noqa: S301 - our own other end


def _bytes(fd: int, size: int, deadline: float | None) -> bytes:
    parts: list[bytes] = []
    while size:
        if deadline is not None and not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
