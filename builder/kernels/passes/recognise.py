"""Recognises what exporters decompose: layer norm in nine operators, RMS norm, products of flattened rows.

Runs before layouts are chosen. A layer norm becomes one operator, which is computed row by row while the row
is in the L1 cache. A reshape that keeps the last axis moves behind the products and element-wise operators
that follow it. There it usually meets its inverse, and both vanish, so that the operators that it separated
are fused into one kernel.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call

from builder.kernels.rewriter import (
    RESHAPES,
    Values,
    constant_of,
    definition,
    op_name,
    rewrite_main,
    run,
    shape_of,
)

_IMAGE_RANK: Final = 4
_UNARY: Final = {
    f"relax.{n}" for n in ("nn.relu", "nn.gelu", "nn.gelu_tanh", "nn.silu", "tanh", "sigmoid", "erf", "exp")
}
_BINARY: Final = {f"relax.{n}" for n in ("add", "subtract", "multiply", "divide", "maximum", "minimum")}


def recognise(mod: tvm.IRModule) -> tvm.IRModule:
    """Recombine decomposed operators in `mod`, and move reshapes out of the way of fusion.

    Parameters
    ----------
    mod
        A canonical module.
    """
    mod = rewrite_main(mod, _emit, Values)
    t = relax.transform
    return run(mod, t.CanonicalizeBindings(), t.DeadCodeElimination(["main"]))


def _emit(table: Values, var: relax.Var, call: Call) -> bool:
    if not isinstance(call.ty, relax.TensorType):
        return False
    forms = (
        _reshape,
        _product,
        _channels_of_attention,
        _elementwise,
        _quotient,
        _layer_norm,
        _rms_norm,
        _affine,
        _swapped_norm,
    )
    for form in forms:
        new = form(table, call)
        if new is not None:
            table.define(var, new)
            return True
    return False


def _unfolded(table: Values, expr: relax.Expr) -> relax.Expr | None:
    """Return the tensor that `expr` reshapes, None if `expr` is not a reshape or changes the last axis."""
    view = definition(table, expr, *RESHAPES)
    if view is None:
        return None
    source = view.args[0]
    before, after = shape_of(source), shape_of(expr)
    return source if before and after and before[-1] == after[-1] else None


def _reshape(table: Values, call: Call) -> relax.Expr | None:
    """Merge a reshape of a reshape into one; drop both if they are inverse to each other."""
    if op_name(call) not in RESHAPES:
        return None
    x = table.plain(call.args[0])
    view = definition(table, x, *RESHAPES)
    source = x if view is None else view.args[0]
    if shape_of(source) == shape_of(call):
        return source
    shuffled = _shuffle(table, x, shape_of(call))
    if shuffled is not None:
        return shuffled
    return None if source is x else table.bb.emit(relax.op.reshape(source, shape_of(call)))


def _shuffle(table: Values, expr: relax.Expr, shape: tuple[int, ...]) -> relax.Expr | None:
    """Return a shuffle of channels as a gather: `expr` is a transpose, which is reshaped to `shape`.

    Exporters write it as a reshape of `[N, C, ...]` to `[N, a, b, ...]`, a transpose that leaves the first
    axis and those of pixels in place, and a reshape back.
    """
    transpose = definition(table, expr, "relax.permute_dims")
    view = None if transpose is None else definition(table, transpose.args[0], *RESHAPES)
    if transpose is None or view is None or len(shape) != 4 or shape_of(view.args[0]) != shape:
        return None
    inner, axes = shape_of(view), [int(axis) for axis in transpose.attrs.axes or ()]
    parts = len(inner) - 3  # of the axis of channels
    if parts < 2 or (inner[0], *inner[-2:]) != (shape[0], *shape[2:]):
        return None
    if axes[:1] != [0] or axes[-2:] != [parts + 1, parts + 2]:
        return None
    order = np.arange(shape[1]).reshape(inner[1:-2]).transpose([axis - 1 for axis in axes[1:-2]]).ravel()
    return table.bb.emit(relax.op.take(view.args[0], relax.const(order.astype("int64")), axis=1, mode="clip"))


def _product(table: Values, call: Call) -> relax.Expr | None:
    """Move a reshape of the rows from before a product with a constant matrix to after it."""
    if op_name(call) != "relax.matmul":
        return None
    source, weight = _unfolded(table, table.plain(call.args[0])), constant_of(call.args[1])
    if source is None or weight is None or weight.ndim != 2 or len(shape_of(source)) < 2:
        return None
    rows = table.bb.emit(relax.op.matmul(source, call.args[1], out_dtype=str(call.ty.dtype)))
    return table.bb.emit(relax.op.reshape(rows, shape_of(call)))


def _channels_of_attention(table: Values, call: Call) -> relax.Expr | None:
    """Return values of channels times a transposed softmax, `V Pt`, as `(P Vt)t`: attention as of rows.

    The attention of an image has a row of values for each channel. The matrix of probabilities has a row and
    a column for each pixel, so its transpose is the largest copy of all.
    """
    if op_name(call) != "relax.matmul":
        return None
    values, turned = (table.plain(a) for a in call.args)
    transpose = definition(table, turned, "relax.permute_dims")
    softmax = None if transpose is None else definition(table, transpose.args[0], "relax.nn.softmax")
    rank = len(shape_of(call))
    swapped = [*range(rank - 2), rank - 1, rank - 2]
    if transpose is None or softmax is None or not isinstance(values, relax.Var):
        return None
    if rank < 3 or not len(shape_of(values)) == len(shape_of(turned)) == rank:
        return None
    axes = list(range(rank))[::-1] if transpose.attrs.axes is None else [int(a) for a in transpose.attrs.axes]
    if axes != swapped or int(softmax.attrs.axis) not in (-1, rank - 1):
        return None
    columns = table.bb.emit(relax.op.permute_dims(values, swapped))
    product = table.bb.emit(relax.op.matmul(transpose.args[0], columns, out_dtype=str(call.ty.dtype)))
    return table.bb.emit(relax.op.permute_dims(product, swapped))


def _is_of_product(table: Values, expr: relax.Expr) -> bool:
    """Whether `expr` is a product with a constant matrix, or an element-wise function of one."""
    while (value := definition(table, expr, "relax.matmul", *_BINARY, *_UNARY)) is not None:
        if op_name(value) == "relax.matmul":
            return constant_of(value.args[1]) is not None
        expr = next((a for a in value.args if isinstance(a, relax.Var)), value.args[0])
    return False


def _elementwise(table: Values, call: Call) -> relax.Expr | None:
    """Move a reshape of a product from before an element-wise operator to after it."""
    name = op_name(call)
    if name not in _BINARY and name not in _UNARY:
        return None
    args = [table.plain(a) for a in call.args]
    sources = [_unfolded(table, a) for a in args]
    source = next((s for s in sources if s is not None and _is_of_product(table, s)), None)
    if source is None:
        return None
    shape = shape_of(source)
    if math.prod(shape) != math.prod(shape_of(call)):
        return None
    new = [_as_rows(table, a, shape, shape_of(call)) for a in args]
    if any(a is None for a in new):
        return None
    result = table.bb.emit(Call(call.op, new, call.attrs))
    return table.bb.emit(relax.op.reshape(result, shape_of(call)))


def _as_rows(
    table: Values, expr: relax.Expr, shape: tuple[int, ...], old: tuple[int, ...]
) -> relax.Expr | None:
    """Return `expr`, which broadcasts to `old`, so that it broadcasts to `shape`; None if it cannot."""
    own = shape_of(expr)
    if own == old:
        view = definition(table, expr, *RESHAPES)
        if view is not None and shape_of(view.args[0]) == shape:
            return view.args[0]
        return table.bb.emit(relax.op.reshape(expr, shape))
    numbers = constant_of(expr)
    if numbers is None or math.prod(own) != (own[-1] if own else 1):
        return None
    return relax.const(numbers.reshape(own[-1:]), str(expr.ty.dtype))


def _quotient(table: Values, call: Call) -> relax.Expr | None:
    """Return a division by a constant as a multiplication.

    Only if that changes nothing (a power of two), or next to nothing: the argument of an erf, as in GELU, and
    what was clipped, as in hard swish, whose definition has a multiplication by a sixth.
    """
    name = op_name(call)
    if name == "relax.erf":
        x = table.plain(call.args[0])
        inner = definition(table, x, "relax.divide")
        inverse = None if inner is None else _inverse(inner.args[1])
        if inner is None or inverse is None or not isinstance(inner.args[0], relax.Var):
            return None
        return table.bb.emit(relax.op.erf(table.bb.emit(relax.op.multiply(inner.args[0], inverse))))
    if name == "relax.divide":
        inverse = _inverse(call.args[1])
        if inverse is None or not isinstance(call.args[0], relax.Var):
            return None
        is_gate = definition(table, table.plain(call.args[0]), "relax.clip") is not None
        if is_gate or np.all(np.frexp(inverse.value.numpy())[0] == 0.5):
            return table.bb.emit(relax.op.multiply(table.plain(call.args[0]), inverse))
    return None


def _inverse(expr: relax.Expr) -> relax.Constant | None:
    """Return one over a positive float32 constant, None if `expr` is anything else."""
    numbers = constant_of(expr)
    if numbers is None or numbers.dtype != np.float32 or not numbers.size or not np.all(numbers > 0):
        return None
    with np.errstate(all="ignore"):
        inverse = (np.float32(1) / numbers).astype("float32")
    return relax.const(inverse) if np.all(np.isfinite(inverse)) else None


def _layer_norm(table: Values, call: Call) -> relax.Expr | None:
    """Recognise `(x - mean(x)) / sqrt(mean((x - mean(x))**2) + epsilon)` over the last axes.

    Over one axis this is layer norm; over all axes of a plane, or of a group of planes, it is ONNX's instance
    norm, which is the layer norm of the flat planes.
    """
    name = op_name(call)
    if name not in ("relax.divide", "relax.multiply") or str(call.ty.dtype) != "float32":
        return None
    args = [table.plain(a) for a in call.args]
    if name == "relax.multiply" and _definition(table, args[0], "relax.rsqrt") is not None:
        args.reverse()
    root = _definition(table, args[1], "relax.sqrt" if name == "relax.divide" else "relax.rsqrt")
    centred = definition(table, args[0], "relax.subtract")
    if root is None or centred is None or shape_of(centred) != shape_of(call):
        return None
    x = centred.args[0]
    if _is_of_channels(table, centred.args[1], x):
        return _channel_norm(table, root, x, args[0])
    count = _mean_of(table, centred.args[1], x) if isinstance(x, relax.Var) else 0
    axes = _last_axes(shape_of(x), count)
    kept = (*shape_of(x)[: len(shape_of(x)) - axes], *(1,) * axes)
    if not axes or shape_of(centred.args[1]) != kept or shape_of(args[1]) != kept:
        return None
    total = _definition(table, root.args[0], "relax.add")
    if total is None:
        return None
    variance, epsilon = _variance_and_epsilon(total)
    if epsilon is None or _variance_of(table, variance, x, args[0]) != count:
        return None
    rows = x if axes == 1 else table.bb.emit(relax.op.reshape(x, (*shape_of(x)[:-axes], count)))
    one, zero = relax.const(np.ones(count, "f4")), relax.const(np.zeros(count, "f4"))
    norm = table.bb.emit(
        relax.op.nn.layer_norm(rows, one, zero, axes=-1, epsilon=epsilon, center=False, scale=False)
    )
    return norm if axes == 1 else table.bb.emit(relax.op.reshape(norm, shape_of(x)))


def _rms_norm(table: Values, call: Call) -> relax.Expr | None:
    """Recognise `x / sqrt(mean(x**2) + epsilon)` over the last axes, as it may be written out."""
    if op_name(call) not in ("relax.divide", "relax.multiply") or str(call.ty.dtype) != "float32":
        return None
    args = [table.plain(a) for a in call.args]
    pairs = [args] if op_name(call) == "relax.divide" else [args, args[::-1]]
    for x, root in pairs:
        if not isinstance(x, relax.Var) or shape_of(x) != shape_of(call):
            continue
        total = _radicand(table, root, inverse=op_name(call) == "relax.multiply")
        if total is None:
            continue
        mean, epsilon = _variance_and_epsilon(total)
        squares = _definition(table, mean, "relax.mean")
        if epsilon is None or squares is None or not _is_square_of(table, squares.args[0], x):
            continue
        count = _mean_of(table, mean, squares.args[0])
        axes = _last_axes(shape_of(x), count)
        if not axes or shape_of(root) != (*shape_of(x)[: len(shape_of(x)) - axes], *(1,) * axes):
            continue
        rows = x if axes == 1 else table.bb.emit(relax.op.reshape(x, (*shape_of(x)[:-axes], count)))
        one = relax.const(np.ones(count, "f4"))
        norm = table.bb.emit(relax.op.nn.rms_norm(rows, one, axes=-1, epsilon=epsilon))
        return norm if axes == 1 else table.bb.emit(relax.op.reshape(norm, shape_of(x)))
    return None


def _radicand(table: Values, expr: relax.Expr, *, inverse: bool) -> Call | None:
    """Return the sum of which `expr` is the root, or one over the root; None if it is neither."""
    if not inverse:
        root = _definition(table, expr, "relax.sqrt")
    else:
        root = _definition(table, expr, "relax.rsqrt", "relax.power", "relax.divide")
        if root is not None and op_name(root) == "relax.power" and not _is_number(root.args[1], -0.5):
            return None
        if root is not None and op_name(root) == "relax.divide":
            root = _definition(table, root.args[1], "relax.sqrt") if _is_number(root.args[0], 1) else None
    return None if root is None else _definition(table, root.args[0], "relax.add")


def _is_number(expr: relax.Expr, number: float) -> bool:
    """Whether a constant is one number."""
    value = constant_of(expr)
    return value is not None and value.size == 1 and float(value.item()) == number


def _channel_norm(table: Values, root: Call, x: relax.Expr, centred: relax.Expr) -> relax.Expr | None:
    """Return the layer norm over the channels of an image; `root` is the root of variance and epsilon."""
    total = definition(table, root.args[0], "relax.add")
    if total is None:
        return None
    variance, epsilon = _variance_and_epsilon(total)
    mean = definition(table, variance, "relax.mean")
    if mean is None:
        known = _is_of_channels(table, variance, x, "relax.variance")
    else:
        known = _is_of_channels(table, variance, mean.args[0]) and _is_square_of(table, mean.args[0], centred)
    if epsilon is None or not known:
        return None
    count = shape_of(x)[1]
    one, zero = relax.const(np.ones(count, "f4")), relax.const(np.zeros(count, "f4"))
    norm = relax.op.nn.layer_norm(x, one, zero, axes=[1], epsilon=epsilon, center=False, scale=False)
    return table.bb.emit(norm)


def _variance_and_epsilon(total: Call) -> tuple[relax.Expr, float | None]:
    """Return the operands of a sum, the constant last; its value is None if it is not a single number."""
    variance, epsilon = total.args
    if constant_of(variance) is not None:
        variance, epsilon = epsilon, variance
    number = constant_of(epsilon)
    return variance, None if number is None or number.size != 1 else float(number.item())


def _is_of_channels(table: Values, expr: relax.Expr, x: relax.Expr, operator: str = "relax.mean") -> bool:
    """Whether `expr` is the mean of the channels of each pixel of `x`, an image."""
    mean = definition(table, expr, operator)
    if mean is None or mean.attrs.axis is None or not mean.args[0].same_as(x):
        return False
    axes, rank = [int(axis) for axis in mean.attrs.axis], len(shape_of(x))
    return rank == _IMAGE_RANK and [axis % rank for axis in axes] == [1] and bool(mean.attrs.keepdims)


def _swapped_norm(table: Values, call: Call) -> relax.Expr | None:
    """Return a layer norm of the last axis between two transposes as one over the channels of an image."""
    if op_name(call) != "relax.permute_dims" or call.attrs.axes is None:
        return None
    if [int(axis) for axis in call.attrs.axes] != [0, 3, 1, 2]:
        return None
    norm = definition(table, table.plain(call.args[0]), "relax.nn.layer_norm")
    first = None if norm is None else definition(table, norm.args[0], "relax.permute_dims")
    if norm is None or first is None or first.attrs.axes is None or str(call.ty.dtype) != "float32":
        return None
    if [int(axis) for axis in first.attrs.axes] != [0, 2, 3, 1]:
        return None
    if [int(axis) % _IMAGE_RANK for axis in norm.attrs.axes] != [_IMAGE_RANK - 1]:
        return None
    gain, shift = norm.args[1:]
    options = {"epsilon": float(norm.attrs.epsilon)}
    options |= {"center": bool(norm.attrs.center), "scale": bool(norm.attrs.scale)}
    return table.bb.emit(relax.op.nn.layer_norm(first.args[0], gain, shift, axes=[1], **options))


def _source(table: Values, expr: relax.Expr) -> relax.Expr:
    """Return what `expr` is a reshape of, or `expr` itself."""
    while (view := definition(table, expr, *RESHAPES)) is not None:
        expr = view.args[0]
    return expr


def _definition(table: Values, expr: relax.Expr, *names: str) -> Call | None:
    """Return the call that a variable, or what it is a reshape of, is bound to."""
    return definition(table, _source(table, expr), *names)


def _last_axes(shape: tuple[int, ...], count: int) -> int:
    """Return how many last axes of `shape` have `count` elements, 0 if none; both axes of an image."""
    found = next((a for a in range(1, len(shape) + 1) if math.prod(shape[-a:]) == count), 0)
    return 2 if found == 1 and len(shape) == _IMAGE_RANK and shape[2] == 1 else found


def _mean_of(table: Values, expr: relax.Expr, x: relax.Expr, operator: str = "relax.mean") -> int:
    """Return of how many last elements of `x` `expr` is the mean, in whatever shape; 0 if it is not."""
    mean = _definition(table, expr, operator)
    if mean is None or mean.attrs.axis is None:
        return 0
    if not _source(table, mean.args[0]).same_as(_source(table, x)):
        return 0
    shape = shape_of(mean.args[0])
    axes = sorted(int(a) % len(shape) for a in mean.attrs.axis)
    return math.prod(shape[axes[0] :]) if axes == list(range(len(shape) - len(axes), len(shape))) else 0


def _variance_of(table: Values, expr: relax.Expr, x: relax.Expr, centred: relax.Expr) -> int:
    """Return of how many last elements of `x` `expr` is the variance; 0 if it is not."""
    mean = _definition(table, expr, "relax.mean")
    if mean is None:
        variance = _definition(table, expr, "relax.variance")
        return 0 if variance is None else _mean_of(table, expr, x, "relax.variance")
    squares = mean.args[0]
    return _mean_of(table, expr, squares) if _is_square_of(table, squares, centred) else 0


def _is_square_of(table: Values, expr: relax.Expr, x: relax.Expr) -> bool:
    """Whether `expr` is the square of `x`, as a power, a product or a square."""
    value = definition(table, expr, "relax.power", "relax.multiply", "relax.square")
    if value is None or not _equal(table, value.args[0], x):
        return False
    if op_name(value) == "relax.power":
        exponent = constant_of(value.args[1])
        return exponent is not None and bool(np.all(exponent == 2))
    return op_name(value) == "relax.square" or _equal(table, value.args[1], x)


def _equal(table: Values, one: relax.Expr, other: relax.Expr) -> bool:
    """Whether two values are the same, or the same difference of the same values."""
    if one.same_as(other):
        return True
    first, second = (definition(table, expr, "relax.subtract") for expr in (one, other))
    if first is None or second is None:
        return False
    return all(a.same_as(b) for a, b in zip(first.args, second.args, strict=True))


def _affine(table: Values, call: Call) -> relax.Expr | None:
    """Fold a multiplication by a gain, or an addition of a shift, into the layer norm before it."""
    name = op_name(call)
    if name not in ("relax.multiply", "relax.add"):
        return None
    nothing = 1 if name == "relax.multiply" else 0
    for x, other in (call.args, reversed(call.args)):
        norm, numbers = definition(table, table.plain(x), "relax.nn.layer_norm"), constant_of(other)
        known = norm is not None and numbers is not None and shape_of(norm) == shape_of(call)
        if known and np.all(numbers == nothing):
            return table.plain(x)  # as exporters write a group norm, whose gain comes later
    for x, other in (call.args, reversed(call.args)):
        norm = definition(table, table.plain(x), "relax.nn.layer_norm", "relax.nn.rms_norm")
        numbers = constant_of(other)
        if norm is None or numbers is None or numbers.shape[-1:] != shape_of(call)[-1:]:
            continue
        if [int(axis) % len(shape_of(call)) for axis in norm.attrs.axes] != [len(shape_of(call)) - 1]:
            continue
        if numbers.size != numbers.shape[-1] or shape_of(norm) != shape_of(call):
            continue
        if op_name(norm) == "relax.nn.rms_norm":
            gain = constant_of(norm.args[1])
            if name == "relax.add" or gain is None or np.any(gain != 1):
                continue
            vector = relax.const(numbers.reshape(-1).astype("float32"))
            epsilon = float(norm.attrs.epsilon)
            return table.bb.emit(relax.op.nn.rms_norm(norm.args[0], vector, axes=-1, epsilon=epsilon))
        if norm.attrs.center:
            continue
        if name == "relax.multiply" and norm.attrs.scale:
            continue
        data, gain, shift = norm.args
        vector = relax.const(numbers.reshape(-1).astype("float32"))
        gain, shift = (vector, shift) if name == "relax.multiply" else (gain, vector)
        return table.bb.emit(
            relax.op.nn.layer_norm(
                data,
                gain,
                shift,
                axes=-1,
                epsilon=float(norm.attrs.epsilon),
                center=name == "relax.add",
                scale=bool(norm.attrs.scale) or name == "relax.multiply",
            )
        )
    return None
