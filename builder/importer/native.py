"""Calls into onnx's and ONNX Runtime's native code with a user's model, in a process of their own.

Promises a result or a `NativeError`, whatever the native code does: it may crash, hang or fill the memory,
and only `native_program.py` dies of it. One such process serves all models of this one. It is started with
the first of them, or earlier by `start`, and again when it has died; it ends with this process, on Ctrl-C,
and after a minute without work. Threads take turns, and a fork has its own.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import numpy as np
import onnx
import onnx.onnx_cpp2py_export
from numpy.typing import NDArray

from builder.errors import NativeCrashError, NativeError
from builder.importer import native_program

# The largest known models take a second, on a slow machine ten; large weights are not sent.
SECONDS: Final = 30.0
_BYTES_A_SECOND: Final = 1 << 20
MEMORY_BYTES: Final = 4 << 30
# What is folded may be a weight of some gigabytes, which is copied several times.
_MEMORY_A_BYTE: Final = 8
_ALL_MEMORY: Final = 1 << 62
# ONNX takes integer vectors for shapes, and 140 bytes for each number of every sum of them.
_MOST_PROPAGATED: Final = 1 << 16
_SHAPES: Final = (onnx.TensorProto.INT32, onnx.TensorProto.INT64)
_TOOLS: Final[Mapping[str, str]] = {
    "infer_shapes": "onnx's shape inference",
    "convert_version": "onnx's version converter",
    "inline": "onnx's inliner",
    "inline_selected": "onnx's inliner",
    "check": "onnx's checker",
    "evaluate": "ONNX Runtime",
    "open": "ONNX Runtime",
    "run": "ONNX Runtime",
}
# A run of a whole model: minutes for the largest, and as much memory as there is.
RUN_SECONDS: Final = 1800.0


class NativeProcess:
    """A process that answers one call after the other.

    `seconds`, `memory_bytes`: what a call may take, besides what its size adds.
    """

    def __init__(self, seconds: float = SECONDS, memory_bytes: int = MEMORY_BYTES) -> None:
        self._seconds, self._memory_bytes = seconds, memory_bytes
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()

    def start(self) -> None:
        """Start it if it does not run, without waiting for it."""
        with self._lock:
            self._started()

    def ask(
        self, call: str, arguments: Sequence[object], blobs: Sequence[Any]
    ) -> tuple[dict[str, Any], list[bytes]]:
        """Make one call and return its reply.

        Raises `NativeCrashError` if the process died of it.
        Raises `NativeError` if the library refuses.
        """
        size = sum(memoryview(blob).nbytes for blob in blobs)
        memory_bytes = self._memory_bytes + size * _MEMORY_A_BYTE
        seconds = self._seconds + size / _BYTES_A_SECOND
        if call in ("open", "run"):
            seconds, memory_bytes = RUN_SECONDS, _ALL_MEMORY
        request = {"call": call, "arguments": arguments, "seconds": seconds, "memory_bytes": memory_bytes}
        with self._lock:
            try:
                # It may have ended a moment ago, for want of work.
                reply = self._exchange(request, blobs) or self._exchange(request, blobs)
            except BaseException:
                self._end()
                raise
            if reply is None:
                raise NativeCrashError(f"{_TOOLS[call]} does not start")
        header, results = reply
        if header.get("memory"):
            raise NativeCrashError(f"{_TOOLS[call]} needs more than {memory_bytes >> 20} MiB")
        if "error" in header:
            raise NativeError(header["error"])
        return header, results

    def close(self) -> None:
        """End it; it is started again at the next call."""
        if self._owner == os.getpid():
            with self._lock:
                self._end()

    def _exchange(
        self, request: dict[str, Any], blobs: Sequence[Any]
    ) -> tuple[dict[str, Any], list[bytes]] | None:
        """Send a request and return its reply; None if the process had ended before."""
        requests, replies = self._started()
        try:
            native_program.send(requests, request, blobs)
            return native_program.receive(replies)
        except (BrokenPipeError, EOFError) as error:
            status = self._end(killed=False)
            if not status:
                return None
            tool = _TOOLS[request["call"]]
            if status == -signal.SIGALRM:
                raise NativeCrashError(f"{tool} took longer than {request['seconds']:.0f} s") from error
            how = f"crashed ({_signal_name(-status)})" if status < 0 else f"ended with status {status}"
            raise NativeCrashError(f"{tool} {how}", is_repeatable=status < 0) from error

    def _started(self) -> tuple[IO[bytes], IO[bytes]]:
        if self._process is None:
            program = Path(native_program.__file__).resolve()
            self._process = subprocess.Popen(  # noqa: S603 - our own program
                [sys.executable, "-I", "-S", str(program)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=program.anchor,
                start_new_session=True,  # Ctrl-C is for this process, which ends the other
            )
            path = [str(Path(entry).resolve()) for entry in sys.path]
            extension = onnx.onnx_cpp2py_export.__file__
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # the first request says so
                native_program.send(self._process.stdin, {"extension": extension, "path": path})
        requests, replies = self._process.stdin, self._process.stdout
        assert requests is not None
        assert replies is not None
        return requests, replies

    def _end(self, *, killed: bool = True) -> int:
        """End the process and return its status."""
        process, self._process = self._process, None
        if process is None:
            return 0
        if killed:
            process.kill()
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()
        return process.wait()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@functools.cache
def _process_of(_pid: int) -> NativeProcess:
    process = NativeProcess()
    atexit.register(process.close)
    return process


def start() -> None:
    """Start the process, so that it is ready when the model has been read."""
    _process_of(os.getpid()).start()


def infer_shapes(model: onnx.ModelProto, *, strict: bool) -> onnx.ModelProto:
    """Infer types and shapes, also from constants, unless there is a vector of very many integers.

    Parameters
    ----------
    model
        The model, without large weights.
    strict
        Whether to refuse shapes that contradict each other.
    """
    kinds = [value.type.tensor_type for value in model.graph.input]  # large weights are among them
    vectors = [kind for kind in kinds if kind.elem_type in _SHAPES and len(kind.shape.dim) == 1]
    longest = max((kind.shape.dim[0].dim_value for kind in vectors), default=0)
    return _model("infer_shapes", [strict, strict, longest <= _MOST_PROPAGATED], model)


def convert_version(model: onnx.ModelProto, version: int) -> onnx.ModelProto:
    """Convert a model to another opset."""
    return _model("convert_version", [version], model)


def inline_functions(model: onnx.ModelProto, *, convert: bool) -> onnx.ModelProto:
    """Inline a model's own functions, and convert them to its opset on the way."""
    return _model("inline", [convert], model)


