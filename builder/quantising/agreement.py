"""Agreement of a quantised model with its float model: signal to noise, equal classes, accuracy.

The float model's outputs are kept for all samples, or for as many as fit in a bounded memory.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray

from agent.bundle.tensor_spec import TensorSpec
from builder.errors import ModelError
from builder.quantising.calibration import CalibrationData
from builder.quantising.progress import now_and_then
from builder.quantising.session import Session
from builder.spelling import similar_file

# Outputs of the float model that are kept: a detector's are 8 MB a picture.
MAX_KEPT_BYTES: Final = 256 << 20
MAX_CSV_BYTES: Final = 16 << 20
# Of outputs without any noise, in dB: an infinite ratio would be no JSON.
NOISELESS_DB: Final = 200.0

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Agreement:
    """How well a quantised model agrees with its float model.

    `sqnr_db`: signal to quantisation noise of the worst output, in dB; None if no output is a float.
    `top1`: share of samples with the same best class, in percent; None if no output has class scores.
    `float_accuracy`, `accuracy`: share of labelled samples that the float and the quantised model get right,
        in percent, or None.
    """

    samples: int
    sqnr_db: float | None
    top1: float | None = None
    float_accuracy: float | None = None
    accuracy: float | None = None

    @property
    def drop(self) -> float | None:
        """Percentage points that are lost: of accuracy, else of equal classes; None without class scores."""
        if self.accuracy is not None and self.float_accuracy is not None:
            return self.float_accuracy - self.accuracy
        return None if self.top1 is None else 100.0 - self.top1


class Noise:
    """Sums of squares of a signal and of its error."""

    def __init__(self) -> None:
        self._signal = self._noise = 0.0

    def add(self, reference: Array, value: Array) -> None:
        """Add the values of a sample; what is not finite in the reference is left out."""
        finite = np.isfinite(reference)
        wide = reference[finite].astype(np.float64)
        self._signal += float(np.sum(wide**2))
        self._noise += float(np.sum((value[finite].astype(np.float64) - wide) ** 2))

    @property
    def ratio_db(self) -> float:
        """Signal to noise, at most `NOISELESS_DB`; without a signal, 0 if there is noise."""
        if self._noise == 0:
            return NOISELESS_DB
        if self._signal == 0 or not math.isfinite(self._noise):
            return 0.0 if self._signal == 0 else -NOISELESS_DB
        return max(-NOISELESS_DB, min(NOISELESS_DB, 10 * math.log10(self._signal / self._noise)))


def class_scores(outputs: Sequence[TensorSpec]) -> int | None:
    """The index of the only output, if it has one score for each of two or more classes."""
    if len(outputs) != 1:
        return None
    [spec] = outputs
    shape = list(spec.shape)
    while len(shape) > 2 and shape[-1] == 1:
        shape.pop()
    return 0 if spec.datatype.startswith("FP") and len(shape) == 2 and shape[1] >= 2 else None


class Comparison:
    """Compares quantised models with one float model.

    `truths`: sample number -> its class, or None.
    `scores`: index of the output with class scores, or None.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        outputs: Sequence[TensorSpec],
        data: CalibrationData,
        truths: Mapping[int, int] | None,
        scores: int | None,
        progress: Callable[[str], None],
    ) -> None:
        self._data, self._truths, self._scores = data, truths, scores
        self._progress = now_and_then(progress)
        size = sum(math.prod(spec.shape) * np.dtype(spec.dtype).itemsize for spec in outputs)
        self.indices = data.evenly(max(1, MAX_KEPT_BYTES // max(size, 1)))
        session = Session(model)
        self._reference = {}
        for count, index in enumerate(self.indices):
            self._progress(f"running the float model: sample {count + 1} of {len(self.indices)}")
            self._reference[index] = session.run(data.read(index))

    def measure(self, model: onnx.ModelProto, count: int | None = None) -> Agreement:
        """Compare a model on all samples, or on `count` of them, evenly spaced."""
        session = Session(model)
        indices = self.indices
        if count is not None and count < len(indices):
            indices = [indices[i * len(indices) // count] for i in range(count)]
        noises: list[Noise | None] = []
        equal = decisions = right = float_right = labelled = 0
        for done, index in enumerate(indices):
            self._progress(f"running the quantised model: sample {done + 1} of {len(indices)}")
            values, reference = session.run(self._data.read(index)), self._reference[index]
            if not noises:
                noises = [Noise() if value.dtype.kind == "f" else None for value in reference]
            for noise, expected, value in zip(noises, reference, values, strict=True):
                if noise is not None:
                    noise.add(expected, value)
            if self._scores is None:
                continue
            best, wanted = _best(values[self._scores]), _best(reference[self._scores])
            equal += int(np.count_nonzero(best == wanted))
            decisions += len(best)
            if self._truths is not None and index in self._truths:
                labelled += len(best)
                right += int(np.count_nonzero(best == self._truths[index]))
                float_right += int(np.count_nonzero(wanted == self._truths[index]))
        ratios = [noise.ratio_db for noise in noises if noise is not None]
        return Agreement(
            len(indices),
            min(ratios) if ratios else None,
            100 * equal / decisions if decisions else None,
            100 * float_right / labelled if labelled else None,
            100 * right / labelled if labelled else None,
        )


def _best(scores: Array) -> Array:
    best: Array = scores.reshape(scores.shape[0], -1).argmax(axis=1)
    return best


def truths_for(
    labels: str | os.PathLike[str] | None,
    data: CalibrationData,
    outputs: Sequence[TensorSpec],
    scores: int | None,
) -> dict[int, int] | None:
    """Read the classes of samples by `read_truths`, None without labels; `scores` is the place of the scores.

    Raises `ModelError` if there are labels and no scores, or as in `read_truths`.
    """
    if labels is None:
        return None
    if scores is None:
        raise ModelError(
            "expected a model with class scores for labels, got other outputs",
            hint="leave out the labels: the signal to noise of the outputs is measured instead",
        )
    return read_truths(Path(labels), data, math.prod(outputs[scores].shape[1:]))


def read_truths(path: Path, data: CalibrationData, classes: int) -> dict[int, int]:
    """Read the classes of samples.

    `path`: CSV: the name of a picture within the calibration folder, or the number of a sample, and the
        number of its class. A first line of titles is skipped.
    Result: sample number -> class, for the samples that are used.
    Raises `ModelError` if the file cannot be read, a line is malformed, or no sample has a class.
    """
    try:
        if path.stat().st_size > MAX_CSV_BYTES:
            raise ModelError(
                f"{path}: expected at most {MAX_CSV_BYTES} bytes, got {path.stat().st_size}",
                hint="give a table of FILE,CLASS, one picture a line",
            )
        rows = list(csv.reader(path.read_text(encoding="utf-8-sig").splitlines()))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})", hint=similar_file(path)) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ModelError(
            f"{path}: expected CSV in UTF-8 ({str(error)[:120]})",
            hint="write it as UTF-8 with a line for each picture, such as seven.png,7",
        ) from error
    numbers = {name: index for index, name in enumerate(data.names)}
    found: dict[int, int] = {}
    for line, row in enumerate(rows, start=1):
        if not row or (line == 1 and len(row) > 1 and not row[1].strip().isdecimal()):
            continue
        text = row[1].strip() if len(row) == 2 else ""
        if not (text.isascii() and text.isdecimal() and len(text) <= 9):
            raise ModelError(
                f"{path}, line {line}: expected a sample's name and the number of its class, "
                f"got {','.join(row)[:80]!r}",
                hint="for example seven.png,7",
            )
        if int(text) >= classes:
            raise ModelError(
                f"{path}, line {line}: expected a class from 0 to {classes - 1}, got {text}",
                hint="count the classes from 0, as the model's output does",
            )
        if (index := numbers.get(row[0].strip())) is not None:
            found[index] = int(text)
    if not found:
        raise ModelError(
            f"{path}: expected classes of calibration samples, got none that matches",
            hint=f"samples are named like {data.names[0][:80]!r}",
        )
    return found
