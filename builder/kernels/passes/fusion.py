"""Fuses calls into kernels with TVM's passes, and keeps what each kernel was made of.

Within a kernel, a value is computed where it is read. A chain of element-wise calls that each read their
value twice, as a loop that is written out has, would compute its beginning 2^n times, so it is divided. So is
a chain of quantisations: each reads its number three times. Calls whose index or sum is long, as those of
pads that reflect and of cubic resizes, are not written into each other either (`written_out`).

TVM makes one function of all groups that are equal, and drops the spans of their calls. So the groups are
compared with the calls before: what a group computes is looked up by the kernel and its arguments.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import Call, GenericConst, TensorLoad
from tvm.relax.expr import _update_type

from builder.calls.spans import Names, bindings_of, names_of, span_of, with_spans
from builder.kernels.passes.written_out import Body, WrittenOut
from builder.kernels.spaces.quantisation import ELEMENTWISE

# How TVM numbers kinds of functions (`relax.OpPatternKind`): up to the first, they are computed where their
# results are read; the second is never fused.
_INJECTIVE: Final = 2
_OPAQUE: Final = 8
# Calls that a kernel may compute for one element of its result; networks have some tens.
MOST_COMPUTED: Final = 512
# What a value is: the call that computes it and its arguments, numbered as they appear.
_Key = tuple[object, ...]


def fuse_operators(mod: tvm.IRModule) -> tvm.IRModule:
    """Fuse the calls of `main`; each call of a fused kernel has the spans of all calls in it.

    Parameters
    ----------
    mod
        A module whose `main` calls functions that are annotated with the kind of their operator.
    """
    t = relax.transform
    mod = _divided(_with_kinds(mod))
    groups = t.FuseOps()(mod)
    spans = [span_of(names) for names in _Comparison(mod).names(groups)]
    kernels = t.FuseTIR()(groups)
    # Bindings may vanish, but calls stay in order.
    calls = zip(map(_function, bindings_of(groups)), spans, strict=True)
    found = []
    for binding in bindings_of(kernels):
        name = _function(binding)
        found.append(next((span for called, span in calls if called == name), None) if name else None)
    return with_spans(kernels, found)


def _with_kinds(mod: tvm.IRModule) -> tvm.IRModule:
    """Return `mod` with the kind of functions that are element-wise though TVM does not see it."""
    changed = {
        var: func.with_attr("op_pattern", 0)
        for var, func in mod.functions.items()
        if isinstance(func, tirx.PrimFunc) and func.attrs and ELEMENTWISE in func.attrs
    }
    return tvm.IRModule({**dict(mod.functions.items()), **changed}, attrs=mod.attrs) if changed else mod


def _divided(mod: tvm.IRModule) -> tvm.IRModule:
    """Return `mod` with calls that end a kernel where it would compute too many calls, or become too large.

    They call copies of their functions that TVM does not fuse.
    """
    computed: dict[relax.Expr, int] = {}
    sizes: dict[relax.Expr, WrittenOut] = {}
    bodies: dict[tvm.ir.GlobalVar, Body] = {}
    ends: set[relax.Var] = set()
    for binding in bindings_of(mod):
        func = mod.functions.get(_callee(binding.value))
        kind = None if func is None or func.attrs is None else func.attrs.get("op_pattern")
        fields = list(getattr(binding.value, "args", ()))
        operands = [each for field in fields for each in getattr(field, "fields", [field])]
        if func is not None:
            operands.remove(_callee(binding.value))
        reads = _reads(func) if func is not None else [1] * len(operands)
        count = 1 + sum(computed.get(each, 0) * times for each, times in zip(operands, reads, strict=False))
        if kind is None:  # a reshape, or an item of a tuple: another name
            computed[binding.var] = count
        elif int(kind) <= _INJECTIVE:
            callee = _callee(binding.value)
            assert callee is not None
            if callee not in bodies:
                bodies[callee] = Body(func)
            size = bodies[callee].written_out([sizes.get(each) for each in operands])
            if count > MOST_COMPUTED or (size is not None and not size.fits):
                ends.add(binding.var)
                continue
            computed[binding.var] = count
            if size is not None:
                sizes[binding.var] = size
    return _with_ends(mod, ends) if ends else mod


def _reads(func: tirx.PrimFunc) -> list[int]:
    """Return how often the expressions of a function read each of its parameters, at least 1."""
    loads: Counter[tirx.Buffer] = Counter()

    def count(load: TensorLoad) -> None:
        loads[load.source] += 1

    tvm_ffi.structural_walk(func.body, (TensorLoad, count))
    return [max(1, loads[param]) for param in func.params]


def _with_ends(mod: tvm.IRModule, ends: set[relax.Var]) -> tvm.IRModule:
    """Return `mod` with copies of the functions that the calls `ends` call."""
    functions = dict(mod.functions.items())
    main = next(var for var in functions if var.name_hint == "main")
    copies: dict[tvm.ir.GlobalVar, tvm.ir.GlobalVar] = {}
    bindings = []
    for binding in bindings_of(mod):
        if binding.var not in ends:
            bindings.append(binding)
            continue
        called = _callee(binding.value)
        assert called is not None
        if called not in copies:
            copies[called] = tvm.ir.GlobalVar(f"{called.name_hint}_end")
            _update_type(copies[called], called.ty)
            functions[copies[called]] = functions[called].with_attr("op_pattern", _OPAQUE)
        call = binding.value
        new = Call(call.op, [copies[called], *call.args[1:]], call.attrs, call.ty_args, call.span)
        _update_type(new, call.ty)
        bindings.append(relax.VarBinding(binding.var, new))
    old = functions[main]
    body = relax.SeqExpr([relax.DataflowBlock(bindings)], old.body.body)
    _update_type(body, old.body.ty)
    functions[main] = relax.Function(old.params, body, old.ret_ty, old.is_pure, old.attrs)
    return tvm.IRModule(functions, attrs=mod.attrs)


def _callee(value: relax.Expr) -> tvm.ir.GlobalVar | None:
    """Return the function that a `call_tir` calls, None if the value is anything else."""
    first = next(iter(value.args), None) if isinstance(value, Call) else None
    return first if isinstance(first, tvm.ir.GlobalVar) else None


def _function(binding: relax.Binding) -> str:
    """Return the function that a binding calls, "" if it calls none."""
    value = binding.value
    if not isinstance(value, Call):
        return ""
    callee = value.op if isinstance(value.op, tvm.ir.GlobalVar) else next(iter(value.args), None)
    return str(callee.name_hint) if isinstance(callee, tvm.ir.GlobalVar) else ""


class _Comparison:
    """Numbers the values of a module, and finds them again in another one.

    `mod`: the module before fusion.
    """

    def __init__(self, mod: tvm.IRModule) -> None:
        self._numbers: dict[_Key, int] = {}
        self._names: dict[_Key, Names] = {}
        self._values: dict[relax.Expr, int] = {}
        for binding in bindings_of(mod):
            key = self._key(binding.value, self._values)
            self._values[binding.var] = self._of(binding.value, self._values)
            self._names[key] = self._names.get(key, ()) + names_of(binding.value)

    def names(self, groups: tvm.IRModule) -> list[Names]:
        """Return for each binding of `groups`, the module with fused functions, its nodes."""
        values: dict[relax.Expr, int] = {}
        found: list[Names] = []
        for binding in bindings_of(groups):
            value = binding.value
            group = groups[value.op] if isinstance(value, Call) and value.op in groups.functions else None
            if isinstance(group, relax.Function):
                arguments = [self._of(argument, values) for argument in value.args]
                inner = dict(zip(group.params, arguments, strict=True))
                names: Names = ()
                for block in group.body.blocks:
                    for each in block.bindings:
                        key = self._key(each.value, inner)
                        inner[each.var] = self._of(each.value, inner)
                        names += self._names.get(key, ())
                values[binding.var] = self._of(group.body.body, inner)
                found.append(names)
            else:
                key = self._key(value, values)
                values[binding.var] = self._of(value, values)
                found.append(self._names.get(key, ()))
        return found

    def _of(self, expr: relax.Expr, values: dict[relax.Expr, int]) -> int:
        """Return the number of a value: variables have those of what they are bound to."""
        if isinstance(expr, relax.Var) and expr in values:
            return values[expr]
        key = self._key(expr, values)
        return self._numbers.setdefault(key, len(self._numbers))

    def _key(self, expr: relax.Expr, values: dict[relax.Expr, int]) -> _Key:
        if isinstance(expr, relax.Var):
            return ("parameter", expr.name)
        if isinstance(expr, relax.Tuple):
            return ("tuple", *(self._of(field, values) for field in expr.fields))
        if isinstance(expr, relax.TupleGetItem):
            return ("item", self._of(expr.tuple_value, values), int(expr.index))
        if isinstance(expr, Call):
            op = expr.op if isinstance(expr.op, tvm.ir.Op) else ""
            return ("call", str(getattr(op, "name", op)), *(self._of(a, values) for a in expr.args))
        if isinstance(expr, GenericConst):
            return ("constant", expr.value)
        if isinstance(expr, tvm.ir.GlobalVar):
            return ("function", expr.name_hint)
        return ("other", str(expr))
