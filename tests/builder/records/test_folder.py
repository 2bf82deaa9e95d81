from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tvm.s_tir import meta_schedule as ms

from builder import resolve
from builder.compiling.lower import lower
from builder.errors import RecordsError
from builder.importer import ImportedModel
from builder.kernels.decisions import Schedules
from builder.records.best_records import BestRecords, chosen, merge, pick_best
from builder.records.folder import META, RECORDS, WORKLOADS, Records
from builder.records.meta_json import BoardTime, Ratio, RecordsMeta, Verdict
from builder.records.task import Task
from builder.target.device_target import DeviceTarget


@pytest.fixture
def task(tasks: tuple[Task, ...]) -> Task:
    return max(tasks, key=lambda t: t.space.size)


@pytest.fixture
def folder(tmp_path: Path, task: Task, device: DeviceTarget) -> Path:
    """Three measured points: slow, failed, fast."""
    path = tmp_path / "records"
    with Records.write(path, device) as records:
        fill(records, task, [[2e-5, 4e-5, 3e-5], None, [1e-5]])
    return path


def others(task: Task) -> list[Any]:
    return [d for d in task.space.all_decisions() if d != task.space.default]


def fill(records: Records, task: Task, seconds: Any, skip: int = 0) -> None:
    points = [task.space.point(d) for d in others(task)[skip : skip + len(seconds)]]
    records.append(task, zip(points, seconds, strict=True))


def test_points_come_back_with_their_median_times(folder: Path, task: Task, device: DeviceTarget) -> None:
    records = Records.read(folder, device)
    assert list(records.measured(task.key).values()) == [3e-5, None, 1e-5]
    assert list(records.measured(task.key)) == others(task)[:3]
    assert records.best(task.key)[0].seconds == 1e-5


def test_tvms_own_database_reads_the_folder(folder: Path, task: Task, device: DeviceTarget) -> None:
    database = ms.database.JSONDatabase(work_dir=str(folder))
    best = database.query_tuning_record(task.workload, device.tvm_target, "x")
    assert [float(s) for s in best.run_secs] == [1e-5]


def test_the_best_record_is_what_lowering_takes(
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


def test_a_trace_that_does_not_apply_leaves_the_heuristic_and_says_so(
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
    notes = []
    best = BestRecords(Records.read(folder, device))
    lowered = lower(digits.mod, device, Schedules(best, progress=notes.append))
    plain = lower(digits.mod, device)
    assert len(notes) == 1
    assert "heuristic" in notes[0]
    assert lowered.kernels[task.name].script() == plain.kernels[task.name].script()


def test_a_decision_of_a_step_that_is_not_there_is_refused(folder: Path, device: DeviceTarget) -> None:
    lines = (folder / RECORDS).read_text().splitlines()
    record = json.loads(lines[0])
    record[1][0][1][-1][0] = len(record[1][0][0])
    (folder / RECORDS).write_text("\n".join([json.dumps(record), *lines[1:]]) + "\n")
    with pytest.raises(RecordsError, match="line 1: expected a tuning record"):
        Records.read(folder, device)


def test_a_verdict_against_a_point_keeps_the_heuristic(
    folder: Path, task: Task, device: DeviceTarget
) -> None:
    with Records.write(folder, device) as records:
        ratio = Ratio(10.0, 11.0, 0.9, 0.85, 0.95, 21)
        verdict = Verdict(others(task)[2], ratio, use=False)
        records.update(replace(records.meta, verdicts={task.key: verdict}))
        assert chosen(records, task.key) is None
        records.update(replace(records.meta, verdicts={task.key: replace(verdict, use=True)}))
        assert chosen(records, task.key).decisions == others(task)[2]


def test_the_heuristics_own_point_changes_nothing(tmp_path: Path, task: Task, device: DeviceTarget) -> None:
    with Records.write(tmp_path, device) as records:
        records.append(task, [(task.space.point(task.space.default), [1e-6])])
        fill(records, task, [[1e-5]])
        assert chosen(records, task.key) is None


@pytest.mark.parametrize("torn", [b'[0, [[[["GetSBlo', b"\x00\x00\x00\x00", b"{}}\n", b'[0, [[["x"'])
def test_a_line_torn_by_a_crash_is_cut_off(
    folder: Path, task: Task, device: DeviceTarget, torn: bytes
) -> None:
    whole = (folder / RECORDS).read_bytes()
    (folder / RECORDS).write_bytes(whole + torn)
    assert len(Records.read(folder, device).all) == 3
    notes = []
    with Records.write(folder, device, notes.append) as records:
        assert len(records.all) == 3
        fill(records, task, [[5e-6]], skip=3)
    assert len(notes) == 1
    assert "incomplete last line" in notes[0]
    assert (folder / RECORDS).read_bytes().startswith(whole)
    assert len(Records.read(folder, device).all) == 4


@pytest.mark.parametrize("keep", [0.2, 0.5, 0.9, 0.999])
def test_a_file_cut_anywhere_keeps_its_whole_lines(folder: Path, device: DeviceTarget, keep: float) -> None:
    whole = (folder / RECORDS).read_bytes()
    cut = whole[: int(len(whole) * keep)]
    (folder / RECORDS).write_bytes(cut)
    with Records.write(folder, device) as records:
        assert len(records.all) == cut.count(b"\n")


def test_a_damaged_line_in_the_middle_is_refused(folder: Path, device: DeviceTarget) -> None:
    lines = (folder / RECORDS).read_text().splitlines()
    (folder / RECORDS).write_text("\n".join([lines[0], "garbage", lines[2]]) + "\n")
    with pytest.raises(RecordsError, match="line 2: expected JSON, got 'garbage'"):
        Records.read(folder, device)


@pytest.mark.parametrize("line", ["[]", "[7, [[[], []], [1.0]]]", "[-1, [[[], []], [1.0]]]", "3", '["x", 1]'])
def test_a_line_that_is_no_record_is_refused(folder: Path, device: DeviceTarget, line: str) -> None:
    with (folder / RECORDS).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(RecordsError, match="line 4: expected a tuning record"):
        Records.read(folder, device)


def test_two_writers_are_one_too_many(folder: Path, device: DeviceTarget) -> None:
    with Records.write(folder, device), pytest.raises(RecordsError, match="another tuning run"):
        Records.write(folder, device)
    Records.write(folder, device).close()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tvm", "0.26.0", "TVM version 0.27.0.post1, got 0.26.0"),
        ("space", 0, "design-space version"),
        ("format", 2, "format 1, got 2"),
    ],
)
def test_records_of_another_version_are_refused(
    folder: Path, device: DeviceTarget, field: str, value: Any, message: str
) -> None:
    meta = json.loads((folder / META).read_text())
    meta[field] = value
    (folder / META).write_text(json.dumps(meta))
    for opened in (Records.read, Records.write):
        with pytest.raises(RecordsError, match=message):
            opened(folder, device)


