"""Which nodes of the ONNX model an expression comes from, as spans of Relax calls.

Promises that every call of `main` says so after a pass of the front end or of ours. TVM's own passes keep the
span of a call that they copy, but not of one that they replace: `carry` restores those. A span is the name of
a node of the normalised model, or a sequence of them. Leaves their original names to
`builder.importer.source_nodes`.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax
from tvm.ir import Call, Op
from tvm.ir.base import SequentialSpan, SourceName, Span
from tvm.relax.expr import _update_type

Names = tuple[str, ...]


def span_of(names: Sequence[str]) -> Span | SequentialSpan | None:
    """Return a span of these nodes, None if there are none."""
    spans = [Span(SourceName(name), 1, 1, 1, 1) for name in dict.fromkeys(names)]
    if len(spans) > 1:
        return SequentialSpan(spans)
    return spans[0] if spans else None


def names_of(expr: relax.Expr) -> Names:
    """Return the names of the nodes that a call comes from; none if it has no span."""
    span = expr.span if isinstance(expr, Call) else None
    if span is None:
        return ()
    spans = span.spans if isinstance(span, SequentialSpan) else [span]
    return tuple(str(each.source_name.name) for each in spans)


def _with_span(call: Call, args: Sequence[relax.Expr], span: Span | SequentialSpan) -> Call:
    new = Call(call.op, args, call.attrs, call.ty_args, span)
    ty = getattr(call, "ty", None)
    if ty is not None:
        _update_type(new, ty)
    return new


class TracingBuilder(relax.BlockBuilder):  # type: ignore[misc]  # TVM has no types
    """A block builder that marks what it emits with the span `current`.

    It also emits nested calls, as the base class does, which would drop the span of the outer call.
    """

    def __init__(self, mod: tvm.IRModule | None = None) -> None:
        super().__init__(mod)
        self.current: Span | SequentialSpan | None = None
        self._emitted: dict[relax.Expr, relax.Var] = {}  # a value that is used twice must stay one

    def emit(self, expr: relax.Expr, name_hint: str = "") -> relax.Var:
        """Emit a binding, as the base class does."""
        return super().emit(self._marked(expr), name_hint)

    def normalize(self, expr: relax.Expr) -> relax.Expr:
        """Normalise an expression, as the base class does."""
        return super().normalize(self._marked(expr))

    def emit_output(self, output: relax.Expr, name_hint: str = "") -> relax.Var:
        """Emit an output of the dataflow block, as the base class does."""
        return super().emit_output(self._leaf(output), name_hint)

    def _marked(self, expr: relax.Expr) -> relax.Expr:
        """Return `expr` with a span if it is a call without one; its arguments become variables."""
        if not _is_relax_call(expr):
            return self._leaf(expr)
        args = [self._leaf(argument) for argument in expr.args]
        if expr.span is not None and all(map(_same, args, expr.args)):
            return expr
        span = expr.span or self.current
        return expr if span is None else _with_span(expr, args, span)

    def _leaf(self, expr: relax.Expr) -> relax.Expr:
        """Return `expr`, in which a variable stands for each call."""
        if _is_relax_call(expr):
            if expr not in self._emitted:
                self._emitted[expr] = super().emit(self._marked(expr))
            return self._emitted[expr]
        if isinstance(expr, relax.Tuple):
            fields = [self._leaf(field) for field in expr.fields]
            return expr if all(map(_same, fields, expr.fields)) else relax.Tuple(fields)
        if isinstance(expr, relax.TupleGetItem):
            value = self._leaf(expr.tuple_value)
            return expr if _same(value, expr.tuple_value) else relax.TupleGetItem(value, expr.index)
        return expr


def _is_relax_call(expr: relax.Expr) -> bool:
    """Whether `expr` is a call of tensors; TVM writes calls of scalars with the same class."""
    if not isinstance(expr, Call):
        return False
    return not isinstance(expr.op, Op) or str(expr.op.name).startswith("relax.")


def _same(one: relax.Expr, other: relax.Expr) -> bool:
    return bool(one.same_as(other))


def carry(before: tvm.IRModule, after: tvm.IRModule) -> tvm.IRModule:
    """Return `after`, the result of a pass over `before`, whose calls have spans again.

    A variable that the pass kept has the same nodes as before. What the pass wrote ahead of a variable serves
    that variable.
    """
    known = {
        binding.var.name: binding.value.span
        for binding in bindings_of(before)
        if isinstance(binding.value, Call) and binding.value.span is not None
    }
    spans: list[Span | SequentialSpan | None] = []
    following = None
    for binding in reversed(bindings_of(after)):
        span = binding.value.span if isinstance(binding.value, Call) else None
        following = span or known.get(binding.var.name) or following
        spans.append(following)
    return with_spans(after, spans[::-1])


def bindings_of(mod: tvm.IRModule) -> list[relax.Binding]:
    """Return the bindings of `main`, in order."""
    return [binding for block in mod["main"].body.blocks for binding in block.bindings]


def with_spans(mod: tvm.IRModule, spans: Sequence[Span | SequentialSpan | None]) -> tvm.IRModule:
    """Return `mod` with one of `spans` on each binding of `main` whose value is a call without a span."""
    main = mod["main"]
    blocks, following, changed = [], iter(spans), False
    for block in main.body.blocks:
        bindings = []
        for binding in block.bindings:
            span, value = next(following), binding.value
            if span is None or not isinstance(value, Call) or value.span is not None:
                bindings.append(binding)
                continue
            bindings.append(relax.VarBinding(binding.var, _with_span(value, value.args, span)))
            changed = True
        kind = relax.DataflowBlock if isinstance(block, relax.DataflowBlock) else relax.BindingBlock
        blocks.append(kind(bindings))
    if not changed:
        return mod
    body = relax.SeqExpr(blocks, main.body.body)
    _update_type(body, main.body.ty)
    functions = dict(mod.functions.items())
    functions[mod.get_global_var("main")] = relax.Function(
        main.params, body, main.ret_ty, main.is_pure, main.attrs
    )
    return tvm.IRModule(functions, attrs=mod.attrs)
