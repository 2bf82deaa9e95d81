"""The precisions by name: which quantiser makes a model of each, and with which options.

Promises that the weights of a model which is imported at several sizes become the same codes at every size,
and that they are computed once. What quantising costs is measured at the size that is asked for first, which
is the largest where a model is compiled into buckets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from builder.compiling.options import HALVES, Options
from builder.importer import ImportedModel
from builder.quantising.halves import HalvesReport, to_halves
from builder.quantising.quantise import MAX_DROP, MAX_FLOAT, Limits, QuantisedModel, quantize
from builder.quantising.report import QuantisationReport
from builder.quantising.weights_only import (
    Levels,
    WeightsOnlyModel,
    WeightsReport,
    quantise_like,
    quantize_weights,
)
from builder.target.device_target import DeviceTarget

Report = QuantisationReport | WeightsReport | HalvesReport


class Quantiser:
    """Quantises a model, at each size at which it is imported, as options say.

    Parameters
    ----------
    device
        What the model is quantised for.
    options
        The precision and its options; without a precision, models stay as they are.
    progress
        Called with each step as it begins.

    Attributes
    ----------
    report
        What quantising did and cost; None before the first model.
    """

    def __init__(self, device: DeviceTarget, options: Options, progress: Callable[[str], None]) -> None:
        self.report: Report | None = None
        self._device = device
        self._options = options
        self._progress = progress
        self._levels: Levels = {}

    def __call__(self, model: ImportedModel) -> ImportedModel:
        """Return a quantised model.

        Raises
        ------
        InputFault
            If it cannot be quantised, or not within the limits.
        """
        options = self._options
        if options.precision is None:
            return model
        if options.precision == HALVES:
            halves = to_halves(
                model,
                self._device,
                calibration=options.calibration,
                preprocess=options.preprocess,
                progress=self._progress,
            )
            self.report = halves.report
            return halves.model
        if self.report is not None and options.precision != "int8":
            return quantise_like(model, options.precision, self._levels)
        quantised = self.quantised(model)
        self.report = quantised.report
        # What a file says about pictures and classes is not in the quantised one.
        made = quantised.imported(self._progress)
        return replace(made, labels=model.labels, preprocess=model.preprocess)

    def quantised(self, model: ImportedModel) -> QuantisedModel | WeightsOnlyModel:
        """Return the model of a precision that a file of ONNX can have."""
        options = self._options
        assert options.precision is not None
        assert options.precision != HALVES
        if options.precision != "int8":
            return quantize_weights(
                model,
                options.precision,
                calibration=options.calibration,
                # Without samples, random numbers serve; a picture is one item of a batch that changes.
                preprocess=None if options.has_bounds and options.calibration is None else options.preprocess,
                labels=options.calibration_labels,
                levels=self._levels,
                progress=self._progress,
            )
        assert options.calibration is not None
        limits = Limits(
            MAX_DROP if options.max_drop is None else options.max_drop,
            options.min_sqnr,
            MAX_FLOAT if options.max_float is None else options.max_float,
            options.metric or "auto",
        )
        return quantize(
            model,
            options.calibration,
            preprocess=options.preprocess,
            labels=options.calibration_labels,
            target=self._device,
            activations=options.activations,
            limits=limits,
            progress=self._progress,
        )
