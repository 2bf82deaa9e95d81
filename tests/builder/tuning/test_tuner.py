"""Whole runs with a small model: complete, continued, killed and interrupted."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from builder import Package, RunnerOptions, TuneOptions, compile, load, run, tune
from builder.cli import main
from builder.errors import FleetError
from builder.importer import ImportedModel
from builder.kernels.design_space import decisions_of
from builder.records.folder import RECORDS, Records
from builder.records.meta_json import Ratio
from builder.records.task import Task
from builder.target.device_target import DeviceTarget
from builder.tuning.tasks.extraction import extract_tasks
from builder.tuning.views.html_report import render as render_report
from builder.tuning.views.html_report import write_report
from builder.tuning.views.progress import Progress
from tests.patience import PATIENCE_S
from tests.two_operators import two_operators

pytestmark = pytest.mark.slow

DIGITS = Path(__file__).resolve().parents[3] / "examples" / "model" / "model.onnx"
FAST = RunnerOptions(number=1, repeat=2, min_repeat_ms=0, timeout_s=30)
TRIALS = 4


class Seen:
    """A view that keeps everything that it is given."""

    def __init__(self) -> None:
        self.progress: list[Progress] = []
        self.notes: list[str] = []

    def update(self, progress: Progress) -> None:
        self.progress.append(progress)

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of the model that is tuned."""
    path = tmp_path_factory.mktemp("model") / "model.onnx"
    onnx.save(two_operators(), path)
    return path


@pytest.fixture(scope="module")
def model(path: Path) -> ImportedModel:
    return load(path)


@pytest.fixture(scope="module")
def tasks(model: ImportedModel, device: DeviceTarget) -> tuple[Task, ...]:
    return extract_tasks(model, device)


@pytest.fixture(scope="module")
def tuned(
    tmp_path_factory: pytest.TempPathFactory, model: ImportedModel, device: DeviceTarget
) -> tuple[Records, Any]:
    """A finished run, and the view that saw its progress."""
    folder = tmp_path_factory.mktemp("tuned") / "records"
    seen = Seen()
    records = tune(
        model, device, folder, options=TuneOptions(trials=TRIALS, pairs=5, parallel=2), runner=FAST, view=seen
    )
    return records, seen


@pytest.fixture(scope="module")
def plain(model: ImportedModel) -> Package:
    """The model without records."""
    return compile(model)


def recorded(path: Path) -> list[str]:
    """Return workload and decisions of each record as text."""
    found = []
    for line in (path / RECORDS).read_text().splitlines():
        index, (trace, *_) = json.loads(line)
        found.append(json.dumps([index, trace[1]]))
    return found


def test_every_task_gets_its_trials_the_heuristics_first(
    tuned: tuple[Records, Any], tasks: tuple[Task, ...]
) -> None:
    records, seen = tuned
    for task in tasks:
        measured = list(records.measured(task.key))
        assert len(measured) == min(TRIALS, task.space.size)
        assert measured[0] == task.space.default
    assert seen.progress[-1].phase == "done"
    assert seen.progress[-1].peak_gflops > 0


def test_no_point_is_measured_twice(tuned: tuple[Records, Any]) -> None:
    records, _ = tuned
    assert len(set(recorded(records.path))) == len(recorded(records.path)) == len(records.all)


def test_a_point_is_used_only_if_it_is_faster_beyond_doubt(tuned: tuple[Records, Any]) -> None:
    records, _ = tuned
    for verdict in records.meta.verdicts.values():
        assert verdict.use == (verdict.ratio.low > 1.0)
    assert records.meta.boards["local"].measured >= len(records.all)
    assert records.meta.boards["local"].seconds > 0


def test_a_model_compiled_with_its_records_gives_the_same_answers(
    tuned: tuple[Records, Any], model: ImportedModel, plain: Package
) -> None:
    records, _ = tuned
    package = compile(model, tuning_records=records)
    assert package.manifest.provenance.tuning_records_sha256 == records.digest()
    ours, theirs = run(package).get_output("output_0"), run(plain).get_output("output_0")
    assert np.allclose(ours, theirs, rtol=0, atol=1e-4)


