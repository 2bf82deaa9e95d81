"""What a process made of a case: run it in a child, watch its time, memory, messages and files.

Every case has a process of its own, forked from one that has imported the libraries; so a crash ends only
that case, and the kernel measures its memory exactly.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from benchmarks.fuzz.case import Case

LIMIT_S: Final = 30.0
MEMORY_BYTES: Final = 2 << 30
_ERROR: Final = "edgebundle: error: "
_LONGEST_LINE: Final = 20_000
_SHOWN: Final = 400
# Exit codes of `edgebundle`: success, and the user's mistake.
_SUCCESS: Final = 0
_INTERNAL: Final = 1
# Address space beyond resident memory: allocators reserve some for each thread.
_RESERVED_BYTES: Final = 2 << 30
_PAGE: Final = resource.getpagesize()
_CONTROL: Final = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a case.

    Attributes
    ----------
    seed
        The case's number.
    kind
        `accepted`, `refused`, or a fault: `raised`, `crash`, `slow`, `large`, `unclear`, `left`, `ran`.
    detail
        The message, or what is wrong.
    seconds, memory_bytes
        What it took.
    """

    seed: int
    kind: str
    detail: str
    seconds: float = 0.0
    memory_bytes: int = 0

    @property
    def is_fault(self) -> bool:
        """Whether a promise is broken."""
        return self.kind not in ("accepted", "refused")


def judge(seed: int, case: Case, read: Callable[[Path], int]) -> Verdict:
    """Read a case in a child.

    Parameters
    ----------
    seed
        The case's number.
    case
        The files.
    read
        Reads the main file, whose path relative to the current folder is given; returns an exit code.
    """
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = Path(name)
        case.place(folder)
        (folder / "tmp").mkdir()
        before = _listing(folder)
        with tempfile.TemporaryFile() as output:
            start = time.monotonic()
            told, tell = os.pipe()
            child = _fork(folder, case, read, output.fileno(), tell)
            os.close(tell)
            is_late, status, used = _wait(child)
            seconds = time.monotonic() - start
            with os.fdopen(told, "rb") as stream:
                first_bytes = int(stream.read() or b"0")
            output.seek(0)
            text = output.read().decode(errors="replace")
        memory = max(0, used.ru_maxrss * 1024 - first_bytes)
        new = sorted(_listing(folder) - before)
    kind, detail = _kind(status, text, is_late=is_late)
    if any(Path(path).name == "ran" for path in new):
        kind, detail = "ran", "code of the file was run"
    elif new and kind in ("accepted", "refused"):
        kind, detail = "left", f"left {new[:3]}"
    elif memory > MEMORY_BYTES:
        kind, detail = "large", f"{kind} with {memory >> 20} MiB: {detail}"
    return Verdict(seed, kind, detail, seconds, memory)


def _fork(folder: Path, case: Case, read: Callable[[Path], int], output: int, tell: int) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _child(folder, case, read, output, tell)
    with contextlib.suppress(OSError):
        os.setpgid(child, child)
    return child


def _child(folder: Path, case: Case, read: Callable[[Path], int], output: int, tell: int) -> NoReturn:
    code = 99
    try:
        os.setpgid(0, 0)
        os.write(tell, str(_resident()).encode())
        os.close(tell)
        for stream in (1, 2):
            os.dup2(output, stream)
        sys.stdout, sys.stderr = (os.fdopen(stream, "w", closefd=False) for stream in (1, 2))
        os.chdir(folder)
        os.environ["TMPDIR"] = os.environ["HOME"] = str(folder / "tmp")
        tempfile.tempdir = None
        limit = _virtual() + MEMORY_BYTES + _RESERVED_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        code = read(Path(case.main))
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException as error:  # noqa: BLE001 - the end of this process, which must not return
        with contextlib.suppress(Exception):
            print(f"Traceback: {type(error).__name__}: {error}", flush=True)
    finally:
        os._exit(code)


def _wait(child: int) -> tuple[bool, int, resource.struct_rusage]:
    """Wait for a child, and end it and its own children when it is late."""
    is_late = False
    waiting = os.pidfd_open(child)
    try:
        is_late = not select.select([waiting], [], [], LIMIT_S)[0]
    finally:
        os.close(waiting)
    if is_late:
        with contextlib.suppress(OSError):
            os.killpg(child, signal.SIGKILL)
    _, status, used = os.wait4(child, 0)
    with contextlib.suppress(OSError):
        os.killpg(child, signal.SIGKILL)
    return is_late, os.waitstatus_to_exitcode(status), used


def _kind(status: int, text: str, *, is_late: bool) -> tuple[str, str]:
    found = text.strip()
    last = found[-_SHOWN:]
    if is_late:
        return "slow", last
    if status < 0:
        return "crash", f"signal {-status}: {last}"
    if "Traceback" in text or "internal error" in text or status in (_INTERNAL, 99):
        return "raised", last
    if status == _SUCCESS:
        return "accepted", ""
    first, *rest = found.splitlines() or [""]
    is_clear = first.startswith(_ERROR) and not any(line.startswith(_ERROR) for line in rest)
    if not is_clear or max(map(len, found.splitlines())) > _LONGEST_LINE or _CONTROL.search(found):
        return "unclear", repr(found[:_SHOWN])
    return "refused", first[:_SHOWN]


def _listing(folder: Path) -> set[str]:
    return {
        str(Path(root, name).relative_to(folder)) for root, folders, files in os.walk(folder)
        for name in (*folders, *files)
    }  # fmt: skip


def _resident() -> int:
    """The memory of this process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


def _virtual() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE
