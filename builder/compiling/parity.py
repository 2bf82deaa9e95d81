"""Parity: if a compiled model does not give the reference's numbers, no bundle is written.

The reference is ONNX Runtime running the normalised model. The error of an output is its largest absolute
difference divided by the reference's largest magnitude, or by `SCALE_FLOOR` if that is larger. For integers
and booleans, any difference is an infinite error, and for floats a NaN where the other side has a number. A
float16 output was rounded from float32 on both sides: the step that this may put between two almost equal
numbers is subtracted from their difference.

A model may amplify rounding so much that two correct results differ by more than the tolerance. Then both are
compared with the result in double precision (`builder.compiling.truth`): ours may be `AMPLIFIED` times as far
from it as the reference's is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as states

from builder.errors import ModelError, ParityError
from builder.importer.large_models import open_session

# ONNX Runtime's Sigmoid is a rational function plus 0.5, off by up to 1e-7 everywhere. If all values of an
# output are tiny (objectness of a picture without objects), differences of that size mean nothing.
SCALE_FLOOR: Final = 1e-2

# Winograd's and Strassen's algorithms round more often than a direct sum, so our distance from the exact
# result may be larger than that of ONNX Runtime, which uses neither. A wrong number is much further away.
AMPLIFIED: Final = 4.0
# However much a model amplifies rounding, a difference of more than one percent is taken for a fault.
LARGEST: Final = 1e-2

# The largest number of float16; the next one would be 65536.
LARGEST_HALF: Final = 65504.0

# ONNX Runtime raises its own exception classes, and Python's for a wrong input name or dtype.
REFUSALS: tuple[type[Exception], ...] = (
    *(c for c in vars(states).values() if isinstance(c, type) and issubclass(c, Exception)),
    ValueError,
    RuntimeError,
    TypeError,
)

# What ONNX Runtime's optimiser may fuse into kernels of its own.
_QUANTISED: Final = frozenset({"DequantizeLinear", "DynamicQuantizeLinear", "QuantizeLinear"})

REFERENCE: Final = f"onnxruntime {ort.__version__}"

Arrays = Mapping[str, npt.NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class Parity:
    """How well a compiled model agrees with its reference.

    Attributes
    ----------
    error
        Largest relative error over all outputs.
    worst_output
        The name of the output with that error.
    reference
        Name and version of the reference.
    """

    error: float
    worst_output: str
    reference: str


@dataclass(frozen=True, slots=True)
class Distances:
    """How far two results are from the exact one, as relative errors.

    Attributes
    ----------
    ours, reference
        The compiled model's largest distance, and the reference's.
    """

    ours: float
    reference: float

    @property
    def is_rounding(self) -> bool:
        """Whether our distance is explained by rounding, which took the reference almost as far."""
        known = math.isfinite(self.reference)  # a NaN of the reference explains nothing
        return known and self.ours <= min(AMPLIFIED * self.reference, LARGEST)


def distances(
    names: Sequence[str],
    outputs: Sequence[npt.NDArray[np.generic]],
    reference: Sequence[npt.NDArray[np.generic]],
    exact: Sequence[npt.NDArray[np.generic]],
) -> Distances:
    """Return how far our outputs and the reference's are from the exact ones.

    Parameters
    ----------
    names
        The outputs' names; at least one.
    outputs, reference, exact
        Arrays in the order of `names`; floats of `exact` are float64.

    Raises
    ------
    ParityError
        If a shape differs.
    """
    kinds = [a.astype(r.dtype) if r.dtype.kind != "f" else a for a, r in zip(exact, reference, strict=True)]

    def distance(results: Sequence[npt.NDArray[np.generic]]) -> float:
        return _worst(names, results, kinds)[0]

    return Distances(distance(outputs), distance(reference))


def reference_outputs(model: onnx.ModelProto, inputs: Arrays) -> list[npt.NDArray[np.generic]]:
    """Run a model in ONNX Runtime.

    Parameters
    ----------
    model
        The normalised model.
    inputs
        Input name -> array.

    Returns
    -------
    list
        The outputs, in the model's order.

    Raises
    ------
    ModelError
        If ONNX Runtime refuses the model or the inputs.
    """
    return _run(_session(model, ort.GraphOptimizationLevel.ORT_ENABLE_ALL), inputs)


def run_as_defined(model: onnx.ModelProto, inputs: Arrays) -> list[npt.NDArray[np.generic]]:
    """Run a model in ONNX Runtime without its optimiser, which replaces quantised layers by approximations.

    The parameters, results and errors are those of `reference_outputs`.
    """
    return _run(_session(model, ort.GraphOptimizationLevel.ORT_DISABLE_ALL), inputs)


def is_approximated(model: onnx.ModelProto) -> bool:
    """Whether ONNX Runtime's optimiser may replace layers of a model by approximations.

    It multiplies by dequantised weights with kernels that round the other operand to int8.
    """
    return any(node.op_type in _QUANTISED for node in model.graph.node)


def _run(session: ort.InferenceSession, inputs: Arrays) -> list[npt.NDArray[np.generic]]:
    try:
        outputs: list[npt.NDArray[np.generic]] = session.run(None, dict(inputs))
    except REFUSALS as error:
        raise _refusal(error) from error
    return outputs


def require_reference(model: onnx.ModelProto) -> None:
    """Refuse a model that the reference cannot run.

    Raises
    ------
    ModelError
        If ONNX Runtime refuses the model.
    """
    _session(model, ort.GraphOptimizationLevel.ORT_ENABLE_ALL)


def _session(model: onnx.ModelProto, level: ort.GraphOptimizationLevel) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.log_severity_level = 4  # what it logs as an error it raises too
    # One run: threads that spin afterwards, waiting for another, would only disturb what follows.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return open_session(model, options)
    except REFUSALS as error:
        raise _refusal(error) from error


def _refusal(error: Exception) -> ModelError:
    return ModelError(f"ONNX Runtime refused the model: {str(error).strip().splitlines()[0][:300]}")


def compare(
    names: Sequence[str],
    outputs: Sequence[npt.NDArray[np.generic]],
    reference: Sequence[npt.NDArray[np.generic]],
) -> Parity:
    """Compare outputs with the reference's.

    Parameters
    ----------
    names
        The outputs' names; at least one.
    outputs, reference
        Arrays in the order of `names`.

    Raises
    ------
    ParityError
        If an output's shape or dtype differs from the reference's.
    """
    for name, ours, theirs in zip(names, outputs, reference, strict=True):
        if ours.dtype != theirs.dtype:
            raise mismatch(name, ours, theirs)
    worst, worst_name = _worst(names, outputs, reference)
    return Parity(worst, worst_name, REFERENCE)


def check(parity: Parity, tolerance: float, measured: Distances | None = None) -> None:
    """Refuse a model whose error is beyond the tolerance, unless it is rounding.

    Parameters
    ----------
    parity
        The comparison with the reference.
    tolerance
        The largest relative error.
    measured
        The distances from the exact result, if they are known.

    Raises
    ------
    ParityError
        If the error is larger than `tolerance`, or not a number, and is not explained by rounding.
    """
    if not parity.error <= tolerance and (measured is None or not measured.is_rounding):
        far = ""
        if measured is not None:
            far = (
                f"; compared in double precision, its error is {measured.ours:.3g}, "
                f"the reference's {measured.reference:.3g}"
            )
        raise ParityError(
            f"output {parity.worst_output}: expected a relative error of at most {tolerance:g} "
            f"against {parity.reference}, got {parity.error:.3g}{far}",
            hint="raise --tolerance if the model is known to be that sensitive; no bundle was written",
        )


def _worst(
    names: Sequence[str],
    outputs: Sequence[npt.NDArray[np.generic]],
    reference: Sequence[npt.NDArray[np.generic]],
) -> tuple[float, str]:
    """Return the largest error, and the name of the output that has it."""
    worst, worst_name = 0.0, names[0]
    for name, ours, theirs in zip(names, outputs, reference, strict=True):
        if ours.shape != theirs.shape:
            raise mismatch(name, ours, theirs)
        error = _relative_error(ours, theirs)
        if error > worst:
            worst, worst_name = error, name
    return worst, worst_name


def mismatch(name: str, ours: npt.NDArray[np.generic], theirs: npt.NDArray[np.generic]) -> ParityError:
    """Return the error of an output with another shape or dtype than the reference's."""
    return ParityError(
        f"output {name}: expected {theirs.dtype}{list(theirs.shape)}, got {ours.dtype}{list(ours.shape)}"
    )


