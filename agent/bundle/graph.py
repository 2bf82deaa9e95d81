"""mod.json: the graph of kernel calls, in the format of TVM's classic graph executor, field for field.

Promises that every index is within bounds, that a node reads only what earlier nodes wrote, and that the
tables have an entry for each output. Leaves memory, devices and functions to the executor, and liveness
(whether two values may share a storage) to the planner that wrote it.

Terms of the format: a *node* has one or more outputs; an *entry* is one output of one node, and its id is
`node_row_ptr[node] + index`; tensors (dtype, shape, storage) are listed by entry id.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from agent.bundle.graph_node import COPY, MAX_ARGUMENTS, NOP, Node, NodeEntry, entry_from_json
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import EndlessDataError, FormatError

__all__ = ["COPY", "CPU", "MAX_GRAPH_BYTES", "NOP", "Graph", "Node", "NodeEntry"]

# The graph of a BERT with 24 layers takes under 1 MiB; parsed JSON takes some ten times its text.
MAX_GRAPH_BYTES: Final = 8 << 20
MAX_NODES: Final = 65536

# DLPack's DLDeviceType of host memory.
CPU: Final = 1
# The tables that the reader knows, and the tag that stands before each.
_TABLES: Final = MappingProxyType(
    {
        "dltype": "list_str",
        "storage_id": "list_int",
        "shape": "list_shape",
        "device_index": "list_int",
        "storage_scope": "list_str",
    }
)


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph whose indices hold; see the module's terms.

    Attributes
    ----------
    nodes
        In an order in which they can run.
    arg_nodes
        Ids of all `null` nodes; this order numbers the inputs.
    heads
        The outputs.
    node_row_ptr
        Running count of entries, one more than nodes.
    dltype, storage_id, shape, device_index
        By entry id. `device_index` holds device *types*, 1 for the CPU.

    Raises
    ------
    FormatError
        If anything in it does not hold together.
    """

    nodes: tuple[Node, ...]
    arg_nodes: tuple[int, ...]
    heads: tuple[NodeEntry, ...]
    node_row_ptr: tuple[int, ...]
    dltype: tuple[str, ...]
    storage_id: tuple[int, ...]
    shape: tuple[tuple[int, ...], ...]
    device_index: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.nodes:
            raise FormatError("a graph has nodes, and this one none")
        if len(self.nodes) > MAX_NODES:
            raise EndlessDataError(f"a graph has at most {MAX_NODES} nodes, not {len(self.nodes)}")
        self._check_nodes()
        self._check_tables()
        self._check_storage()

    @classmethod
    def build(
        cls,
        nodes: Sequence[Node],
        heads: Sequence[NodeEntry],
        dltype: Sequence[str],
        storage_id: Sequence[int],
        shape: Sequence[Sequence[int]],
    ) -> Graph:
        """Make a graph on the CPU; what follows from the nodes is filled in."""
        row_ptr = [0]
        for node in nodes:
            row_ptr.append(row_ptr[-1] + node.num_outputs)
        return cls(
            tuple(nodes),
            tuple(i for i, node in enumerate(nodes) if node.is_null),
            tuple(heads),
            tuple(row_ptr),
            tuple(dltype),
            tuple(storage_id),
            tuple(tuple(s) for s in shape),
            (CPU,) * row_ptr[-1],
        )

    @property
    def num_entries(self) -> int:
        """How many outputs all nodes have together."""
        return self.node_row_ptr[-1]

    def entry_id(self, entry: NodeEntry) -> int:
        """Index into the tables of one output of one node."""
        return self.node_row_ptr[entry.node_id] + entry.index

    def spec(self, entry_id: int, name: str = "-") -> TensorSpec:
        """Datatype and shape of an entry, under a name of the caller's."""
        return TensorSpec.from_dtype(name, self.dltype[entry_id], self.shape[entry_id])

    def storage_bytes(self) -> Mapping[int, int]:
        """Bytes that each storage needs: those of its largest entry."""
        sizes: dict[int, int] = {}
        for entry_id, storage in enumerate(self.storage_id):
            sizes[storage] = max(sizes.get(storage, 0), self.spec(entry_id).nbytes)
        return sizes

    def to_json(self) -> bytes:
        """Return the file, always the same bytes for the same graph."""
        document = {
            "nodes": [node.to_json() for node in self.nodes],
            "arg_nodes": self.arg_nodes,
            "heads": [[e.node_id, e.index, e.version] for e in self.heads],
            "attrs": {
                "dltype": ["list_str", self.dltype],
                "device_index": ["list_int", self.device_index],
                "storage_id": ["list_int", self.storage_id],
                "shape": ["list_shape", self.shape],
            },
            "node_row_ptr": self.node_row_ptr,
        }
        return json.dumps(document, separators=(",", ":")).encode("ascii")

    @classmethod
    def from_json(cls, raw: bytes | str) -> Graph:
        """Read any graph in the classic format.

        Raises
        ------
        FormatError
            If it is not such a graph, whatever it is instead.
        EndlessDataError
            If it is larger than any graph here.
        """
        if len(raw) > MAX_GRAPH_BYTES:
            raise EndlessDataError(f"mod.json has at most {MAX_GRAPH_BYTES} bytes, this one {len(raw)}")
        try:
            text = raw if isinstance(raw, str) else bytes(raw).decode("utf-8")
            document = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"mod.json is not JSON: {' '.join(str(error).split()):.200}") from error
        try:
            return _graph(document)
        except RecursionError as error:
            # What could be parsed is still too deep to be printed in a message.
            raise FormatError("mod.json is nested deeper than any graph") from error

    def _check_nodes(self) -> None:
        if len(self.node_row_ptr) != len(self.nodes) + 1 or self.node_row_ptr[0] != 0:
            raise FormatError(
                f"node_row_ptr has {len(self.node_row_ptr)} entries for {len(self.nodes)} nodes, from 0"
            )
        inputs = set()
        for i, node in enumerate(self.nodes):
            if self.node_row_ptr[i + 1] - self.node_row_ptr[i] != node.num_outputs:
                raise FormatError(f"node_row_ptr does not count the {node.num_outputs} outputs of node {i}")
            if node.is_null and node.name in inputs:
                raise FormatError(f"two inputs have the name {node.name}")
            if node.is_null:
                inputs.add(node.name)
            for entry in node.inputs:
                self._check_entry(entry, i, f"node {i}")
        nulls = [i for i, node in enumerate(self.nodes) if node.is_null]
        if sorted(self.arg_nodes) != nulls:
            raise FormatError(f"arg_nodes is not the list of the graph's {len(nulls)} inputs and weights")
        if not 1 <= len(self.heads) <= MAX_ARGUMENTS:
            raise FormatError(f"a graph has 1 to {MAX_ARGUMENTS} heads, not {len(self.heads)}")
        for entry in self.heads:
            self._check_entry(entry, len(self.nodes), "heads")

    def _check_entry(self, entry: NodeEntry, before: int, where: str) -> None:
        if not 0 <= entry.node_id < before:
            raise FormatError(f"{where} refers to node {entry.node_id}, expected one before {before}")
        if not 0 <= entry.index < self.nodes[entry.node_id].num_outputs:
            raise FormatError(
                f"{where} refers to output {entry.index} of node {entry.node_id}, which has none"
            )

    def _check_tables(self) -> None:
        tables = (("dltype", self.dltype), ("storage_id", self.storage_id), ("shape", self.shape))
        for name, table in (*tables, ("device_index", self.device_index)):
            if len(table) != self.num_entries:
                raise FormatError(f"attrs.{name} has {len(table)} values for {self.num_entries} entries")
        for entry_id in range(self.num_entries):
            try:
                self.spec(entry_id)
            except ValueError as error:
                raise FormatError(f"entry {entry_id}: {error}") from error

    def _check_storage(self) -> None:
        devices: dict[int, int] = {}
        for storage, device in zip(self.storage_id, self.device_index, strict=True):
            # The planner numbers storages from 0, and never needs more of them than there are entries.
            if not 0 <= storage < self.num_entries:
                raise FormatError(f"storage_id has {storage}, expected 0 to {self.num_entries - 1}")
            if device < 0 or devices.setdefault(storage, device) != device:
                raise FormatError(f"storage {storage} is on two devices, {devices[storage]} and {device}")
        for i, node in enumerate(self.nodes):
            if node.func_name == NOP:
                source, target = self.entry_id(node.inputs[0]), self.node_row_ptr[i]
                if self.storage_id[source] != self.storage_id[target]:
                    raise FormatError(f"node {i} is {NOP}, and its output is not in its input's storage")
                if self.spec(source).nbytes != self.spec(target).nbytes:
                    raise FormatError(f"node {i} is {NOP}, and its output is not of its input's size")


