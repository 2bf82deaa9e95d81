"""Walks a model's `main` binding by binding, and builds the function that replaces it.

TVM's own mutators visit expressions, but a layout pass decides about values: in which forms a value exists,
and which form a consumer wants. So this walk keeps a table from old variables to new expressions, and the
pass decides how to replace each call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeVar

import numpy as np
import tvm
from tvm import relax, te, tirx
from tvm.ir import Call, GenericConst, Op

from builder.calls.spans import TracingBuilder

# With fewer, a node to widen them costs more bytes than it saves.
_FEWEST_HALVES: Final = 1024
# Operators that change the shape without moving data (row-major, contiguous): the graph keeps each of them as
# another name for its input's storage.
RESHAPES: Final = ("relax.reshape", "relax.flatten", "relax.squeeze", "relax.expand_dims")


class Values:
    """The new expression of each old variable.

    A subclass may keep values in other forms; `plain` then converts a value when it is first asked for.
    """

    def __init__(self, bb: relax.BlockBuilder) -> None:
        self.bb = bb
        self._plain: dict[relax.Var, relax.Expr] = {}

    def define(self, var: relax.Var, expr: relax.Expr) -> None:
        """Make `expr` the value of the old variable `var`."""
        self._plain[var] = expr

    def plain(self, expr: relax.Expr) -> relax.Expr:
        """Return `expr` over new variables, in the model's own layout."""
        if isinstance(expr, relax.Var):
            return self._plain[expr]
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([self.plain(f) for f in expr.fields])
        return expr

    def call(self, call: Call) -> relax.Expr:
        """Return `call` over new variables."""
        args = [a if isinstance(a, tvm.ir.GlobalVar) else self.plain(a) for a in call.args]
        return Call(call.op, args, call.attrs, call.ty_args, call.span)


V = TypeVar("V", bound=Values)


def rewrite_main(
    mod: tvm.IRModule, emit: Callable[[V, relax.Var, Call], bool], values: Callable[[relax.BlockBuilder], V]
) -> tvm.IRModule:
    """Rebuild `main`; `emit` decides how to replace each call.

    What is emitted for a call has the call's span.

    `mod`: a module whose `main` is in A-normal form.
    `emit`: takes the table, the old variable and the old call. It either emits a replacement, defines the
        variable and returns True, or returns False, and the call is copied.
    `values`: makes the table: `Values`, or a subclass if values may have several forms.
    """
    main = mod["main"]
    functions = {g: f for g, f in mod.functions.items() if g.name_hint != "main"}
    bb = TracingBuilder(tvm.IRModule(functions))
    params = list(main.params)
    attrs = {k: v for k, v in (main.attrs or {}).items() if k != "global_symbol"}
    with bb.function("main", params, attrs=attrs or None):
        with bb.dataflow():
            table = values(bb)
            for param in params:
                table.define(param, param)
            for block in main.body.blocks:
                for binding in block.bindings:
                    _rewrite(table, binding, emit)
            result = bb.emit_output(table.plain(main.body.body))
        bb.emit_func_output(result)
    return bb.get()


def run(mod: tvm.IRModule, *passes: tvm.transform.Pass) -> tvm.IRModule:
    """Return what passes make of a module, one after another."""
    return tvm.transform.Sequential(list(passes))(mod)


def in_anf(mod: tvm.IRModule) -> tvm.IRModule:
    """Return a module whose `main` is in A-normal form, without variables that only rename others."""
    t = relax.transform
    return run(mod, t.Normalize(), t.ConvertToDataflow(min_size=1), t.CanonicalizeBindings())


def _rewrite(table: V, binding: relax.Binding, emit: Callable[[V, relax.Var, Call], bool]) -> None:
    value = binding.value
    if isinstance(value, Call):
        table.bb.current = value.span
        if not emit(table, binding.var, value):
            table.define(binding.var, table.bb.emit(table.call(value)))
    elif isinstance(value, relax.TupleGetItem):
        source = table.plain(value.tuple_value)
        table.define(binding.var, table.bb.emit(relax.TupleGetItem(source, value.index)))
    else:
        table.define(binding.var, table.plain(value))


def op_name(call: Call) -> str:
    """Return the name of an operator, such as `relax.nn.conv2d` or `tirx.log`; "" for any other call."""
    return str(call.op.name) if isinstance(call.op, Op) else ""


def shape_of(expr: relax.Expr) -> tuple[int, ...]:
    """Return the static shape of a tensor expression."""
    return tuple(int(d) for d in expr.ty.shape)


