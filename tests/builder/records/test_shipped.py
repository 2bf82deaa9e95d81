"""Shipped records are used where they still fit; the user's own records win; both can be switched off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from builder import compile, load, resolve
from builder.compiling.lower import lower
from builder.errors import BuildError
from builder.importer import ImportedModel
from builder.kernels.decisions import UNTUNED, Schedules, heuristic
from builder.records.best_records import BestRecords
from builder.records.folder import Records
from builder.records.shipped import (
    CoreRecords,
    ShippedChoices,
    ShippedEntry,
    name_for,
    point_of,
    signature_for,
)
from builder.records.task import Task
from builder.target.device_target import DeviceTarget
from builder.tuning.tasks.extraction import extract_tasks
from tests.builder.records.conftest import point_at

pytestmark = pytest.mark.slow

DIGITS = Path(__file__).resolve().parents[3] / "examples" / "digits" / "digits.onnx"
NAMES = ("x86-avx512", "x86-avx2", "cortex-a53", "cortex-a72", "cortex-a76")


@pytest.fixture(scope="module")
def digits() -> ImportedModel:
    return load(DIGITS)


@pytest.fixture(scope="module")
def device() -> DeviceTarget:
    return resolve("host")


@pytest.fixture(scope="module")
def task(digits: ImportedModel, device: DeviceTarget) -> Task:
    return max(extract_tasks(digits, device, choose=heuristic), key=lambda t: t.space.size)


def signature(task: Task) -> str:
    found = signature_for(task.workload)
    assert found is not None
    return found


def entry(task: Task) -> ShippedEntry:
    """Return an entry whose point is not the heuristic's."""
    names, default = task.space.names, task.space.default
    other = next(d for d in task.space.all_decisions() if d != default and task.space.point(d) is not None)
    return ShippedEntry(
        {n: v[i] for n, v, i in zip(names, task.space.values, other, strict=True)},
        {n: v[i] for n, v, i in zip(names, task.space.values, default, strict=True)},
        1.5,
        ("digits",),
    )


def choices(*found: tuple[str, ShippedEntry]) -> ShippedChoices:
    return ShippedChoices(CoreRecords(1, "x86-avx512", "znver5", True, "a test", "2026-11-21", dict(found)))


def kernel(digits: ImportedModel, device: DeviceTarget, task: Task, schedules: Schedules = UNTUNED) -> str:
    """Return the lowered kernel of `task` as a script."""
    return str(lower(digits.mod, device, schedules).kernels[task.name].script())


def test_an_entry_takes_the_heuristics_place(digits: ImportedModel, device: DeviceTarget, task: Task) -> None:
    chosen = choices((signature(task), entry(task)))
    assert kernel(digits, device, task, Schedules(shipped=chosen)) != kernel(digits, device, task)
    assert chosen.used == {signature(task)}


@pytest.mark.parametrize(
    "change",
    [
        lambda e: replace(e, chosen={**e.chosen, next(iter(e.chosen)): 9999}),
        lambda e: replace(e, instead={**e.instead, next(iter(e.instead)): 9999}),
        lambda e: replace(e, chosen={"renamed": 1, **e.chosen}),
        lambda e: replace(e, chosen=dict(list(e.chosen.items())[1:])),
    ],
    ids=["a value no longer offered", "another heuristic", "one decision too many", "one too few"],
)
def test_an_entry_that_does_not_fit_is_ignored(
    digits: ImportedModel, device: DeviceTarget, task: Task, change: Callable[[ShippedEntry], ShippedEntry]
) -> None:
    chosen = choices((signature(task), change(entry(task))))
    assert kernel(digits, device, task, Schedules(shipped=chosen)) == kernel(digits, device, task)
    assert chosen.used == set()
    assert chosen.stale == {signature(task)}


def test_an_entry_is_a_point_of_the_space(task: Task) -> None:
    known = entry(task)
    point = point_of(known, task.space)
    assert point is not None
    named = zip(task.space.names, task.space.values, point, strict=True)
    assert {name: values[i] for name, values, i in named} == known.chosen
    elsewhere = replace(known, chosen={**known.chosen, next(iter(known.chosen)): 9999})
    assert point_of(elsewhere, task.space) is None


def test_the_users_own_records_win(
    digits: ImportedModel, device: DeviceTarget, task: Task, tmp_path: Path
) -> None:
    names, known = task.space.names, entry(task)
    of = {
        d: dict(zip(names, (v[i] for v, i in zip(task.space.values, d, strict=True)), strict=True))
        for d in task.space.all_decisions()
        if task.space.point(d) is not None
    }
    fastest = next(d for d, values in of.items() if values not in (known.chosen, known.instead))
    with Records.write(tmp_path, device) as records:
        records.append(task, [(point_at(task, task.space.default), [2e-6])])
        records.append(task, [(point_at(task, fastest), [1e-6])])
    chosen = choices((signature(task), known))
    best = BestRecords(Records.read(tmp_path, device))
    with_both = kernel(digits, device, task, Schedules(best, chosen))
    assert with_both == kernel(digits, device, task, Schedules(best))
    assert not chosen.used


def test_the_manifest_names_the_records_used_and_none_uses_nothing(
    digits: ImportedModel, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = choices((signature(task), entry(task)))
    monkeypatch.setattr("builder.compiling.compilation.shipped_for", lambda _: chosen)
    notes: list[str] = []
    declared = compile(digits, progress=notes.append).manifest.provenance.shipped_records
    assert declared is not None
    assert (declared.name, declared.kernels, declared.board_timed) == ("x86-avx512", 1, True)
    assert declared.sha256 == chosen.records.digest()
    assert any("shipped records of x86-avx512 for 1 kernel" in note for note in notes)
    assert compile(digits, tuning_records="none").manifest.provenance.shipped_records is None


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("llvm -mtriple=x86_64-linux-gnu -mcpu=cascadelake", "x86-avx512"),
        ("llvm -mtriple=x86_64-linux-gnu -mcpu=znver5", "x86-avx512"),
        ("x86-64-v3", "x86-avx2"),
        ("llvm -mtriple=x86_64-linux-gnu -mcpu=x86-64-v2", None),
        ("rpi3", "cortex-a53"),
        ("rpi4", "cortex-a72"),
        ("llvm -mtriple=aarch64-linux-gnu -mcpu=neoverse-n1", "cortex-a76"),
        ("rpi5", "cortex-a76"),
        ("rpi-armv7", None),
        ("riscv64", None),
    ],
)
def test_records_are_chosen_by_instruction_set(target: str, name: str | None) -> None:
    assert name_for(resolve(target)) == name


@pytest.mark.parametrize("name", NAMES)
def test_shipped_records_are_what_they_claim(name: str) -> None:
    records = CoreRecords.read(name)
    assert records.name == name
    assert records.board_timed == name.startswith("x86")
    if not records.board_timed:
        assert "no board was timed" in records.measure
    for found in records.entries.values():
        assert found.gain >= 1.03
        assert found.chosen != found.instead
        assert found.chosen.keys() == found.instead.keys()


def test_shipped_records_are_small() -> None:
    assert sum(len(CoreRecords.read(name).to_text()) for name in NAMES) <= 300_000


def test_a_broken_installation_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cortex-a72.json").write_text('{"format": 1}')
    monkeypatch.setattr("importlib.resources.files", lambda _: tmp_path)
    with pytest.raises(BuildError, match=r"cortex-a72\.json"):
        CoreRecords.read("cortex-a72")
    with pytest.raises(BuildError, match=r"x86-avx2\.json"):
        CoreRecords.read("x86-avx2")
