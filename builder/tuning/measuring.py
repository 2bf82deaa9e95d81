"""Measuring: a process of its own that times candidates, here or on a board, and that can be killed.

A kernel may hang, crash or write where it should not; all of that happens in this process or on the board, and
the process that conducts waits with a time limit. The two speak length-prefixed pickles over pipes: both ends
are ours.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from builder.tuning.board_functions import PREFIX, BoardState, register

MAX_FRAME_BYTES = 1 << 31  # two bundles of half a gigabyte and their inputs
START_TIMEOUT_S = 120.0  # loading TVM takes a second or two, and a minute on a machine that is busy
MAX_PLAUSIBLE_S = 600.0  # no kernel takes ten minutes a call
MIN_PLAUSIBLE_S = 1e-9  # nor less than a cycle or so


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class Place:
    """Where a session goes: a server that a tracker named, or this machine (host None)."""

    host: str | None = None
    port: int = 0
    matchkey: str = ""
    session_s: float = 0.0

    @property
    def name(self) -> str:
        """The board's name."""
        return "local" if self.host is None else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Code:
    """A kernel as a shared object, and the dtypes and shapes of its arguments."""

    content: bytes
    arguments: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Timing:
    """What timing gave: seconds of a call in each repeat, and how the board fared just after."""

    seconds: tuple[float, ...]
    state: BoardState


class MeasureFault(Exception):  # noqa: N818 - its leaves are the errors
    """A measurement that gave no result."""


class CandidateError(MeasureFault):
    """The board said no: the candidate's fault, or the request's."""


class BoardError(MeasureFault):
    """The board went away, hung, or answered nonsense."""


