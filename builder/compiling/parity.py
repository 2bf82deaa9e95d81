"""Parity: if a compiled model does not give the reference's numbers, no bundle is written.

The reference is ONNX Runtime running the model that `builder.compiling.judge` says. The error of an output is
its largest absolute difference divided by the reference's largest magnitude, or by `SCALE_FLOOR` if that is
larger. For integers and booleans, any difference is an infinite error, and for floats a NaN where the other
side has a number. A float16 output was rounded from float32 on both sides: the step that this may put between
two almost equal numbers is subtracted from their difference.

A model may amplify rounding so much that two correct results differ by more than the tolerance. Then the
difference is compared with what rounding does to the reference itself (`builder.compiling.noise`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as states

from builder.errors import ModelError, NativeError, ParityError, lines_of
from builder.importer.classic import ensemble
from builder.importer.divisors import with_defined_quotients
from builder.importer.large_models import is_too_large, open_session
from builder.importer.native import FileSession
from builder.importer.onnx_graph import walk_nodes

# ONNX Runtime's Sigmoid is a rational function plus 0.5, off by up to 1e-7 everywhere. If all values of an
# output are tiny (objectness of a picture without objects), differences of that size mean nothing.
SCALE_FLOOR: Final = 1e-2

# The largest number of float16; the next one would be 65536.
LARGEST_HALF: Final = 65504.0
# What stands for infinities.
_INFINITIES: Final = {"float16": 2.0**16}
# What masks use for minus infinity says nothing about the size of the other numbers.
_LARGEST_SCALE: Final = 1e38

# ONNX Runtime raises its own exception classes, and Python's for a wrong input name or dtype.
REFUSALS: tuple[type[Exception], ...] = (
    *(c for c in vars(states).values() if isinstance(c, type) and issubclass(c, Exception)),
    ValueError,
    RuntimeError,
    TypeError,
)

REFERENCE: Final = f"onnxruntime {ort.__version__}"

# A correct result may be this much further from the reference than rounding errors move that.
ALLOWED: Final = 4.0
# Of the elements of an output, so many may be further: how far theirs moves is only known from some runs.
FEW: Final = 0.01
# However much a model amplifies rounding, a difference of more than one percent is taken for a fault.
LARGEST: Final = 1e-2

Arrays = Mapping[str, npt.NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class Parity:
    """How well a compiled model agrees with its reference.

    `error`: largest relative error over all outputs.
    `reference`: name and version of the reference.
    """

    error: float
    worst_output: str
    reference: str


@dataclass(frozen=True, slots=True)
class Noise:
    """How a difference from the reference compares with what rounding does to the reference.

    `error`: the largest difference, relative to the output's largest number.
    `ratio`: the root of the mean square of the differences, divided by that of the noise; of the worst
        output.
    `beyond`: the share of elements whose difference is more than `ALLOWED` times their noise; of the worst
        output.
    """

    error: float
    ratio: float
    beyond: float

    @property
    def is_rounding(self) -> bool:
        """Whether rounding explains the difference."""
        return self.error <= LARGEST and self.ratio <= ALLOWED and self.beyond <= FEW


def run_as_defined(model: onnx.ModelProto, inputs: Arrays) -> list[npt.NDArray[np.generic]]:
    """Run a model in ONNX Runtime as it is, without its optimiser, which puts approximations in places.

    Result: the outputs, in the model's order.
    Raises `ModelError` if ONNX Runtime refuses the model or the inputs.
    """
    operators = {node.op_type for node in walk_nodes(model.graph)}
    return run_session(session(model, threads_for(operators)), None, inputs)


def threads_for(operators: Collection[str]) -> int:
    """Return how many threads may run a model with these operators; 0 for as many as ONNX Runtime likes.

    Of many trees, ONNX Runtime adds the leaves in as many parts as it has threads. Classes whose votes are
    equal then differ by rounding, and the label depends on the number of cores.
    """
    return 0 if ensemble.OPERATORS.isdisjoint(operators) else 1


def run_session(
    opened: ort.InferenceSession | FileSession, names: Sequence[str] | None, inputs: Arrays
) -> list[Any]:
    """Run a session; with None, return all of its outputs.

    Raises `ModelError` if ONNX Runtime refuses the names or the inputs.
    """
    try:
        outputs: list[Any] = opened.run(names, dict(inputs))
    except NativeError as error:
        raise _refusal(error) from error
    except REFUSALS as error:
        raise _refusal(error) from error
    return outputs


def session_elsewhere(source: Path | onnx.ModelProto, threads: int) -> ort.InferenceSession | FileSession:
    """Open a user's model in ONNX Runtime, without its optimiser, in the process that may die of it.

    A model in memory is written to a file; if it is too large for one message, it stays in this process.
    Raises `ModelError` if ONNX Runtime refuses it, or crashes.
    """
    if isinstance(source, onnx.ModelProto):
        if is_too_large(source):
            return session(source, threads)
        source = with_defined_quotients(source)
    try:
        return FileSession(source, threads)
    except NativeError as error:
        raise _refusal(error) from error


def session(model: onnx.ModelProto, threads: int = 0) -> ort.InferenceSession:
    """Open a session of ONNX Runtime, without its optimiser, for a model.

    Parameters
    ----------
    model
        The model.
    threads
        What `threads_for` returned for its operators.

    Raises
    ------
    ModelError
        If ONNX Runtime refuses the model.
    """
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # what it logs as an error it raises too
    # Few runs: threads that spin afterwards, waiting for another, would only disturb what follows.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return open_session(model, options)
    except REFUSALS as error:
        raise _refusal(error) from error


def _refusal(error: Exception) -> ModelError:
    return ModelError(
        f"ONNX Runtime refused the model: {lines_of(error)[0][:300]}",
        hint="open it with onnxruntime.InferenceSession: if that works, please report it with the model",
    )


def compare(
    names: Sequence[str],
    outputs: Sequence[npt.NDArray[np.generic]],
    reference: Sequence[npt.NDArray[np.generic]],
    *,
    by_element: bool = False,
) -> Parity:
    """Compare outputs with the reference's.

    `by_element`: whether the error of an element is relative to the element, not to the output's largest
        number.
    Raises `ParityError` if an output's shape or dtype differs from the reference's.
    """
    for name, ours, theirs in zip(names, outputs, reference, strict=True):
        if ours.dtype != theirs.dtype:
            raise mismatch(name, ours, theirs)
        if ours.shape != theirs.shape:
            raise mismatch(name, ours, theirs)
    errors = [
        _relative_error(ours, theirs, by_element=by_element)
        for ours, theirs in zip(outputs, reference, strict=True)
    ]
    worst = max(errors)
    return Parity(worst, names[errors.index(worst)], REFERENCE)


def check(parity: Parity, tolerance: float, noise: Noise | None = None) -> None:
    """Refuse a model whose error is beyond the tolerance, unless it is rounding.

    `noise`: the comparison with the noise of rounding, if it was measured.
    Raises `ParityError` if the error is larger than `tolerance`, or not a number, and is not explained by
        rounding.
    """
    if parity.error <= tolerance or (noise is not None and noise.is_rounding):
        return
    far = ""
    if noise is not None:
        far = f", and {noise.ratio:.3g} times what rounding explains"
    raise ParityError(
        f"output {parity.worst_output}: expected a relative error of at most {tolerance:g} "
        f"against {parity.reference}, got {parity.error:.3g}{far}",
        hint="raise --tolerance if the model is known to be that sensitive; no bundle was written",
    )


def mismatch(name: str, ours: npt.NDArray[np.generic], theirs: npt.NDArray[np.generic]) -> ParityError:
    """Return the error of an output with another shape or dtype than the reference's."""
    return ParityError(
        f"output {name}: expected {theirs.dtype}{list(theirs.shape)}, got {ours.dtype}{list(ours.shape)}",
        hint="please report it with the model",
    )


