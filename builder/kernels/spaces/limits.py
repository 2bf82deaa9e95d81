"""Limits of numbers, which carry NaN as ONNX Runtime's do: `relu`, `clip`, `maximum`, `minimum` and `sign`.

A maximum is `a > b ? a : b`, which is b if one of them is NaN. So a number comes first: `max(0, x)` is NaN if
x is. On x86, that is the same instruction; on ARM, `builder.codegen.carried_nan` makes it one. Of two
tensors, either may be NaN: x86 needs a comparison more (`unless_nan`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

import numpy as np
from tvm import relax, te, tirx, topi
from tvm.ir import Call

from builder.kernels.real_numbers import hidden
from builder.kernels.rewriter import constant_of, legalise_as_tvm, shape_of
from builder.target.device_target import DeviceTarget

Legalisation = Callable[[relax.BlockBuilder, Call], relax.Expr]
Extremum = Callable[[tirx.Expr, tirx.Expr], tirx.Expr]

# Architecture -> the types of which a maximum is one instruction, which is NaN if either number is.
CARRYING: Final[Mapping[str, AbstractSet[str]]] = {
    "aarch64": frozenset({"float32", "float64"}),
    "armv7l": frozenset({"float32"}),
}


def legalisations(target: DeviceTarget) -> Mapping[str, Legalisation]:
    """Return the tensor expressions for a device by the operator that they replace."""
    carrying = CARRYING.get(target.arch, frozenset())
    return {
        "relax.nn.relu": _relu,
        "relax.clip": _clip,
        "relax.sign": _sign,
        "relax.maximum": _extremum(tirx.Max, topi.maximum, carrying),
        "relax.minimum": _extremum(tirx.Min, topi.minimum, carrying),
    }


def _is_real(call: Call) -> bool:
    return np.dtype(str(call.ty.dtype)).kind == "f"


def _relu(bb: relax.BlockBuilder, call: Call) -> relax.Expr:
    zero = tirx.const(0, str(call.ty.dtype))

    def compute(x: te.Tensor) -> te.Tensor:
        return te.compute(x.shape, lambda *i: tirx.Max(zero, x(*i)), name="relu")

    return bb.call_te(compute, call.args[0], primfunc_name_hint="relu")


def _clip(bb: relax.BlockBuilder, call: Call) -> relax.Expr:
    if not _is_real(call):
        return legalise_as_tvm(bb, call)
    low, high = (tirx.const(float(bound.value), str(call.ty.dtype)) for bound in call.args[1:])

    def compute(x: te.Tensor) -> te.Tensor:
        return te.compute(x.shape, lambda *i: tirx.Max(low, tirx.Min(high, x(*i))), name="clip")

    return bb.call_te(compute, call.args[0], primfunc_name_hint="clip")


def _sign(bb: relax.BlockBuilder, call: Call) -> relax.Expr:
    """Legalise `sign`: what is neither positive nor negative stays NaN, or becomes 0 without a sign."""
    if not _is_real(call):
        return legalise_as_tvm(bb, call)
    zero, one = (tirx.const(number, str(call.ty.dtype)) for number in (0, 1))

    def sign(x: tirx.Expr) -> tirx.Expr:
        return tirx.Select(x > zero, one, tirx.Select(x < zero, -one, tirx.Add(x, hidden(zero))))

    return bb.call_te(
        lambda x: te.compute(x.shape, lambda *i: sign(x(*i)), name="sign"),
        call.args[0],
        primfunc_name_hint="sign",
    )


def _extremum(of: Extremum, plain: Callable[..., te.Tensor], carrying: AbstractSet[str]) -> Legalisation:
    """Return the legalisation of a maximum or minimum.

    `plain`: TVM's operator, for integers.
    `carrying`: the types for which the device's instruction is NaN if either operand is.
    """

    def legalise(bb: relax.BlockBuilder, call: Call) -> relax.Expr:
        if not _is_real(call):
            return legalise_as_tvm(bb, call)
        x, y = call.args
        if constant_of(y) is not None:
            x, y = y, x
        number = constant_of(x)
        # A constant comes first, so that NaN of the tensor is carried; NaN of the constant would be dropped.
        is_number = number is not None and not np.isnan(number).any()
        may_drop = not is_number and str(call.ty.dtype) not in carrying
        name = plain.__name__
        if number is not None and is_number and number.ndim == 0:
            bound = tirx.const(number.item(), str(call.ty.dtype))

            def limit(t: te.Tensor) -> te.Tensor:
                return te.compute(t.shape, lambda *i: of(bound, t(*i)), name=name)

            return bb.call_te(limit, y, primfunc_name_hint=name)

        def compute(a: te.Tensor, b: te.Tensor) -> te.Tensor:
            def element(*i: tirx.Var) -> tirx.Expr:
                left, right = element_of(a, i), element_of(b, i)
                chosen = of(left, right)
                return unless_nan(left, chosen) if may_drop else chosen

            return te.compute(shape_of(call), element, name=name)

        return bb.call_te(compute, x, y, primfunc_name_hint=name)

    return legalise


def unless_nan(first: tirx.Expr, extremum: tirx.Expr) -> tirx.Expr:
    """Return `extremum`, which drops NaN of its first number, or `first` if that is NaN."""
    return tirx.Select(tirx.EQ(first, hidden(first)), extremum, first)  # TVM has no vectors of `isnan`


def element_of(tensor: te.Tensor, place: Sequence[tirx.Var]) -> tirx.Expr:
    """Return an element of a tensor that is broadcast."""
    own = place[len(place) - len(tensor.shape) :]
    return tensor(*(0 if int(extent) == 1 else at for extent, at in zip(tensor.shape, own, strict=True)))
