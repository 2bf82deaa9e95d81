"""mod.json: the graph of kernel calls, in the format of TVM's classic graph executor, field for field.

Promises that every index is within bounds, that a node reads only what earlier nodes wrote, and that the
tables have an entry for each output. Leaves memory, devices and functions to the executor, and leaves
liveness (whether two values may share a storage) to the planner that wrote the graph.

The format's terms: a *node* is an input, a weight or the call of a kernel, and has one or more outputs. An
*entry* is one output of one node; its id is `node_row_ptr[node] + index`. Tensors (dtype, shape, storage) are
listed by entry id.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from agent.bundle.joins import check_joins
from agent.bundle.node import MAX_ARGUMENTS, NOP, Node, NodeEntry
from agent.bundle.strict_json import refuse_constant, unique_object
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import EndlessDataError, FormatError

# The graph of a BERT with 24 layers takes less than 1 MiB; parsed JSON takes some ten times its text.
MAX_GRAPH_BYTES: Final = 8 << 20
# The largest exports have a few thousand nodes.
MAX_NODES: Final = 65536

# DLPack's DLDeviceType of host memory.
CPU: Final = 1
# The tables that the reader knows, and the tag before each.
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
    """A graph whose indices are all valid; the module explains the terms.

    Attributes
    ----------
    nodes
        The nodes, in an order in which they can run.
    arg_nodes
        Ids of all `null` nodes; this order numbers the inputs.
    heads
        The graph's outputs.
    node_row_ptr
        Running count of entries, from 0: one number more than there are nodes.
    dltype, storage_id, shape, device_index
        Datatype (`float32`), storage, shape and device of each entry, by entry id. `device_index` holds
        device *types*, 1 for the CPU.

    Raises
    ------
    FormatError
        If an index is out of bounds, a table has the wrong length, or two fields contradict each other.
    EndlessDataError
        If there are more than 65536 nodes.
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
            raise FormatError("expected a graph with nodes, got one without")
        if len(self.nodes) > MAX_NODES:
            raise EndlessDataError(f"expected a graph of at most {MAX_NODES} nodes, got {len(self.nodes)}")
        self._check_nodes()
        self._check_tables()
        self._check_storage()
        check_joins(self)

    @classmethod
    def build(
        cls,
        nodes: Sequence[Node],
        heads: Sequence[NodeEntry],
        dltype: Sequence[str],
        storage_id: Sequence[int],
        shape: Sequence[Sequence[int]],
    ) -> Graph:
        """Make a graph on the CPU.

        Parameters
        ----------
        nodes, heads
            See `Graph`; `arg_nodes` and `node_row_ptr` follow from the nodes.
        dltype, storage_id, shape
            One value for each entry, by entry id.

        Raises
        ------
        FormatError, EndlessDataError
            If the parts do not fit each other, as in `Graph`.
        """
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
        """Number of outputs of all nodes together."""
        return self.node_row_ptr[-1]

    def entry_id(self, entry: NodeEntry) -> int:
        """Return the index into the tables of one output of one node."""
        return self.node_row_ptr[entry.node_id] + entry.index

    def spec(self, entry_id: int, name: str = "-") -> TensorSpec:
        """Return the datatype and shape of an entry, under the name that the caller gives it."""
        return TensorSpec.from_dtype(name, self.dltype[entry_id], self.shape[entry_id])

    def storage_bytes(self) -> Mapping[int, int]:
        """Return the size of each storage in bytes, by storage id: that of its largest entry."""
        sizes: dict[int, int] = {}
        for entry_id, storage in enumerate(self.storage_id):
            sizes[storage] = max(sizes.get(storage, 0), self.spec(entry_id).nbytes)
        return sizes

    def to_json(self) -> bytes:
        """Return mod.json: always the same bytes for the same graph."""
        document = {
            "nodes": [node.to_json() for node in self.nodes],
            "arg_nodes": self.arg_nodes,
            "heads": [entry.to_json() for entry in self.heads],
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

        Parameters
        ----------
        raw
            The content of mod.json, untrusted.

        Raises
        ------
        FormatError
            If it is anything but such a graph.
        EndlessDataError
            If it is larger than 8 MiB, or has more than 65536 nodes.
        """
        if len(raw) > MAX_GRAPH_BYTES:
            raise EndlessDataError(f"mod.json: expected at most {MAX_GRAPH_BYTES} bytes, got {len(raw)}")
        try:
            text = raw if isinstance(raw, str) else bytes(raw).decode("utf-8")
            document = json.loads(text, object_pairs_hook=unique_object, parse_constant=refuse_constant)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"mod.json: expected JSON: {' '.join(str(error).split()):.200}") from error
        try:
            return _graph(document)
        except RecursionError as error:
            # What could be parsed can still be too deep to print in a message.
            raise FormatError("mod.json: nested too deeply for a graph") from error

    def _check_nodes(self) -> None:
        if len(self.node_row_ptr) != len(self.nodes) + 1 or self.node_row_ptr[0] != 0:
            raise FormatError(
                f"node_row_ptr: expected {len(self.nodes) + 1} numbers from 0, "
                f"got {len(self.node_row_ptr)} from {next(iter(self.node_row_ptr), None)}"
            )
        inputs = set()
        for i, node in enumerate(self.nodes):
            if self.node_row_ptr[i + 1] - self.node_row_ptr[i] != node.num_outputs:
                raise FormatError(
                    f"node_row_ptr: expected node {i} to have {node.num_outputs} outputs, "
                    f"got {self.node_row_ptr[i + 1] - self.node_row_ptr[i]}"
                )
            if node.is_null and node.name in inputs:
                raise FormatError(f"two inputs have the name {node.name}")
            if node.is_null:
                inputs.add(node.name)
            for entry in node.inputs:
                self._check_entry(entry, i, f"node {i}")
        nulls = [i for i, node in enumerate(self.nodes) if node.is_null]
        if sorted(self.arg_nodes) != nulls:
            raise FormatError(
                f"arg_nodes: expected each of the {len(nulls)} null nodes once, got {self.arg_nodes!r:.80}"
            )
        if not 1 <= len(self.heads) <= MAX_ARGUMENTS:
            raise FormatError(f"heads: expected 1 to {MAX_ARGUMENTS} outputs, got {len(self.heads)}")
        for entry in self.heads:
            self._check_entry(entry, len(self.nodes), "heads")

    def _check_entry(self, entry: NodeEntry, before: int, where: str) -> None:
        if not 0 <= entry.node_id < before:
            raise FormatError(f"{where}: expected a node before {before}, got {entry.node_id}")
        if not 0 <= entry.index < self.nodes[entry.node_id].num_outputs:
            raise FormatError(
                f"{where} refers to output {entry.index} of node {entry.node_id}, which does not exist"
            )

    def _check_tables(self) -> None:
        tables = (("dltype", self.dltype), ("storage_id", self.storage_id), ("shape", self.shape))
        for name, table in (*tables, ("device_index", self.device_index)):
            if len(table) != self.num_entries:
                raise FormatError(f"attrs.{name}: expected {self.num_entries} values, got {len(table)}")
        for entry_id in range(self.num_entries):
            try:
                self.spec(entry_id)
            except ValueError as error:
                raise FormatError(f"entry {entry_id}: {error}") from error

    def _check_storage(self) -> None:
        devices: dict[int, int] = {}
        for storage, device in zip(self.storage_id, self.device_index, strict=True):
            # The planner numbers storages from 0, and never needs more storages than there are entries.
            if not 0 <= storage < self.num_entries:
                raise FormatError(f"storage_id: expected 0 to {self.num_entries - 1}, got {storage}")
            if device < 0:
                raise FormatError(f"device_index: expected a device type of 0 or more, got {device}")
            if devices.setdefault(storage, device) != device:
                raise FormatError(f"storage {storage} is on two devices, {devices[storage]} and {device}")
        for i, node in enumerate(self.nodes):
            if node.func_name == NOP:
                source, target = self.entry_id(node.inputs[0]), self.node_row_ptr[i]
                if self.storage_id[source] != self.storage_id[target]:
                    raise FormatError(
                        f"node {i} is {NOP}, but its output is in another storage than its input"
                    )
                if self.spec(source).nbytes != self.spec(target).nbytes:
                    raise FormatError(f"node {i} is {NOP}, but its output has another size than its input")


def _graph(document: object) -> Graph:
    if not isinstance(document, dict):
        raise FormatError("mod.json: expected an object")
    required = ("nodes", "arg_nodes", "heads", "attrs", "node_row_ptr")
    if missing := [key for key in required if key not in document]:
        raise FormatError(f"mod.json has no {missing[0]}")
    if unknown := document.keys() - {*required, "metadata"}:
        raise FormatError(f"mod.json has the unknown key {min(unknown)!r:.80}")
    # The classic reader stops at this key, so it would not see what follows; ours would.
    if "metadata" in document and list(document)[-1] != "metadata":
        raise FormatError("mod.json: expected metadata as the last key")
    nodes = _list(document["nodes"], "nodes")
    if len(nodes) > MAX_NODES:
        raise EndlessDataError(f"expected a graph of at most {MAX_NODES} nodes, got {len(nodes)}")
    attrs = document["attrs"]
    if not isinstance(attrs, dict):
        raise FormatError("attrs: expected an object")
    tables = {key: _table(key, value) for key, value in attrs.items()}
    if absent := [key for key in ("dltype", "storage_id", "shape") if key not in tables]:
        raise FormatError(f"attrs has no {absent[0]}")
    if any(scope not in ("", "global") for scope in tables.get("storage_scope", ())):
        raise FormatError("attrs.storage_scope: expected global, got the scope of another kind of device")
    entries = len(tables["dltype"])
    return Graph(
        nodes=tuple(Node.from_json(node, f"node {i}") for i, node in enumerate(nodes)),
        arg_nodes=_integers(document["arg_nodes"], "arg_nodes"),
        heads=tuple(NodeEntry.from_json(entry, "heads") for entry in _list(document["heads"], "heads")),
        node_row_ptr=_integers(document["node_row_ptr"], "node_row_ptr"),
        dltype=tables["dltype"],
        storage_id=tables["storage_id"],
        shape=tables["shape"],
        device_index=tables.get("device_index", (CPU,) * entries),
    )


def _table(key: str, value: object) -> tuple[Any, ...]:
    if key not in _TABLES:
        # Some codegens write tables that no reader uses: [tag, list], or a number with the tag size_t.
        if isinstance(value, list) and len(value) == 2 and value[0] in ("list_int", "size_t"):
            return ()
        raise FormatError(f"attrs has {key!r:.80}, neither a known table nor one that may be skipped")
    where = f"attrs.{key}"
    if not isinstance(value, list) or len(value) != 2 or value[0] != _TABLES[key]:
        raise FormatError(f'{where}: expected ["{_TABLES[key]}", [...]], got {value!r:.80}')
    rows = _list(value[1], where)
    if _TABLES[key] == "list_int":
        return _integers(rows, where)
    if _TABLES[key] == "list_shape":
        return tuple(_integers(row, where) for row in rows)
    if any(not isinstance(row, str) for row in rows):
        raise FormatError(f"{where}: expected only strings")
    return tuple(rows)


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise FormatError(f"{where}: expected an array, got {value!r:.80}")
    return value


def _integers(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(number) is not int for number in value):
        raise FormatError(f"{where}: expected an array of integers, got {value!r:.80}")
    return tuple(value)