class MeasureProcess:
    """The process, as who conducts sees it. Not for two threads at once."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._place: Place | None = None

    @property
    def place(self) -> Place | None:
        """Where the open session goes."""
        return self._place

    def open(self, place: Place, timeout_s: float) -> BoardState:
        """Connect to a board.

        Raises
        ------
        BoardError
            It does not answer in time.
        """
        self.close()
        state: BoardState = self._ask("open", (place,), START_TIMEOUT_S + timeout_s)
        self._place = place
        return state

    def measure(self, code: Code, options: RunnerOptions) -> Timing:
        """Time a kernel.

        Raises
        ------
        CandidateError
            It does not load or run there.
        BoardError
            The board hangs, is gone, or answers nonsense.
        """
        timing: Timing = self._ask("measure", (code, options), options.timeout_s)
        check_plausible(timing.seconds)
        return timing

    def compare(
        self, untuned: Code, tuned: Code, pairs: int, options: RunnerOptions
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
        """Call one of `builder.tuning.board_functions`, sending files first and fetching others after.

        Paths in `request` are written ``{path:NAME}`` and become those on the board.
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
            _write(process.stdin.fileno(), (verb, arguments), deadline)
            kind, value = _read(process.stdout.fileno(), deadline)
        except TimeoutError as e:
            self.kill()
            raise BoardError(f"no answer within {timeout_s:g} s") from e
        except (OSError, EOFError, pickle.UnpicklingError) as e:
            code = process.poll()
            self.kill()
            raise BoardError(f"the measuring process ended ({code})") from e
        if kind == "candidate":
            raise CandidateError(value)
        if kind == "board":
            self.kill()
            raise BoardError(value)
        return value

    def _start(self) -> subprocess.Popen[bytes]:
        # A session of its own: Ctrl-C goes to who conducts, which ends this one when it has saved its records.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "builder.tuning.measuring"],
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
        One is negative, zero, not a number, or longer than ten minutes.
    """
    for value in seconds:
        if not MIN_PLAUSIBLE_S <= value <= MAX_PLAUSIBLE_S:
            raise BoardError(f"expected a kernel's time, got {value!r} s")
    if not seconds:
        raise BoardError("expected a kernel's times, got none")


def _write(fd: int, message: object, deadline: float) -> None:
    data = pickle.dumps(message)
    view = memoryview(struct.pack("<Q", len(data)) + data)
    while view:
        if not select.select([], [fd], [], max(0.0, deadline - time.monotonic()))[1]:
            raise TimeoutError
        with contextlib.suppress(BlockingIOError):
            view = view[os.write(fd, view[: 1 << 16]) :]


def _read(fd: int, deadline: float | None) -> Any:  # noqa: ANN401
    (size,) = struct.unpack("<Q", _read_bytes(fd, 8, deadline))
    if size > MAX_FRAME_BYTES:
        raise EOFError("a frame that is too large")
    return pickle.loads(_read_bytes(fd, size, deadline))  # noqa: S301 - our own other end


def _read_bytes(fd: int, size: int, deadline: float | None) -> bytes:
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


class _Session:
    """The process's own side: a TVM session and what it holds there."""

    def __init__(self, place: Place) -> None:
        from tvm import rpc

        if place.host is None:
            self._remote = rpc.LocalSession()
        else:
            self._remote = rpc.connect(
                place.host, place.port, place.matchkey, session_timeout=place.session_s
            )
        self._device = self._remote.cpu(0)
        self._files = 0
        self._arguments: tuple[object, list[Any]] | None = None
        try:
            self._board = self._remote.get_function(f"{PREFIX}board")
        except (AttributeError, RuntimeError, ValueError):
            self._board = None  # TVM's own server, which says nothing of itself

    def state(self) -> BoardState:
        return BoardState() if self._board is None else BoardState.from_json(str(self._board()))

    def load(self, code: Code, options: RunnerOptions) -> Any:  # noqa: ANN401 - TVM's module
        self._files += 1
        name = f"kernel{self._files}.so"  # the dynamic linker takes a second file of one name for the first
        self._remote.upload(bytearray(code.content), target=name)
        module = self._remote.load_module(name)
        self._remote.remove(name)
        if options.threads is not None:
            module["edge_set_threads"](options.threads)
        return module

    def arguments(self, code: Code) -> list[Any]:
        if self._arguments is None or self._arguments[0] != code.arguments:
            import tvm

            self._arguments = None  # the old ones go before the new ones come
            fill = self._remote.get_function("tvm.contrib.random.random_fill_for_measure")
            tensors = [tvm.runtime.empty(shape, dtype, self._device) for dtype, shape in code.arguments]
            for tensor in tensors:
                fill(tensor)
            self._device.sync()
            self._arguments = (code.arguments, tensors)
        return self._arguments[1]

    def evaluator(self, module: Any, options: RunnerOptions, repeat: int) -> Any:  # noqa: ANN401
        flush = options.cache_flush
        return module.time_evaluator(
            KERNEL,
            self._device,
            number=1 if flush else options.number,
            repeat=repeat,
            min_repeat_ms=0 if flush else max(0, round(options.min_repeat_ms)),
            cooldown_interval_ms=max(0, round(options.cooldown_ms)),
            repeats_to_cooldown=1,
            f_preproc="cache_flush_cpu_non_first_arg" if flush else "",
        )

    def measure(self, code: Code, options: RunnerOptions) -> Timing:
        arguments = self.arguments(code)
        module = self.load(code, options)
        seconds = self.evaluator(module, options, options.repeat)(*arguments).results
        return Timing(tuple(float(s) for s in seconds), self.state())

    def compare(
        self, untuned: Code, tuned: Code, pairs: int, options: RunnerOptions
    ) -> tuple[tuple[float, float], ...]:
        arguments = self.arguments(untuned)
        timers = [self.evaluator(self.load(code, options), options, 1) for code in (untuned, tuned)]
        result = []
        for index in range(pairs):
            seconds = [0.0, 0.0]
            for which in (0, 1) if index % 2 == 0 else (1, 0):
                seconds[which] = float(timers[which](*arguments).results[0])
            result.append((seconds[0], seconds[1]))
        return tuple(result)

    def call(
        self, name: str, request: str, files: Sequence[tuple[str, bytes]], wanted: Sequence[str]
    ) -> tuple[str, tuple[bytes, ...]]:
        try:
            function = self._remote.get_function(f"{PREFIX}{name}")
        except (AttributeError, RuntimeError, ValueError) as e:
            raise LookupError(
                "the board's server knows no bundles: start it with `edgebundle rpc-server`"
            ) from e
        path_of = self._remote.get_function("tvm.rpc.server.workpath")
        names = {file for file, _ in files} | set(wanted)
        for file, content in files:
            self._remote.upload(bytearray(content), target=file)
        for file in names:
            request = request.replace(f"{{path:{file}}}", str(path_of(file)))
        answer = str(function(request))
        fetched = tuple(bytes(self._remote.download(file)) for file in wanted)
        for file in names:
            self._remote.remove(file)
        return answer, fetched


KERNEL = "kernel"  # the name of a candidate's function in its shared object
_GONE = (
    "socket",
    "connection",
    "rpc server",
    "sessiontimeout",
    "recv",
    "channel",
    "shut down",
    "broken pipe",
)


def serve() -> None:
    """Answer requests on standard input until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    incoming = os.dup(0)
    outgoing = os.dup(1)
    quiet = os.open(os.devnull, os.O_RDWR)
    os.dup2(quiet, 0)
    os.dup2(quiet, 1)  # what TVM prints is no frame
    register()
    session: _Session | None = None
    while True:
        try:
            verb, arguments = _read(incoming, None)
        except EOFError:
            return
        try:
            value: Any = None
            if verb == "open":
                session = _Session(*arguments)
                value = session.state()
            elif verb == "close" or session is None:
                session = None
            else:
                value = getattr(session, verb)(*arguments)
            answer: tuple[str, Any] = ("value", value)
        except Exception as e:  # noqa: BLE001 - the outermost loop: TVM raises what it pleases
            lines = [line for line in str(e).strip().splitlines() if line.strip()]
            text = (lines[-1] if lines else type(e).__name__).strip()[:300]
            gone = verb == "open" or any(word in str(e).lower() for word in _GONE)
            answer = ("board" if gone else "candidate", text)
        data = pickle.dumps(answer)
        data = struct.pack("<Q", len(data)) + data
        while data:
            data = data[os.write(outgoing, data) :]


if __name__ == "__main__":
    serve()
    # Threads of kernels and sessions that are half open would keep the interpreter from leaving.
    os._exit(0)