def _relative_error(
    ours: npt.NDArray[np.generic], theirs: npt.NDArray[np.generic], *, by_element: bool
) -> float:
    if ours.size == 0:
        return 0.0
    return float((differences(ours, theirs) / scale_of(theirs, by_element=by_element)).max())


def scale_of(theirs: npt.NDArray[np.generic], *, by_element: bool = False) -> npt.NDArray[np.float64]:
    """Return what errors are relative to: an output's largest number but for infinities, or each number."""
    if theirs.dtype.kind != "f":
        return np.ones(())
    sizes = np.abs(theirs.astype(np.float64))
    sizes = np.where(sizes < _LARGEST_SCALE, sizes, 0.0)
    return np.maximum(sizes if by_element else sizes.max(initial=0), SCALE_FLOOR)


def differences(ours: npt.NDArray[np.generic], theirs: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
    """Return how far each element is from the reference's; infinite where there is no distance."""
    if theirs.dtype.kind != "f":
        return np.where(ours == theirs, 0.0, math.inf)
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))  # infinities and the reference's own NaNs
    rounding = _half_steps(ours) + _half_steps(theirs)
    a, b = _without_infinities(ours, a), _without_infinities(theirs, b)
    with np.errstate(invalid="ignore"):
        found = np.where(same, 0.0, np.maximum(np.abs(a - b) - rounding, 0.0))
    return np.where(np.isnan(found), math.inf, found)


def _half_steps(values: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
    """Return how far each number may be from the one that was rounded to it: 0 if it is not float16."""
    if values.dtype != np.float16:
        return np.zeros(values.shape)
    exponents = np.frexp(np.minimum(np.abs(values.astype(np.float64)), LARGEST_HALF))[1] - 1
    # 11 digits; numbers below 2^-14 have as many digits after the point as 2^-14.
    return np.asarray(np.ldexp(0.5, np.maximum(exponents, -14) - 10))


def _without_infinities(
    values: npt.NDArray[np.generic], wide: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Replace infinities; what is closer to float16's number after the largest rounds up to one."""
    stands = _INFINITIES.get(values.dtype.name)
    return wide if stands is None else np.where(np.isinf(wide), np.copysign(stands, wide), wide)
