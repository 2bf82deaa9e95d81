"""Resize, where TVM's front end differs from ONNX: a product with a constant matrix along each axis.

TVM derives the scale from the sizes; ONNX uses the given scale, which differs if the size was rounded down.
TVM also lacks antialiasing, `exclude_outside`, `axes` and some coordinate transformations. Every mode of
Resize is separable and linear in the picture, so one small matrix per axis is enough; nearest is a Gather.
Formulas: ONNX operator specification, Resize-19; Keys 1981 for the cubic kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from builder.importer.onnx_graph import OnnxGraph, attributes, copy_node
from builder.importer.rewrites.replacement import Nodes, Replacement, input_name

_KEPT_COORDINATES: Final = frozenset({"half_pixel", "pytorch_half_pixel", "asymmetric", "align_corners"})
# `tf_half_pixel_for_nn` is of opsets 11 and 12.
_COORDINATES: Final = _KEPT_COORDINATES | {
    "half_pixel_symmetric",
    "tf_crop_and_resize",
    "tf_half_pixel_for_nn",
}
# Elements of all matrices of one Resize: 4096 to 4096 pixels along one axis take 16 million.
MAX_ELEMENTS: Final = 1 << 24
_SIGNAL_RANK: Final = 3
# Of an integer, which are more than what sums of products of bytes err by in float32.
_PARTS: Final = 1 << 10
_ROUNDED: Final = "/rounded"


@dataclass(frozen=True, slots=True)
class _Axis:
    """An axis that is resized.

    `scale`: the scale as ONNX defines it: the ratio of the extents before `after` was rounded to an integer.
    `start`, `end`: the region of `tf_crop_and_resize`, from 0 to 1.
    """

    axis: int
    before: int
    after: int
    scale: float
    start: float
    end: float


def resize(whole: Replacement) -> Nodes | None:
    """Rewrite a Resize that the front end gets wrong; None if it gets it right or sizes are unknown.

    Exporters write an empty tensor for scales that sizes replace, and for a region that is not read, because
    opset 11 required both inputs. The front end counts them as given.
    """
    node, graph = whole.node, whole.graph
    shape = graph.shape_of(node.input[0])
    if shape is not None and shape == graph.shape_of(node.output[0]) and not is_cropped(attributes(node)):
        # ONNX Runtime copies, though a scale such as 1.1 that rounds down to the same size would interpolate.
        return [helper.make_node("Identity", [node.input[0]], list(node.output), name=node.name)]
    lean = _without_unread_inputs(node, graph)
    new = _of_integers(lean, graph) or _crop_by_request(lean, graph) or _resize(lean, graph)
    return [lean] if new is None and lean != node else new


def _without_unread_inputs(node: onnx.NodeProto, graph: OnnxGraph) -> onnx.NodeProto:
    lean = copy_node(node)
    if not is_cropped(attributes(node)) and input_name(node, 1):
        lean.input[1] = ""
    if input_name(node, 3) and (name := input_name(node, 2)) and graph.shape_of(name) == (0,):
        lean.input[2] = ""
    return lean


def _of_integers(node: onnx.NodeProto, graph: OnnxGraph) -> list[onnx.NodeProto] | None:
    """Interpolate integers as floats, then round towards zero, as ONNX Runtime does.

    What rounding error moves just below an integer counts as that integer, on every processor. ONNX Runtime
    takes the one before, so its answers are one lower there: `is_rounded` tells the judge.
    """
    options, found = attributes(node), graph.type_of(node.input[0])
    if options.get("mode", "nearest") != "linear" or found is None or found.dtype.kind not in "iu":
        return None
    if options.get("antialias", 0):
        return None
    wide = np.dtype(np.float32 if found.dtype.itemsize == 1 else np.float64)
    new = Replacement(node, graph)
    x = new.cast(node.input[0], helper.np_dtype_to_tensor_dtype(wide))
    x = new.op("Resize", x, *node.input[1:], **options)
    x = new.op("Round", new.op("Mul", x, new.constant(_PARTS, wide)))
    new.cast(new.op("Mul", x, new.constant(1 / _PARTS, wide)), found.elem_type, to=node.output[0])
    new.nodes[-1].name += _ROUNDED
    return new.nodes


def is_rounded(node: onnx.NodeProto) -> bool:
    """Whether a node of a normalised model rounds what was a Resize of integers."""
    return bool(node.op_type == "Cast" and node.name.endswith(_ROUNDED))


def is_cropped(options: dict[str, Any]) -> bool:
    """Whether a Resize reads its region."""
    return bool(options.get("coordinate_transformation_mode") == "tf_crop_and_resize")


def _crop_by_request(node: onnx.NodeProto, graph: OnnxGraph) -> list[onnx.NodeProto] | None:
    """Crop and resize a region of the request: every coordinate is computed, its neighbours are gathered.

    As ONNX Runtime, which interpolates along the last two axes only, and chooses the nearest along all.
    """
    options, shape = attributes(node), graph.shape_of(node.input[0])
    region, found = input_name(node, 1), graph.type_of(node.input[0])
    after = graph.shape_of(node.output[0])
    if not is_cropped(options) or not region or graph.is_constant(region):
        return None
    if shape is None or after is None or found is None:
        return None
    rank, mode = len(shape), options.get("mode", "nearest")
    places = [int(axis) % rank for axis in options.get("axes", range(rank))]
    if options.get("antialias", 0) or options.get("exclude_outside", 0) or 0 in shape:
        return None
    if options.get("keep_aspect_ratio_policy", "stretch") != "stretch":
        return None
    new = Replacement(node, graph)
    bounds = new.cast(region, TensorProto.FLOAT)
    exact = mode == "nearest" or found.elem_type == TensorProto.FLOAT
    x = node.input[0] if exact else new.cast(node.input[0], TensorProto.FLOAT)
    inside = ""
    for index, axis in enumerate(places):
        if mode != "nearest" and shape[axis] == after[axis] and axis < rank - 2:
            continue
        start, end = (
            new.op("Slice", bounds, new.ints(at), new.ints(at + 1)) for at in (index, index + len(places))
        )
        where = _requested(new, start, end, shape[axis], after[axis])
        form = new.ints(*(after[axis] if place == axis else 1 for place in range(rank)))
        last = new.constant(shape[axis] - 1, np.float32)
        enters = new.op("GreaterOrEqual", where, new.constant(0, np.float32))
        line = new.op("And", enters, new.op("LessOrEqual", where, last))
        line = new.op("Reshape", line, form)
        inside = new.op("And", inside, line) if inside else line
        terms = []
        for place, weight in _taps(new, where, options, last):
            whole = new.cast(new.op("Clip", place, new.constant(0, np.float32), last), TensorProto.INT64)
            part = new.op("Gather", x, whole, axis=axis)
            terms.append(new.op("Mul", part, new.op("Reshape", weight, form)) if weight else part)
        x = terms[0]
        for term in terms[1:]:
            x = new.op("Add", x, term)
    x = x if exact else new.cast(x, found.elem_type)
    value = new.constant(float(options.get("extrapolation_value", 0.0)), found.dtype)
    new.op("Where", inside, x, value, to=node.output[0])
    return new.nodes


def _requested(new: Replacement, start: str, end: str, before: int, after: int) -> str:
    """The coordinate of each output element in a region, [after]; see `_coordinates`."""
    last = new.constant(before - 1, np.float32)
    if after == 1:
        return new.op("Mul", new.op("Mul", new.op("Add", start, end), new.constant(0.5, np.float32)), last)
    steps = new.op("Mul", new.constant(np.arange(after), np.float32), new.op("Sub", end, start))
    steps = new.op("Div", new.op("Mul", steps, last), new.constant(after - 1, np.float32))
    return new.op("Add", new.op("Mul", start, last), steps)


def _taps(new: Replacement, where: str, options: dict[str, Any], last: str) -> list[tuple[str, str]]:
    """The neighbours of each coordinate and their weights, which are empty for the only one."""

    def number(value: float) -> str:
        return new.constant(value, np.float32)

    match options.get("mode", "nearest"):
        case "nearest":
            return [(_nearest_to(new, where, str(options.get("nearest_mode", "round_prefer_floor"))), "")]
        case "linear":
            clipped = new.op("Clip", where, number(0), last)
            low = new.op("Floor", clipped)
            part = new.op("Sub", clipped, low)
            return [(low, new.op("Sub", number(1), part)), (new.op("Add", low, number(1)), part)]
    a = float(options.get("cubic_coeff_a", -0.75))
    low = new.op("Floor", where)
    part = new.op("Sub", where, low)
    taps = []
    for offset in (-1, 0, 1, 2):
        distance = new.op("Abs", new.op("Sub", part, number(offset)))
        near = offset in (0, 1)
        factors = (a + 2, -(a + 3), 0.0, 1.0) if near else (a, -5 * a, 8 * a, -4 * a)
        weight = number(factors[0])
        for factor in factors[1:]:
            weight = new.op("Add", new.op("Mul", weight, distance), number(factor))
        taps.append((new.op("Add", low, number(offset)), weight))
    return taps


def _nearest_to(new: Replacement, where: str, mode: str) -> str:
    half = new.constant(0.5, np.float32)
    match mode:
        case "round_prefer_ceil":
            return new.op("Floor", new.op("Add", where, half))
        case "floor":
            return new.op("Floor", where)
        case "ceil":
            return new.op("Ceil", where)
    return new.op("Ceil", new.op("Sub", where, half))


def _resize(node: onnx.NodeProto, graph: OnnxGraph) -> Nodes | None:
    options = attributes(node)
    shape = graph.shape_of(node.input[0])
    found = graph.type_of(node.input[0])
    axes = None if shape is None else _axes(node, graph, options, shape)
    inferred = graph.shape_of(node.output[0])
    if found is None or shape is None or axes is None or inferred is None:
        return None
    # ONNX Runtime has no Resize of float64.
    narrow = found.elem_type != TensorProto.DOUBLE
    if narrow and _is_kept(options, axes, shape) and all(inferred[axis.axis] == axis.after for axis in axes):
        return None
    if options.get("coordinate_transformation_mode", "half_pixel") not in _COORDINATES:
        return None
    if narrow and (picture := _as_picture(node, graph, options, axes, shape)) is not None:
        return picture
    changed = [axis for axis in axes if not _is_identity(axis, options)]
    if sum(axis.before * axis.after for axis in changed) > MAX_ELEMENTS:
        return None
    new = Replacement(node, graph)
    x = node.input[0]
    if options.get("mode", "nearest") == "nearest":
        for axis in changed:
            x = new.op("Gather", x, new.ints(*_nearest(axis, options)), axis=axis.axis)
    else:
        matrices = [(axis.axis, _matrix(axis, options).astype(found.dtype)) for axis in changed]
        x = _multiply(new, x, len(shape), matrices)
    if is_cropped(options):
        inside = _inside(axes, options, len(shape))
        value = new.constant(float(options.get("extrapolation_value", 0.0)), found.dtype)
        x = new.op("Where", new.constant(inside, np.bool_), x, value)
    new.op("Identity", x, to=node.output[0])
    return new.nodes


def _as_picture(
    node: onnx.NodeProto, graph: OnnxGraph, options: dict[str, Any], axes: list[_Axis], shape: tuple[int, ...]
) -> list[onnx.NodeProto] | None:
    """Return the Resize of a signal as one of a picture with one row, if the front end gets that right.

    The matrix of a long signal would have as many elements as the square of its length.
    """
    if len(shape) != _SIGNAL_RANK or len(axes) != _SIGNAL_RANK:
        return None
    before = (*shape[:2], 1, shape[2])
    wide = [*axes[:2], _Axis(2, 1, 1, 1.0, 0.0, 1.0), replace(axes[2], axis=3)]
    if not _is_kept(options, wide, before):
        return None
    new = Replacement(node, graph)
    x = new.op("Reshape", node.input[0], new.ints(*before))
    scales = new.constant([axis.scale for axis in wide], np.float32)
    x = new.op("Resize", x, "", scales, **options)
    new.op("Reshape", x, new.ints(*(axis.after for axis in axes)), to=node.output[0])
    return new.nodes


def _axes(
    node: onnx.NodeProto, graph: OnnxGraph, options: dict[str, Any], shape: tuple[int, ...]
) -> list[_Axis] | None:
    """The axes that Resize names, or all of them if it names none."""
    after = graph.shape_of(node.output[0])
    places = [int(axis) % len(shape) for axis in options.get("axes", range(len(shape)))]
    if after is None:
        return None
    scales: NDArray[Any] | None = None
    sizes: NDArray[Any] | None = None
    if name := input_name(node, 2):
        scales = graph.constant(name)
    if (name := input_name(node, 3)) and (scales is None or not scales.size):
        sizes = graph.constant(name)
    region: NDArray[Any] | None = None
    if (name := input_name(node, 1)) and is_cropped(options):
        region = graph.constant(name)
        if region is None or region.size != 2 * len(places):
            return None
    result = []
    for index, axis in enumerate(places):
        if scales is not None and scales.size:
            scale = float(scales[index])
        elif sizes is not None:
            scale = float(sizes[index]) / shape[axis]
        else:
            return None
        size = after[axis]
        if scales is not None and scales.size:
            # Rounded as in ONNX Runtime: 10 times 1.3 is 13 in float32, but less than 13 in double precision.
            size = int(np.float32(shape[axis]) * np.float32(scale))
        start = 0.0 if region is None else float(region[index])
        end = 1.0 if region is None else float(region[index + len(places)])
        result.append(_Axis(axis, shape[axis], size, scale, start, end))
    policy = options.get("keep_aspect_ratio_policy", "stretch")
    if policy != "stretch" and sizes is not None:
        ratios = [axis.scale for axis in result]
        shared = min(ratios) if policy == "not_larger" else max(ratios)
        result = [_Axis(a.axis, a.before, a.after, shared, a.start, a.end) for a in result]
    return result


def _is_kept(options: dict[str, Any], axes: list[_Axis], shape: tuple[int, ...]) -> bool:
    """Whether the front end's own Resize is right: NCHW, only the last two axes, exact scales."""
    if len(shape) != 4 or "axes" in options or len(axes) != 4:
        return False
    if options.get("antialias", 0) or options.get("exclude_outside", 0):
        return False
    coordinates = options.get("coordinate_transformation_mode", "half_pixel")
    if coordinates not in _KEPT_COORDINATES or any(axis.before != axis.after for axis in axes[:2]):
        return False
    if options.get("mode", "nearest") == "nearest" and not all(_is_whole(axis) for axis in axes):
        return False
    exact = all(_is_exact(axis) for axis in axes)
    # A single pixel does not have two corners to align: the front end divides by zero.
    return exact and not (coordinates == "align_corners" and any(axis.after == 1 for axis in axes[2:]))


