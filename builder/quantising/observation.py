"""Observe the values inside a float model over all samples: histograms.

The model runs twice on each sample, first for the ends of the histograms and then to fill them, so memory is
bounded by one sample's values and one histogram for each tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray

from builder.quantising.calibration import CalibrationData
from builder.quantising.progress import now_and_then
from builder.quantising.ranges import BINS, Histogram
from builder.quantising.session import Session

# Masks of attention use such numbers for "never"; no level is left for other values beside them.
LARGEST: Final = 1e30

# Values of one sample's tensor that are counted, evenly spaced; the histogram's ends are those of all values.
MOST_VALUES: Final = 1 << 17

Array = NDArray[Any]


def observe(
    model: onnx.ModelProto,
    tensors: Sequence[str],
    data: CalibrationData,
    progress: Callable[[str], None],
) -> dict[str, Histogram]:
    """Run a model on all samples.

    `tensors`: names of float32 values to observe, the model's inputs among them.
    Result: tensor -> histogram, without tensors whose values are not finite, or larger than `LARGEST`.
    Raises `ModelError` if ONNX Runtime refuses the model or a sample.
    """
    inputs = {value.name for value in model.graph.input}
    session = Session(model, [name for name in tensors if name not in inputs])
    progress = now_and_then(progress)
    lows, highs = dict.fromkeys(tensors, 0.0), dict.fromkeys(tensors, 0.0)
    for index in range(len(data)):
        progress(f"observing values: sample {index + 1} of {len(data)}")
        for name, value in _values(session, data.read(index), tensors):
            if not value.size:
                continue
            # NaN spreads into both, and comparisons with it are false below.
            lows[name] = float(np.minimum(value.min(), lows[name]))
            highs[name] = float(np.maximum(value.max(), highs[name]))
    finite = [name for name in tensors if lows[name] > -LARGEST and highs[name] < LARGEST]
    counts = {name: np.zeros(BINS, np.int64) for name in finite}
    wanted = [name for name in finite if highs[name] > lows[name]]
    session = Session(model, [name for name in wanted if name not in inputs])
    for index in range(len(data)):
        progress(f"filling histograms: sample {index + 1} of {len(data)}")
        for name, value in _values(session, data.read(index), wanted):
            _fill(counts[name], lows[name], highs[name], value)
    return {name: Histogram(lows[name], highs[name], counts[name]) for name in finite}


def _values(session: Session, sample: Mapping[str, Array], tensors: Sequence[str]) -> list[tuple[str, Array]]:
    made = dict(zip(session.names, session.run(sample), strict=True))
    return [(name, made[name] if name in made else sample[name]) for name in tensors]


def _fill(counts: NDArray[np.int64], low: float, high: float, value: Array) -> None:
    flat = value.ravel()
    if flat.size > MOST_VALUES:
        step = flat.size // MOST_VALUES + 1
        while any(dim > 1 and dim % step == 0 for dim in value.shape):  # or it would visit the same columns
            step += 1
        flat = flat[::step]
    flat = flat[flat != 0].astype(np.float64)
    bins = ((flat - low) * (BINS / (high - low))).astype(np.int64)
    np.clip(bins, 0, BINS - 1, out=bins)
    counts += np.bincount(bins, minlength=BINS)
