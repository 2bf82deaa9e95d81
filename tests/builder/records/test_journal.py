from __future__ import annotations

from pathlib import Path

import pytest

from builder.errors import RecordsError
from builder.records.journal import append_lines, read_lines, repair


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.json"


def test_appended_lines_are_read_with_their_numbers(path: Path) -> None:
    append_lines(path, [[1, "a"], {"b": None}])
    append_lines(path, [])
    append_lines(path, ["ü"])
    assert read_lines(path) == [(1, [1, "a"]), (2, {"b": None}), (3, "ü")]


def test_a_missing_file_has_no_lines(path: Path) -> None:
    append_lines(path, [])
    assert not path.exists()
    assert read_lines(path) == []
    assert repair(path) == 0


@pytest.mark.parametrize("torn", [b"[3", b"[3\n", b"\x00\x00\x00"])
def test_an_incomplete_last_line_is_ignored_and_cut_off(path: Path, torn: bytes) -> None:
    append_lines(path, [[1], [2]])
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert read_lines(path) == [(1, [1]), (2, [2])]
    assert repair(path) == len(torn)
    assert path.read_bytes() == whole
    assert repair(path) == 0


def test_a_damaged_line_before_the_last_is_refused(path: Path) -> None:
    path.write_bytes(b"[1]\ngarbage\n[3]\n")
    with pytest.raises(RecordsError, match="line 2: expected JSON, got 'garbage'"):
        read_lines(path)


def test_a_file_over_the_limit_is_not_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append_lines(path, ["long enough"])
    monkeypatch.setattr("builder.records.journal.MAX_BYTES", 5)
    with pytest.raises(RecordsError, match=r"expected at most .* of records, got 14 bytes"):
        read_lines(path)