def test_the_same_command_again_measures_nothing(
    tuned: tuple[Records, Any], model: ImportedModel, device: DeviceTarget
) -> None:
    records, _ = tuned
    before = recorded(records.path)
    tune(model, device, records.path, options=TuneOptions(trials=TRIALS, pairs=0, parallel=1), runner=FAST)
    assert recorded(records.path) == before


def test_more_trials_continue_from_the_records(
    tuned: tuple[Records, Any], model: ImportedModel, device: DeviceTarget, tmp_path: Path
) -> None:
    import shutil

    records, _ = tuned
    shutil.copytree(records.path, tmp_path / "more")
    before = recorded(records.path)
    options = TuneOptions(trials=TRIALS + 2, pairs=0, parallel=1)
    more = tune(model, device, tmp_path / "more", options=options, runner=FAST)
    after = recorded(tmp_path / "more")
    assert after[: len(before)] == before
    assert len(set(after)) == len(after) > len(before)
    assert len(more.all) == len(after)


def test_other_records_best_points_are_measured_early(
    tuned: tuple[Records, Any],
    model: ImportedModel,
    device: DeviceTarget,
    tmp_path: Path,
    tasks: tuple[Task, ...],
) -> None:
    records, _ = tuned
    task = max(tasks, key=lambda t: t.space.size)
    fresh = tune(
        model,
        device,
        tmp_path / "fresh",
        options=TuneOptions(
            trials=3, pairs=0, parallel=1, tasks=str(task.index), prior_records=[records.path]
        ),
        runner=FAST,
    )
    wanted = [r.decisions for r in records.best(task.key, 3)]
    assert set(list(fresh.measured(task.key))[1:3]) <= set(wanted)


def test_early_stopping_ends_a_task(
    model: ImportedModel, device: DeviceTarget, tmp_path: Path, tasks: tuple[Task, ...]
) -> None:
    task = max(tasks, key=lambda t: t.space.size)
    options = TuneOptions(
        tuner="gridsearch", trials=1000, early_stopping=2, pairs=0, batch=2, parallel=1, tasks=str(task.index)
    )
    records = tune(model, device, tmp_path, options=options, runner=FAST)
    times = list(records.measured(task.key).values())
    assert len(times) < task.space.size
    best = min(range(len(times)), key=lambda i: times[i] or 1)
    assert 2 <= len(times) - 1 - best < 4


def test_the_manifest_has_the_comparison_of_the_model(
    tuned: tuple[Records, Any], model: ImportedModel, plain: Package, device: DeviceTarget, tmp_path: Path
) -> None:
    import shutil
    from dataclasses import replace

    records, _ = tuned
    shutil.copytree(records.path, tmp_path / "r")
    with Records.write(tmp_path / "r", device) as copy:
        result = copy.meta.models[model.source_sha256]
        ratio = Ratio(120.0, 100.0, 1.2, 1.1, 1.3, 21)
        better = replace(result, board="pi:9091", ratio=ratio, use=True)
        copy.update(replace(copy.meta, models={model.source_sha256: better}))
    tuning = compile(model, tuning_records=tmp_path / "r").manifest.provenance.tuning
    assert tuning is not None
    assert (tuning.board, tuning.untuned_ms, tuning.tuned_ms, tuning.speedup) == ("pi:9091", 0.12, 0.1, 1.2)
    with Records.write(tmp_path / "r", device) as copy:
        copy.update(replace(copy.meta, models={model.source_sha256: replace(better, use=False)}))
    lines: list[str] = []
    package = compile(model, tuning_records=tmp_path / "r", progress=lines.append)
    assert package.manifest.provenance.tuning is None
    assert any("slower as a whole" in line for line in lines)
    assert package.members["mod.so"] == plain.members["mod.so"]


