"""Turns the remaining operators into tensor expressions: TVM's, or ours if TVM's are slow."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import tvm
from tvm import relax, te, tirx, topi
from tvm.ir import Call

from builder.kernels.real_numbers import hidden
from builder.kernels.rewriter import (
    RESHAPES,
    constant_of,
    is_halves,
    legalise_as_tvm,
    op_name,
    shape_of,
    widened,
)
from builder.kernels.spaces import (
    columns,
    concatenation,
    division,
    limits,
    matmul,
    padding,
    quantisation,
    root_mean_square,
    rows,
    sorting,
    transpose,
)
from builder.target.device_target import DeviceTarget

Legalisation = Callable[[relax.BlockBuilder, Call], relax.Expr]


def legalise_map(target: DeviceTarget) -> dict[str, Legalisation]:
    """Return our tensor expressions for a device by the operator that they replace."""
    own: dict[str, Legalisation] = {"relax.nn.softmax": _softmax}
    own["relax.nn.log_softmax"] = _log_softmax
    own["relax.nn.layer_norm"] = rows.layer_norm
    own[root_mean_square.NAME] = root_mean_square.rms_norm
    own |= dict.fromkeys(rows.REDUCTIONS, _reduction)
    own |= dict.fromkeys(("relax.argmax", "relax.argmin"), _place_of_extremum)
    own["relax.matmul"] = matmul.legalise
    own["relax.permute_dims"] = transpose.legalise
    own |= limits.legalisations(target)
    own |= dict.fromkeys(division.OPERATORS, division.legalise)
    own["relax.power"] = _power
    own["relax.nn.pad"] = padding.legalise
    own |= {name: partial(_arithmetic, node) for name, node in _FOLDED.items()}
    own["relax.multiply"] = _multiply
    own["relax.negative"] = _negative
    own["relax.nn.leakyrelu"] = _leaky_relu
    own["relax.nn.prelu"] = _prelu
    own["relax.take"] = _take
    own["relax.concat"] = concatenation.legalise
    own["relax.cumsum"] = _cumsum
    own["relax.topk"] = sorting.topk
    own["relax.sort"] = sorting.sort
    own["relax.argsort"] = sorting.argsort
    own["relax.quantize"] = partial(quantisation.quantize, fma=target.simd.fma)
    own["relax.dequantize"] = quantisation.dequantize
    return own


def _softmax(bb: relax.BlockBuilder, call: Call) -> relax.Expr:
    """Legalise softmax: along rows, or along columns."""
    last = len(shape_of(call)) - 1
    if int(call.attrs.axis) in (-1, last) or str(call.ty.dtype) != "float32":
        return rows.softmax(bb, call)
    return columns.softmax(bb, call)


def _log_softmax(bb: relax.BlockBuilder, call: Call) -> relax.Expr:
    """Legalise the logarithm of softmax: along rows, or along columns."""
    last = len(shape_of(call)) - 1
    if int(call.attrs.axis) in (-1, last) or str(call.ty.dtype) != "float32":
        return rows.log_softmax(bb, call)
    return columns.log_softmax(bb, call)


def _reduction(bb: relax.BlockBuilder, call: Call) -> relax.Expr:
    """Legalise a reduction: of rows, of columns, or as TVM does."""
    reduced = columns.reduction(bb, call)
    return rows.reduction(bb, call) if reduced is None else reduced


def _place_of_extremum(bb: relax.BlockBuilder, call: Call) -> relax.Expr:
    """Legalise `argmax` or `argmin`: of columns, or as TVM does.

    Where no number is beyond TVM's first one (all are infinite, or NaN), TVM answers -1. The place is then 0.
    """
    place = columns.place_of_extremum(bb, call)
    if place is not None:
        return place
    place = legalise_as_tvm(bb, call)
    none = relax.const(0, str(call.ty.dtype))
    return bb.call_te(topi.maximum, bb.emit(place), none, primfunc_name_hint="place")


def _power(bb: relax.BlockBuilder, call: Call) -> relax.Expr:
    """Legalise `power`: exponents as in GELU and layer norm as products and roots of whole vectors."""
    x, exponents = call.args[0], constant_of(call.args[1])
    formula = None if exponents is None or exponents.size != 1 else _POWERS.get(float(exponents.item()))
    if formula is None or shape_of(x) != shape_of(call) or str(x.ty.dtype) not in ("float32", "float64"):
        return legalise_as_tvm(bb, call)
    return bb.call_te(
        lambda t: te.compute(t.shape, lambda *i: formula(t(*i)), name="power"), x, primfunc_name_hint="power"
    )


def _square_root(x: tirx.Expr) -> tirx.Expr:
    """Return x to the power of 0.5: positive also for -0 and for the negative infinity (C's pow)."""
    infinity = tirx.const(math.inf, str(x.ty.dtype))
    zero = hidden(tirx.const(0.0, str(x.ty.dtype)))
    return tirx.Select(x == -infinity, infinity, tirx.Add(tirx.sqrt(x), zero))


def _inverse(x: tirx.Expr) -> tirx.Expr:
    return tirx.const(1.0, str(x.ty.dtype)) / x


# Others are calls of the C library for each element.
_POWERS: Final[Mapping[float, Callable[[tirx.Expr], tirx.Expr]]] = {
    -2.0: lambda x: _inverse(x * x),
    -1.0: _inverse,
    0.5: _square_root,
    1.0: lambda x: x,
    2.0: lambda x: x * x,
    3.0: lambda x: x * x * x,
    4.0: lambda x: (x * x) * (x * x),
}


def _multiply(bb: relax.BlockBuilder, call: Call) -> relax.Expr:
    """Legalise `multiply`; a constant that scales a computed number is an argument of the kernel.

    TVM writes it into the code. Then products that are quantised while they run would each be a kernel of
    their own, which differs from the others only by the scale of its weights.
    """
    constants = [arg for arg in call.args if constant_of(arg) is not None]
    if len(constants) != 1 or shape_of(call) or str(call.ty.dtype) != "float32":
        return _arithmetic(tirx.Mul, bb, call)
    return bb.call_te(topi.multiply, *call.args, primfunc_name_hint="multiply")


# Operators of two numbers that TVM folds as those of real numbers: `x - x`, `0 * x`.
_FOLDED: Final[Mapping[str, type[tirx.Expr]]] = {
    "relax.add": tirx.Add,
    "relax.subtract": tirx.Sub,
    "relax.multiply": tirx.Mul,
    "relax.divide": tirx.Div,
    "relax.equal": tirx.EQ,
    "relax.not_equal": tirx.NE,
}


def _arithmetic(node: type[tirx.Expr], bb: relax.BlockBuilder, call: Call) -> relax.Expr:
    """Legalise an operator of `_FOLDED`: of a number and itself, or 0, so that TVM does not fold it."""
    dtype = str(call.args[0].ty.dtype)
    numbers = [constant_of(arg) for arg in call.args]
    zero = any(number is not None and number.ndim == 0 and number == 0 for number in numbers)
    if not dtype.startswith("float"):
        return (
            division.legalise(bb, call) if op_name(call) in division.OPERATORS else legalise_as_tvm(bb, call)
        )
    if not dtype.startswith("float") or not (zero or call.args[0].same_as(call.args[1])):
        return legalise_as_tvm(bb, call)
    scalars = [None if number is None or number.ndim else float(number) for number in numbers]

    def compute(*tensors: te.Tensor) -> te.Tensor:
        def element(*place: tirx.Var) -> tirx.Expr:
            read = iter(tensors)
            a, b = (
                limits.element_of(next(read), place) if scalar is None else hidden(tirx.const(scalar, dtype))
                for scalar in scalars
            )
            return node(a, hidden(b))

        return te.compute(shape_of(call), element, name=op_name(call).rpartition(".")[2])

    read = [arg for arg, scalar in zip(call.args, scalars, strict=True) if scalar is None]
    return bb.call_te(compute, *read, primfunc_name_hint=op_name(call).rpartition(".")[2])


def _negative(bb: relax.BlockBuilder, call: Call) -> relax.Expr:
    """Legalise `negative`: TVM's `0 - x` makes 0 of 0, which becomes -0."""
    dtype = str(call.ty.dtype)
    if not dtype.startswith("float"):
        return legalise_as_tvm(bb, call)
    minus = tirx.const(-1.0, dtype)
    return bb.call_te(
        lambda x: te.compute(x.shape, lambda *i: x(*i) * minus, name="negative"),
        call.args[0],
        primfunc_name_hint="negative",
    )


def _leaky_relu(bb: relax.BlockBuilder, call: Call) -> relax.Expr:
    """Legalise `leakyrelu`: only what is below zero has a slope. TVM gives it to 0 and NaN, too.

    With a slope of 0, TVM would make 0 of the negative infinity.
    """
    slope = hidden(tirx.const(float(call.attrs.alpha), str(call.ty.dtype)))
    return bb.call_te(
        lambda x: te.compute(x.shape, lambda *i: _leaking(x(*i), slope), name="leaky_relu"),
        call.args[0],
        primfunc_name_hint="leaky_relu",
    )


def _prelu(bb: relax.BlockBuilder, call: Call) -> relax.Expr:
    """Legalise `prelu` as `leakyrelu`: an infinite slope of 0 would be NaN."""
    axis = int(call.attrs.axis) % len(shape_of(call))
    single = shape_of(call.args[1]) == (1,)

    def compute(x: te.Tensor, slopes: te.Tensor) -> te.Tensor:
        return te.compute(x.shape, lambda *i: _leaking(x(*i), slopes(0 if single else i[axis])), name="prelu")

    return bb.call_te(compute, *call.args, primfunc_name_hint="prelu")


def _leaking(x: tirx.Expr, slope: tirx.Expr) -> tirx.Expr:
    return tirx.Select(x < tirx.const(0.0, str(x.ty.dtype)), tirx.Mul(x, slope), x)


def _take(bb: relax.BlockBuilder, call: Call) -> relax.Expr:
    """Legalise `take`; an index out of range takes the nearest element, as indices may come from users.

    A constant table of float16's numbers keeps their bits.
    """
    if quantisation.is_table(call):
        return quantisation.look_up(bb, call)
    axis = None if call.attrs.axis is None else int(call.attrs.axis)
    table = constant_of(call.args[0])
    if table is not None and is_halves(table):
        return bb.call_te(
            lambda bits, indices: widened(topi.take(bits, indices, axis, mode="clip")),
            relax.const(table.astype("float16").view("uint16")),
            call.args[1],
            primfunc_name_hint="take",
        )
    return bb.call_te(topi.take, call.args[0], call.args[1], axis, mode="clip", primfunc_name_hint="take")


def _cumsum(bb: relax.BlockBuilder, call: Call) -> relax.Expr:
    """Legalise `cumsum`, whose result has the type that the call declares."""
    axis = None if call.attrs.axis is None else int(call.attrs.axis)
    return bb.call_te(
        lambda x: topi.cumsum(x, axis, str(call.ty.dtype), bool(call.attrs.exclusive)),
        call.args[0],
        primfunc_name_hint="cumsum",
    )


def legalise(mod: tvm.IRModule, target: DeviceTarget) -> tvm.IRModule:
    """Make every operator a call of a tensor expression.

    Reshapes stay: the graph keeps them as other names for the same storage.
    """
    return relax.transform.LegalizeOps(legalise_map(target), skip_ops=list(RESHAPES))(mod)