def _is_exact(axis: _Axis) -> bool:
    """Whether the scale is the ratio of the extents, which is stored in float32."""
    return math.isclose(axis.before * axis.scale, axis.after, rel_tol=1e-6)


def _is_whole(axis: _Axis) -> bool:
    """Whether one extent is a multiple of the other, so that no quotient is rounded."""
    return axis.before % axis.after == 0 or axis.after % axis.before == 0


def _is_identity(axis: _Axis, options: dict[str, Any]) -> bool:
    return axis.before == axis.after and axis.scale == 1.0 and not is_cropped(options)


def _coordinates(axis: _Axis, options: dict[str, Any]) -> NDArray[np.float32]:
    """The input coordinate of each output element, [after].

    In float32, like ONNX Runtime: half way between two pixels, the last bit decides which one is nearest.
    """
    out = np.arange(axis.after, dtype=np.float32)
    last = axis.before - 1
    where: NDArray[Any] = out / axis.scale
    match options.get("coordinate_transformation_mode", "half_pixel"):
        case "half_pixel":
            where = (out + 0.5) / axis.scale - 0.5
        case "tf_half_pixel_for_nn":
            where = (out + 0.5) / axis.scale
        case "half_pixel_symmetric":
            adjustment = axis.after / (axis.before * axis.scale)
            where = axis.before / 2 * (1 - adjustment) + (out + 0.5) / axis.scale - 0.5
        case "pytorch_half_pixel":
            where = (out + 0.5) / axis.scale - 0.5 if axis.after > 1 else np.full_like(out, -0.5)
        case "align_corners":
            # Based on the rounded size, like ONNX Runtime; ONNX's reference uses the size before rounding.
            where = out * last / (axis.after - 1) if axis.after > 1 else np.zeros_like(out)
        case "tf_crop_and_resize" if axis.after > 1:
            where = axis.start * last + out * (axis.end - axis.start) * last / (axis.after - 1)
        case "tf_crop_and_resize":
            where = np.full_like(out, 0.5 * (axis.start + axis.end) * last)
    return where.astype(np.float32, copy=False)


