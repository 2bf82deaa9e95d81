"""The shipped records fit the design spaces of the same version."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from benchmarks.architectures import generate
from benchmarks.shipped_records import operators
from benchmarks.shipped_records.check import applicability
from benchmarks.shipped_records.cores import TARGETS
from benchmarks.shipped_records.operators import operators_of
from builder.importer import ImportedModel, import_onnx
from builder.kernels.design_space import DesignSpace
from builder.records.shipped import CoreRecords, ShippedEntry
from builder.target.device_target import resolve

pytestmark = pytest.mark.slow

# The smaller models; `python -m benchmarks.shipped_records.check` checks all of them.
MODELS = ("resnet18", "mobilenetv2")


@functools.cache
def imported(name: str) -> ImportedModel:
    return import_onnx(generate(name))


@pytest.fixture(autouse=True)
def each_model_is_imported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "generate", lambda name: name)
    monkeypatch.setattr(operators, "import_onnx", lambda name, **_: imported(name))


@pytest.mark.parametrize("name", [name for name, target in TARGETS.items() if target != "host"])
def test_nine_of_ten_entries_apply(name: str) -> None:
    result = applicability(CoreRecords.read(name), MODELS)
    assert result.share >= 0.9, (
        f"search again with `python -m benchmarks.shipped_records {name}`: {result.stale}"
    )


def test_entries_that_no_longer_fit_are_counted() -> None:
    """Of three entries, one fits, one has another heuristic, and one is for an operator that is gone."""
    fits, other, *_ = operators_of(["resnet18"], resolve("rpi4"), ["conv2d"])
    entries = {
        fits.signature: entry(fits.tasks[0].space, 0),
        other.signature: entry(other.tasks[0].space, 1),
        "conv2d 9 of 9 float32": entry(fits.tasks[0].space, 0),
    }
    result = applicability(replace(CoreRecords.read("cortex-a72"), entries=entries), ["resnet18"])
    assert result.fit == 1
    assert [s for s, _ in result.stale] == [other.signature, "conv2d 9 of 9 float32"]
    assert result.share == pytest.approx(1 / 3)


def entry(space: DesignSpace, shift: int) -> ShippedEntry:
    """Return the heuristic's own point, compared with a heuristic whose values differ by `shift`."""
    values = zip(space.names, space.values, space.default, strict=True)
    default = {name: options[index] for name, options, index in values}
    return ShippedEntry(default, {name: value + shift for name, value in default.items()}, 1.1, ("resnet18",))
