"""Joins of untrusted graphs: what is accepted lies in its bounds, aligned, and without overlap."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.bundle.graph import Graph
from agent.bundle.joins import ALIGNMENT, Place, joined, roots_of
from agent.bundle.node import NodeEntry
from agent.errors import EdgeError, FormatError
from agent.runtime import storage
from tests.agent.bundle.documents import drop, put
from tests.fake_module import GraphBuilder


def nested() -> Graph:
    """Return a graph whose second join contains its first: [[a, b], view of c]."""
    g = GraphBuilder()
    x = g.input("x", (16,))
    a, b = g.call("relu", [x], (16,)), g.call("double", [x], (32,))
    first = g.call("join", [a, b], (48,), joins=True)
    c = g.call("double", [first], (4, 8))
    second = g.call("join", [first, g.reshape(c, (32,))], (80,), joins=True)
    return g.graph(g.call("relu", [second], (80,)))


def test_parts_follow_each_other_through_nested_joins_and_reshapes() -> None:
    graph = nested()
    found = joined(graph, roots_of(graph))
    assert found.nodes == {3, 6}
    assert found.places == {1: Place(6, 0), 2: Place(6, 64), 3: Place(6, 0), 4: Place(6, 192)}


def test_a_join_of_a_constant_part_is_not_in_place() -> None:
    graph = nested()
    found = joined(graph, roots_of(graph), {4})
    assert found.nodes == {3}
    assert found.places == {1: Place(3, 0), 2: Place(3, 64)}


def test_joins_assume_the_alignment_of_kernels() -> None:
    assert ALIGNMENT == storage.ALIGNMENT


def test_a_written_join_is_read_back() -> None:
    assert Graph.from_json(nested().to_json()) == nested()


JOIN = ("nodes", 3, "attrs", "joins")
COPY_ATTRS = {"func_name": "__copy", "num_inputs": "1", "num_outputs": "1", "flatten_data": "0", "joins": "1"}
BAD: dict[str, tuple[Callable[[Any], object], str]] = {
    "value 0": (put(*JOIN, to="0"), "joins to be 1"),
    "value 2": (put(*JOIN, to="2"), "joins to be 1"),
    "value empty": (put(*JOIN, to=""), "joins to be 1"),
    "value an offset": (put(*JOIN, to="64"), "joins to be 1"),
    "value negative": (put(*JOIN, to="-1"), "joins to be 1"),
    "value a number": (put(*JOIN, to=1), "strings"),
    "of a copy": (put("nodes", 2, "attrs", to=COPY_ATTRS), "a kernel that joins"),
    "of a reshape": (put("nodes", 5, "attrs", "joins", to="1"), "a kernel that joins"),
    "of nothing": (lambda d: (put("nodes", 3, "inputs", to=[])(d),
                              put("nodes", 3, "attrs", "num_inputs", to="0")(d)), "a kernel that joins"),
    "of an input": (put("nodes", 3, "inputs", 0, to=[0, 0, 0]), "an input"),
    "of one part twice": (put("nodes", 3, "inputs", to=[[1, 0, 0], [1, 0, 0]]), "part of a join already"),
    "of a part of another": (put("nodes", 6, "inputs", 1, to=[2, 0, 0]), "part of a join already"),
    "of an output": (put("heads", to=[[7, 0, 0], [1, 0, 0]]), "an output of the graph"),
    "of a reshaped output": (put("heads", to=[[5, 0, 0]]), "an output of the graph"),
    "of a join that is an output": (put("heads", to=[[3, 0, 0]]), "an output of the graph"),
    "too large a part": (put("attrs", "shape", 1, 2, to=[48]), "expected 192 bytes in all, got 256"),
    "an enormous part": (put("attrs", "shape", 1, 1, to=[1 << 29]), "expected 192 bytes in all"),
    "too small a part": (put("attrs", "shape", 1, 2, to=[16]), "expected 192 bytes in all, got 128"),
    "a part of nothing": (put("attrs", "shape", 1, 2, to=[0]), "expected 192 bytes in all, got 64"),
    "too small an output": (put("attrs", "shape", 1, 3, to=[32]), "expected 128 bytes in all, got 192"),
    "an output of nothing": (put("attrs", "shape", 1, 3, to=[0]), "expected 0 bytes in all"),
    "a part that is not aligned": (put("attrs", "shape", 1, 1, to=[15]), "begin at byte 60"),
    "a part at an odd byte": (lambda d: (put("attrs", "dltype", 1, 1, to="int8")(d),
                                         put("attrs", "shape", 1, 1, to=[1])(d)), "another dtype"),
    "another dtype": (put("attrs", "dltype", 1, 2, to="int32"), "another dtype"),
    "a wider dtype": (put("attrs", "dltype", 1, 2, to="float64"), "another dtype"),
    "output of another dtype": (put("attrs", "dltype", 1, 3, to="int32"), "another dtype"),
    "reads itself": (put("nodes", 3, "inputs", 0, to=[3, 0, 0]), "before 3"),
    "reads a later node": (put("nodes", 3, "inputs", 0, to=[6, 0, 0]), "before 3"),
    "reads output 1 of a part": (put("nodes", 3, "inputs", 0, to=[1, 1, 0]), "output 1"),
    "a reshape of another size": (put("attrs", "shape", 1, 5, to=[31]), "size"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_an_impossible_join_is_refused(name: str) -> None:
    change, message = BAD[name]
    document = json.loads(nested().to_json())
    change(document)
    with pytest.raises(FormatError, match=message):
        Graph.from_json(json.dumps(document))


def test_without_the_attribute_the_same_graph_is_any_graph() -> None:
    document = json.loads(nested().to_json())
    drop("nodes", 3, "attrs", "joins")(document)
    put("heads", to=[[3, 0, 0]])(document)
    drop("nodes", 6, "attrs", "joins")(document)
    assert not any(node.joins for node in Graph.from_json(json.dumps(document)).nodes)


def assert_in_bounds(graph: Graph, constant: set[int]) -> None:
    """Assert that parts are within their owner, aligned, and overlap only what they are part of."""
    root = roots_of(graph)
    found = joined(graph, root, constant)
    ranges: dict[int, list[tuple[int, int, int]]] = {}
    for part, place in found.places.items():
        begin, end = place.offset, place.offset + graph.spec(part).nbytes
        assert place.owner not in found.places
        assert root[place.owner] == place.owner
        assert begin % ALIGNMENT == 0
        assert 0 <= begin <= end <= graph.spec(place.owner).nbytes
        assert end <= graph.storage_bytes()[graph.storage_id[place.owner]]
        assert part not in constant
        ranges.setdefault(place.owner, []).append((begin, end, part))
    joins = {
        graph.node_row_ptr[i]: {root[graph.entry_id(e)] for e in graph.nodes[i].inputs} for i in found.nodes
    }

    def inside(part: int, whole: int) -> bool:
        return any(part == each or inside(part, each) for each in joins.get(whole, ()))

    for each in ranges.values():
        for begin, end, part in each:
            for other_begin, other_end, other in each:
                if part < other and begin < other_end and other_begin < end:
                    assert inside(part, other)


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """Return a graph as JSON in which most joins are possible, and some tables are changed."""
    g = GraphBuilder()
    values = [g.input("x", (16,))]
    sizes = [16]
    free: list[int] = []  # values that can be parts
    for _ in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(["call", "join", "join", "reshape"]))
        at = draw(st.integers(0, len(values) - 1))
        if kind == "call":
            size = draw(st.sampled_from([16, 32, 48, 5, 0]))
            values.append(g.call("k", [values[at]], (size,)))
            free.append(len(sizes))
        elif kind == "join":
            some = (
                st.integers(0, len(values) - 1) if not free or draw(st.booleans()) else st.sampled_from(free)
            )
            parts = draw(st.lists(some, min_size=1, max_size=4, unique=True))
            size = sum(sizes[part] for part in parts) + draw(st.sampled_from([0, 0, 0, 0, 16, -16, 1]))
            if size < 0:
                continue
            joins = draw(st.integers(0, 3)) > 0
            values.append(g.call("join", [values[part] for part in parts], (size,), joins=joins))
            free = [each for each in free if each not in parts] + [len(sizes)]
        else:
            size = sizes[at]
            values.append(g.reshape(values[at], (size, 1)))
        sizes.append(size)
    heads = [values[draw(st.sampled_from(free or [0]))]]
    marks = [node.attrs for node in g.nodes]
    plain = [  # the builder would refuse what the reader must refuse
        node if node.is_null else type(node).call(node.name, node.func_name, node.inputs) for node in g.nodes
    ]
    document = json.loads(Graph.build(plain, heads, g.dltype, g.storage, g.shape).to_json())
    for node, attrs in zip(document["nodes"], marks, strict=True):
        if "joins" in attrs:
            node["attrs"]["joins"] = "1"
    for _ in range(draw(st.integers(0, 2))):
        table = document["attrs"][draw(st.sampled_from(["storage_id", "shape", "dltype"]))][1]
        other = draw(st.integers(0, len(table) - 1))
        table[draw(st.integers(0, len(table) - 1))] = table[other]
    return document


@settings(max_examples=300, deadline=None)
@given(document=documents(), constant=st.sets(st.integers(0, 12)))
def test_parts_of_every_accepted_graph_are_in_bounds(document: dict[str, Any], constant: set[int]) -> None:
    try:
        graph = Graph.from_json(json.dumps(document))
    except EdgeError:
        return
    assert_in_bounds(graph, constant)


def test_the_property_meets_joins_that_are_accepted() -> None:
    graph = nested()
    assert_in_bounds(graph, set())
    assert_in_bounds(graph, {2})


def test_a_chain_of_thousands_of_joins_is_read() -> None:
    g = GraphBuilder()
    whole = g.call("k", [g.input("x", (16,))], (16,))
    for i in range(2, 2000):
        part = g.call("k", [whole], (16,))
        whole = g.call("join", [whole, part], (16 * i,), joins=True)
    graph = Graph.from_json(g.graph(g.call("k", [whole], (16,))).to_json())
    found = joined(graph, roots_of(graph))
    owners = {place.owner for place in found.places.values()}
    assert owners == {graph.entry_id(NodeEntry(len(graph.nodes) - 2))}
