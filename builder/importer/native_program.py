"""Native code of onnx and ONNX Runtime, as a program of its own.

`native.py` starts it by its path; it imports nothing of edgebundle, and NumPy and ONNX Runtime only while it
waits. Standard input has requests and standard output replies, each a frame: the length of a JSON object as
four bytes, the object, and the blobs whose lengths are its `sizes`. The first frame names onnx's extension
and the path of modules. A request that takes longer than its `seconds` ends the program (SIGALRM), whatever
native code is doing. So does the end of its input, or a minute without a request.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import json
import os
import resource
import select
import signal
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final

IDLE_S: Final = 60.0
_LENGTH: Final = struct.Struct("<I")
_PIECE_BYTES: Final = 1 << 24
_LOG_NOTHING: Final = 4
# What libraries say: the C++ library, and ONNX Runtime's arena, which has no class for it.
_OUT_OF_MEMORY: Final = ("bad_alloc", "Failed to allocate memory")

Reply = tuple[dict[str, Any], Sequence[bytes]]


def send(stream: IO[bytes], header: dict[str, Any], blobs: Sequence[Any] = ()) -> None:
    """Write a frame."""
    text = json.dumps({**header, "sizes": [memoryview(blob).nbytes for blob in blobs]}).encode()
    stream.write(_LENGTH.pack(len(text)) + text)
    for blob in blobs:
        stream.write(blob)
    stream.flush()


def receive(stream: IO[bytes]) -> tuple[dict[str, Any], list[bytes]]:
    """Read a frame.

    Raises `EOFError` if the other side has closed the stream.
    """
    (length,) = _LENGTH.unpack(_exactly(stream, _LENGTH.size))
    header: dict[str, Any] = json.loads(_exactly(stream, length))
    return header, [_exactly(stream, size) for size in header["sizes"]]


def _exactly(stream: IO[bytes], size: int) -> bytes:
    pieces = []
    while size:
        piece = stream.read(min(size, _PIECE_BYTES))
        if not piece:
            raise EOFError
        pieces.append(piece)
        size -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class Program:
    """Answers requests: a method for each call.

    `extension`: the path of `onnx.onnx_cpp2py_export`, whose package would import NumPy and protobuf.
    """

    def __init__(self, extension: str) -> None:
        loader = importlib.machinery.ExtensionFileLoader("onnx_cpp2py_export", extension)
        spec = importlib.util.spec_from_file_location("onnx_cpp2py_export", extension, loader=loader)
        assert spec is not None
        self._onnx: Any = importlib.util.module_from_spec(spec)
        loader.exec_module(self._onnx)
        self._opened: tuple[tuple[str, int], Any] | None = None

    def answer(self, request: dict[str, Any], blobs: list[bytes]) -> Reply:
        """Do what one request says."""
        calls: dict[str, Callable[..., Reply]] = {
            "infer_shapes": self._infer_shapes,
            "convert_version": self._convert_version,
            "inline": self._inline,
            "inline_selected": self._inline_selected,
            "check": self._check,
            "evaluate": _evaluate,
            "open": self._open,
            "run": self._run,
        }
        try:
            return calls[request["call"]](*request["arguments"], *blobs)
        except MemoryError:
            return {"memory": True}, ()
        except Exception as error:  # noqa: BLE001 - whatever a library raises is the reply
            memory = any(words in str(error) for words in _OUT_OF_MEMORY)
            return {"error": str(error) or type(error).__name__, "memory": memory}, ()

    def _infer_shapes(self, check_type: bool, strict: bool, from_data: bool, model: bytes) -> Reply:
        return {}, [self._onnx.shape_inference.infer_shapes(model, check_type, strict, from_data)]

    def _convert_version(self, version: int, model: bytes) -> Reply:
        return {}, [self._onnx.version_converter.convert_version(model, version)]

    def _inline(self, convert: bool, model: bytes) -> Reply:
        return {}, [self._onnx.inliner.inline_local_functions(model, convert)]

    def _inline_selected(self, operators: list[list[str]], model: bytes) -> Reply:
        chosen = [(domain, name) for domain, name in operators]
        return {}, [self._onnx.inliner.inline_selected_functions2(model, chosen, False)]

    def _check(self, model: bytes) -> Reply:
        self._onnx.checker.check_model(model, False, False, False)
        return {}, ()

    def _open(self, path: str, threads: int) -> Reply:
        """Open a file in ONNX Runtime, and describe its inputs."""
        self._opened = None  # the file may be another one than the last of this name
        return {"inputs": [[v.name, v.type, v.shape] for v in self._session(path, threads).get_inputs()]}, ()

    def _run(self, path: str, threads: int, names: list[str], fed: list[list[Any]], *values: bytes) -> Reply:
        """Run a file in ONNX Runtime. Texts, and lists of dictionaries, are in the header of the reply."""
        blobs: list[bytes] = []
        found = self._session(path, threads).run(names, _feeds(fed, values))
        return {"made": [_described(value, blobs) for value in found]}, blobs

    def _session(self, path: str, threads: int) -> Any:  # noqa: ANN401 - ONNX Runtime is loaded late
        """Return the session of a file, which stays open until another one is asked for."""
        if self._opened is None or self._opened[0] != (path, threads):
            self._opened = None
            options = _options(threads)
            # Few runs: threads that spin afterwards, waiting for another, would only disturb what follows.
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
            self._opened = (path, threads), _opened(path, options)
        return self._opened[1]


def _options(threads: int) -> Any:  # noqa: ANN401
    """Return options of ONNX Runtime, without its optimiser; its default number of threads is 0."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = _LOG_NOTHING
    options.intra_op_num_threads = threads
    return options


