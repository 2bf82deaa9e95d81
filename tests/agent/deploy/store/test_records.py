"""The records of bundles outlive the agent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent.deploy.store.records import RECORDS_FILE, Records
from agent.deploy.store.state_file import StateFile
from agent.deploy.trial import MIN_KNOWN, Score, Tally, Times

HERE = ("v1", "v0")


def loaded(root: Path) -> Records:
    records = Records(root)
    records.load()
    return records


def saved(root: Path, scores: dict[str, Score]) -> Records:
    records = loaded(root)
    records.save(records.document(scores, HERE))
    return loaded(root)


def test_runs_are_added(tmp_path: Path) -> None:
    first = Score({"a": Tally(100, 2)}, {"1/1/a": Times(300, 0.1), "2/1/a": Times(5, 0.1)})
    second = Score({"a": Tally(10, 1), "b": Tally(50, 0)}, {"1/1/a": Times(20, 0.2)}, others=("x",))
    saved(tmp_path, {"v1": first})
    whole = saved(tmp_path, {"v1": second}).whole("v1", Score(others=("y",), hot=True))
    assert whole.clients == {"a": Tally(110, 3), "b": Tally(50, 0)}
    assert whole.times == {"1/1/a": Times(300, 0.1), "2/1/a": Times(5, 0.1)}
    assert (whole.others, whole.hot) == (("y",), True)


def test_only_clients_that_count_are_kept_and_not_more_than_in_one_run(tmp_path: Path) -> None:
    many = {f"{index}": Tally(MIN_KNOWN + index, 0) for index in range(100)}
    few = {"new": Tally(MIN_KNOWN - 1, 0), "failing": Tally(1000, 1000)}
    kept = saved(tmp_path, {"v1": Score(many | few)}).whole("v1", Score()).clients
    assert kept.keys() == {f"{index}" for index in range(36, 100)}


def test_bundle_that_comes_back_has_its_record_and_one_that_is_gone_has_none(tmp_path: Path) -> None:
    records, known = loaded(tmp_path), Score({"a": Tally(100, 0)})
    records.keep("v0", known)
    records.keep("gone", known)
    records.save(records.document({"v1": Score()}, HERE))
    again = loaded(tmp_path)
    assert again.whole("v0", Score()) == known
    assert again.whole("gone", known) == known


def test_what_has_not_changed_is_not_written(tmp_path: Path) -> None:
    records = loaded(tmp_path)
    assert [records.save(records.document({"v1": Score()}, HERE)) for _ in range(2)] == [True, False]


@pytest.mark.parametrize("score", [7, None, {}, {"clients": {"a": 1}}, {"clients": [], "times": {}}])
def test_record_that_cannot_be_read_is_left_out(tmp_path: Path, score: object) -> None:
    good = {"clients": {"a": [20, 0]}, "times": {}, "others": [], "hot": False}
    StateFile(tmp_path / RECORDS_FILE, mirrored=False).save({"v1": score, "v0": good})
    assert json.loads((tmp_path / RECORDS_FILE).read_text())
    records = loaded(tmp_path)
    assert records.whole("v1", Score()) == Score()
    assert records.whole("v0", Score()).clients == {"a": Tally(20, 0)}
