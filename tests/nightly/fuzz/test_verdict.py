"""What a child does is seen: crashes, tracebacks, unclear messages, files, time, memory, code."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.nightly.fuzz import verdict as verdicts
from tests.nightly.fuzz.case import Case, one_file
from tests.nightly.fuzz.verdict import Judge, judge

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


def leaves_a_process(_: Path) -> int:
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    return 0


def by_content(path: Path) -> int:
    """Do what the file says."""
    kinds = {b"crash": crashes, b"write": writes, b"large": allocates, b"leave": leaves_a_process}
    return kinds.get(path.read_bytes(), says("edgebundle: error: expected X, got Y", 4))(path)


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
    if kind == "slow":
        monkeypatch.setattr(verdicts, "LIMIT_S", 1.0)
    monkeypatch.setattr(verdicts, "MEMORY_BYTES", 100 << 20)
    assert judge(7, CASE, read).kind == kind


def test_one_child_reads_many_cases_and_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "MEMORY_BYTES", 100 << 20)
    monkeypatch.setattr(verdicts, "CASES_OF_A_CHILD", 3)
    found: list[str] = []
    processes: list[int | None] = []
    with Judge(by_content) as each:
        for content in b"a b crash c large d write leave e f g h".split():
            found.append(each.judge(len(found), one_file("m", content)).kind)
            processes.append(None if each._child is None else each._child._process)
    refused = "refused"
    assert found == [refused, refused, "crash", refused, "large", refused, "left", "accepted", *[refused] * 4]
    assert processes[0] == processes[1]
    assert processes[2] is None  # it crashed, also by itself
    assert processes[7] is None  # it left a process
    assert processes[8] == processes[9] and processes[10] is None


def test_a_fault_that_needs_earlier_cases_says_so() -> None:
    seen: list[Path] = []

    def third(path: Path) -> int:
        seen.append(path)
        return crashes(path) if len(seen) == 3 else says("edgebundle: error: no", 4)(path)

    with Judge(third) as each:
        kinds = [each.judge(seed, CASE) for seed in range(3)]
    assert [verdict.kind for verdict in kinds] == ["refused", "refused", "crash"]
    assert kinds[2].detail.startswith("only after 2 other files in the same process: signal 11")


def test_what_one_case_sets_does_not_count_for_the_next() -> None:
    """The largest memory, and what was printed."""

    def read(path: Path) -> int:
        return allocates(path) if path.read_bytes() == b"large" else says("edgebundle: error: no", 4)(path)

    with Judge(read) as each:
        first, second = each.judge(0, one_file("m", b"large")), each.judge(1, CASE)
    assert first.memory_bytes > 140 << 20 > second.memory_bytes
    assert (first.kind, second.kind, second.detail) == ("accepted", "refused", "edgebundle: error: no")


def test_links_and_pipes_are_placed(tmp_path: Path) -> None:
    Case("a", {"b/c": b"1"}, {"a": "b/c"}, ("pipe",)).place(tmp_path)
    assert (tmp_path / "a").read_bytes() == b"1"
    assert (tmp_path / "pipe").is_fifo()
