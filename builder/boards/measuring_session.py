"""The program that the measuring process runs: one session with a board or with this machine."""

from __future__ import annotations

import os
import pickle
import signal
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

from builder.boards.measuring_process import (
    BoardAddress,
    BuiltKernel,
    RunnerOptions,
    Timing,
    read_frame,
)
from builder.boards.remote_functions import PREFIX, BoardState, register

KEPT: Final = 2  # loaded shared objects that are kept: a batch of candidates, and one to compare with


class MeasuringSession:
    """A TVM session, and the buffers that it holds on the board."""

    def __init__(self, address: BoardAddress) -> None:
        from tvm import rpc

        if address.host is None:
            self._remote = rpc.LocalSession()
        else:
            self._remote = rpc.connect(
                address.host, address.port, address.matchkey, session_timeout=address.session_s
            )
        self._device = self._remote.cpu(0)
        self._files = 0
        self._loaded: list[tuple[bytes, int | None, Any]] = []
        self._arguments: tuple[object, list[Any]] | None = None
        try:
            self._board = self._remote.get_function(f"{PREFIX}board")
        except (AttributeError, RuntimeError, ValueError):
            self._board = None  # TVM's own server does not offer it

    def is_alive(self) -> bool:
        """Whether the board still answers and accepts files; then an error is the candidate's fault."""
        try:
            self._remote.upload(bytearray(b"alive"), target="alive")
            self._remote.remove("alive")
        except (RuntimeError, ValueError, OSError):
            return False
        return True

    def state(self) -> BoardState:
        """Read the board's state; all of it is unknown if the board's server does not offer it."""
        return BoardState() if self._board is None else BoardState.from_json(str(self._board()))

    def load(self, kernel: BuiltKernel, options: RunnerOptions) -> Any:  # noqa: ANN401 - TVM's module
        """Return a kernel's shared object as a module loaded on the board; send it if it is new."""
        for content, threads, module in self._loaded:
            if content == kernel.content and threads == options.threads:
                return module
        self._files += 1
        name = f"kernel{self._files}.so"  # the dynamic linker would not load a second file of the same name
        self._remote.upload(bytearray(kernel.content), target=name)
        module = self._remote.load_module(name)
        self._remote.remove(name)
        if options.threads is not None:
            module["edge_set_threads"](options.threads)
        self._loaded = [*self._loaded[1 - KEPT :], (kernel.content, options.threads, module)]
        return module

    def arguments(self, kernel: BuiltKernel) -> list[Any]:
        """Return buffers on the board, filled with random numbers, for a kernel's arguments."""
        if self._arguments is None or self._arguments[0] != kernel.arguments:
            import tvm

            self._arguments = None  # free the old ones first
            fill = self._remote.get_function("tvm.contrib.random.random_fill_for_measure")
            tensors = [tvm.runtime.empty(shape, dtype, self._device) for dtype, shape in kernel.arguments]
            for tensor in tensors:
                fill(tensor)
            self._device.sync()
            self._arguments = (kernel.arguments, tensors)
        return self._arguments[1]

    def evaluator(self, kernel: BuiltKernel, options: RunnerOptions, repeat: int) -> Any:  # noqa: ANN401
        """Return TVM's time evaluator for a candidate, which is loaded first."""
        flush = options.cache_flush
        return self.load(kernel, options).time_evaluator(
            kernel.name,
            self._device,
            number=1 if flush else options.number,
            repeat=repeat,
            min_repeat_ms=0 if flush else max(0, round(options.min_repeat_ms)),
            cooldown_interval_ms=max(0, round(options.cooldown_ms)),
            repeats_to_cooldown=1,
            f_preproc="cache_flush_cpu_non_first_arg" if flush else "",
        )

    def measure(self, kernel: BuiltKernel, options: RunnerOptions) -> Timing:
        """Time a kernel; return seconds per call in each repeat, and the board's state."""
        arguments = self.arguments(kernel)
        seconds = self.evaluator(kernel, options, options.repeat)(*arguments).results
        return Timing(tuple(float(s) for s in seconds), self.state())

    def compare(
        self, untuned: BuiltKernel, tuned: BuiltKernel, pairs: int, options: RunnerOptions
    ) -> tuple[tuple[float, float], ...]:
        """Time two kernels alternately; return seconds per call as (untuned, tuned)."""
        arguments = self.arguments(untuned)
        timers = [self.evaluator(kernel, options, 1) for kernel in (untuned, tuned)]
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
        """Call one of `builder.boards.remote_functions`; send files before, and fetch others after."""
        try:
            function = self._remote.get_function(f"{PREFIX}{name}")
        except (AttributeError, RuntimeError, ValueError) as error:
            raise LookupError(
                "the board's server cannot run bundles: start it with `edgebundle rpc-server`"
            ) from error
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


def serve(make: Callable[[BoardAddress], MeasuringSession] = MeasuringSession) -> None:
    """Answer requests from standard input until it closes; `make` opens the session with a board."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    incoming = os.dup(0)
    outgoing = os.dup(1)
    quiet = os.open(os.devnull, os.O_RDWR)
    os.dup2(quiet, 0)
    os.dup2(quiet, 1)  # TVM prints to stdout, which must carry only frames
    register()
    session: MeasuringSession | None = None
    while True:
        try:
            verb, arguments = read_frame(incoming, None)
        except EOFError:
            return
        try:
            value: Any = None
            if verb == "open":
                session = make(*arguments)
                value = session.state()
            elif verb == "close" or session is None:
                session = None
            else:
                value = getattr(session, verb)(*arguments)
            answer: tuple[str, Any] = ("value", value)
        except Exception as error:  # noqa: BLE001 - the outermost loop: TVM raises anything
            lines = [line for line in str(error).strip().splitlines() if line.strip()]
            text = (lines[-1] if lines else type(error).__name__).strip()[:300]
            gone = verb == "open" or session is None or not session.is_alive()
            answer = ("board" if gone else "candidate", text)
        data = pickle.dumps(answer)
        data = struct.pack("<Q", len(data)) + data
        while data:
            data = data[os.write(outgoing, data) :]


if __name__ == "__main__":
    serve()
    # Kernel threads and half-open sessions would keep the interpreter from exiting.
    os._exit(0)
