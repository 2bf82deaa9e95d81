"""Quantise a float model with calibration data: `quantize`.

The steps, in order: import, fold constants into weights, observe the values inside, choose ranges, place the
levels, write the QDQ model, compare it with the float model, and leave blocks in float until it is accurate
enough. The same input gives the same bytes. Leaves compiling to `builder.compiling`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import onnx

from agent import __version__
from agent.bundle.tensor_spec import TensorSpec
from agent.durable import replacing
from builder.errors import AccuracyError, ModelError
from builder.importer import ImportedModel, import_onnx, load
from builder.importer.large_models import model_bytes
from builder.importer.multiply_adds import multiply_adds
from builder.importer.onnx_graph import DEFAULT_DOMAINS
from builder.quantising.agreement import Agreement, Comparison, class_scores, truths_for
from builder.quantising.blocks import SAMPLES, isolated_sqnr, mean_errors
from builder.quantising.calibration import (
    FEW_SAMPLES,
    CalibrationData,
    Source,
    describe,
    resolution,
    samples_for,
)
from builder.quantising.folding import folded
from builder.quantising.observation import observe
from builder.quantising.placement import Placement, place
from builder.quantising.qdq import OLDEST, Activations, Corrections, QdqModel, Scales, write_qdq
from builder.quantising.ranges import Range, choose
from builder.quantising.report import Block, QuantisationReport, count_methods
from builder.quantising.sensitivity import fewest, rank
from builder.quantising.units import Unit, find_units
from builder.target.device_target import DeviceTarget, resolve

Metric = Literal["auto", "top1", "sqnr"]
Progress = Callable[[str], None]

MAX_DROP: Final = 0.5  # percentage points
# What is aimed at for models without class scores; with less, detectors begin to lose boxes.
GOOD_SQNR_DB: Final = 20.0
# If it cannot be reached, blocks are left in float only while that still adds as much.
_WORTHWHILE_DB: Final = 1.0
# And no more than these for an aim that the user did not state: functions in float cost time, though no
# multiply-adds.
_MOST_FOR_THE_AIM: Final = 8
# Share of the multiply-adds that may be left in float to reach the accuracy, in percent.
MAX_FLOAT: Final = 5.0
_QUANTISED: Final = frozenset(
    {
        "ConvInteger", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "QLinearConv",
        "QLinearMatMul", "QuantizeLinear",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Limits:
    """What quantising may cost.

    Attributes
    ----------
    max_drop
        Percentage points of accuracy that may be lost if classes of samples are known; else percentage
        points of samples whose best class may differ from the float model's.
    min_sqnr_db
        Least signal to noise of a model without class scores, in dB. With None, `GOOD_SQNR_DB` is aimed at,
        and a warning says if it was not reached.
    max_float
        Largest share of the multiply-adds that is left in float for that, in percent.
    metric
        `top1` takes the only output for class scores; `sqnr` never does; `auto` does if its shape is that of
        class scores.
    """

    max_drop: float = MAX_DROP
    min_sqnr_db: float | None = None
    max_float: float = MAX_FLOAT
    metric: Metric = "auto"


@dataclass(frozen=True, slots=True)
class QuantisedModel:
    """A model in int8.

    Attributes
    ----------
    onnx
        The model in QDQ form, with static shapes.
    name
        The float model's name.
    report
        What quantising did and cost.
    """

    onnx: onnx.ModelProto
    name: str
    report: QuantisationReport

    def to_bytes(self) -> bytes:
        """Return the model's file; the same input gives the same bytes."""
        raw: bytes = self.onnx.SerializeToString(deterministic=True)
        return raw

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model's file, at once and completely."""
        with replacing(Path(path)) as file:
            file.write(self.to_bytes())

    def imported(self, progress: Progress | None = None) -> ImportedModel:
        """Return the model in the form that `builder.compile` takes, with the float model's name."""
        return replace(import_onnx(self.onnx, progress=progress), name=self.name)


