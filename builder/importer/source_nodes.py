"""The nodes of the model as its author wrote it, and what the importer made of each.

The importer folds, rewrites and renames nodes. Promises that a node of the normalised model leads back to the
original node that it came from: by its name, which rewrites only extend, or by a value that both make.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx

from builder.importer.onnx_graph import reads


@dataclass(frozen=True, slots=True)
class SourceNode:
    """A node of the original model.

    Attributes
    ----------
    name, op
        Its name, made unique, and its operator.
    reads, writes
        Names of the values that it reads, also in its subgraphs, and of its outputs.
    """

    name: str
    op: str
    reads: frozenset[str]
    writes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SourceNodes:
    """The nodes of the original model.

    `origins`: node of the normalised model -> index in `nodes`.
    """

    nodes: tuple[SourceNode, ...]
    inputs: frozenset[str]
    outputs: frozenset[str]
    origins: Mapping[str, int]

    @classmethod
    def of(cls, model: onnx.ModelProto) -> SourceNodes:
        """Take down the nodes of a prepared model, before it is normalised in place."""
        weights = {tensor.name for tensor in model.graph.initializer}
        return cls(
            tuple(
                SourceNode(node.name, node.op_type, frozenset(reads(node)), tuple(filter(None, node.output)))
                for node in model.graph.node
            ),
            frozenset(value.name for value in model.graph.input if value.name not in weights),
            frozenset(value.name for value in model.graph.output),
            {},
        )

    def normalised_as(self, model: onnx.ModelProto) -> SourceNodes:
        """Return the same nodes with the origins of the nodes of the normalised model."""
        by_name = {node.name: index for index, node in enumerate(self.nodes)}
        by_value = self.makers()
        origins: dict[str, int] = {}
        users: dict[str, str] = {}
        for node in reversed(model.graph.node):
            origin = _by_prefix(node.name, by_name)
            makers = [by_value[name] for name in node.output if name in by_value]
            same_name = origin is not None and self.nodes[origin].name == node.name
            if makers and (origin is None or (same_name and self.nodes[origin].op != node.op_type)):
                origin = makers[0]
            if origin is None:  # what an optimiser added serves the node that reads it
                origin = next(
                    (origins[users[name]] for name in node.output if users.get(name) in origins), None
                )
            if origin is not None:
                origins[node.name] = origin
            users.update(dict.fromkeys(node.input, node.name))
        return SourceNodes(self.nodes, self.inputs, self.outputs, origins)

    def makers(self) -> Mapping[str, int]:
        """Return value -> index of the node that makes it."""
        return {name: index for index, node in enumerate(self.nodes) for name in node.writes}

    def readers(self) -> Mapping[str, tuple[int, ...]]:
        """Return value -> indices of the nodes that read it."""
        found: dict[str, list[int]] = {}
        for index, node in enumerate(self.nodes):
            for name in node.reads:
                found.setdefault(name, []).append(index)
        return {name: tuple(indices) for name, indices in found.items()}


def _by_prefix(name: str, by_name: Mapping[str, int]) -> int | None:
    """Return the node whose name is `name` or what stands before one of its slashes, the longest such."""
    while name:
        for candidate in (name, name.rstrip("_")):
            if candidate in by_name:
                return by_name[candidate]
        name = name.rpartition("/")[0]
    return None
