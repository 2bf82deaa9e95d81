"""What a process made of a case: read it in a child, watch its time, memory, messages and files.

A child is forked from a process that has imported the libraries, and reads many cases, one after the other:
to fork such a process and to end it takes longer than to read most files. A child that crashes, hangs or
leaves processes behind is replaced. What looks like a fault is judged again in a new child, so no case is
blamed for an earlier one; a fault that needs earlier cases is one all the same, and says so.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import resource
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn, Self

import psutil

from builder.importer import native
from tests.nightly.fuzz.case import Case

LIMIT_S: Final = 30.0
MEMORY_BYTES: Final = 2 << 30
# Cases that one child reads: then the fork costs a hundredth of each, and what they leak stays small.
CASES_OF_A_CHILD: Final = 200
_ERROR: Final = "edgebundle: error: "
_LONGEST_LINE: Final = 20_000
_SHOWN: Final = 400
# Exit codes of `edgebundle`: success, and the user's mistake.
_SUCCESS: Final = 0
_INTERNAL: Final = 1
_RAISED: Final = 99
# Address space beyond resident memory: allocators reserve some for each thread.
_RESERVED_BYTES: Final = 2 << 30
_PAGE: Final = resource.getpagesize()
# proc(5): the first resets the peak of the resident memory, which the second shows.
_RESET_PEAK: Final = "5"
_PEAK: Final = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)
_CONTROL: Final = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_ANSWER_BYTES: Final = 4096  # of one line; a pipe takes that much at once

Read = Callable[[Path], int]


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


class Judge:
    """Reads cases in children; a context manager.

    Parameters
    ----------
    read
        Reads the main file, whose path relative to the current folder is given; returns an exit code.
    """

    def __init__(self, read: Read) -> None:
        self._read = read
        self._child: _Child | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.end()
            self._child = None

    def judge(self, seed: int, case: Case) -> Verdict:
        """Read a case.

        Parameters
        ----------
        seed
            The case's number.
        case
            The files.
        """
        before = 0 if self._child is None else self._child.count
        found = self._judge(seed, case)
        if not found.is_fault or not before:
            return found
        self.close()
        separate = self._judge(seed, case)
        if separate.is_fault:
            return separate
        return replace(found, detail=f"only after {before} other files in the same process: {found.detail}")

    def _judge(self, seed: int, case: Case) -> Verdict:
        if self._child is None:
            self._child = _Child(self._read)
        child = self._child
        with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
            folder = Path(name)
            case.place(folder)
            (folder / "tmp").mkdir()
            before = _listing(folder)
            start = time.monotonic()
            end = child.ask(folder, case.main)
            seconds = time.monotonic() - start
            new = sorted(_listing(folder) - before)
        if not end.is_reusable or child.count >= CASES_OF_A_CHILD:
            self.close()
        kind, detail = _kind(end.status, end.text, is_late=end.is_late)
        if any(Path(path).name == "ran" for path in new):
            kind, detail = "ran", "code of the file was run"
        elif new and kind in ("accepted", "refused"):
            kind, detail = "left", f"left {new[:3]}"
        elif end.memory_bytes > MEMORY_BYTES:
            kind, detail = "large", f"{kind} with {end.memory_bytes >> 20} MiB: {detail}"
        return Verdict(seed, kind, detail, seconds, end.memory_bytes)


def judge(seed: int, case: Case, read: Read) -> Verdict:
    """Read a case in a child of its own."""
    with Judge(read) as one:
        return one.judge(seed, case)


@dataclass(frozen=True, slots=True)
class _End:
    """How the reading of a case ended.

    Attributes
    ----------
    status
        The exit code, or minus the signal that ended the child.
    text
        What was printed.
    memory_bytes
        The largest memory beyond that of the child before it read the case.
    is_late
        Whether it took longer than `LIMIT_S`.
    is_reusable
        Whether the child can read another case.
    """

    status: int
    text: str
    memory_bytes: int
    is_late: bool
    is_reusable: bool


class _Child:
    """A forked process that reads cases.

    Attributes
    ----------
    count
        How many cases it was given.
    """

    def __init__(self, read: Read) -> None:
        self.count = 0
        # An unnamed file, whose position parent and child share.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self._first_bytes = _resident()
        self._process = os.fork()
        if self._process == 0:
            os.close(self._commands)
            os.close(self._answers)
            _serve(read, commands, answers, self._output.fileno())
        os.close(commands)
        os.close(answers)
        with contextlib.suppress(OSError):
            os.setpgid(self._process, self._process)
        self._waiting = os.pidfd_open(self._process)
        self._used: resource.struct_rusage | None = None
        self._status = 0

    def ask(self, folder: Path, main: str) -> _End:
        """Let the child read a case that lies in a folder."""
        self.count += 1
        self._output.seek(0)
        self._output.truncate()
        with contextlib.suppress(OSError):  # it has ended: the missing answer says so
            os.write(self._commands, json.dumps([str(folder), main]).encode() + b"\n")
        ready = select.select([self._answers, self._waiting], [], [], LIMIT_S)[0]
        line = os.read(self._answers, _ANSWER_BYTES) if self._answers in ready else b""
        if not line:
            self._reap()
        self._output.seek(0)
        text = self._output.read().decode(errors="replace")
        if line:
            status, memory_bytes, is_alone = json.loads(line)
            return _End(status, text, memory_bytes, is_late=False, is_reusable=is_alone)
        assert self._used is not None
        # It was started with the memory of this process, which is not the case's.
        memory_bytes = max(0, self._used.ru_maxrss * 1024 - self._first_bytes)
        return _End(self._status, text, memory_bytes, is_late=not ready, is_reusable=False)

    def end(self) -> None:
        """End the child and the processes that it started, and close what belongs to it."""
        if self._used is None:
            self._reap()
        for stream in (self._commands, self._answers, self._waiting):
            os.close(stream)
        self._output.close()

    def _reap(self) -> None:
        """End the child if it still runs, wait for it, and end its own children."""
        if not select.select([self._waiting], [], [], 0)[0]:
            with contextlib.suppress(OSError):
                os.killpg(self._process, signal.SIGKILL)
        _, status, self._used = os.wait4(self._process, 0)
        self._status = os.waitstatus_to_exitcode(status)
        with contextlib.suppress(OSError):
            os.killpg(self._process, signal.SIGKILL)


def _serve(read: Read, commands: int, answers: int, output: int) -> NoReturn:
    """Read cases until there are no more commands; the code of the child, which must not return."""
    try:
        os.setpgid(0, 0)
        gc.freeze()  # what was imported is no garbage: collecting would copy its pages
        for stream in (1, 2):
            os.dup2(output, stream)
        sys.stdout, sys.stderr = (os.fdopen(stream, "w", closefd=False) for stream in (1, 2))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        native.start()  # it serves all cases, and is not of one of them
        with os.fdopen(commands, "rb") as lines:
            for line in lines:
                folder, main = json.loads(line)
                os.write(answers, json.dumps(_answer(read, Path(folder), Path(main))).encode() + b"\n")
    finally:
        os._exit(_RAISED)


def _answer(read: Read, folder: Path, main: Path) -> list[Any]:
    """Read one case; return the exit code, the memory in bytes, and whether no process is left of it."""
    code = _RAISED
    os.chdir(folder)
    os.environ["TMPDIR"] = os.environ["HOME"] = str(folder / "tmp")
    tempfile.tempdir = None
    before = _children()
    first_bytes = _resident()
    children_bytes = _largest_child()
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (_virtual() + MEMORY_BYTES + _RESERVED_BYTES, hard))
    try:
        code = read(main)
    except BaseException as error:  # noqa: BLE001 - the outermost loop of this process
        with contextlib.suppress(Exception):  # what was read may have closed or replaced stdout
            print(f"Traceback: {type(error).__name__}: {error}")
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    with contextlib.suppress(Exception):  # as above
        sys.stdout.flush()
        sys.stderr.flush()
    largest = [_peak()]
    if _largest_child() > children_bytes:
        largest.append(_largest_child())
    return [code, max(0, max(largest) - first_bytes), _children() <= before]


def _children() -> set[int]:
    """The children of this process that run, or have ended without having been waited for."""
    return {child.pid for child in psutil.Process().children()}


def _kind(status: int, text: str, *, is_late: bool) -> tuple[str, str]:
    found = text.strip()
    last = found[-_SHOWN:]
    if is_late:
        return "slow", last
    if status < 0:
        return "crash", f"signal {-status}: {last}"
    if "Traceback" in text or "internal error" in text or status in (_INTERNAL, _RAISED):
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


def _peak() -> int:
    """The largest memory of this process since it was reset, in bytes."""
    found = _PEAK.search(Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def _largest_child() -> int:
    """The largest memory of the children that were waited for, in bytes."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
