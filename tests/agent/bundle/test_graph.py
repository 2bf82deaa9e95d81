from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from agent.bundle.graph import Graph
from agent.bundle.node import Node, NodeEntry
from agent.errors import EndlessDataError, FormatError
from tests.agent.bundle.documents import drop, put

# As TVM 0.18's codegen writes it, with keys of other codegens (hash, layout) in attrs, and metadata last.
CLASSIC = """
{"nodes": [
  {"op": "null", "name": "data", "inputs": []},
  {"op": "null", "name": "p0", "inputs": []},
  {"op": "tvm_op", "name": "split", "attrs": {"num_outputs": "2", "num_inputs": "2", "flatten_data": "0",
    "func_name": "tvmgen_default_fused_split", "hash": "e2b7f0a1", "out_layout": ""},
    "inputs": [[0, 0, 0], [1, 0, 0]]},
  {"op": "tvm_op", "name": "reshape_nop", "attrs": {"num_outputs": "1", "num_inputs": "1",
    "flatten_data": "0", "func_name": "__nop", "hash": "00"}, "inputs": [[2, 1, 0]]}],
 "arg_nodes": [0, 1],
 "heads": [[2, 0, 0], [3, 0, 0]],
 "attrs": {
  "dltype": ["list_str", ["float32", "int8", "float32", "int64", "int64"]],
  "device_index": ["list_int", [1, 1, 1, 1, 1]],
  "storage_id": ["list_int", [0, 1, 2, 3, 3]],
  "shape": ["list_shape", [[1, 4], [3], [], [2, 3], [6]]]},
 "node_row_ptr": [0, 1, 2, 4, 5],
 "metadata": {"signature": "ignored"}}
"""


def test_classic_graph_is_read_field_for_field() -> None:
    graph = Graph.from_json(CLASSIC)
    assert [node.is_null for node in graph.nodes] == [True, True, False, False]
    split = graph.nodes[2]
    assert (split.func_name, split.num_outputs, split.flatten_data) == (
        "tvmgen_default_fused_split",
        2,
        False,
    )
    assert split.attrs == {"hash": "e2b7f0a1", "out_layout": ""}
    assert graph.heads == (NodeEntry(2, 0), NodeEntry(3, 0))
    assert graph.entry_id(NodeEntry(2, 1)) == 3
    assert graph.num_entries == 5
    assert str(graph.spec(3, "ids")) == "ids INT64[2,3]"
    # A storage is as large as its largest entry; a scalar has one element.
    assert graph.storage_bytes() == {0: 16, 1: 3, 2: 4, 3: 48}


def test_written_graph_is_read_back_and_is_always_the_same_bytes(kit: Any) -> None:
    graph = Graph.from_json(CLASSIC)
    assert Graph.from_json(graph.to_json()) == graph
    assert graph.to_json() == Graph.from_json(graph.to_json()).to_json()
    document = json.loads(graph.to_json())
    assert document["nodes"][2]["attrs"]["num_inputs"] == "2"
    assert document["attrs"]["storage_id"] == ["list_int", [0, 1, 2, 3, 3]]


def test_older_spellings_are_read() -> None:
    document = json.loads(CLASSIC)
    document["nodes"][2]["attr"] = document["nodes"][2].pop("attrs")
    document["nodes"][2]["control_deps"] = [0]
    document["nodes"][2]["inputs"] = [[0, 0], [1, 0]]
    document["attrs"]["layers"] = ["list_int", [1, 2]]
    document["attrs"]["step"] = ["size_t", 3]
    document["attrs"]["storage_scope"] = ["list_str", ["", "global", "", "", ""]]
    del document["attrs"]["device_index"]
    document["nodes"][0]["attrs"] = {"T": "type: DT_FLOAT"}
    assert Graph.from_json(json.dumps(document)) == Graph.from_json(CLASSIC)


