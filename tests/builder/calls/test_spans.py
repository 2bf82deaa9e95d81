"""Calls say which nodes of the ONNX model they come from, whatever is done to them."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.ir import Call

from builder.calls.spans import TracingBuilder, bindings_of, carry, names_of, span_of

X = relax.Var("x", relax.TensorType((2, 3), "float32"))


def calls(mod: tvm.IRModule) -> list[tuple[str, tuple[str, ...]]]:
    values = [binding.value for binding in bindings_of(mod)]
    return [(str(v.op.name), names_of(v)) for v in values if isinstance(v, Call)]


def test_a_span_names_its_nodes_once_and_in_order() -> None:
    call = relax.op.exp(X)
    assert names_of(call) == names_of(X) == ()
    for names in ((), ("a",), ("b", "a", "b")):
        marked = Call(call.op, call.args, call.attrs, call.ty_args, span_of(names))
        assert names_of(marked) == tuple(dict.fromkeys(names))


def test_the_builder_marks_nested_calls_and_keeps_a_value_that_is_used_twice_one() -> None:
    bb = TracingBuilder()
    with bb.function("main", [X]):
        with bb.dataflow():
            shared = relax.op.exp(X)
            bb.current = span_of(["first"])
            first = bb.normalize(relax.op.add(shared, relax.op.tanh(X)))
            bb.current = span_of(["second"])
            second = bb.emit(relax.op.multiply(first, shared))
            result = bb.emit_output(relax.Tuple([first, second]))
        bb.emit_func_output(result)
    assert calls(bb.get()) == [
        ("relax.exp", ("first",)),
        ("relax.tanh", ("first",)),
        ("relax.add", ("first",)),
        ("relax.multiply", ("second",)),
    ]


def test_calls_that_a_pass_replaced_get_their_spans_back() -> None:
    bb = TracingBuilder()
    with bb.function("main", [X]):
        with bb.dataflow():
            bb.current = span_of(["one"])
            value = bb.emit(relax.op.nn.softmax(X))
            bb.current = span_of(["two"])
            result = bb.emit_output(bb.emit(relax.op.exp(value)))
        bb.emit_func_output(result)
    before = bb.get()
    after = relax.transform.LegalizeOps()(before)
    assert [names for _, names in calls(after)] == [(), ()]
    assert [names for _, names in calls(carry(before, after))] == [("one",), ("two",)]
