"""Joins in generated graphs: which calls are marked, and that no value is overwritten before its last use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from unittest import mock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax

from agent.bundle.params import dump_params
from agent.runtime import graph_executor
from agent.runtime.storage import Array, Block, allocate, view
from builder.codegen.graph_codegen import GeneratedGraph
from tests.builder.codegen.lowered import Lowered
from tests.fake_module import FakeModule

JOINS = ("join",)


def marks(made: GeneratedGraph) -> list[bool]:
    """Return for each call of `join` whether it is marked."""
    return [node.joins for node in made.graph.nodes if node.func_name == "join"]


def dense_block(lowered: Lowered, layers: int) -> relax.Expr:
    value: relax.Expr = lowered.call("k0", [lowered.inputs[0]], (16,))
    for i in range(1, layers):
        part = lowered.call(f"k{i}", [value], (16,))
        value = lowered.call("join", [value, part], (16 * (i + 1),))
    return value


def test_a_dense_block_is_one_buffer() -> None:
    lowered = Lowered((16,))
    whole = dense_block(lowered, 8)
    result = lowered.call("k8", [whole], (16,))
    made = lowered.generate(result, joins=JOINS)
    assert marks(made) == [True] * 7
    assert made.arena_bytes == 4 * (8 * 16 + 16)
    assert lowered.generate(result).arena_bytes > made.arena_bytes


def test_calls_of_other_kernels_are_not_marked() -> None:
    lowered = Lowered((16,))
    result = lowered.call("k", [dense_block(lowered, 3)], (16,))
    assert marks(lowered.generate(result)) == [False, False]


def test_what_cannot_be_in_place_is_not_marked() -> None:
    lowered = Lowered((16,), (16,))
    x, y = lowered.inputs
    a, b, short = (
        lowered.call("a", [x], (16,)),
        lowered.call("b", [x], (16,)),
        lowered.call("c", [x], (5,)),
    )
    constant = relax.const(np.ones(16, "float32"))
    computed_at_load = lowered.call("d", [constant], (16,))
    head = lowered.call("e", [x], (16,))
    wholes = [
        lowered.call("join", parts, (size,))
        for parts, size in (
            ([a, y], 32),  # an input
            ([a, constant], 32),
            ([a, computed_at_load], 32),
            ([a, a], 32),
            ([short, a], 21),  # which would begin at byte 20
            ([a, head], 32),
            ([lowered.reshape(y, (4, 4)), b], 32),
            ([a, short], 21),  # the only one that can
        )
    ]
    result = lowered.call("k", wholes, (16,))
    made = lowered.generate(relax.Tuple([result, head]), "y", "z", joins=JOINS)
    assert marks(made) == [False] * 7 + [True]


def test_a_value_is_part_of_the_join_that_copies_most() -> None:
    lowered = Lowered((16,))
    a, b, c = (lowered.call(name, [lowered.inputs[0]], (16,)) for name in "abc")
    small = lowered.call("join", [a, b], (32,))
    large = lowered.call("join", [b, c, lowered.call("d", [small], (16,))], (48,))
    made = lowered.generate(lowered.call("k", [large, small], (16,)), joins=JOINS)
    assert marks(made) == [False, True]


def test_the_storage_of_a_join_is_reserved_from_its_first_part_on() -> None:
    lowered = Lowered((16,))
    early = lowered.call("a", [lowered.inputs[0]], (16,))
    value: relax.Expr = early
    for i in range(6):  # values as large as the join, between its parts
        value = lowered.call(f"k{i}", [value], (32,))
    late = lowered.call("b", [value], (16,))
    made = lowered.generate(
        lowered.call("c", [lowered.call("join", [early, late], (32,))], (16,)), joins=JOINS
    )
    graph = made.graph
    (join,) = [i for i, node in enumerate(graph.nodes) if node.joins]
    storages = graph.storage_id[graph.node_row_ptr[2] : graph.node_row_ptr[8]]
    assert graph.storage_id[graph.node_row_ptr[join]] not in storages


def test_the_storage_of_a_join_is_reserved_until_its_last_part_is_read() -> None:
    lowered = Lowered((16,))
    early, late = (lowered.call(name, [lowered.inputs[0]], (16,)) for name in "ab")
    value: relax.Expr = lowered.call("join", [early, late], (32,))
    for i in range(6):  # values as large as the join, while only a part of it is needed
        value = lowered.call(f"k{i}", [value], (32,))
    graph = lowered.generate(lowered.call("c", [value, early], (16,)), joins=JOINS).graph
    (join,) = [i for i, node in enumerate(graph.nodes) if node.joins]
    storages = graph.storage_id[graph.node_row_ptr[join + 1] : graph.node_row_ptr[join + 7]]
    assert graph.storage_id[graph.node_row_ptr[join]] not in storages


@dataclass(frozen=True)
class Op:
    """A call: which values it reads, and how many elements it writes; a join writes as many as it reads."""

    kind: str
    reads: tuple[int, ...]
    size: int = 0


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[Op], list[int]]:
    """Return calls on two inputs and a weight, values 0 to 2, and which values are outputs."""
    ops: list[Op] = []
    for number in range(3, draw(st.integers(4, 18))):
        kind = draw(st.sampled_from(["call", "call", "join", "join", "reshape"]))
        # Recent values, so that chains and nested joins are common.
        value = st.integers(max(0, number - 6), number - 1)
        if kind == "join":
            ops.append(Op(kind, tuple(draw(st.lists(value, min_size=1, max_size=3)))))
        elif kind == "call":
            reads = tuple(draw(st.lists(value, min_size=1, max_size=2)))
            ops.append(Op(kind, reads, draw(st.sampled_from([16, 16, 16, 32, 48, 7]))))
        else:
            ops.append(Op(kind, (draw(value),)))
    last = len(ops) + 2
    heads = draw(st.lists(st.integers(3, last), max_size=1))
    return ops, list(dict.fromkeys([last, *heads]))


def kernel(*arrays: Array) -> None:
    """Write numbers that depend on every element of every input."""
    *inputs, out = arrays
    total = sum(
        (i + 1) * float(np.dot(x.reshape(-1), np.arange(1, x.size + 1))) for i, x in enumerate(inputs)
    )
    out.reshape(-1)[...] = (total + 7 * np.arange(out.size)) % 997


def join(*arrays: Array) -> None:
    *parts, out = arrays
    out.reshape(-1)[...] = np.concatenate([part.reshape(-1) for part in parts])


KERNELS = {"call": kernel, "join": join}


def expected(ops: Sequence[Op], heads: Sequence[int], values: Sequence[Array]) -> list[Array]:
    known = list(values)
    for op in ops:
        inputs = [known[i] for i in op.reads]
        out = np.empty(op.size or sum(x.size for x in inputs), np.float32)
        if op.kind == "reshape":
            out = inputs[0]
        else:
            KERNELS[op.kind](*inputs, out)
        known.append(out)
    return [known[i] for i in heads]


def generated(ops: Sequence[Op], heads: Sequence[int], weight: Array) -> GeneratedGraph:
    lowered = Lowered((16,), (16,))
    known: list[relax.Expr] = [*lowered.inputs, relax.const(weight)]
    sizes = [16, 16, 16]
    for op in ops:
        inputs = [known[i] for i in op.reads]
        sizes.append(op.size or sum(sizes[i] for i in op.reads))
        if op.kind == "reshape":
            known.append(lowered.reshape(inputs[0], (sizes[-1],)))
        else:
            known.append(lowered.call(op.kind, inputs, (sizes[-1],)))
    names = [f"y{i}" for i in range(len(heads))]
    results = [known[i] for i in heads]
    return lowered.generate(results[0] if len(results) == 1 else relax.Tuple(results), *names, joins=JOINS)


def poisoned(nbytes: int) -> Block:
    block = allocate(nbytes)
    block[...] = 0xFF  # NaN
    return block


def in_place(made: GeneratedGraph, inputs: Sequence[Sequence[Array]]) -> list[list[Array]]:
    """Return the outputs of our executor for each pair of inputs, one after another."""
    weights = dump_params((spec, data.data) for spec, data in made.params)
    with mock.patch("agent.runtime.memory.allocate", poisoned):
        module = graph_executor.create(made.graph.to_json(), FakeModule(KERNELS))
        module.load_params(weights)
        results = []
        for x, y in inputs:
            module.run(x0=x, x1=y)
            results.append([module.get_output(i) for i in range(len(made.outputs))])
    return results


def by_copies(made: GeneratedGraph, inputs: Sequence[Array]) -> list[Array]:
    """Return the outputs of an executor that knows only storages, and makes every call."""
    graph = made.graph
    storages = {each: poisoned(size) for each, size in graph.storage_bytes().items()}
    arrays = [
        view(storages[each], graph.dltype[entry], graph.shape[entry])
        for entry, each in enumerate(graph.storage_id)
    ]
    given = dict(zip(["x0", "x1"], inputs, strict=True)) | {spec.name: data for spec, data in made.params}
    for i in graph.arg_nodes:
        arrays[graph.node_row_ptr[i]][...] = given[graph.nodes[i].name]
    for i, node in enumerate(graph.nodes):
        if node.func_name in KERNELS:
            KERNELS[node.func_name](
                *(arrays[graph.entry_id(e)] for e in node.inputs), arrays[graph.node_row_ptr[i]]
            )
    return [arrays[graph.entry_id(head)] for head in graph.heads]


@settings(max_examples=300, deadline=None)
@given(program=programs())
def test_no_value_is_overwritten_before_its_last_use(program: tuple[list[Op], list[int]]) -> None:
    ops, heads = program
    numbers = np.random.default_rng(len(ops)).integers(0, 99, (5, 16)).astype("float32")
    pairs = [(numbers[0], numbers[1]), (numbers[2], numbers[3])]
    made = generated(ops, heads, numbers[4])
    wanted = [expected(ops, heads, [*pair, numbers[4]]) for pair in pairs]
    for got, want in zip(in_place(made, pairs), wanted, strict=True):
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)
    for a, b in zip(by_copies(made, pairs[1]), wanted[1], strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_property_meets_joins_in_joins() -> None:
    ops = [
        Op("call", (0,), 16),
        Op("call", (1,), 16),
        Op("join", (3, 4)),
        Op("call", (5,), 7),
        Op("join", (5, 6)),
    ]
    ops += [Op("call", (7, 6), 16)]
    made = generated(ops, [8], np.ones(16, "float32"))
    assert marks(made) == [True, True]