def _graph(document: object) -> Graph:
    if not isinstance(document, dict):
        raise FormatError("mod.json is not an object")
    required = ("nodes", "arg_nodes", "heads", "attrs", "node_row_ptr")
    if missing := [key for key in required if key not in document]:
        raise FormatError(f"mod.json has no {missing[0]}")
    if unknown := document.keys() - {*required, "metadata"}:
        raise FormatError(f"mod.json has the unknown key {min(unknown)!r:.80}")
    # The classic reader stops at this key: what follows it would be seen by one reader and not by another.
    if "metadata" in document and list(document)[-1] != "metadata":
        raise FormatError("mod.json has metadata that is not its last key")
    nodes = _list(document["nodes"], "nodes")
    if len(nodes) > MAX_NODES:
        raise EndlessDataError(f"a graph has at most {MAX_NODES} nodes, not {len(nodes)}")
    attrs = document["attrs"]
    if not isinstance(attrs, dict):
        raise FormatError("mod.json's attrs is not an object")
    tables = {key: _table(key, value) for key, value in attrs.items()}
    if absent := [key for key in ("dltype", "storage_id", "shape") if key not in tables]:
        raise FormatError(f"mod.json's attrs has no {absent[0]}")
    if any(scope not in ("", "global") for scope in tables.get("storage_scope", ())):
        raise FormatError("mod.json has a storage_scope that is not global: it is for another kind of device")
    entries = len(tables["dltype"])
    return Graph(
        nodes=tuple(Node.from_json(node, f"node {i}") for i, node in enumerate(nodes)),
        arg_nodes=_integers(document["arg_nodes"], "arg_nodes"),
        heads=tuple(entry_from_json(entry, "heads") for entry in _list(document["heads"], "heads")),
        node_row_ptr=_integers(document["node_row_ptr"], "node_row_ptr"),
        dltype=tables["dltype"],
        storage_id=tables["storage_id"],
        shape=tables["shape"],
        device_index=tables.get("device_index", (CPU,) * entries),
    )


def _table(key: str, value: object) -> tuple[Any, ...]:
    where = f"attrs.{key:.80}"
    if key not in _TABLES:
        # Written by some codegens, read by nobody: [tag, list], or a bare number tagged size_t.
        if isinstance(value, list) and len(value) == 2 and value[0] in ("list_int", "size_t"):
            return ()
        raise FormatError(f"{where} is neither a table that is known nor one that may be skipped")
    if not isinstance(value, list) or len(value) != 2 or value[0] != _TABLES[key]:
        raise FormatError(f'{where} is not ["{_TABLES[key]}", [...]]')
    rows = _list(value[1], where)
    if _TABLES[key] == "list_int":
        return _integers(rows, where)
    if _TABLES[key] == "list_shape":
        return tuple(_integers(row, where) for row in rows)
    if any(not isinstance(row, str) for row in rows):
        raise FormatError(f"{where} has something else than strings")
    return tuple(rows)


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise FormatError(f"{where} is not an array")
    return value


def _integers(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(number) is not int for number in value):
        raise FormatError(f"{where} is not an array of integers")
    return tuple(value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a key stands there twice")
    return out


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no number")
