"""Samples of special numbers: on them, too, a model must give what the reference gives.

Ordinary samples are normally distributed. They have no NaN, infinity or zero of either sign, no numbers
halfway between two integers, and integers only of the size of a mask; so a rewrite that holds only for real
numbers, such as `x - x = 0`, agrees on all of them. These samples have all of these numbers, in each place of
a small input at least once.

Which numbers a model gets depends on its operators. NaN and infinities are given to those that carry them as
ONNX Runtime does (docs/importing.md, "NaN and infinity"), very large numbers only to those that compute each
element by itself: a sum would lose the small ones beside them. The others, such as convolutions, get zeros,
negative numbers and ties. Integers get small numbers where a model computes with integers only, and the
limits of their type where each element is computed by itself; those that may select from tables, count, or be
sizes keep their ordinary sample. Denormal numbers are left out: kernels take them for zeros.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from agent.bundle.processing import Preprocess
from agent.bundle.tensor_spec import TensorSpec
from builder.compiling.defined_samples import PARTIAL, divides_integers
from builder.compiling.sample_inputs import masks
from builder.importer.cache_length import capacity_of
from builder.importer.narrow_types import INTEGERS, limits
from builder.importer.onnx_graph import OnnxGraph

Array = npt.NDArray[Any]
Arrays = Mapping[str, npt.NDArray[np.generic]]

# Numbers of ordinary size: zeros, negative ones, ties of rounding.
_MILD: Final = (0.0, -0.0, -1.0, 1.0, -0.5, 0.5, 1.5, 2.5, -2.5)
_NOT_FINITE: Final = (np.inf, -np.inf, np.nan)
# Those that only elementwise operators take without losing what is beside them.
_EXTREME: Final = (1e6, -1e10, 1e20, -1e-30)
# A product and the sum behind it may be one instruction, in which the product does not overflow.
_LARGE: Final = (1e6, -1e10, 1e18, -1e-30)
# At most so many samples, where an input has fewer places than there are special numbers.
MOST: Final = 6

# Operators that make of each element what ONNX Runtime makes of it, whatever it is, and that move elements.
_ELEMENTWISE: Final = frozenset(
    {"Abs", "Add", "And", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Cast", "Ceil", "Clip",
     "Concat", "Constant", "Div", "Elu", "Equal", "Erf", "Exp", "Expand", "Flatten", "Floor", "Gather",
     "Gelu", "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish", "Identity", "IsInf", "IsNaN",
     "LeakyRelu", "Less", "LessOrEqual", "Log", "Max", "Min", "Mish", "Mul", "Neg", "Not", "Or", "PRelu",
     "Pad", "Pow", "Reciprocal", "Relu", "Reshape", "Round", "Selu", "Sigmoid", "Sign", "Slice", "Softplus",
     "Softsign", "Split", "Sqrt", "Squeeze", "Sub", "Tanh", "Tile", "Transpose", "Unsqueeze", "Where", "Xor"}
)  # fmt: skip
# Operators that a model may also have before it is normalised: they are folded, or written as those above.
_FOLDED: Final = frozenset(
    {"CastLike", "Celu", "ConstantOfShape", "Dropout", "If", "Mean", "Range", "Shape", "Shrink", "Size",
     "Sum", "ThresholdedRelu"}
)  # fmt: skip
# Operators whose sums carry NaN and infinities, but lose small numbers beside large ones.
_SUMS: Final = frozenset({"Gemm", "LogSoftmax", "MatMul", "ReduceMean", "ReduceSum", "Softmax"})
# Operators that may make a NaN of such numbers, which not all others carry, and those that choose among equal
# numbers: rounding decides what they choose.
_UNDEFINED: Final = PARTIAL | {
    "ArgMax",
    "ArgMin",
    "Div",
    "Hardmax",
    "Mod",
    "NonMaxSuppression",
    "Reciprocal",
    "TopK",
    "Unique",
}
# The longest axis of a product that is summed as it is written: larger ones are computed by Strassen's
# algorithm, which also adds and subtracts elements of other rows.
_LONGEST: Final = 512
_NO_TYPES: Final[Mapping[str, int]] = MappingProxyType({})


def special_samples(
    inputs: Sequence[TensorSpec],
    model: onnx.ModelProto,
    first: Arrays,
    preprocess: Preprocess | None = None,
    original: Collection[str] = (),
    narrow: Mapping[str, int] = _NO_TYPES,
) -> Iterator[dict[str, npt.NDArray[np.generic]]]:
    """Yield samples of special numbers.

    `first`: its ordinary sample, whose numbers stand between the special ones.
    `preprocess`: how a picture becomes an input, or None; that input keeps its pixels.
    `original`: the operators of the model before it was normalised. One that we write as sums, such as DFT or
        Resize, carries a NaN to other places than these.
    `narrow`: inputs whose bytes hold numbers of another type, and their types.
    """
    elementwise = is_elementwise(model)
    carries = set(original) <= _ELEMENTWISE | _SUMS | _FOLDED
    special = np.array(_MILD)
    if elementwise and carries:
        special = np.array(_MILD + _NOT_FINITE + (_LARGE if _adds_products(model) else _EXTREME))
    elif carries and _has_only(model, _ELEMENTWISE | _SUMS):
        special = np.array(_MILD + _NOT_FINITE)
    elif any(node.domain or node.op_type in _UNDEFINED for node in model.graph.node):
        return
    any_integer = (elementwise or _is_integral(inputs, model, original)) and not divides_integers(model)
    free = set(masks(inputs, model)) if any_integer else set()
    drawn = {
        spec.name: _integers(np.dtype(spec.dtype), narrow.get(spec.name), limited=elementwise)
        if spec.name in free
        else special
        for spec in inputs
        if (spec.name in free or np.dtype(spec.dtype).kind == "f")
        and first[spec.name].size
        and capacity_of(spec.name) is None
        and (preprocess is None or preprocess.input != spec.name)
    }
    if not drawn:
        return
    size = max(first[name].size for name in drawn)
    for turn in range(min(MOST, -(-2 * len(special) // size))):
        sample = dict(first)
        for place, (name, numbers) in enumerate(drawn.items()):
            sample[name] = _sprinkled(first[name], numbers, turn, shift=place)
        yield sample


def _adds_products(model: onnx.ModelProto) -> bool:
    products = {node.output[0] for node in model.graph.node if node.op_type == "Mul"}
    return any(
        node.op_type in ("Add", "Sub") and not products.isdisjoint(node.input) for node in model.graph.node
    )


def is_elementwise(model: onnx.ModelProto) -> bool:
    """Whether each element of the outputs is computed by itself, so that its error is its own, too."""
    return _has_only(model, _ELEMENTWISE)


def _is_integral(inputs: Sequence[TensorSpec], model: onnx.ModelProto, original: Collection[str]) -> bool:
    """Whether a model computes with integers only, so that its outputs are equal or wrong."""
    types = [np.dtype(spec.dtype) for spec in inputs]
    types += [helper.tensor_dtype_to_np_dtype(end.type.tensor_type.elem_type) for end in model.graph.output]
    makes_floats = any("Cast" in operator or "Quant" in operator for operator in original)
    return bool(original) and not makes_floats and all(dtype.kind in "iub" for dtype in types)


def _has_only(model: onnx.ModelProto, operators: frozenset[str]) -> bool:
    """Whether a model has only these operators, and none of them makes integers of floats."""
    graph = OnnxGraph(model)
    for node in model.graph.node:
        if node.domain or node.op_type not in operators:
            return False
        if node.op_type == "Cast":
            source, target = graph.type_of(node.input[0]), graph.type_of(node.output[0])
            if source is None or target is None or (source.dtype.kind == "f" and target.dtype.kind in "iu"):
                return False
        if node.op_type in ("Gemm", "MatMul"):
            shapes = [graph.shape_of(name) for name in node.input]
            if any(shape is None or max(shape, default=0) > _LONGEST for shape in shapes):
                return False
    return True


def _integers(dtype: np.dtype[Any], narrow: int | None, *, limited: bool) -> Array:
    """Return integers that are no mask; `limited`: also the limits of the type, which sums overflow."""
    if dtype.kind == "b":
        return np.array([False, True])
    low, high = (
        limits(narrow)
        if narrow is not None and narrow in INTEGERS
        else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    )
    numbers = [0, 1, 2, 3, 7, -3] + [low, high] * limited
    return np.array([number for number in numbers if low <= number <= high], dtype)


def _sprinkled(array: npt.NDArray[np.generic], special: Array, turn: int, shift: int) -> Array:
    """Put special numbers in every other place, or in every place of a small array.

    Each time that all of them were put, they begin `shift` places later, so that those of two inputs meet in
    all pairs.
    """
    flat = array.ravel().copy()
    places = np.arange(flat.size) if flat.size < 2 * special.size else np.arange(0, flat.size, 2)
    order = np.arange(places.size) + turn * places.size
    order += shift * (order // special.size)
    with np.errstate(over="ignore", invalid="ignore"):
        flat[places] = special[order % special.size].astype(array.dtype)
    return flat.reshape(array.shape)
