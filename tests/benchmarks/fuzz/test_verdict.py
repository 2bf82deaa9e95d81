"""What a child does is seen: crashes, tracebacks, unclear messages, files, time, memory, code."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.fuzz import verdict as verdicts
from benchmarks.fuzz.case import Case, one_file
from benchmarks.fuzz.verdict import judge

CASE = one_file("model.onnx", b"content")


def says(text: str, code: int) -> Callable[[Path], int]:
    def read(_: Path) -> int:
        print(text)
        return code

    return read


def crashes(_: Path) -> int:
    os.kill(os.getpid(), signal.SIGSEGV)
    return 0


def writes(_: Path) -> int:
    Path("left.bin").write_bytes(b"x")
    return 0


def runs(_: Path) -> int:
    return os.system("touch tmp/ran")


def allocates(_: Path) -> int:
    assert len(b"x" * (150 << 20)) > 1
    return 0


def raises(_: Path) -> int:
    raise KeyError("x")


def waits(_: Path) -> int:
    time.sleep(60)
    return 0


def reads(path: Path) -> int:
    assert path.read_bytes() == b"content"
    return 0


@pytest.mark.parametrize(
    ("read", "kind"),
    [
        (reads, "accepted"),
        (says("edgebundle: error: expected X, got Y\nedgebundle: hint: do Z", 4), "refused"),
        (says("edgebundle: error: one\nedgebundle: error: two", 4), "unclear"),
        (says("edgebundle: error: \x1b[31mred", 4), "unclear"),
        (says("", 4), "unclear"),
        (says("edgebundle: error: internal error: KeyError: 1", 1), "raised"),
        (raises, "raised"),
        (crashes, "crash"),
        (writes, "left"),
        (runs, "ran"),
        (waits, "slow"),
        (allocates, "large"),
    ],
)
def test_what_a_child_does_is_seen(
    monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], int], kind: str
) -> None:
    if kind == "slow":  # the others end by themselves, however busy the machine is
        monkeypatch.setattr(verdicts, "LIMIT_S", 1.0)
    monkeypatch.setattr(verdicts, "MEMORY_BYTES", 100 << 20)
    assert judge(7, CASE, read).kind == kind


def test_links_and_pipes_are_placed(tmp_path: Path) -> None:
    Case("a", {"b/c": b"1"}, {"a": "b/c"}, ("pipe",)).place(tmp_path)
    assert (tmp_path / "a").read_bytes() == b"1"
    assert (tmp_path / "pipe").is_fifo()