def _nearest(axis: _Axis, options: dict[str, Any]) -> list[int]:
    if options.get("coordinate_transformation_mode") == "asymmetric" and _is_exact(axis):
        # In whole numbers: a quotient in float32 falls just below some pixels, as ONNX Runtime's does.
        places = [Fraction(index * axis.before, axis.after) for index in range(axis.after)]
        return [min(_rounded(place, options), axis.before - 1) for place in places]
    where = _coordinates(axis, options)
    match options.get("nearest_mode", "round_prefer_floor"):
        case "round_prefer_ceil":
            chosen = np.floor(where + 0.5)
        case "floor":
            chosen = np.floor(where)
        case "ceil":
            chosen = np.ceil(where)
        case _:
            chosen = np.ceil(where - 0.5)
    return [int(index) for index in np.clip(chosen, 0, axis.before - 1)]


def _rounded(place: Fraction, options: dict[str, Any]) -> int:
    match options.get("nearest_mode", "round_prefer_floor"):
        case "round_prefer_ceil":
            return math.floor(place + Fraction(1, 2))
        case "floor":
            return math.floor(place)
        case "ceil":
            return math.ceil(place)
        case _:
            return math.ceil(place - Fraction(1, 2))


def _matrix(axis: _Axis, options: dict[str, Any]) -> NDArray[np.float64]:
    """Weights of the input's elements for each output element, [after, before]."""
    cubic = options.get("mode") == "cubic"
    # Antialiasing widens the kernel by the factor by which the picture shrinks.
    stretch = min(axis.scale, 1.0) if options.get("antialias", 0) else 1.0
    reach = (2.0 if cubic else 1.0) / stretch
    coefficient = float(options.get("cubic_coeff_a", -0.75))
    matrix = np.zeros((axis.after, axis.before))
    for row, where in enumerate(_coordinates(axis, options)):
        taps = np.arange(math.floor(where - reach) + 1, math.ceil(where + reach))
        if not taps.size:
            taps = np.array([math.floor(where)])
        distance = np.abs(taps - where) * stretch
        weights = _cubic(distance, coefficient) if cubic else np.maximum(1.0 - distance, 0.0)
        if options.get("exclude_outside", 0):
            weights = np.where((taps < 0) | (taps >= axis.before), 0.0, weights)
        weights = weights / weights.sum()
        np.add.at(matrix[row], np.clip(taps, 0, axis.before - 1), weights)
    return matrix


