"""Computes the products of a model in float16, and keeps its activations so.

Convolutions and matrix products take float16 operands and make float32 sums (`half_sums`); some first layers
multiply them in float32 (`half_winograd.is_faster_in_floats`). What follows them in the same kernel is
computed from these sums: the bias in float32, then, as far as results stay small and exact enough, in
float16. Convolutions of few products make float16 sums if a single call reads what their bias gives, and in
float16. Functions such as the exponential, and softmax, norms and means, are computed in float32. Everything
after the last product is, too: the boxes of a detector have more digits than float16.

A module is marked with the nodes that must stay in float32 (`mark`), because numbers there may be too large.
What is computed in float16 is finite for any finite input: numbers are limited where they need to be
(`half_limits`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from collections.abc import Set as AbstractSet
from typing import Final

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call
from tvm.tirx import FloatImm

from builder.calls.spans import bindings_of, names_of
from builder.kernels.passes import half_limits
from builder.kernels.passes.half_limits import ANY, LARGEST, MOVES, Interval
from builder.kernels.rewriter import Values, constant_of, op_name, rewrite_main, shape_of, users_of
from builder.kernels.spaces.geometry import Conv2d
from builder.kernels.spaces.half_sums import LONGEST, MOST

MARK: Final = "edge.floats"

_PRODUCTS: Final = ("relax.nn.conv2d", "relax.matmul")
# A constant operand of these is applied to the sums, before they are rounded.
_SCALES: Final = ("relax.add", "relax.multiply")
_NARROW: Final = {
    f"relax.{n}"
    for n in (
        "add", "subtract", "multiply", "maximum", "minimum", "nn.relu", "nn.relu6", "nn.leakyrelu", "clip",
        "abs", "negative",
    )
}  # fmt: skip
_WIDE: Final = {
    f"relax.{n}"
    for n in ("nn.silu", "nn.gelu", "nn.gelu_tanh", "nn.softplus", "sigmoid", "tanh", "erf", "exp")
}
# Their own limits can be narrowed instead of adding another one.
_LIMITING: Final = ("relax.nn.relu", "relax.clip")


def mark(mod: tvm.IRModule, floats: Collection[str]) -> tvm.IRModule:
    """Return `mod`, whose products are to be computed in float16, except those of the nodes `floats`."""
    functions = dict(mod.functions.items())
    var = mod.get_global_var("main")
    functions[var] = mod["main"].with_attr(MARK, sorted(floats))
    return tvm.IRModule(functions, attrs=mod.attrs)


def floats_of(mod: tvm.IRModule) -> frozenset[str] | None:
    """Return the nodes that stay in float32; None if the module is not marked."""
    attrs = mod["main"].attrs
    if not attrs or MARK not in attrs:
        return None
    return frozenset(str(name) for name in attrs[MARK])


def use_halves(mod: tvm.IRModule) -> tvm.IRModule:
    """Compute the products of a marked module in float16; another module is returned as it is.

    Parameters
    ----------
    mod
        A canonical module whose patterns are recognised.
    """
    floats = floats_of(mod)
    if floats is None:
        return mod
    halving = _Halving(mod, floats)
    mod = rewrite_main(mod, halving.emit, lambda bb: _Forms(bb, halving))
    return relax.transform.DeadCodeElimination(["main"])(mod)


class _Forms(Values):
    """A table of values that may exist as float32, as float16, or as both."""

    def __init__(self, bb: relax.BlockBuilder, halving: _Halving) -> None:
        super().__init__(bb)
        self._halving = halving
        self._intervals: dict[relax.Var, Interval] = {}
        self._half_intervals: dict[relax.Var, Interval] = {}
        self.halves: dict[relax.Var, relax.Expr] = {}

    def plain(self, expr: relax.Expr) -> relax.Expr:
        if isinstance(expr, relax.Var) and expr not in self._plain and expr in self.halves:
            self.define(expr, self.bb.emit(relax.op.astype(self.halves[expr], "float32")))
        return super().plain(expr)

    def has_sums(self, expr: relax.Expr) -> bool:
        """Whether a value has not been rounded to float16 yet."""
        return isinstance(expr, relax.Var) and expr in self._plain and expr not in self.halves

    def half(self, expr: relax.Expr) -> relax.Expr:
        """Return `expr` as float16."""
        numbers = constant_of(expr)
        if numbers is not None:
            return relax.const(numbers.astype(np.float16))
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([self.half(field) for field in expr.fields])
        if not isinstance(expr, relax.Var):
            return expr
        if expr not in self.halves:
            self.define_half(expr, relax.op.astype(self.plain(expr), "float16"))
        return self.halves[expr]

    def define_half(self, var: relax.Var, new: Call) -> None:
        """Make `new` the float16 form of the old variable `var`, limited if it may be too large."""
        interval = self._intervals.get(var, ANY)
        most = self._halving.need(var)
        if half_limits.needs_limit(interval, most) and not self._halving.waits(var, self.half_interval):
            low, high = -most, most
            if op_name(new) == "relax.clip":
                low, high = (min(max(float(a.value), -most), most) for a in new.args[1:])
            if op_name(new) == "relax.nn.relu":
                low = 0.0
            source = new.args[0] if op_name(new) in _LIMITING else self.bb.emit(new)
            new = relax.op.clip(source, low, high)
            interval = interval.within(most)
        self._half_intervals[var] = interval
        self.halves[var] = self.bb.emit(new)

    def note(self, var: relax.Var, interval: Interval) -> None:
        """Remember in which interval a value is before it is rounded and limited."""
        self._intervals[var] = interval

    def interval(self, expr: relax.Expr) -> Interval:
        """Return the interval of a value as operators in float32 read it."""
        if isinstance(expr, relax.Var) and expr not in self._plain and expr in self._half_intervals:
            return self._half_intervals[expr]
        return self._interval(expr, self._intervals)

    def half_interval(self, expr: relax.Expr) -> Interval:
        """Return the interval of a value in float16; anything if it is not in float16 yet."""
        return self._interval(expr, self._half_intervals)

    @staticmethod
    def _interval(expr: relax.Expr, known: Mapping[relax.Var, Interval]) -> Interval:
        numbers = constant_of(expr)
        if numbers is not None and numbers.size:
            return Interval.of((numbers.min(), numbers.max()))
        return known.get(expr, ANY) if isinstance(expr, relax.Var) else ANY


class _Halving:
    """Decides for each call in which form its operands and its result are."""

    def __init__(self, mod: tvm.IRModule, floats: AbstractSet[str]) -> None:
        self._floats = floats
        self._users = users_of(mod["main"])
        # Values that are computed from products, and are read by others: they are kept in float16.
        self._inner: set[relax.Var] = set()
        self._feeds: set[relax.Var] = set()
        self._needs: dict[relax.Var, float] = {}
        # The first call that reads a value, and the variable of its result.
        self._reader: dict[relax.Var, tuple[relax.Var, Call]] = {}
        for binding in reversed(bindings_of(mod)):
            value = binding.value
            if (isinstance(value, Call) and self._is_product(value)) or binding.var in self._feeds:
                relax.analysis.post_order_visit(
                    value, lambda e: self._feeds.add(e) if isinstance(e, relax.Var) else None
                )
            if isinstance(value, Call):
                self._read(binding.var, value)

    def _read(self, var: relax.Var, call: Call) -> None:
        """Note what a call, whose readers are known, needs of its operands."""
        product = self._is_product(call)
        need = half_limits.most_for(half_limits.growth_of(call)) if product else self.need(var)
        for arg in _operands(call):
            if isinstance(arg, relax.Var):
                self._reader[arg] = var, call
                if product or half_limits.passes_need(call, only=self._users.get(arg, 0) == 1):
                    self._needs[arg] = min(self.need(arg), need)

    def need(self, var: relax.Var) -> float:
        """Return the largest magnitude in float16 that all products which read a value can take."""
        return self._needs.get(var, LARGEST)

    def waits(self, var: relax.Var, half_interval: Callable[[relax.Expr], Interval]) -> bool:
        """Whether a value may be infinite, because the only call that reads it makes a number of it."""
        if self._users.get(var, 0) != 1 or var not in self._reader:
            return False
        result, call = self._reader[var]
        return self._may_be_half(result, call) and half_limits.passes_infinity(call, half_interval, var)

    def _is_product(self, call: Call) -> bool:
        """Whether a call is a product that is computed in float16."""
        if op_name(call) not in _PRODUCTS or not self._floats.isdisjoint(names_of(call)):
            return False
        weight = constant_of(call.args[1])
        if weight is None or weight.dtype != np.float32 or not np.abs(weight).max(initial=0) <= LARGEST:
            return False
        if str(call.args[0].ty.dtype) != "float32":
            return False
        if op_name(call) == "relax.matmul":
            return weight.ndim == 2 and len(shape_of(call.args[0])) >= 2
        op = Conv2d.of(call)
        return op is not None and not (op.is_depthwise and np.prod(op.kernel) > LONGEST)

    def emit(self, table: _Forms, var: relax.Var, call: Call) -> bool:
        """Replace `call` if it is computed in float16, or from values that are."""
        name = op_name(call)
        if self._is_product(call):
            self._product(table, var, call)
            return True
        if not isinstance(call.ty, relax.TensorType) or str(call.ty.dtype) != "float32":
            return False
        table.note(var, half_limits.interval_of(call, table.interval))
        if var not in self._feeds or not self._floats.isdisjoint(names_of(call)):
            return False
        tensors = [a for a in _operands(call) if isinstance(a.ty, relax.TensorType)]
        if not any(isinstance(a, relax.Var) and a in self._inner for a in tensors):
            return False
        if any(str(a.ty.dtype) != "float32" for a in tensors):
            return False
        scales = name in _SCALES and any(
            table.has_sums(a) and constant_of(b) is not None for a, b in (tensors[:2], tensors[1::-1])
        )
        if name in _WIDE or scales:
            self._wide(table, var, table.bb.emit(table.call(call)))
            return True
        if not self._may_be_half(var, call):
            return False
        args = [table.half(a) for a in call.args]
        table.note(var, half_limits.interval_of(call, table.half_interval))
        table.define_half(var, Call(call.op, args, call.attrs, span=call.span))
        self._inner.add(var)
        return True

    def _may_be_half(self, var: relax.Var, call: Call) -> bool:
        """Whether a call whose operands are in float16 is computed so."""
        return (
            op_name(call) in _NARROW | MOVES
            and var in self._feeds
            and self._floats.isdisjoint(names_of(call))
            and all(self._fits(a) for a in _operands(call))
        )

    def _is_read_as_half(self, var: relax.Var) -> bool:
        """Whether a product, its bias and its scale are read once each, and in the end in float16."""
        while self._users.get(var, 0) == 1 and var in self._reader:
            result, call = self._reader[var]
            if op_name(call) not in _SCALES or all(constant_of(arg) is None for arg in call.args):
                return self._is_product(call) or self._may_be_half(result, call)
            var = result
        return False

    @staticmethod
    def _fits(expr: relax.Expr) -> bool:
        """Whether float16 holds a constant, such as a bound of a clip."""
        if isinstance(expr, FloatImm):
            return abs(float(expr.value)) <= LARGEST
        numbers = constant_of(expr)
        return numbers is None or bool(np.abs(numbers).max(initial=0) <= LARGEST)

    def _wide(self, table: _Forms, var: relax.Var, new: relax.Expr) -> None:
        """Define a float32 result, which is rounded at once if it is read more than once."""
        self._inner.add(var)
        if self._users.get(var, 0) > 1 and var in self._feeds:
            table.define_half(var, relax.op.astype(new, "float16"))
        else:
            table.define(var, new)

    def _product(self, table: _Forms, var: relax.Var, call: Call) -> None:
        weight = constant_of(call.args[1])
        assert weight is not None
        x, w = table.half(call.args[0]), relax.const(weight.astype(np.float16))
        table.note(var, half_limits.interval_of(call, table.half_interval))
        if op_name(call) == "relax.matmul":
            self._wide(table, var, table.bb.emit(relax.op.matmul(x, w, out_dtype="float32")))
            return
        attrs, op = call.attrs, Conv2d.of(call)
        options = {
            "strides": [int(v) for v in attrs.strides],
            "padding": [int(v) for v in attrs.padding],
            "dilation": [int(v) for v in attrs.dilation],
            "groups": int(attrs.groups),
        }
        few = weight[0].size <= MOST and self._is_read_as_half(var)
        if op is not None and (op.is_depthwise or few):  # their sum is rounded as each of them is
            new = relax.op.nn.conv2d(x, w, out_dtype="float16", **options)
            if var in self._feeds:
                table.define_half(var, new)
            else:
                table.define(var, table.bb.emit(relax.op.astype(table.bb.emit(new), "float32")))
            self._inner.add(var)
            return
        self._wide(table, var, table.bb.emit(relax.op.nn.conv2d(x, w, out_dtype="float32", **options)))


def _operands(call: Call) -> list[relax.Expr]:
    """Return the operands of a call, and the members of those that are tuples."""
    return [f for a in call.args for f in (a.fields if isinstance(a, relax.Tuple) else [a])]
