"""Keep foreign libraries from printing, warning and logging to the user's terminal."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import onnx
import onnx.checker
import onnx.shape_inference
import onnx.version_converter
from google.protobuf.message import DecodeError
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from builder.errors import NativeError

# TVM's front end lets any Python error through; the other libraries have classes without a common base. Each
# call into them catches this tuple.
FOREIGN_FAILURES: Final = (
    onnx.checker.ValidationError,
    onnx.shape_inference.InferenceError,
    onnx.version_converter.ConvertError,
    DecodeError,
    NativeError,
    ort_errors.EPFail,
    ort_errors.Fail,
    ort_errors.InvalidArgument,
    ort_errors.InvalidGraph,
    ort_errors.InvalidProtobuf,
    ort_errors.NotImplemented,
    ort_errors.RuntimeException,
    ArithmeticError,
    AssertionError,
    AttributeError,
    BufferError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
_STDERR: Final = 2
_LOGGERS: Final = ("onnxslim", "onnx", "tvm", "root")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings, logs and output to Python's streams while the block runs."""
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    sink = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
        warnings.simplefilter("ignore")
        try:
            for name in _LOGGERS:
                logging.getLogger(name).setLevel(logging.CRITICAL)
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)


@contextlib.contextmanager
def quiet_native() -> Iterator[None]:
    """Also suppress what native code writes to the process's standard error, in every thread.

    Only for short calls: everything else that the process writes there meanwhile is lost too.
    """
    sys.stderr.flush()
    saved = os.dup(_STDERR)
    try:
        with Path(os.devnull).open("wb") as sink:
            os.dup2(sink.fileno(), _STDERR)
        with quiet():
            yield
    finally:
        os.dup2(saved, _STDERR)
        os.close(saved)


def first_line(error: BaseException) -> str:
    """An error's reason in one line of at most 240 characters, without traceback or location."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # TVM's C++ errors include a traceback; the reason is the last line, after a location in brackets.
    chosen = lines[-1] if lines and lines[0].startswith("Traceback") else (lines[0] if lines else "")
    chosen = re.sub(r"^\[\d\d:\d\d:\d\d\] \S+:\d+:\s*", "", chosen)
    return (chosen or type(error).__name__)[:240]