def _cubic(distance: NDArray[np.float64], a: float) -> NDArray[np.float64]:
    near = (a + 2) * distance**3 - (a + 3) * distance**2 + 1
    far = a * distance**3 - 5 * a * distance**2 + 8 * a * distance - 4 * a
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0.0))


def _multiply(new: Replacement, x: str, rank: int, matrices: list[tuple[int, NDArray[Any]]]) -> str:
    """Multiply each axis by its matrix; an axis before the last two is moved to the end and back."""
    for axis, matrix in matrices:
        if axis == rank - 2:
            x = new.op("MatMul", new.constant(matrix, matrix.dtype), x)
            continue
        order = list(range(rank))
        order[axis], order[-1] = order[-1], order[axis]
        if axis != rank - 1:
            x = new.op("Transpose", x, perm=order)
        x = new.op("MatMul", x, new.constant(matrix.T, matrix.dtype))
        if axis != rank - 1:
            x = new.op("Transpose", x, perm=order)
    return x


def _inside(axes: list[_Axis], options: dict[str, Any], rank: int) -> NDArray[np.bool_]:
    """Which output elements lie within the picture; the others get the extrapolation value."""
    inside: NDArray[np.bool_] = np.ones([1] * rank, np.bool_)
    for axis in axes:
        where = _coordinates(axis, options)
        line = (where >= 0) & (where <= axis.before - 1)
        inside = inside & line.reshape([-1 if place == axis.axis else 1 for place in range(rank)])
    return inside
