"""The measuring process's own side: a session with a board or this machine, and what it holds there."""

from __future__ import annotations

import os
import pickle
import signal
import struct
from collections.abc import Callable, Sequence
from typing import Any

from builder.boards.measuring_process import (
    KERNEL,
    BoardAddress,
    BuiltKernel,
    RunnerOptions,
    Timing,
    read_frame,
)
from builder.boards.remote_functions import PREFIX, BoardState, register


class MeasuringSession:
    """The process's own side: a TVM session and what it holds there."""

    def __init__(self, place: BoardAddress) -> None:
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

    def is_alive(self) -> bool:
        """Whether the board still answers, and takes files: then an error is the candidate's."""
        try:
            self._remote.upload(bytearray(b"alive"), target="alive")
            self._remote.remove("alive")
        except (RuntimeError, ValueError, OSError):
            return False
        return True

    def state(self) -> BoardState:
        """How the board fares, unknown where its server does not tell."""
        return BoardState() if self._board is None else BoardState.from_json(str(self._board()))

    def load(self, code: BuiltKernel, options: RunnerOptions) -> Any:  # noqa: ANN401 - TVM's module
        """Send a shared object and load it there."""
        self._files += 1
        name = f"kernel{self._files}.so"  # the dynamic linker takes a second file of one name for the first
        self._remote.upload(bytearray(code.content), target=name)
        module = self._remote.load_module(name)
        self._remote.remove(name)
        if options.threads is not None:
            module["edge_set_threads"](options.threads)
        return module

    def arguments(self, code: BuiltKernel) -> list[Any]:
        """Buffers on the board with random numbers in them."""
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
        """TVM's time evaluator of a candidate."""
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

    def measure(self, code: BuiltKernel, options: RunnerOptions) -> Timing:
        """Time a kernel."""
        arguments = self.arguments(code)
        module = self.load(code, options)
        seconds = self.evaluator(module, options, options.repeat)(*arguments).results
        return Timing(tuple(float(s) for s in seconds), self.state())

    def compare(
        self, untuned: BuiltKernel, tuned: BuiltKernel, pairs: int, options: RunnerOptions
    ) -> tuple[tuple[float, float], ...]:
        """Time two kernels in turn."""
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
        """Call one of `board_functions`, sending files before and fetching others after."""
        try:
            function = self._remote.get_function(f"{PREFIX}{name}")
        except (AttributeError, RuntimeError, ValueError) as error:
            raise LookupError(
                "the board's server knows no bundles: start it with `edgebundle rpc-server`"
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
    """Answer requests on standard input until it closes, with a session that `make` opens."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    incoming = os.dup(0)
    outgoing = os.dup(1)
    quiet = os.open(os.devnull, os.O_RDWR)
    os.dup2(quiet, 0)
    os.dup2(quiet, 1)  # what TVM prints is no frame
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
        except Exception as error:  # noqa: BLE001 - the outermost loop: TVM raises what it pleases
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
    # Threads of kernels and sessions that are half open would keep the interpreter from leaving.
    os._exit(0)
