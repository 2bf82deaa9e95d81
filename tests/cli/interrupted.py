"""A program that compiles a model again and again, with Ctrl-C in the functions that its arguments name.

For each `FILE` it prints a line: the exit code, whether the point was reached, what was left, and other lines
on stderr. `tvm:FILE` is a function that TVM has called.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from builder.cli import main

REACHED = "the signal is sent"


def at(point: str) -> Callable[[FrameType, str, object], None]:
    """Return a profiler that sends SIGINT in the first function of a file."""
    caller, _, file = point.rpartition(":")

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        if event != "call" or not frame.f_code.co_filename.endswith(file):
            return
        if caller and "tvm_ffi" not in _callers(frame):
            return
        sys.setprofile(None)
        print(REACHED, file=sys.stderr, flush=True)
        signal.raise_signal(signal.SIGINT)

    return profile


def _callers(frame: FrameType | None) -> set[str]:
    found = set()
    while frame is not None:
        found.add(frame.f_globals.get("__name__", "").partition(".")[0])
        frame = frame.f_back
    return found


def interrupt(point: str, model: str, folder: Path) -> dict[str, object]:
    """Compile in a copy of this process; return what came of it."""
    work, log = folder / "work", folder / "log"
    for each in (folder, work, work / "tmp"):
        each.mkdir()
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY), 2)
            os.chdir(work)
            tempfile.tempdir = str(work / "tmp")
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.setprofile(at(point))
            code = main(["compile", model, "-o", "o.bundle"])
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    said = log.read_text("utf-8").splitlines()
    return {
        "code": os.waitstatus_to_exitcode(status),
        "reached": REACHED in said,
        "left": [str(path) for path in work.rglob("*") if path != work / "tmp"],
        "said": [line for line in said if "error" in line or "Traceback" in line or "Warning" in line],
    }


if __name__ == "__main__":
    model, folder, *points = sys.argv[1:]
    main(["compile", model, "-q", "-o", f"{folder}/first.bundle"])  # all is imported
    sys.stdout.flush()
    for i, point in enumerate(points):
        print(json.dumps([point, interrupt(point, model, Path(folder) / str(i))]), flush=True)
