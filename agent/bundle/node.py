"""A node of mod.json, and one of its outputs: an input, a weight or the call of a kernel.

Promises that the fields of a node fit each other and keep their limits. Leaves to the graph whether the nodes
that it reads exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from agent.errors import FormatError

# The largest fused operators take a few dozen arguments; a concatenation takes as many as the model joins.
MAX_ARGUMENTS: Final = 1024

# Functions that are not kernels: the output is the input's memory, or a copy of it.
NOP: Final = "__nop"
COPY: Final = "__copy"
# An attribute of a call whose output is its inputs, one after another (`agent.bundle.joins`); its value is 1.
JOINS: Final = "joins"

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

    def to_json(self) -> list[int]:
        """Return the entry as an array of mod.json: node, index and version."""
        return [self.node_id, self.index, self.version]

    @classmethod
    def from_json(cls, value: object, where: str) -> NodeEntry:
        """Read an entry: `[node, index, version]`, or `[node, index]` as old codegen wrote it.

        Parameters
        ----------
        value
            The parsed JSON.
        where
            Its name in error messages, such as `heads`.

        Raises
        ------
        FormatError
            If it is anything else; whether the node exists is checked by the graph.
        """
        if (
            not isinstance(value, list)
            or len(value) not in (2, 3)
            or any(type(number) is not int for number in value)
        ):
            raise FormatError(f"{where}: expected [node, index, version], got {value!r:.80}")
        return cls(*value)


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
        if self.joins:
            if self.attrs[JOINS] != "1":
                raise FormatError(f"{self.name}: expected {JOINS} to be 1, got {self.attrs[JOINS]!r:.80}")
            if not self.inputs or self.num_outputs != 1 or self.func_name in (NOP, COPY):
                raise FormatError(
                    f"{self.name}: expected a kernel that joins its inputs to one output, "
                    f"got {self.func_name} with {len(self.inputs)} and {self.num_outputs}"
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

    @property
    def joins(self) -> bool:
        """Whether the output is the inputs, one after another."""
        return JOINS in self.attrs

    def to_json(self) -> dict[str, Any]:
        """Return the node as an object of mod.json."""
        inputs = [entry.to_json() for entry in self.inputs]
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
        inputs = tuple(NodeEntry.from_json(entry, f"{where}.inputs") for entry in value["inputs"])
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


def _string(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise FormatError(f"{where}: expected a string, got {value!r:.80}")
    return value


def _number(attrs: dict[str, str], key: str, where: str) -> int:
    if not _NUMBER.fullmatch(attrs[key]):
        raise FormatError(f"{where}.attrs.{key}: expected a number in a string, got {attrs[key]!r:.80}")
    return int(attrs[key])
