"""Graph code generation: nodes, storages, parameters, and functions that are refused."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from agent.bundle.graph import Graph
from agent.bundle.node import NOP
from builder.codegen.graph_codegen import generate
from builder.errors import UnsupportedOperatorError
from tests.builder.codegen.lowered import F32, Lowered


def constant(*shape: int, value: float = 1.0) -> relax.Expr:
    return relax.const(np.full(shape, value, F32))


def test_a_chain_shares_two_storages_and_keeps_its_input() -> None:
    lowered = Lowered((4, 4))
    value: relax.Expr = lowered.inputs[0]
    for i in range(6):
        value = lowered.call(f"k{i}", [value], (4, 4))
    made = lowered.generate(value)
    assert [node.func_name for node in made.graph.nodes] == ["", *(f"k{i}" for i in range(6))]
    assert made.arena_bytes == 2 * 64
    assert made.graph.storage_id[0] not in made.graph.storage_id[1:]


def test_a_reshape_is_a_nop_on_its_inputs_storage() -> None:
    lowered = Lowered((4, 4))
    hidden = lowered.call("k", [lowered.inputs[0]], (4, 4))
    flat = lowered.reshape(hidden, (16,))
    made = lowered.generate(lowered.call("l", [flat], (16,)))
    nop = next(node for node in made.graph.nodes if node.func_name == NOP)
    source = made.graph.entry_id(nop.inputs[0])
    assert made.graph.storage_id[source + 1] == made.graph.storage_id[source]
    assert made.graph.shape[source + 1] == (16,)


def test_a_reshaped_value_lives_as_long_as_its_last_view() -> None:
    lowered = Lowered((16,))
    hidden = lowered.call("k", [lowered.inputs[0]], (16,))
    view = lowered.reshape(hidden, (4, 4))
    other = lowered.call("l", [lowered.inputs[0]], (16,))
    again = lowered.call("m", [other], (16,))
    made = lowered.generate(lowered.call("n", [view, again], (4, 4)))
    storage = made.graph.storage_id
    assert storage[1] not in storage[3:5]


def test_equal_constants_are_one_parameter() -> None:
    lowered = Lowered((4,))
    a = lowered.call("k", [lowered.inputs[0], constant(4)], (4,))
    made = lowered.generate(lowered.call("k", [a, constant(4), constant(4, value=2.0)], (4,)))
    assert [spec.name for spec, _ in made.params] == ["p0", "p1"]


def test_a_parameter_does_not_take_an_inputs_name() -> None:
    lowered = Lowered((4,))
    out = lowered.call("k", [lowered.inputs[0], constant(4)], (4,))
    body = relax.SeqExpr([relax.BindingBlock(lowered.bindings)], out)
    made = generate(relax.Function(lowered.inputs, body, out.ty), ["p0"], ["y"])
    assert made.inputs[0].name == "p0"
    assert made.params[0][0].name != "p0"


def test_a_value_that_depends_only_on_parameters_keeps_its_storage() -> None:
    lowered = Lowered((4,))
    packed = lowered.call("transform", [constant(4)], (4,))
    twice = lowered.call("transform", [packed], (4,))
    a = lowered.call("k", [lowered.inputs[0], twice], (4,))
    made = lowered.generate(lowered.call("k", [a, twice], (4,)))
    ids = made.graph.storage_id
    assert len(set(ids)) == len(
        ids
    )  # input, p0, two transforms, `a` while the last kernel reads it, and the result
    assert made.arena_bytes == 2 * 16


def test_a_kernel_with_two_outputs() -> None:
    lowered = Lowered((4,))
    pair = lowered.call("split", [lowered.inputs[0]], (2,), (2,))
    first, second = (lowered.bind(relax.TupleGetItem(pair, i)) for i in range(2))
    made = lowered.generate(relax.Tuple([second, first]), "b", "a")
    assert [(head.node_id, head.index) for head in made.graph.heads] == [(1, 1), (1, 0)]
    assert [spec.name for spec in made.outputs] == ["b", "a"]
    assert made.graph.node_row_ptr == (0, 1, 3)


def test_an_output_may_be_an_input_or_a_constant() -> None:
    lowered = Lowered((4,))
    made = lowered.generate(relax.Tuple([lowered.inputs[0], constant(3)]), "same", "fixed")
    assert [head.node_id for head in made.graph.heads] == [0, 1]


def test_the_written_graph_reads_back_the_same() -> None:
    lowered = Lowered((4, 4))
    made = lowered.generate(lowered.reshape(lowered.call("k", [lowered.inputs[0]], (4, 4)), (16,)))
    assert Graph.from_json(made.graph.to_json()) == made.graph


def test_an_operator_without_a_kernel_is_named() -> None:
    lowered = Lowered((4, 4))
    lowered.bind(relax.op.exp(lowered.inputs[0]), relax.TensorType((4, 4), F32))
    with pytest.raises(UnsupportedOperatorError, match="exp has no kernel"):
        lowered.generate(lowered.bindings[-1].var)


def test_a_dynamic_shape_is_refused() -> None:
    n = tvm.tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorType((n, 4), F32))
    body = relax.SeqExpr([], x)
    with pytest.raises(UnsupportedOperatorError, match="static shape"):
        generate(relax.Function([x], body, x.ty), ["x"], ["y"])