def inline_operators(model: onnx.ModelProto, operators: Collection[tuple[str, str]]) -> onnx.ModelProto:
    """Replace operators, each a domain and a name, by ONNX's definitions."""
    return _model("inline_selected", [sorted(operators)], model)


def check(model: onnx.ModelProto) -> None:
    """Run onnx's checker."""
    _ask("check", [], [model.SerializeToString()])


class SessionInput(NamedTuple):
    """An input of a session: its name, its type such as `tensor(float)`, and its dimensions."""

    name: str
    type: str
    shape: list[Any]


class FileSession:
    """A model of a user's, opened in ONNX Runtime without its optimiser, as an `InferenceSession` is used.

    Parameters
    ----------
    source
        The file, or a model in memory, which is written to a file that lives as long as the session.
    threads
        How many may run it; 0 for as many as ONNX Runtime likes.

    Raises
    ------
    NativeError
        If ONNX Runtime refuses it, or crashes.
    """

    def __init__(self, source: Path | onnx.ModelProto, threads: int) -> None:
        if isinstance(source, onnx.ModelProto):
            self._written = tempfile.NamedTemporaryFile(suffix=".onnx")  # noqa: SIM115 - it is kept
            self._written.write(source.SerializeToString())
            self._written.flush()
            source = Path(self._written.name)
        self._file = [str(source.resolve()), threads]
        header, _ = _ask("open", self._file, [])
        self._inputs = [SessionInput(*each) for each in header["inputs"]]

    def get_inputs(self) -> list[SessionInput]:
        """Return what describes the inputs."""
        return self._inputs

    def run(self, names: Sequence[str] | None, feeds: Mapping[str, NDArray[Any]]) -> list[Any]:
        """Return the outputs with these names: arrays, lists of them or of dictionaries, `[]` for others.

        Raises
        ------
        NativeError
            If ONNX Runtime refuses the inputs, or crashes.
        """
        fed, blobs = _fed(feeds)
        header, results = _ask("run", [*self._file, names, fed], blobs)
        rest = iter(results)
        return [_received(each, rest) for each in header["made"]]


def _received(described: list[Any], rest: Iterator[bytes]) -> Any:  # noqa: ANN401 - what a model answers
    """Return an output that `native_program` describes; `rest` has the bytes of its numbers."""
    kind, *how = described
    if kind == "array":
        return np.frombuffer(next(rest), np.dtype(how[0])).reshape(how[1])
    if kind == "texts":
        return np.array(how[1], object).reshape(how[0])
    if kind == "sequence":
        return [_received(each, rest) for each in how[0]]
    return [dict(row) for row in how[0]] if kind == "rows" else []


def evaluate(
    model: onnx.ModelProto, names: Sequence[str], feeds: Mapping[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    """Run a model in ONNX Runtime, and return those of its outputs that are arrays of numbers."""
    fed, blobs = _fed(feeds)
    header, results = _ask("evaluate", [list(names), fed], [model.SerializeToString(), *blobs])
    return {
        name: np.frombuffer(value, np.dtype(dtype)).reshape(shape)
        for (name, dtype, shape), value in zip(header["made"], results, strict=True)
    }


def _fed(feeds: Mapping[str, NDArray[Any]]) -> tuple[list[list[Any]], list[NDArray[np.uint8]]]:
    """Return arrays as `native_program` takes them: descriptions, and the bytes of numbers."""
    fed: list[list[Any]] = []
    blobs = []
    for name, value in feeds.items():
        texts = [value.ravel().tolist()] if value.dtype.kind in "OUS" else []
        fed.append([name, value.dtype.str, list(value.shape), *texts])
        if not texts:
            blobs.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
    return fed, blobs


def _model(call: str, arguments: Sequence[object], model: onnx.ModelProto) -> onnx.ModelProto:
    _, (result,) = _ask(call, arguments, [model.SerializeToString()])
    return onnx.ModelProto.FromString(result)


def _ask(call: str, arguments: Sequence[object], blobs: Sequence[Any]) -> tuple[dict[str, Any], list[bytes]]:
    return _process_of(os.getpid()).ask(call, arguments, blobs)