def test_records_of_another_target_are_refused(folder: Path) -> None:
    before = (folder / META).read_bytes()
    for opened in (Records.read, Records.write):
        with pytest.raises(RecordsError, match=r"expected records for aarch64.*cortex-a72"):
            opened(folder, resolve("rpi4"))
    assert (folder / META).read_bytes() == before


@pytest.mark.parametrize("content", ["", "{}", "[]", "not json", '{"format": 1}'])
def test_a_meta_file_that_is_none_is_refused(folder: Path, device: DeviceTarget, content: str) -> None:
    (folder / META).write_text(content)
    with pytest.raises(RecordsError, match=r"meta\.json"):
        Records.read(folder, device)


def test_a_folder_without_meta_is_refused(folder: Path, device: DeviceTarget) -> None:
    (folder / META).unlink()
    for opened in (Records.read, Records.write):
        with pytest.raises(RecordsError, match=r"meta\.json"):
            opened(folder, device)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path, device: DeviceTarget) -> None:
    with pytest.raises(RecordsError, match="cannot be read"):
        Records.read(tmp_path / "none", device)


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


def test_the_best_are_picked_into_a_folder_of_their_own(
    folder: Path, tmp_path: Path, task: Task, device: DeviceTarget
) -> None:
    with pick_best(Records.read(folder, device), tmp_path / "best", device) as picked:
        assert [r.seconds for r in picked.all] == [1e-5]
    assert BestRecords(Records.read(tmp_path / "best", device)).trace(task.space.func) is not None


def test_the_digest_follows_the_contents(folder: Path, task: Task, device: DeviceTarget) -> None:
    before = Records.read(folder, device).digest()
    assert before == Records.read(folder, device).digest()
    with Records.write(folder, device) as records:
        fill(records, task, [[5e-6]], skip=3)
        assert records.digest() != before


def test_meta_comes_back_as_it_was_written(device: DeviceTarget) -> None:
    meta = replace(
        RecordsMeta.new(device),
        peak_gflops=12.5,
        boards={"pi": BoardTime(1.5, 3, 1, 1, 2)},
        verdicts={"1": Verdict((0, 1), Ratio(2.0, 1.0, 2.0, 1.9, 2.1, 21), use=True)},
    )
    assert RecordsMeta.from_text(meta.to_text(), "meta.json") == meta


def test_workloads_are_written_before_the_records_that_name_them(folder: Path) -> None:
    indices = {json.loads(line)[0] for line in (folder / RECORDS).read_text().splitlines()}
    assert indices == set(range(len((folder / WORKLOADS).read_text().splitlines())))