def quantize(
    model: ImportedModel | str | os.PathLike[str],
    calibration: Source,
    *,
    preprocess: str | None = None,
    labels: str | os.PathLike[str] | None = None,
    target: str | DeviceTarget = "host",
    activations: Activations | None = None,
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> QuantisedModel:
    """Quantise a float model.

    Parameters
    ----------
    model
        The result of `builder.load`, or a path.
    calibration
        A folder of pictures, an .npz file, a folder of them, or arrays by input name; see
        `builder.quantising.calibration.open_calibration`.
    preprocess
        A preset or a TOML file, as for `builder.compile`; needed for pictures.
    labels
        CSV with the classes of samples; see `builder.quantising.agreement.read_truths`.
    target
        The device, which decides the type of activations: uint8 on x86, else int8. If it has no dot products
        of bytes, weights are such that sums of four products fit 16 bits.
    activations
        That type, instead.
    limits
        What quantising may cost.
    progress
        Called with each step as it begins.

    Raises
    ------
    ModelError
        If the model or the calibration data cannot be used.
    ShapeError
        If the calibration data do not fit the model's inputs.
    AccuracyError
        If the model is not accurate enough within the limits.
    """
    progress = progress or (lambda _: None)
    limits = limits or Limits()
    if not isinstance(model, ImportedModel):
        progress("importing the model")
        model = load(model, progress=progress)
    device = target if isinstance(target, DeviceTarget) else resolve(target)
    if activations is None:
        activations = "uint8" if device.arch == "x86_64" else "int8"
    prepared = _prepared(model.onnx)
    units = find_units(prepared)
    if not any(unit.weights is not None for unit in units):
        raise ModelError(
            "expected convolutions or matrix products with constant weights, got none",
            hint="there is nothing to quantise: compile it as it is (weights must be finite numbers)",
        )
    data = samples_for(model, calibration, preprocess)
    scores = _scores(model.outputs, limits.metric)
    truths = truths_for(labels, data, model.outputs, scores)
    work = _Work(model, prepared, units, data, activations, limits, scores, truths, progress)
    work.in_words = device.dot.halves
    return work.run()


def _prepared(source: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of a normalised model, with constants folded into weights.

    Raises `ModelError` if the model is quantised already, or of an old opset that ONNX could not convert.
    """
    found = sorted({node.op_type for node in source.graph.node} & _QUANTISED)
    if found:
        raise ModelError(
            f"expected a float model, got one with {', '.join(found)}",
            hint="it is quantised already: compile it as it is",
        )
    opset = next((o.version for o in source.opset_import if o.domain in DEFAULT_DOMAINS), 1)
    if opset < OLDEST:
        raise ModelError(
            f"expected a model of opset {OLDEST} or newer, got opset {opset}",
            hint="ONNX cannot convert this model to a newer opset: export it again",
        )
    return folded(source)


def _scores(outputs: Sequence[TensorSpec], metric: Metric) -> int | None:
    if metric == "sqnr":
        return None
    found = class_scores(outputs)
    if found is None and metric == "top1":
        listed = ", ".join(f"{o.name}{list(o.shape)}" for o in outputs)
        raise ModelError(
            f"expected one output with a score for each class, got {listed[:200]}", hint="use --metric sqnr"
        )
    return found


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A quantised form of the model, and how well it agrees with the float model."""

    placement: Placement
    qdq: QdqModel
    agreement: Agreement


class _Work:
    """One quantisation: what its steps share."""

    def __init__(
        self,
        model: ImportedModel,
        prepared: onnx.ModelProto,
        units: Sequence[Unit],
        data: CalibrationData,
        activations: Activations,
        limits: Limits,
        scores: int | None,
        truths: Mapping[int, int] | None,
        progress: Progress,
    ) -> None:
        self._source, self._model, self._units, self._data = model, prepared, units, data
        self._activations, self._limits, self._progress = activations, limits, progress
        self._scores, self._truths = scores, truths
        self.in_words = False
        self._warnings: list[str] = []
        self._ranges: dict[str, Range] = {}
        self._corrections: Corrections = {}
        self._scales: Scales = {}

    def run(self) -> QuantisedModel:
        """Quantise the model."""
        self._progress(describe(self._data))
        if len(self._data) < FEW_SAMPLES:
            self._warnings.append(
                f"only {len(self._data)} calibration samples: ranges may miss values that others have; "
                f"give {FEW_SAMPLES} or more, better a few hundred"
            )
        self._progress("running the float model on the calibration samples")
        tensors = dict.fromkeys(name for unit in self._units for name in (*unit.data, *unit.results))
        histograms = observe(self._model, list(tensors), self._data, self._progress)
        self._progress(f"choosing the ranges of {len(histograms)} tensors")
        self._ranges = {name: choose(histogram) for name, histogram in histograms.items()}
        weighted = [unit for unit in self._units if unit.weights is not None]
        if not any(all(name in self._ranges for name in unit.data) for unit in weighted):
            raise ModelError(
                "expected samples of which the model makes finite numbers, got none: "
                f"{weighted[0].name} reads values that are not",
                hint="prepare the samples as the model expects them: see --preprocess",
            )
        self._progress("comparing the quantised model with the float model")
        self._comparison = Comparison(
            self._model, self._source.outputs, self._data, self._truths, self._scores, self._progress
        )
        attempt = self._attempt(())
        isolated = isolated_sqnr(self._model, attempt.qdq.model, attempt.placement, self._data)
        attempt, correction_db = self._corrected(attempt)
        excluded: tuple[str, ...] = ()
        if not self._is_enough(attempt.agreement):
            attempt, excluded = self._leave_in_float(attempt, isolated)
        self._warn_about(attempt, excluded)
        return self._result(attempt, excluded, isolated, correction_db)

    def _corrected(self, plain: _Attempt) -> tuple[_Attempt, float | None]:
        """Correct the biases, if that lessens the noise: the better attempt, and what it adds in dB."""
        self._progress("correcting biases")
        self._corrections = mean_errors(self._model, plain.qdq.model, plain.placement, self._data)
        attempt = self._attempt(())
        ours, other = attempt.agreement.sqnr_db, plain.agreement.sqnr_db
        if ours is None or other is None or ours < other:
            self._corrections = {}
            return plain, None
        return attempt, ours - other

    def _attempt(self, excluded: Sequence[str], count: int | None = None) -> _Attempt:
        """Quantise all units but these, and compare on all samples or on `count`."""
        placement = place(self._model, self._units, self._ranges, excluded)
        qdq = write_qdq(
            self._model,
            placement,
            self._activations,
            self._corrections,
            self._scales,
            in_words=self.in_words,
        )
        return _Attempt(placement, qdq, self._comparison.measure(qdq.model, count))

    def _is_enough(self, agreement: Agreement) -> bool:
        drop = agreement.drop
        if drop is not None:
            return drop <= self._limits.max_drop + 1e-9
        if agreement.sqnr_db is None:  # nothing to lose: no output is a float
            return True
        wanted = self._limits.min_sqnr_db
        return agreement.sqnr_db >= (GOOD_SQNR_DB if wanted is None else wanted)

    def _leave_in_float(
        self, first: _Attempt, isolated: Mapping[str, float]
    ) -> tuple[_Attempt, tuple[str, ...]]:
        """Leave as few blocks in float as make the model accurate enough.

        Raises `AccuracyError` if that takes more than the share of the work that may be left in float.
        """
        self._progress(f"not accurate enough ({_told(first.agreement)}): looking for sensitive blocks")
        base = self._attempt((), SAMPLES).agreement.sqnr_db or 0.0

        def gain(name: str) -> float:
            return (self._attempt((name,), SAMPLES).agreement.sqnr_db or 0.0) - base

        units = [unit for unit in first.placement.units if unit.name in isolated]
        budget = self._limits.max_float / 100 * multiply_adds(self._model)
        candidates: list[Unit] = []
        for unit in rank(units, isolated, gain, self._progress):
            if sum(other.macs for other in candidates) + unit.macs <= budget:
                candidates.append(unit)
        aimed = first.agreement.drop is None and self._limits.min_sqnr_db is None
        if aimed:
            candidates = candidates[:_MOST_FOR_THE_AIM]
        attempts: dict[int, _Attempt] = {0: first}

        def passes(count: int) -> bool:
            attempts[count] = self._attempt([unit.name for unit in candidates[:count]])
            self._progress(f"{count} blocks in float: {_told(attempts[count].agreement)}")
            return self._is_enough(attempts[count].agreement)

        count = fewest(len(candidates), passes) if candidates else None
        if count is None and aimed:
            reached = {number: attempt.agreement.sqnr_db or 0.0 for number, attempt in attempts.items()}
            count = min(n for n, db in reached.items() if db >= max(reached.values()) - _WORTHWHILE_DB)
            self._warnings.append(
                f"much noise: {reached[count]:.1f} dB; compare the model's answers before you use it, "
                "or state what you need with --min-sqnr"
            )
        if count is None:
            raise self._too_inaccurate(attempts[max(attempts)], len(candidates))
        return attempts[count], tuple(unit.name for unit in candidates[:count])

    def _too_inaccurate(self, last: _Attempt, count: int) -> AccuracyError:
        if last.agreement.drop is not None:
            wanted, flag = f"a drop of at most {self._limits.max_drop:g} points", "--max-drop"
        else:
            wanted, flag = f"at least {self._limits.min_sqnr_db or 0:g} dB", "--min-sqnr"
        few = f"give more calibration samples than {len(self._data)}, or " if len(self._data) < 128 else ""
        return AccuracyError(
            f"expected {wanted}, got {_told(last.agreement)} with {count} blocks "
            f"and {self._limits.max_float:g} % of the work in float",
            hint=f"{few}raise {flag}, or --max-float",
        )

    def _warn_about(self, attempt: _Attempt, excluded: Sequence[str]) -> None:
        names = {unit.name for unit in attempt.placement.units}
        for unit in self._units:
            missing = [name for name in unit.data if name not in self._ranges]
            if unit.weights is not None and unit.name not in names and missing:
                self._warnings.append(
                    f"{unit.name} stays in float: it reads values that are not finite numbers"
                )
        for name, count in attempt.qdq.raised.items():
            self._warnings.append(
                f"{name}: {count} channels have coarser weights, so that their sums fit int32"
            )
        drops = attempt.agreement.drop is not None
        if excluded and drops and 0 < self._limits.max_drop < resolution(self._data):
            self._warnings.append(
                f"{len(self._data)} samples cannot show a drop of {self._limits.max_drop:g} points: "
                "no sample may differ"
            )

    def _result(
        self,
        attempt: _Attempt,
        excluded: tuple[str, ...],
        isolated: Mapping[str, float],
        correction_db: float | None,
    ) -> QuantisedModel:
        quantised = attempt.qdq.model
        quantised.producer_name, quantised.producer_version = "edgebundle", __version__
        inside = {unit.name for unit in attempt.placement.units}
        blocks = tuple(
            Block(
                unit.name,
                unit.kind,
                "int8" if unit.name in inside else "float",
                isolated.get(unit.name),
                unit.macs,
            )
            for unit in self._units
            if not unit.keeps_levels
        )
        has_scores = attempt.agreement.drop is not None
        report = QuantisationReport(
            model=self._source.name,
            activations=self._activations,
            samples=len(self._data),
            float_bytes=model_bytes(self._source.onnx),
            bytes=model_bytes(quantised),
            agreement=attempt.agreement,
            max_drop=self._limits.max_drop if has_scores else None,
            min_sqnr_db=None if has_scores else self._limits.min_sqnr_db,
            total_macs=multiply_adds(self._model),
            int8_macs=attempt.placement.macs,
            excluded=excluded,
            blocks=blocks,
            methods=count_methods([self._ranges[name].method for name in attempt.placement.levels]),
            bias_correction_db=correction_db,
            warnings=tuple(self._warnings),
            widened=tuple(attempt.qdq.widened.values()),
        )
        return QuantisedModel(quantised, self._source.name, report)


def _told(agreement: Agreement) -> str:
    """What was measured, such as `a drop of 1.2 points`."""
    if agreement.drop is not None:
        return f"a drop of {agreement.drop:.2f} points"
    return f"{agreement.sqnr_db:.1f} dB" if agreement.sqnr_db is not None else "no float output"