def _opened(model: str | bytes, options: Any) -> Any:  # noqa: ANN401
    import onnxruntime

    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _described(value: object, blobs: list[bytes]) -> list[Any]:
    """Return what tells an output, and add the bytes of its numbers to `blobs`."""
    import numpy as np

    if isinstance(value, list):
        if all(isinstance(row, dict) for row in value):
            return ["rows", [list(row.items()) for row in value]]
        return ["sequence", [_described(each, blobs) for each in value]]
    if not isinstance(value, np.ndarray):
        return ["other"]
    if value.dtype.kind in "OUS":
        return ["texts", list(value.shape), list(map(str, value.ravel()))]
    blobs.append(np.ascontiguousarray(value).tobytes())
    return ["array", value.dtype.str, list(value.shape)]


def _feeds(fed: list[list[Any]], values: Sequence[bytes]) -> dict[str, Any]:
    """Return arrays by name; `fed` has the name, dtype and shape of each, and its texts, if it has any."""
    import numpy as np

    rest = iter(values)
    return {
        name: np.array(texts[0], object).reshape(shape)
        if texts
        else np.frombuffer(next(rest), np.dtype(dtype)).reshape(shape)
        for name, dtype, shape, *texts in fed
    }


def _evaluate(names: list[str], fed: list[list[Any]], model: bytes, *values: bytes) -> Reply:
    """Run a model in ONNX Runtime, as it is written, and return those of its outputs that are arrays."""
    import numpy as np

    session = _opened(model, _options(1))
    made = {
        name: np.ascontiguousarray(value).reshape(value.shape)
        for name, value in zip(names, session.run(names, _feeds(fed, values)), strict=True)
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc"
    }
    described = [[name, value.dtype.str, list(value.shape)] for name, value in made.items()]
    return {"made": described}, [value.tobytes() for value in made.values()]


def _streams() -> tuple[IO[bytes], IO[bytes]]:
    """Requests and replies; what libraries print goes nowhere."""
    # Requests are not buffered: `select` must see each of them.
    requests, replies = os.fdopen(os.dup(0), "rb", buffering=0), os.fdopen(os.dup(1), "wb")
    with Path(os.devnull).open("r+b") as nothing:
        for number in (0, 1, 2):
            os.dup2(nothing.fileno(), number)
    return requests, replies


@contextlib.contextmanager
def _limits(seconds: float, memory_bytes: int) -> Iterator[None]:
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    wanted = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
    with contextlib.suppress(ValueError, OSError):  # not every system has this limit
        resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _has_input(stream: IO[bytes], seconds: float) -> bool:
    return bool(select.select([stream], [], [], seconds)[0])


def main() -> int:
    """Answer requests until there are no more."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    with contextlib.suppress(ValueError, OSError):  # the message says that it died; no dump is wanted
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    requests, replies = _streams()
    with contextlib.suppress(EOFError, BrokenPipeError):
        start, _ = receive(requests)
        program = Program(start["extension"])
        sys.path[:] = start["path"]
        if not _has_input(requests, 0):
            with contextlib.suppress(ImportError):
                import onnxruntime  # noqa: F401 - the first model that folds constants finds it loaded
        while _has_input(requests, IDLE_S):
            request, blobs = receive(requests)
            with _limits(request["seconds"], request["memory_bytes"]):
                header, results = program.answer(request, blobs)
            send(replies, header, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
