"""Joins the kernel of a depthwise convolution with that of the 1x1 convolution that reads its result.

TVM's fusion ends a kernel at each convolution. After it, where one kernel pays (`spaces.separable`), the two
become one, each with its own epilogue.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm import s_tir as st
from tvm.ir import Call
from tvm.relax.expr import _update_type

from builder.calls.spans import bindings_of, names_of, span_of, with_spans
from builder.kernels.decisions import SPACE_MARK
from builder.kernels.rewriter import op_name, shape_of
from builder.kernels.spaces import convolution, depthwise, separable
from builder.kernels.spaces.separable import Pair
from builder.target.device_target import DeviceTarget

_FLOAT: Final = "float32"


def join_separables(mod: tvm.IRModule, target: DeviceTarget) -> tvm.IRModule:
    """Join pairs of kernels of `mod`.

    Parameters
    ----------
    mod
        A module whose `main` calls fused, unscheduled functions.
    target
        The device: it decides where one kernel pays.
    """
    bindings = bindings_of(mod)
    uses: Counter[relax.Var] = Counter(var for b in bindings for var in _variables(b.value))
    uses.update(_variables(mod["main"].body.body))
    values = {binding.var: binding.value for binding in bindings}
    found: dict[relax.Var, relax.Var] = {}  # the 1x1 convolution's value -> that of the depthwise one
    for binding in bindings:
        first = _first(mod, binding.value)
        if first is None or uses[first] > 1 or first not in values:
            continue
        if _pays(mod, values[first], binding.value, target):
            found[binding.var] = first
    return _with_pairs(mod, found) if found else mod


def _variables(value: relax.Expr) -> list[relax.Var]:
    """Return the variables that a value reads, as often as it reads them."""
    if isinstance(value, relax.Var):
        return [value]
    if isinstance(value, relax.TupleGetItem):
        return _variables(value.tuple_value)
    parts = value.fields if isinstance(value, relax.Tuple) else getattr(value, "args", ())
    return [var for part in parts for var in _variables(part)]


def _kernel(mod: tvm.IRModule, value: relax.Expr) -> tirx.PrimFunc | None:
    """Return the function that a `call_tir` of one result calls; None for any other value."""
    if not isinstance(value, Call) or op_name(value) != "relax.call_tir":
        return None
    return mod[value.args[0]] if isinstance(value.ty, relax.TensorType) else None


def _blocks(func: tirx.PrimFunc) -> list[st.SBlock]:
    """Return the blocks of `func`."""
    found: list[st.SBlock] = []
    tvm_ffi.structural_walk(func.body, (st.SBlock, found.append))
    return found


def _anchors(func: tirx.PrimFunc) -> list[st.SBlock]:
    """Return the blocks of `func` that are marked as anchors."""
    return [block for block in _blocks(func) if SPACE_MARK in block.annotations]


def _is_only(blocks: list[st.SBlock], kind: str) -> bool:
    return len(blocks) == 1 and str(blocks[0].annotations[SPACE_MARK]) == kind


def _first(mod: tvm.IRModule, value: relax.Expr) -> relax.Var | None:
    """Return the value whose 1x1 convolution a kernel computes; None for any other kernel."""
    func = _kernel(mod, value)
    if func is None:
        return None
    anchors = _anchors(func)
    if not _is_only(anchors, convolution.KIND):
        return None
    anchor = anchors[0]
    data, weights = (region.source for region in anchor.reads)
    marks = anchor.annotations
    plain = tuple(int(d) for d in weights.shape[2:4]) == (1, 1) and "edge.groups" not in marks
    same = [int(d) for d in data.shape[2:4]] == [int(d) for d in anchor.writes[0].source.shape[2:4]]
    at = next((i for i, param in enumerate(func.params) if param.same_as(data)), None)
    if not plain or not same or str(data.dtype) != _FLOAT or at is None:
        return None
    if sum(any(region.source.same_as(data) for region in block.reads) for block in _blocks(func)) > 1:
        return None  # its epilogue reads the value, too
    operand = value.args[1].fields[at]
    return operand if isinstance(operand, relax.Var) else None


def _pays(mod: tvm.IRModule, first: relax.Expr, second: relax.Expr, target: DeviceTarget) -> bool:
    """Whether `first` is a depthwise convolution, and one kernel for both is faster than two."""
    func = _kernel(mod, first)
    anchors = _anchors(func) if func is not None else []
    if not _is_only(anchors, depthwise.KIND) or str(first.ty.dtype) != _FLOAT:
        return False
    written = [int(d) for d in anchors[0].writes[0].source.shape]
    if written != list(shape_of(first)) or written[-1] > target.simd.lanes:
        return False
    _, blocks, _, _, lanes = (int(d) for d in _anchors(mod[second.args[0]])[0].writes[0].source.shape)
    return Pair.of(anchors[0], blocks * lanes).pays(target)


def _with_pairs(mod: tvm.IRModule, found: dict[relax.Var, relax.Var]) -> tvm.IRModule:
    """Return `mod` in which each of the pairs `found` is one call, with the spans of both."""
    functions = dict(mod.functions.items())
    name = mod.get_global_var("main")
    main = functions[name]
    values = {binding.var: binding.value for binding in bindings_of(mod)}
    firsts = set(found.values())
    groups: dict[tuple[tvm.ir.GlobalVar, ...], tvm.ir.GlobalVar] = {}
    kept, spans = [], []
    for binding in bindings_of(mod):
        if binding.var in firsts:
            continue
        names = names_of(binding.value)
        if binding.var in found:
            first = values[found[binding.var]]
            names = names_of(first) + names
            group = _Group(first, binding.value, found[binding.var])
            key = (first.args[0], binding.value.args[0])
            if key not in groups:
                groups[key] = tvm.ir.GlobalVar(f"{key[0].name_hint}_{key[1].name_hint}")
                functions[groups[key]] = group.function()
                _update_type(groups[key], functions[groups[key]].ty)
            call = Call(groups[key], list(group.arguments))
            _update_type(call, binding.value.ty)
            kept.append(relax.VarBinding(binding.var, call))
        else:
            kept.append(binding)
        spans.append(span_of(names))
    body = relax.SeqExpr([relax.DataflowBlock(kept)], main.body.body)
    _update_type(body, main.body.ty)
    functions[name] = relax.Function(main.params, body, main.ret_ty, main.is_pure, main.attrs)
    joined = relax.transform.FuseTIR()(tvm.IRModule(functions, attrs=mod.attrs))
    return _with_marks(with_spans(joined, spans))


class _Group:
    """A function of Relax that calls both kernels, and what it is called with.

    `between`: the value of `first`, which `second` reads.
    """

    def __init__(self, first: Call, second: Call, between: relax.Var) -> None:
        self._calls = (first, second)
        self._between = between
        self.arguments = [a for call in self._calls for a in call.args[1].fields if not a.same_as(between)]

    def function(self) -> relax.Function:
        """Return the function that TVM fuses into one kernel."""
        bb = relax.BlockBuilder()
        params = [relax.Var(f"operand{i}", argument.ty) for i, argument in enumerate(self.arguments)]
        unused = iter(params)
        with bb.function("group", params, attrs={"Primitive": True}, private=True):
            with bb.dataflow():
                value: relax.Expr | None = None
                for call in self._calls:
                    fields = call.args[1].fields
                    operands = [value if a.same_as(self._between) else next(unused) for a in fields]
                    args = [call.args[0], relax.Tuple(operands)]
                    value = bb.emit(Call(call.op, args, call.attrs, call.ty_args))
                result = bb.emit_output(value)
            bb.emit_func_output(result)
        return bb.get()["group"]


def _with_marks(mod: tvm.IRModule) -> tvm.IRModule:
    """Return `mod` in which each kernel of two convolutions has one anchor, the 1x1 convolution."""
    functions = dict(mod.functions.items())
    for var, func in mod.functions.items():
        anchors = _anchors(func) if isinstance(func, tirx.PrimFunc) else []
        kinds = {str(block.annotations[SPACE_MARK]): block for block in anchors}
        if kinds.keys() != {depthwise.KIND, convolution.KIND}:
            continue
        sch = st.Schedule(tvm.IRModule({"main": func}))
        first, second = (sch.get_sblock(kinds[k].name_hint) for k in (depthwise.KIND, convolution.KIND))
        separable.mark(sch, first, second)
        functions[var] = sch.mod["main"]
    return tvm.IRModule(functions, attrs=mod.attrs)
