from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tvm.s_tir import meta_schedule as ms

from builder import resolve
from builder.errors import RecordsError
from builder.kernels.schedule import SPACES
from builder.kernels.space_versions import SPACE_VERSIONS
from builder.records.best_records import chosen, merge
from builder.records.folder import META, RECORDS, WORKLOADS, Records
from builder.records.meta_json import ModelResult, Ratio, Verdict
from builder.records.task import Task
from builder.target.device_target import DeviceTarget
from tests.builder.records.conftest import fill, others


def test_points_come_back_with_their_median_times(folder: Path, task: Task, device: DeviceTarget) -> None:
    records = Records.read(folder, device)
    assert list(records.measured(task.key).values()) == [3e-5, None, 1e-5]
    assert list(records.measured(task.key)) == others(task)[:3]
    assert records.best(task.key)[0].seconds == 1e-5


def test_tvms_own_database_reads_the_folder(folder: Path, task: Task, device: DeviceTarget) -> None:
    database = ms.database.JSONDatabase(work_dir=str(folder))
    best = database.query_tuning_record(task.workload, device.tvm_target, "x")
    assert [float(s) for s in best.run_secs] == [1e-5]


def test_a_decision_for_a_missing_step_is_refused(folder: Path, device: DeviceTarget) -> None:
    lines = (folder / RECORDS).read_text().splitlines()
    record = json.loads(lines[0])
    record[1][0][1][-1][0] = len(record[1][0][0])
    (folder / RECORDS).write_text("\n".join([json.dumps(record), *lines[1:]]) + "\n")
    with pytest.raises(RecordsError, match="line 1: expected a tuning record"):
        Records.read(folder, device)


@pytest.mark.parametrize("torn", [b'[0, [[[["GetSBlo', b"\x00\x00\x00\x00", b"{}}\n", b'[0, [[["x"'])
def test_a_line_torn_by_a_crash_is_cut_off(
    folder: Path, task: Task, device: DeviceTarget, torn: bytes
) -> None:
    whole = (folder / RECORDS).read_bytes()
    (folder / RECORDS).write_bytes(whole + torn)
    assert len(Records.read(folder, device).all) == 3
    lines: list[str] = []
    with Records.write(folder, device, lines.append) as records:
        assert len(records.all) == 3
        fill(records, task, [[5e-6]], skip=3)
    assert len(lines) == 1
    assert "incomplete last line" in lines[0]
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
def test_a_line_of_another_form_is_refused(folder: Path, device: DeviceTarget, line: str) -> None:
    with (folder / RECORDS).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(RecordsError, match="line 4: expected a tuning record"):
        Records.read(folder, device)


def test_a_second_writer_is_refused(folder: Path, device: DeviceTarget) -> None:
    with Records.write(folder, device), pytest.raises(RecordsError, match="another tuning run"):
        Records.write(folder, device)
    Records.write(folder, device).close()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tvm", "0.26.0", "TVM version 0.27.0.post1, got 0.26.0"),
        ("format", 3, "format 2, got 3"),
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
def test_a_malformed_meta_file_is_refused(folder: Path, device: DeviceTarget, content: str) -> None:
    (folder / META).write_text(content)
    with pytest.raises(RecordsError, match=r"meta\.json"):
        Records.read(folder, device)


def test_a_folder_without_meta_is_refused(folder: Path, device: DeviceTarget) -> None:
    (folder / META).unlink()
    for opened in (Records.read, Records.write):
        with pytest.raises(RecordsError, match=r"meta\.json"):
            opened(folder, device)


def test_a_missing_folder_is_refused(tmp_path: Path, device: DeviceTarget) -> None:
    with pytest.raises(RecordsError, match="cannot be read"):
        Records.read(tmp_path / "none", device)


def test_the_digest_changes_with_the_contents(folder: Path, task: Task, device: DeviceTarget) -> None:
    before = Records.read(folder, device).digest()
    assert before == Records.read(folder, device).digest()
    with Records.write(folder, device) as records:
        fill(records, task, [[5e-6]], skip=3)
        assert records.digest() != before


def test_workloads_are_written_before_the_records_that_name_them(folder: Path) -> None:
    indices = {json.loads(line)[0] for line in (folder / RECORDS).read_text().splitlines()}
    assert indices == set(range(len((folder / WORKLOADS).read_text().splitlines())))