BAD: dict[str, tuple[Callable[[Any], None], str]] = {
    "unknown key": (put("extra", to=1), "unknown key"),
    "metadata first": (lambda d: d.update({"node_row_ptr": d.pop("node_row_ptr")}), "last key"),
    "no heads key": (drop("heads"), "no heads"),
    "no nodes": (put("nodes", to=[]), "nodes"),
    "heads empty": (put("heads", to=[]), "heads"),
    "node not an object": (put("nodes", 0, to=1), "object"),
    "node of another op": (put("nodes", 2, "op", to="tir_op"), "null or tvm_op"),
    "node with another key": (put("nodes", 2, "shell", to="rm"), "unknown key"),
    "node without name": (drop("nodes", 2, "name"), "no name"),
    "node without num_inputs": (drop("nodes", 2, "attrs", "num_inputs"), "no num_inputs"),
    "num_inputs wrong": (put("nodes", 2, "attrs", "num_inputs", to="3"), "num_inputs"),
    "num_inputs an integer": (put("nodes", 2, "attrs", "num_inputs", to=2), "strings"),
    "num_outputs wrong": (put("nodes", 2, "attrs", "num_outputs", to="3"), "node_row_ptr"),
    "num_outputs zero": (put("nodes", 2, "attrs", "num_outputs", to="0"), "outputs"),
    "num_outputs enormous": (put("nodes", 2, "attrs", "num_outputs", to="999999"), "outputs"),
    "num_outputs signed": (put("nodes", 2, "attrs", "num_outputs", to="+2"), "number"),
    "flatten_data neither": (put("nodes", 2, "attrs", "flatten_data", to="2"), "flatten_data"),
    "func_name not a symbol": (put("nodes", 2, "attrs", "func_name", to="a b"), "symbol"),
    "func_name empty": (put("nodes", 2, "attrs", "func_name", to=""), "symbol"),
    "input with inputs": (put("nodes", 1, "inputs", to=[[0, 0, 0]]), "fields of a call"),
    "two inputs of one name": (put("nodes", 1, "name", to="data"), "two inputs"),
    "reads itself": (put("nodes", 2, "inputs", 0, to=[2, 0, 0]), "before 2"),
    "reads a later node": (put("nodes", 2, "inputs", 0, to=[3, 0, 0]), "before 2"),
    "reads node -1": (put("nodes", 2, "inputs", 0, to=[-1, 0, 0]), "before 2"),
    "reads an output that does not exist": (put("nodes", 3, "inputs", 0, to=[2, 2, 0]), "output 2"),
    "reads output -1": (put("nodes", 3, "inputs", 0, to=[2, -1, 0]), "output -1"),
    "entry of one number": (put("nodes", 3, "inputs", 0, to=[2]), "node, index, version"),
    "entry of booleans": (put("nodes", 3, "inputs", 0, to=[True, False, False]), "node, index, version"),
    "head out of bounds": (put("heads", 0, to=[4, 0, 0]), "before 4"),
    "arg_nodes lack one": (put("arg_nodes", to=[0]), "arg_nodes"),
    "arg_nodes have a call": (put("arg_nodes", to=[0, 1, 2]), "arg_nodes"),
    "arg_nodes have one twice": (put("arg_nodes", to=[0, 0]), "arg_nodes"),
    "arg_nodes of fractions": (put("arg_nodes", to=[0.0, 1]), "integers"),
    "row_ptr short": (put("node_row_ptr", to=[0, 1, 2, 4]), "node_row_ptr"),
    "row_ptr not from 0": (put("node_row_ptr", to=[1, 2, 3, 5, 6]), "node_row_ptr"),
    "row_ptr backwards": (put("node_row_ptr", to=[0, 1, 0, 4, 5]), "node_row_ptr"),
    "no shape table": (drop("attrs", "shape"), "no shape"),
    "shape table short": (lambda d: d["attrs"]["shape"][1].pop(), "shape"),
    "dltype table long": (lambda d: d["attrs"]["dltype"][1].append("int8"), "dltype"),
    "storage table short": (lambda d: d["attrs"]["storage_id"][1].pop(), "storage_id"),
    "table of another tag": (put("attrs", "shape", 0, to="list_int"), "list_shape"),
    "unknown table": (put("attrs", "x", to=["list_shape", []]), "neither"),
    "dtype unknown": (put("attrs", "dltype", 1, 0, to="float31"), "dtype"),
    "dtype not a string": (put("attrs", "dltype", 1, 0, to=7), "strings"),
    "shape negative": (put("attrs", "shape", 1, 0, to=[-1]), "dimension"),
    "shape over 4 GiB": (put("attrs", "shape", 1, 0, to=[1 << 31]), "bytes"),
    "shape overflows": (put("attrs", "shape", 1, 0, to=[1 << 32] * 16), "bytes"),
    "shape of 17 dimensions": (put("attrs", "shape", 1, 0, to=[1] * 17), "dimensions"),
    "storage negative": (put("attrs", "storage_id", 1, 0, to=-1), "storage_id"),
    "storage enormous": (put("attrs", "storage_id", 1, 0, to=1 << 40), "storage_id"),
    "storage on two devices": (put("attrs", "device_index", 1, 3, to=2), "two devices"),
    "device negative": (put("attrs", "device_index", 1, 0, to=-1), "device_index"),
    "nop in another storage": (put("attrs", "storage_id", 1, 4, to=4), "storage"),
    "nop of another size": (put("attrs", "shape", 1, 4, to=[5]), "size"),
    "scope of another device": (
        put("attrs", "storage_scope", to=["list_str", ["global.texture"]]),
        "storage_scope",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_inconsistent_graph_is_refused(name: str) -> None:
    change, message = BAD[name]
    document = json.loads(CLASSIC)
    change(document)
    with pytest.raises(FormatError, match=message):
        Graph.from_json(json.dumps(document))


@pytest.mark.parametrize(
    "path", [("nodes",), ("nodes", 0), ("nodes", 2, "inputs"), ("heads",), ("heads", 0), ("attrs", "shape")]
)
def test_message_is_one_line_even_if_the_value_is_not(path: tuple[str | int, ...]) -> None:
    document = json.loads(CLASSIC)
    put(*path, to="two\nlines")(document)
    with pytest.raises(FormatError, match=r"^.*expected .*, got 'two\\nlines'$"):
        Graph.from_json(json.dumps(document))


def test_message_is_one_line_even_if_a_key_is_not() -> None:
    for path in (("two\nlines",), ("nodes", 0, "two\nlines"), ("attrs", "two\nlines")):
        document = json.loads(CLASSIC)
        put(*path, to="x")(document)
        with pytest.raises(FormatError, match=r"^.*'two\\nlines'.*$"):
            Graph.from_json(json.dumps(document))


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"\xff", b"nul", b"[" * 100_000, CLASSIC.replace("[0, 1]", "[NaN]", 1).encode()]
)
def test_anything_but_a_graph_is_refused(raw: bytes) -> None:
    with pytest.raises(FormatError):
        Graph.from_json(raw)


def test_duplicate_key_is_refused() -> None:
    with pytest.raises(FormatError, match="duplicate key"):
        Graph.from_json(CLASSIC.replace('"arg_nodes"', '"heads": [], "arg_nodes"'))


def test_graph_over_the_limits_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(EndlessDataError):
        Graph.from_json(b"[" * (9 << 20))
    with pytest.raises(EndlessDataError, match="65536"):
        Graph.from_json(json.dumps({**json.loads(CLASSIC), "nodes": [0] * 65537, "metadata": 0}))


def test_builder_cannot_make_a_graph_that_the_agent_refuses() -> None:
    nodes = [Node.null("x"), Node.call("y", "f", [NodeEntry(1)])]
    with pytest.raises(FormatError, match="before 1"):
        Graph.build(nodes, [NodeEntry(1)], ["float32"] * 2, [0, 1], [(1,), (1,)])
    with pytest.raises(FormatError, match="num_inputs"):
        Node.call("y", "f", [], num_inputs="7")