def _relative_error(ours: npt.NDArray[np.generic], theirs: npt.NDArray[np.generic]) -> float:
    if ours.size == 0:
        return 0.0
    if theirs.dtype.kind != "f":
        return 0.0 if np.array_equal(ours, theirs) else float("inf")
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    if (np.isnan(a) != np.isnan(b)).any():
        return math.inf
    same = (a == b) | np.isnan(a)  # infinities and the reference's own NaNs
    if same.all():
        return 0.0
    finite = np.abs(b[np.isfinite(b)])
    scale = max(float(finite.max()) if finite.size else 0.0, SCALE_FLOOR)
    rounding = _half_steps(ours) + _half_steps(theirs)
    a, b = _next_after_largest(ours, a), _next_after_largest(theirs, b)
    with np.errstate(invalid="ignore"):
        difference = float(np.maximum(np.abs(a - b) - rounding, 0)[~same].max())
    return difference / scale


def _half_steps(values: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
    """Return how far each number may be from the one that was rounded to it: 0 if it is not float16."""
    if values.dtype != np.float16:
        return np.zeros(values.shape)
    exponents = np.frexp(np.minimum(np.abs(values.astype(np.float64)), LARGEST_HALF))[1] - 1
    # 11 digits; numbers below 2^-14 have as many digits after the point as 2^-14.
    return np.asarray(np.ldexp(0.5, np.maximum(exponents, -14) - 10))


def _next_after_largest(
    values: npt.NDArray[np.generic], wide: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Replace float16's infinities by the number after its largest: what is closer to that one rounds up."""
    if values.dtype != np.float16:
        return wide
    return np.where(np.isinf(wide), np.copysign(2.0**16, wide), wide)