@pytest.fixture
def two_kinds(tmp_path: Path, tasks: tuple[Task, ...], device: DeviceTarget) -> Path:
    """Three records of each of two tasks whose design spaces are of different kinds."""
    path = tmp_path / "two"
    with Records.write(path, device) as records:
        for task in kinds(tasks):
            fill(records, task, [[2e-5], None, [1e-5]])
            verdict = Verdict(others(task)[2], Ratio(20.0, 10.0, 2.0, 1.9, 2.1, 21), use=True)
            model = ModelResult(task.name, {task.key: 1}, "board", verdict.ratio)
            models = {**records.meta.models, task.name: model}
            verdicts = {**records.meta.verdicts, task.key: verdict}
            records.update(replace(records.meta, verdicts=verdicts, models=models))
    return path


def kinds(tasks: tuple[Task, ...]) -> tuple[Task, Task]:
    first = max(tasks, key=lambda t: t.space.size)
    second = max((t for t in tasks if t.kind != first.kind), key=lambda t: t.space.size)
    return first, second


def change(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Raise the version of one kind of design space."""
    use_versions(monkeypatch, {**SPACE_VERSIONS, kind: SPACE_VERSIONS[kind] + 1})


def use_versions(monkeypatch: pytest.MonkeyPatch, versions: Mapping[str, int]) -> None:
    for module in ("meta_json", "folder"):
        monkeypatch.setattr(f"builder.records.{module}.SPACE_VERSIONS", versions)


def test_records_of_a_kind_that_changed_are_skipped_and_others_stay(
    two_kinds: Path, tasks: tuple[Task, ...], device: DeviceTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed, other = kinds(tasks)
    change(monkeypatch, changed.kind)
    before = (two_kinds / RECORDS).read_bytes()
    records = Records.read(two_kinds, device)
    old = SPACE_VERSIONS[changed.kind]
    assert records.skipped == {(changed.kind, old): 3}
    assert records.notes() == [
        f"{two_kinds}: skipped 3 records of {changed.kind}: expected version {old + 1} of its design space, "
        f"got {old}; tune again to replace them"
    ]
    assert records.keys == (other.key,)
    assert chosen(records, changed.key) is None
    assert records.meta.models[changed.name].ratio is None
    assert records.meta.models[other.name].ratio is not None
    used = chosen(records, other.key)
    assert used is not None
    assert used.decisions == others(other)[2]
    assert (two_kinds / RECORDS).read_bytes() == before


def test_new_records_of_a_changed_kind_replace_the_old_ones(
    two_kinds: Path, tasks: tuple[Task, ...], device: DeviceTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed, other = kinds(tasks)
    change(monkeypatch, changed.kind)
    lines: list[str] = []
    with Records.write(two_kinds, device, lines.append) as records:
        assert len(lines) == 1
        fill(records, changed, [[5e-6]])
    again = Records.read(two_kinds, device)
    assert not again.notes()
    assert list(again.measured(changed.key).values()) == [5e-6]
    assert changed.key not in again.meta.verdicts
    assert len(again.measured(other.key)) == 3
    assert again.trace(again.best(changed.key)[0]) is not None
    with Records.write(two_kinds, device) as records:
        fill(records, changed, [[4e-6]], skip=1)
    assert list(Records.read(two_kinds, device).measured(changed.key).values()) == [5e-6, 4e-6]
    database = ms.database.JSONDatabase(work_dir=str(two_kinds))
    assert database.query_tuning_record(other.workload, device.tvm_target, "x") is not None


def test_merged_records_are_of_the_present_version(
    two_kinds: Path,
    tmp_path: Path,
    tasks: tuple[Task, ...],
    device: DeviceTarget,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changed, _ = kinds(tasks)
    change(monkeypatch, changed.kind)
    with Records.write(tmp_path / "new", device) as records:
        fill(records, changed, [[3e-6]])
    with merge(two_kinds, [tmp_path / "new"], device) as merged:
        assert list(merged.measured(changed.key).values()) == [3e-6]
    assert list(Records.read(two_kinds, device).measured(changed.key).values()) == [3e-6]
    with merge(tmp_path / "out", [two_kinds], device) as merged:
        assert not merged.notes()
    assert not Records.read(tmp_path / "out", device).notes()


def test_every_kind_of_design_space_has_a_version() -> None:
    assert SPACE_VERSIONS.keys() == SPACES.keys()


@pytest.mark.parametrize("text", ["null\n", "[]\n", "3\n", "[" * 5000 + "]" * 5000 + "\n3\n"])
@pytest.mark.parametrize("name", ["database_workload.json", "database_tuning_record.json"])
def test_a_line_of_any_other_json_is_refused(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    with pytest.raises(RecordsError, match="expected"):
        Records.read(folder)
