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
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from agent.bundle.strict_json import refuse_constant, unique_object
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import EndlessDataError, FormatError

# The graph of a BERT with 24 layers takes less than 1 MiB; parsed JSON takes some ten times its text.
MAX_GRAPH_BYTES: Final = 8 << 20
# The largest exports have a few thousand nodes.
MAX_NODES: Final = 65536
# The largest fused operators take a few dozen arguments; a concatenation takes as many as the model joins.
MAX_ARGUMENTS: Final = 1024

# Functions that are not kernels: the output is the input's memory, or a copy of it.
NOP: Final = "__nop"
COPY: Final = "__copy"

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
_SYMBOL: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")
_NAME: Final = re.compile(r"[ -~]{1,256}")
_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,5}")
# What codegen writes into "attrs" of a call; the reader demands all four.
_CALL_ATTRS: Final = ("func_name", "num_inputs", "num_outputs", "flatten_data")


@dataclass(frozen=True, slots=True)
class NodeEntry:
    """One output of one node; `version` is always 0 today."""

    node_id: int
    index: int = 0
    version: int = 0


@dataclass(frozen=True, slots=True)
class Node:
    """An input or weight (`op` is `null`), or the call of a kernel (`tvm_op`).

    Attributes
    ----------
    op
        `null` or `tvm_op`.
    name
        The name by which an input is set; a label if the node is a call.
    inputs
        Entries of earlier nodes, in the order of the kernel's arguments; outputs follow them in the call.
    func_name
        The kernel's symbol, `__nop` (the output is the input, in the same storage) or `__copy`; empty if `op`
        is `null`.
    num_outputs
        Number of outputs; 1 for `null`.
    flatten_data
        Whether the kernel takes each argument as one dimension.
    attrs
        Further attributes of a call, such as `hash`.

    Raises
    ------
    FormatError
        If the fields contradict each other, or one is out of its limits.
    """

    op: str
    name: str
    inputs: tuple[NodeEntry, ...] = ()
    func_name: str = ""
    num_outputs: int = 1
    flatten_data: bool = False
    attrs: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.op not in ("null", "tvm_op"):
            raise FormatError(f"node {self.name!r:.80}: expected op null or tvm_op, got {self.op!r:.80}")
        if not _NAME.fullmatch(self.name):
            raise FormatError(
                f"a node's name: expected 1 to 256 printable ASCII characters, got {self.name!r:.80}"
            )
        if self.is_null:
            if self.inputs or self.func_name or self.num_outputs != 1 or self.flatten_data:
                raise FormatError(f"{self.name} is an input and has the fields of a call")
            return
        if not _SYMBOL.fullmatch(self.func_name):
            raise FormatError(f"{self.name}: expected a C symbol as func_name, got {self.func_name!r:.80}")
        if not 1 <= self.num_outputs <= MAX_ARGUMENTS or len(self.inputs) > MAX_ARGUMENTS:
            raise FormatError(
                f"{self.name}: expected at most {MAX_ARGUMENTS} inputs and 1 to {MAX_ARGUMENTS} outputs, "
                f"got {len(self.inputs)} and {self.num_outputs}"
            )
        if self.func_name in (NOP, COPY) and (len(self.inputs), self.num_outputs) != (1, 1):
            raise FormatError(
                f"{self.name}: expected one input and one output of {self.func_name}, "
                f"got {len(self.inputs)} and {self.num_outputs}"
            )
        for key, value in self.attrs.items():
            if key in _CALL_ATTRS or not isinstance(value, str):
                raise FormatError(
                    f"{self.name}: expected strings as further attributes, got {key!r:.80}: {value!r:.80}"
                )

    @classmethod
    def null(cls, name: str) -> Node:
        """Make the node of an input or a weight."""
        return cls("null", name)

    @classmethod
    def call(
        cls, name: str, func_name: str, inputs: Iterable[NodeEntry], num_outputs: int = 1, **attrs: str
    ) -> Node:
        """Make the node of a call; `attrs` are its further attributes."""
        return cls("tvm_op", name, tuple(inputs), func_name, num_outputs, False, attrs)

    @property
    def is_null(self) -> bool:
        """Whether this is an input or a weight."""
        return self.op == "null"

    def to_json(self) -> dict[str, Any]:
        """Return the node as an object of mod.json."""
        inputs = [[entry.node_id, entry.index, entry.version] for entry in self.inputs]
        if self.is_null:
            return {"op": self.op, "name": self.name, "inputs": inputs}
        attrs = {
            "func_name": self.func_name,
            "num_inputs": str(len(self.inputs)),
            "num_outputs": str(self.num_outputs),
            "flatten_data": str(int(self.flatten_data)),
            **dict(sorted(self.attrs.items())),
        }
        return {"op": self.op, "name": self.name, "attrs": attrs, "inputs": inputs}

    @classmethod
    def from_json(cls, value: object, where: str) -> Node:
        """Read a node, as any version of the classic codegen wrote it.

        Parameters
        ----------
        value
            The parsed JSON.
        where
            Its name in error messages, such as `node 3`.

        Raises
        ------
        FormatError
            If a key is missing or unknown, or a value has the wrong type.
        """
        if not isinstance(value, dict):
            raise FormatError(f"{where}: expected an object, got {value!r:.80}")
        if missing := {"op", "name", "inputs"} - value.keys():
            raise FormatError(f"{where} has no {min(missing)}")
        # Graphs older than the graph executor say "attr"; control_deps are checked and ignored.
        if unknown := value.keys() - {"op", "name", "inputs", "attrs", "attr", "control_deps"}:
            raise FormatError(f"{where} has the unknown key {min(unknown)!r:.80}")
        if "attrs" in value and "attr" in value:
            raise FormatError(f"{where} has both attr and attrs")
        op, name = _string(value["op"], f"{where}.op"), _string(value["name"], f"{where}.name")
        if not isinstance(value["inputs"], list):
            raise FormatError(f"{where}.inputs: expected an array, got {value['inputs']!r:.80}")
        inputs = tuple(_entry(entry, f"{where}.inputs") for entry in value["inputs"])
        deps = value.get("control_deps", [])
        if not isinstance(deps, list) or any(type(dep) is not int for dep in deps):
            raise FormatError(f"{where}.control_deps: expected an array of integers, got {deps!r:.80}")
        attrs = value.get("attrs", value.get("attr", {}))
        if not isinstance(attrs, dict) or any(not isinstance(v, str) for v in attrs.values()):
            raise FormatError(f"{where}.attrs: expected an object of strings, got {attrs!r:.80}")
        if op == "null":
            # Old codegen wrote attributes of inputs too, which every reader ignores.
            return cls(op, name, inputs)
        if missing := set(_CALL_ATTRS) - attrs.keys():
            raise FormatError(f"{where}.attrs has no {min(missing)}")
        if _number(attrs, "num_inputs", where) != len(inputs):
            raise FormatError(
                f"{where}: expected {attrs['num_inputs']} inputs (num_inputs), got {len(inputs)}"
            )
        if attrs["flatten_data"] not in ("0", "1"):
            raise FormatError(
                f"{where}.attrs.flatten_data: expected 0 or 1, got {attrs['flatten_data']!r:.80}"
            )
        return cls(
            op,
            name,
            inputs,
            attrs["func_name"],
            _number(attrs, "num_outputs", where),
            attrs["flatten_data"] == "1",
            {key: text for key, text in attrs.items() if key not in _CALL_ATTRS},
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
        heads=tuple(_entry(entry, "heads") for entry in _list(document["heads"], "heads")),
        node_row_ptr=_integers(document["node_row_ptr"], "node_row_ptr"),
        dltype=tables["dltype"],
        storage_id=tables["storage_id"],
        shape=tables["shape"],
        device_index=tables.get("device_index", (CPU,) * entries),
    )


def _entry(value: object, where: str) -> NodeEntry:
    if (
        not isinstance(value, list)
        or len(value) not in (2, 3)
        or any(type(number) is not int for number in value)
    ):
        raise FormatError(f"{where}: expected [node, index, version], got {value!r:.80}")
    return NodeEntry(*value)


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


def _string(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise FormatError(f"{where}: expected a string, got {value!r:.80}")
    return value


def _number(attrs: dict[str, str], key: str, where: str) -> int:
    if not _NUMBER.fullmatch(attrs[key]):
        raise FormatError(f"{where}.attrs.{key}: expected a number in a string, got {attrs[key]!r:.80}")
    return int(attrs[key])
