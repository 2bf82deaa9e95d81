from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tvm.s_tir import meta_schedule as ms

from builder import resolve
from builder.errors import RecordsError
from builder.records.folder import META, RECORDS, WORKLOADS, Records
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
