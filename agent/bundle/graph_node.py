"""Nodes of mod.json: inputs, weights and calls of kernels, and how each is written there.

Promises that a node is well formed in itself. Leaves to `graph` whether what it refers to is there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from agent.errors import FormatError

# The largest fused operators take a few dozen; a concatenation takes what a model joins.
MAX_ARGUMENTS: Final = 1024

NOP: Final = "__nop"
COPY: Final = "__copy"

_SYMBOL: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")
_NAME: Final = re.compile(r"[ -~]{1,256}")
_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,5}")
# What codegen writes into "attrs" of a call; the reader demands all four.
_CALL_ATTRS: Final = ("func_name", "num_inputs", "num_outputs", "flatten_data")


@dataclass(frozen=True, slots=True)
class NodeEntry:
    """One output of one node; `version` is always 0 in what is written today."""

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
        What inputs are set by; of a call, a label.
    inputs
        Entries of earlier nodes, in the order of the kernel's arguments; outputs follow them in the call.
    func_name
        The kernel's symbol, `__nop` (the output is the input, same storage) or `__copy`. Empty for
        `null`.
    num_outputs
        How many entries the node has; 1 for `null`.
    flatten_data
        Whether the kernel wants each argument as one dimension.
    attrs
        Further strings of the node, such as `hash`.
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
            raise FormatError(f"a node has op {self.op!r:.80}, expected null or tvm_op")
        if not _NAME.fullmatch(self.name):
            raise FormatError(
                f"a node has the name {self.name!r:.80}, expected 1 to 256 printable ASCII characters"
            )
        if self.is_null:
            if self.inputs or self.func_name or self.num_outputs != 1 or self.flatten_data:
                raise FormatError(f"{self.name} is an input and calls something")
            return
        if not _SYMBOL.fullmatch(self.func_name):
            raise FormatError(f"{self.name} has func_name {self.func_name!r:.80}, expected a symbol of C")
        if not 1 <= self.num_outputs <= MAX_ARGUMENTS or len(self.inputs) > MAX_ARGUMENTS:
            raise FormatError(
                f"{self.name} has {len(self.inputs)} inputs, {self.num_outputs} outputs, over {MAX_ARGUMENTS}"
            )
        if self.func_name in (NOP, COPY) and (len(self.inputs), self.num_outputs) != (1, 1):
            raise FormatError(f"{self.name} is {self.func_name}, which has one input and one output")
        for key, value in self.attrs.items():
            if key in _CALL_ATTRS or not isinstance(value, str):
                raise FormatError(f"{self.name} has the attribute {key!r:.80} with {value!s:.80}")

    @classmethod
    def null(cls, name: str) -> Node:
        """Make an input or a weight."""
        return cls("null", name)

    @classmethod
    def call(
        cls, name: str, func_name: str, inputs: Iterable[NodeEntry], num_outputs: int = 1, **attrs: str
    ) -> Node:
        """Make the call of a kernel."""
        return cls("tvm_op", name, tuple(inputs), func_name, num_outputs, False, attrs)

    @property
    def is_null(self) -> bool:
        """Whether this is an input or a weight."""
        return self.op == "null"

    def to_json(self) -> dict[str, Any]:
        """Return the node as mod.json has it."""
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
        """Read a node as any version of the classic codegen wrote it.

        Raises
        ------
        FormatError
            If a key is missing or unknown, or a value of the wrong type.
        """
        if not isinstance(value, dict):
            raise FormatError(f"{where} is {value!s:.80}, expected an object")
        if missing := {"op", "name", "inputs"} - value.keys():
            raise FormatError(f"{where} has no {min(missing)}")
        # "attr" is how graphs older than the graph executor spell it; control_deps are read and ignored.
        if unknown := value.keys() - {"op", "name", "inputs", "attrs", "attr", "control_deps"}:
            raise FormatError(f"{where} has the unknown key {min(unknown)!r:.80}")
        if "attrs" in value and "attr" in value:
            raise FormatError(f"{where} has both attr and attrs")
        op, name = _string(value["op"], f"{where}.op"), _string(value["name"], f"{where}.name")
        if not isinstance(value["inputs"], list):
            raise FormatError(f"{where}.inputs is {value['inputs']!s:.80}, expected an array")
        inputs = tuple(entry_from_json(entry, f"{where}.inputs") for entry in value["inputs"])
        deps = value.get("control_deps", [])
        if not isinstance(deps, list) or any(type(dep) is not int for dep in deps):
            raise FormatError(f"{where}.control_deps is {deps!s:.80}, expected an array of integers")
        attrs = value.get("attrs", value.get("attr", {}))
        if not isinstance(attrs, dict) or any(not isinstance(v, str) for v in attrs.values()):
            raise FormatError(f"{where}.attrs is not an object of strings")
        if op == "null":
            # Old codegen wrote attributes of inputs too; no reader looks at them.
            return cls(op, name, inputs)
        if missing := set(_CALL_ATTRS) - attrs.keys():
            raise FormatError(f"{where}.attrs has no {min(missing)}")
        if _number(attrs, "num_inputs", where) != len(inputs):
            raise FormatError(f"{where} has {len(inputs)} inputs, its num_inputs is {attrs['num_inputs']}")
        if attrs["flatten_data"] not in ("0", "1"):
            raise FormatError(f"{where}.attrs.flatten_data is {attrs['flatten_data']!r:.80}, expected 0 or 1")
        return cls(
            op,
            name,
            inputs,
            attrs["func_name"],
            _number(attrs, "num_outputs", where),
            attrs["flatten_data"] == "1",
            {key: text for key, text in attrs.items() if key not in _CALL_ATTRS},
        )


def entry_from_json(value: object, where: str) -> NodeEntry:
    """Read `[node, index]` or `[node, index, version]`.

    Raises
    ------
    FormatError
        If it is neither.
    """
    if (
        not isinstance(value, list)
        or len(value) not in (2, 3)
        or any(type(number) is not int for number in value)
    ):
        raise FormatError(f"{where} has an entry {value!s:.80}, expected [node, index, version]")
    return NodeEntry(*value)


def _string(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise FormatError(f"{where} is {value!s:.80}, expected a string")
    return value


def _number(attrs: dict[str, str], key: str, where: str) -> int:
    if not _NUMBER.fullmatch(attrs[key]):
        raise FormatError(f"{where}.attrs.{key} is {attrs[key]!r:.80}, expected a number in a string")
    return int(attrs[key])
