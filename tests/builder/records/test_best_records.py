from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from builder.compiling.lower import lower
from builder.importer import ImportedModel
from builder.kernels.decisions import Schedules
from builder.records.best_records import BestRecords, chosen, merge, pick_best
from builder.records.folder import RECORDS, Records
from builder.records.meta_json import BoardTime, Ratio, Verdict
from builder.records.task import Task
from builder.target.device_target import DeviceTarget
from tests.builder.records.conftest import fill, others, point_at


@pytest.mark.slow
def test_lowering_uses_the_best_record(
    folder: Path, task: Task, device: DeviceTarget, digits: ImportedModel
) -> None:
    records = Records.read(folder, device)
    best = BestRecords(records)
    lowered, plain = lower(digits.mod, device, Schedules(best)), lower(digits.mod, device)
    assert best.used == {task.key}
    changed = [
        v.name_hint
        for v, f in lowered.kernels.functions.items()
        if f.script() != plain.kernels[v.name_hint].script()
    ]
    assert changed == [task.name]


@pytest.mark.slow
def test_a_trace_that_does_not_apply_keeps_the_heuristic_with_a_message(
    folder: Path, task: Task, device: DeviceTarget, digits: ImportedModel
) -> None:
    lines = (folder / RECORDS).read_text().splitlines()
    record = json.loads(lines[2])
    record[1][0][0] = [
        *[i for i in record[1][0][0] if i[0] != "Unannotate"][:6],
        ["Vectorize", ["b0"], [], []],
    ]
    record[1][0][1] = [d for d in record[1][0][1] if d[0] < 6]
    (folder / RECORDS).write_text("\n".join([*lines[:2], json.dumps(record)]) + "\n")
    messages: list[str] = []
    best = BestRecords(Records.read(folder, device))
    lowered = lower(digits.mod, device, Schedules(best, progress=messages.append))
    plain = lower(digits.mod, device)
    assert len(messages) == 1
    assert "heuristic" in messages[0]
    assert lowered.kernels[task.name].script() == plain.kernels[task.name].script()


def test_a_verdict_against_a_point_keeps_the_heuristic(
    folder: Path, task: Task, device: DeviceTarget
) -> None:
    with Records.write(folder, device) as records:
        ratio = Ratio(10.0, 11.0, 0.9, 0.85, 0.95, 21)
        verdict = Verdict(others(task)[2], ratio, use=False)
        records.update(replace(records.meta, verdicts={task.key: verdict}))
        assert chosen(records, task.key) is None
        records.update(replace(records.meta, verdicts={task.key: replace(verdict, use=True)}))
        best = chosen(records, task.key)
        assert best is not None
        assert best.decisions == others(task)[2]


def test_the_heuristics_own_point_changes_nothing(tmp_path: Path, task: Task, device: DeviceTarget) -> None:
    with Records.write(tmp_path, device) as records:
        records.append(task, [(point_at(task, task.space.default), [1e-6])])
        fill(records, task, [[1e-5]])
        assert chosen(records, task.key) is None


def test_merging_keeps_every_point_once(
    folder: Path, tmp_path: Path, tasks: tuple[Task, ...], task: Task, device: DeviceTarget
) -> None:
    other = tasks[0] if tasks[0] is not task else tasks[1]
    with Records.write(tmp_path / "b", device) as records:
        fill(records, task, [[9e-5], [8e-5], [9e-5], [2e-6]])
        fill(records, other, [[1e-6]])
        records.update(records.meta.with_board("pi", BoardTime(3.0, measured=5)))
    with merge(tmp_path / "out", [folder, tmp_path / "b"], device) as merged:
        assert len(merged.all) == 5
        assert set(merged.keys) == {task.key, other.key}
        assert list(merged.measured(task.key).values()) == [3e-5, None, 1e-5, 2e-6]
        assert merged.meta.boards["pi"].measured == 5
    again = Records.read(tmp_path / "out", device)
    assert BestRecords(again).trace(task.space.func) is not None


def test_the_best_records_are_picked_into_a_new_folder(
    folder: Path, tmp_path: Path, task: Task, device: DeviceTarget
) -> None:
    with pick_best(Records.read(folder, device), tmp_path / "best", device) as picked:
        assert [r.seconds for r in picked.all] == [1e-5]
    assert BestRecords(Records.read(tmp_path / "best", device)).trace(task.space.func) is not None