def constant_of(expr: relax.Expr) -> np.ndarray | None:
    """Return the value of a constant tensor, None if `expr` is anything else."""
    if isinstance(expr, GenericConst) and isinstance(expr.ty, relax.TensorType):
        array: np.ndarray = expr.value.numpy()
        return array
    return None


def integers_of(expr: relax.Expr) -> list[int]:
    """Return the integers of a tuple; an empty list if some are not known."""
    fields = list(expr.fields) if isinstance(expr, relax.Tuple) else []
    return [int(field) for field in fields] if all(isinstance(f, tirx.IntImm) for f in fields) else []


def emit_weights(bb: relax.BlockBuilder, weights: np.ndarray) -> relax.Expr:
    """Return float32 weights as a constant.

    Weights that are small integers, as those of a quantised layer, are kept as int8 in the bundle and
    converted when it is loaded. Those that are all numbers of float16 are kept as its bits.
    """
    if weights.dtype != np.float32 or not weights.size:
        return relax.const(weights)
    if is_small_integers(weights):
        return bb.emit(relax.op.astype(relax.const(weights.astype(np.int8)), "float32"))
    if not is_halves(weights):
        return relax.const(weights)
    bits = relax.const(weights.astype(np.float16).view(np.uint16))
    return bb.emit(bb.call_te(widened, bits, primfunc_name_hint="widened", primfunc_attrs={"op_pattern": 8}))


def is_small_integers(weights: np.ndarray) -> bool:
    """Whether all elements are integers that int8 holds."""
    with np.errstate(invalid="ignore"):  # others become any integer
        return np.array_equal(weights[:1].astype(np.int8), weights[:1]) and np.array_equal(
            weights.astype(np.int8), weights
        )


def is_halves(weights: np.ndarray) -> bool:
    """Whether weights are worth keeping as float16: many, and all finite numbers of that type."""
    if weights.dtype != np.float32 or weights.size < _FEWEST_HALVES:
        return False
    for part in (weights[:1], weights):
        with np.errstate(over="ignore"):
            halves = part.astype(np.float16)
        if not (np.isfinite(halves).all() and np.array_equal(halves.astype(np.float32), part)):
            return False
    return True


def widened(bits: te.Tensor) -> te.Tensor:
    """Return numbers of float16 as float32, from their bits: not every processor has an instruction for it.

    Numbers below 2^-14 have no implicit 1 before the point; the others have another bias of the exponent.
    """

    def element(*i: tirx.Var) -> tirx.Expr:
        half = bits(*i).astype("int32")
        size = half & 0x7FFF
        small = size.astype("float32") * tirx.const(2.0**-24, "float32")
        other = tirx.reinterpret("float32", (size << 13) + (112 << 23))
        value = tirx.Select(size < 0x400, small, other)
        return tirx.Select(half >= 0x8000, -value, value)

    return te.compute(bits.shape, element, name="widened")


def users_of(main: relax.Function) -> Mapping[relax.Var, int]:
    """Return how often each variable of `main` is read; returning a variable counts as a read."""
    counts: dict[relax.Var, int] = {}
    values = [binding.value for block in main.body.blocks for binding in block.bindings]
    for value in (*values, main.body.body):
        for var in _variables(value):
            counts[var] = counts.get(var, 0) + 1
    return counts


def _variables(expr: relax.Expr) -> list[relax.Var]:
    """Return the variables that an expression reads, as often as it reads them.

    TVM's visitor would also visit the type of each of them: all parts of a Split for each part.
    """
    match expr:
        case relax.Var():
            return [expr]
        case relax.Tuple():
            return [var for field in expr.fields for var in _variables(field)]
        case relax.TupleGetItem():
            return _variables(expr.tuple_value)
        case Call():
            return [var for arg in expr.args for var in _variables(arg)]
    return []


def definition(table: Values, expr: relax.Expr, *names: str) -> Call | None:
    """Return the call that a new variable is bound to, None if its operator is not one of `names`."""
    if not isinstance(expr, relax.Var):
        return None
    value = table.bb.lookup_binding(expr)
    return value if isinstance(value, Call) and op_name(value) in names else None


def legalise_as_tvm(bb: relax.BlockBuilder, call: Call) -> relax.Expr:
    """Return `call` as TVM legalises it: a call of TVM's own tensor expression for the operator."""
    legalise = call.op.get_attr("FLegalize")
    result: relax.Expr = legalise(bb, call)
    return result