def test_a_killed_run_loses_at_most_a_batch_and_continues(
    path: Path, tmp_path: Path, tasks: tuple[Task, ...]
) -> None:
    """The run that is killed may leave half a line; the next one continues, and is interrupted."""
    task = max(tasks, key=lambda t: t.space.size)
    command = [
        *(sys.executable, "-m", "builder", "tune", str(path), "-o", str(tmp_path / "r")),
        *("--tasks", str(task.index), "--trials", "100", "--pairs", "0"),
        *("--number", "1", "--repeat", "1", "--min-repeat-ms", "0", "--parallel", "1"),
    ]
    for number in (signal.SIGKILL, signal.SIGINT):
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        before = recorded(tmp_path / "r") if number == signal.SIGINT else []
        deadline = time.monotonic() + 120
        while not (tmp_path / "r" / RECORDS).exists() or len(recorded(tmp_path / "r")) < len(before) + 3:
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        process.wait(PATIENCE_S)
        assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
        if number == signal.SIGINT:
            assert "repeat the command to continue" in process.stderr.read()
        found = recorded(tmp_path / "r")
        assert found[: len(before)] == before
        assert len(set(found)) == len(found) >= len(before) + 3


def test_another_machines_target_needs_boards(model: ImportedModel, tmp_path: Path) -> None:
    with pytest.raises(FleetError, match="cannot measure for aarch64") as caught:
        tune(model, "rpi4", tmp_path)
    assert "--rpc-tracker" in (caught.value.hint or "")


def test_the_report_shows_every_operator_and_fetches_nothing(
    tuned: tuple[Records, Any], model: ImportedModel, tasks: tuple[Task, ...]
) -> None:
    records, _ = tuned
    page = render_report(records, model.source_sha256)
    assert all(task.name in page for task in tasks)
    assert all(task.nodes and ", ".join(task.nodes) in page for task in tasks)
    assert f"<figcaption>{tasks[0].nodes[0]}</figcaption>" in page
    assert page.count("<figure>") == len(tasks)
    assert "http" not in page
    assert "src=" not in page
    assert write_report(records, model.source_sha256).read_text() == page


def test_traces_of_a_run_are_points_of_the_space(tuned: tuple[Records, Any], tasks: tuple[Task, ...]) -> None:
    records, _ = tuned
    task = tasks[0]
    for record in records.best(task.key, 3):
        assert decisions_of(records.trace(record)) == record.decisions


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--tuner", "magic"], 2, "magic"),
        (["--trials", "0"], 2, "expected an integer of 1 or more"),
        (["--min-repeat-ms", "-1"], 2, "milliseconds"),
        (["--tasks", "99"], 4, "--tasks"),
        (["--tasks", "x"], 4, "--tasks"),
        (["--rpc-key", "k"], 4, "belong together"),
        (["--target", "rpi4"], 4, "cannot measure"),
        (["--target", "nonsense"], 4, "unknown target"),
        (["--rpc-tracker", "a:b:c", "--rpc-key", "k"], 4, "host:port"),
        (["--tuning-records", "/nowhere"], 4, "expected a folder of tuning records"),
    ],
)
def test_bad_flags_are_explained(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], code: int, message: str
) -> None:
    assert main(["tune", str(path), "-o", str(tmp_path / "r"), "--quiet", *flags]) == code
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("edgebundle: error: ")
    assert "Traceback" not in error


def test_tasks_can_be_listed(path: Path, capsys: pytest.CaptureFixture[str], tasks: tuple[Task, ...]) -> None:
    assert main(["tune", str(path), "--tasks", "list"]) == 0
    shown = capsys.readouterr().out
    assert all(task.title in shown for task in tasks)
    assert main(["tune", str(path), "--tasks", "list", "--json"]) == 0
    assert [t["name"] for t in json.loads(capsys.readouterr().out)] == [task.name for task in tasks]


def test_records_are_shown_picked_merged_and_exported(
    tuned: tuple[Records, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records, _ = tuned
    folder = str(records.path)
    assert main(["records", "show", folder]) == 0
    assert "untuned us" in capsys.readouterr().out
    assert main(["records", "show", folder, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["operators"]) == len(records.keys)
    assert main(["records", "merge", folder, folder, "-o", str(tmp_path / "m")]) == 0
    assert len(Records.read(tmp_path / "m").all) == len(records.all)
    assert main(["records", "best", folder, "-o", str(tmp_path / "b")]) == 0
    capsys.readouterr()
    assert main(["records", "export", folder, "--format", "csv"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(records.all) + 1
    assert main(["records", "export", folder]) == 0
    assert len(json.loads(capsys.readouterr().out)) == len(records.all)
    assert main(["records", "show", str(tmp_path / "none")]) == 4
