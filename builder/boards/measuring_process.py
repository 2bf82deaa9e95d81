"""The measuring process: times candidates on this machine or on a board, and can be killed.

A kernel may hang, crash or overwrite foreign memory. It does so in this process or on the board, while the
main process waits with a time limit. The two exchange length-prefixed pickles over pipes; both ends are ours.
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

MAX_FRAME_BYTES: Final = 1 << 31  # two bundles of half a gigabyte each, and their inputs
KERNEL: Final = "kernel"  # the name of the function in a shared object with one candidate
START_TIMEOUT_S: Final = 120.0  # loading TVM takes a second or two, and a minute on a busy machine
MAX_PLAUSIBLE_S: Final = 600.0  # no kernel takes ten minutes per call
MIN_PLAUSIBLE_S: Final = 1e-9  # nor less than a few cycles


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """How candidates are timed, under the names that TVMC uses.

    Attributes
    ----------
    number, repeat, min_repeat_ms
        Calls per measurement, number of measurements, and the shortest duration of one; `number` is raised
        until a measurement takes that long.
    cooldown_ms
        Pause after each measurement, for boards that get hot.
    timeout_s
        Time limit for one candidate, including its upload and the pauses.
    cache_flush
        Whether to flush the arguments from the caches before each measurement (`number` becomes 1).
    threads
        Threads that a kernel uses; None for one per CPU of the board.
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
    """The other end of a session: a server that the tracker named, or this machine.

    `host`, `port`: the server's address; `host` is None for this machine.
    `matchkey`: the tracker's ticket for one session.
    `session_s`: time limit that the server sets on the session.
    """

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
    """A kernel in a shared object, which may hold others too.

    Attributes
    ----------
    content
        Bytes of the shared object.
    arguments
        Dtype and shape of each argument.
    name
        The kernel's name in the shared object.
    """

    content: bytes
    arguments: tuple[tuple[str, tuple[int, ...]], ...]
    name: str = KERNEL


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds per call in each repeat, and the state of the board just after."""

    seconds: tuple[float, ...]
    state: BoardState


class MeasuringProcess:
    """The main process's handle on the measuring process. Use it from one thread at a time.

    `session`: the module that the process runs: `builder.boards.measuring_session`, or one that measures
        something other than time.
    """

    def __init__(self, session: str = "builder.boards.measuring_session") -> None:
        self._session = session
        self._process: subprocess.Popen[bytes] | None = None
        self._address: BoardAddress | None = None

    @property
    def address(self) -> BoardAddress | None:
        """The other end of the open session; None if none is open."""
        return self._address

    def open(self, address: BoardAddress, timeout_s: float) -> BoardState:
        """Open a session with a board and return the board's state.

        Raises `BoardError` if the board does not answer in time.
        """
        self.close()
        state: BoardState = self._ask("open", (address,), START_TIMEOUT_S + timeout_s)
        self._address = address
        return state

    def measure(self, kernel: BuiltKernel, options: RunnerOptions) -> Timing:
        """Time a kernel.

        Raises `CandidateError` if the kernel does not load or run on the board.
        Raises `BoardError` if the board hangs, has gone away, or sends an invalid answer.
        """
        timing: Timing = self._ask("measure", (kernel, options), options.timeout_s)
        check_plausible(timing.seconds)
        return timing

    def compare(
        self, untuned: BuiltKernel, tuned: BuiltKernel, pairs: int, options: RunnerOptions
    ) -> tuple[tuple[float, float], ...]:
        """Time two kernels alternately, `pairs` times; return seconds per call as (untuned, tuned)."""
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
        """Call one of `builder.boards.remote_functions`.

        `name`: the function's name without its prefix.
        `request`: its JSON argument, in which `{path:NAME}` stands for a file's path on the board.
        `timeout_s`: time limit for the whole call, transfers included.
        Result: the JSON reply, and the contents of the files in `wanted`.
        """
        answer: tuple[str, tuple[bytes, ...]] = self._ask(
            "call", (name, request, tuple(files), tuple(wanted)), timeout_s
        )
        return answer

    def kill(self) -> None:
        """Kill the process; the next `open` starts another."""
        process, self._process, self._address = self._process, None, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        process.kill()
        process.wait()

    def close(self) -> None:
        """Close the session; the process stays for the next one."""
        if self._address is not None:
            try:
                self._ask("close", (), 10.0)
            except MeasureFault:
                self.kill()
        self._address = None

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
        # In its own session, so that Ctrl-C reaches only the main process, which records the results first.
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
    """Refuse times that no kernel can take.

    Raises
    ------
    BoardError
        If `seconds` is empty, or contains a time that is negative, zero, NaN or longer than ten minutes.
    """
    for value in seconds:
        if not MIN_PLAUSIBLE_S <= value <= MAX_PLAUSIBLE_S:
            raise BoardError(f"expected a kernel's time, got {value!r} s")
    if not seconds:
        raise BoardError("expected a kernel's times, got none")


def write_frame(fd: int, message: object, deadline: float) -> None:
    """Pickle `message` and write it; raise TimeoutError at `deadline`, a time of `time.monotonic`."""
    data = pickle.dumps(message)
    view = memoryview(struct.pack("<Q", len(data)) + data)
    while view:
        if not select.select([], [fd], [], max(0.0, deadline - time.monotonic()))[1]:
            raise TimeoutError
        with contextlib.suppress(BlockingIOError):
            view = view[os.write(fd, view[: 1 << 16]) :]


def read_frame(fd: int, deadline: float | None) -> Any:  # noqa: ANN401
    """Read a message; raise TimeoutError at `deadline`, EOFError if the other end has closed."""
    (size,) = struct.unpack("<Q", _bytes(fd, 8, deadline))
    if size > MAX_FRAME_BYTES:
        raise EOFError(f"expected a frame of at most {MAX_FRAME_BYTES} bytes, got {size}")
    return pickle.loads(_bytes(fd, size, deadline))  # noqa: S301 - the other end is ours


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
