"""Parity: what was compiled gives the reference's numbers, or nothing is written.

The reference is ONNX Runtime on the model as it was given. The error of an output is its largest absolute
difference over the reference's largest magnitude, or over `SCALE_FLOOR` where that is more; of integers and
booleans, any difference is an infinite error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as states

from builder.errors import ModelError, ParityError

TOLERANCE: Final = (
    1e-4  # relative; float32 sums of a few thousand terms in another order differ by 1e-6 to 1e-5
)

# ONNX Runtime's Sigmoid is a rational function plus 0.5 and off by up to 1e-7 wherever it is, so an output
# that is tiny throughout (objectness where there is no object) says nothing below that.
SCALE_FLOOR: Final = 1e-2

# Every exception that ONNX Runtime's library raises is one of these classes of its own, beside Python's for a
# wrong name or dtype of an input.
REFUSALS: tuple[type[Exception], ...] = (
    *(c for c in vars(states).values() if isinstance(c, type) and issubclass(c, Exception)),
    ValueError,
    RuntimeError,
    TypeError,
)

Arrays = Mapping[str, npt.NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class Parity:
    """The agreement of a compiled model with its reference.

    Attributes
    ----------
    error
        Largest relative error over all outputs.
    worst_output
        The output that has it.
    reference
        Name and version of the reference.
    """

    error: float
    worst_output: str
    reference: str


def reference_outputs(model: onnx.ModelProto, inputs: Arrays) -> list[npt.NDArray[np.generic]]:
    """Run a model in ONNX Runtime.

    Raises
    ------
    ModelError
        If ONNX Runtime refuses the model or the inputs.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 3  # its warnings are about its own optimiser
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        outputs: list[npt.NDArray[np.generic]] = session.run(None, dict(inputs))
    except REFUSALS as error:
        raise ModelError(
            f"ONNX Runtime refuses the model: {str(error).strip().splitlines()[0][:300]}"
        ) from error
    return outputs


def compare(
    names: Sequence[str],
    outputs: Sequence[npt.NDArray[np.generic]],
    reference: Sequence[npt.NDArray[np.generic]],
) -> Parity:
    """Compare outputs with the reference's.

    Raises
    ------
    ParityError
        If an output has another shape or dtype than the reference's.
    """
    worst, worst_name = 0.0, names[0]
    for name, ours, theirs in zip(names, outputs, reference, strict=True):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            raise ParityError(
                f"output {name}: expected {theirs.dtype}{list(theirs.shape)}, "
                f"got {ours.dtype}{list(ours.shape)}"
            )
        error = _relative_error(ours, theirs)
        if not error <= worst:
            worst, worst_name = error, name
    return Parity(worst, worst_name, f"onnxruntime {ort.__version__}")


def check(parity: Parity, tolerance: float) -> None:
    """Refuse a result beyond the tolerance.

    Raises
    ------
    ParityError
        If the error is over `tolerance`, or not a number.
    """
    if not parity.error <= tolerance:
        raise ParityError(
            f"output {parity.worst_output}: expected {parity.reference}'s numbers to {tolerance:g}, "
            f"got a relative error of {parity.error:.3g}",
            hint="nothing was written; --tolerance allows more where the model is known to be that sensitive",
        )


def _relative_error(ours: npt.NDArray[np.generic], theirs: npt.NDArray[np.generic]) -> float:
    if ours.size == 0:
        return 0.0
    if theirs.dtype.kind != "f":
        return 0.0 if np.array_equal(ours, theirs) else float("inf")
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))  # infinities and the reference's own NaNs
    if same.all():
        return 0.0
    finite = np.abs(b[np.isfinite(b)])
    scale = max(float(finite.max()) if finite.size else 0.0, SCALE_FLOOR)
    with np.errstate(invalid="ignore"):
        difference = float(np.abs(a - b)[~same].max())
    return difference / scale
