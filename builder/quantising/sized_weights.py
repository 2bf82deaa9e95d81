"""Weights-only quantisation of one model at several sizes of its changing dimensions.

Promises that a weight becomes the same codes at every size, and that they are computed once. What quantising
costs is measured at the size that is asked for first, which is the largest where a model is compiled into
buckets.
"""

from __future__ import annotations

from collections.abc import Callable

from builder.importer import ImportedModel
from builder.quantising.calibration import Source
from builder.quantising.weights_only import (
    Levels,
    WeightsPrecision,
    WeightsReport,
    quantise_like,
    quantize_weights,
)


class SizedWeights:
    """Quantises the weights of a model that is imported at several sizes.

    Parameters
    ----------
    precision
        What the weights become.
    calibration, preprocess, labels, progress
        As in `quantize_weights`, for the first size.

    Attributes
    ----------
    report
        What quantising did and cost; None before the first size.
    """

    def __init__(
        self,
        precision: WeightsPrecision,
        *,
        calibration: Source | None = None,
        preprocess: str | None = None,
        labels: str | None = None,
        progress: Callable[[str], None],
    ) -> None:
        self.report: WeightsReport | None = None
        self._precision = precision
        self._calibration = calibration
        self._preprocess = preprocess
        self._labels = labels
        self._progress = progress
        self._levels: Levels = {}

    def __call__(self, model: ImportedModel) -> ImportedModel:
        """Return a model with quantised weights.

        Raises
        ------
        ModelError
            If it has no weights to quantise, or weights that the precision cannot hold.
        """
        if self.report is not None:
            return quantise_like(model, self._precision, self._levels)
        first = quantize_weights(
            model,
            self._precision,
            calibration=self._calibration,
            preprocess=self._preprocess,
            labels=self._labels,
            levels=self._levels,
            progress=self._progress,
        )
        self.report = first.report
        return first.imported()
