"""Results of an interrupted run, and of another product."""

from __future__ import annotations

from pathlib import Path

from benchmarks.conformance.results import ELSEWHERE, Results, fingerprint
from benchmarks.conformance.verdict import Verdict
from tests.loading import ROOT, loaded


def written(path: Path) -> None:
    results = Results(path, "product")
    for name, kind in (("a", "right"), ("b", "wrong"), ("c", "refused")):
        results.add(Verdict(name, "Add", kind))


def test_an_interrupted_run_continues(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    written(path)
    path.write_text(path.read_text() + '{"name": "d", "oper')
    assert list(Results(path, "product").verdicts) == ["a", "b", "c"]
    assert list(Results(path, "product").verdicts) == ["a", "b", "c"]


def test_another_product_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    written(path)
    assert not Results(path, "changed").verdicts


def test_some_kinds_are_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    written(path)
    assert list(Results(path, None, ["wrong"]).verdicts) == ["a", "c"]
    assert list(Results(path, "product").verdicts) == ["a", "c"]


def test_the_fingerprint_changes_with_the_product(tmp_path: Path) -> None:
    for room in ("agent", "builder"):
        (tmp_path / room).mkdir()
    source = tmp_path / "builder" / "x.py"
    source.write_text("1")
    first = fingerprint(tmp_path)
    assert fingerprint(tmp_path) == first
    source.write_text("2")
    assert fingerprint(tmp_path) != first


def test_the_fingerprint_holds_for_changes_elsewhere(tmp_path: Path) -> None:
    for room in ("agent", "builder"):
        (tmp_path / room / "cli").mkdir(parents=True)
    source = tmp_path / "builder" / "cli" / "x.py"
    source.write_text("1")
    first = fingerprint(tmp_path)
    source.write_text("2")
    assert fingerprint(tmp_path) == first


def test_no_case_runs_through_a_room_elsewhere() -> None:
    found = loaded("import benchmarks.conformance.trial, benchmarks.conformance.worker")
    assert "builder.compiling" in found
    for house, rooms in ELSEWHERE.items():
        assert not found & {f"{house}.{room.removesuffix('.py')}" for room in rooms}
        assert all((ROOT / house / room).exists() for room in rooms)
