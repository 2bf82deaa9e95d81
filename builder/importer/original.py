"""The model as it was given: what ONNX Runtime runs to judge the one that we normalised.

Nothing of the model is copied. A file stays a path, and ONNX Runtime reads it again; a model in memory is the
caller's own. What is kept is what the outputs' strings and dictionaries became, so that the answers of both
can be compared. Leaves running it to `builder.compiling.judge`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import ArrayLike, NDArray

from builder.importer.classic.ensemble import attribute
from builder.importer.large_models import sha256
from builder.importer.model_file import read_model
from builder.importer.narrow_types import widen_edges
from builder.importer.onnx_graph import OnnxGraph, set_attributes, walk_nodes
from builder.importer.rewrites.microsoft.quantised_layers import dynamic_lstm
from builder.importer.rewrites.replacement import rewritten
from builder.importer.sequence_outputs import Element

FILE: Final = "the file itself"
# A DynamicQuantizeLSTM is imported as an LSTM of real numbers. ONNX Runtime's own rounds each step to bytes.
REAL_LSTM: Final = "its DynamicQuantizeLSTM as an LSTM of real numbers"
_ROUNDED: Final = "DynamicQuantizeLSTM"
# A model in memory; most are written by a converter of ours, or by a framework's exporter.
IN_MEMORY: Final = "the ONNX model as it was converted"


@dataclass(frozen=True, slots=True)
class Original:
    """A model before it was normalised.

    `source`: the file, or the model in memory.
    `sha256`: its digest, to notice that somebody changes it meanwhile.
    `shapes`, `values`: what the user fixed, as in `import_onnx`.
    `keys`: output that is a list of dictionaries -> their keys, in the order of the scores.
    `tables`: output that is a tensor of strings -> the strings, at the places that stand for them.
    `elements`: output -> which element it was of an output that is a sequence.
    `operators`: the types of its nodes; of functions, those of their bodies.
    `rounds_to_half`: whether it computes or keeps numbers in float16 or bfloat16, which become float32.
    `excuse`: why ONNX Runtime's answers to it are no reference; empty if they are.
    `has_open_nodes`: whether a node leaves an output unnamed on which ONNX Runtime may crash, or the order of
        its results open.
    `narrow`: inputs and outputs of types that NumPy lacks -> their types.
    `masked`: the values that are scores of an Attention, as `masked_of` finds them.
    """

    source: Path | onnx.ModelProto
    name: str
    sha256: str
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    values: Mapping[str, ArrayLike] = field(default_factory=dict)
    keys: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    tables: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    elements: Mapping[str, Element] = field(default_factory=dict)
    operators: frozenset[str] = frozenset()
    rounds_to_half: bool = False
    excuse: str = ""
    has_open_nodes: bool = False
    narrow: Mapping[str, int] = field(default_factory=dict)
    masked: frozenset[str] = frozenset()

    @property
    def is_changed(self) -> bool:
        """Whether ONNX Runtime cannot judge it as it is, only as `model` returns it."""
        return self.has_open_nodes or bool(self.narrow) or has_rounded_lstm(self.operators)

    def model(self) -> onnx.ModelProto | None:
        """Return the model, read again; None if it is not what was imported any more.

        Outputs of nodes that `skips_output` have names, what a TopK finds the order of its values, `narrow`
        inputs and outputs wider types, and weights of an LSTM the numbers that they stand for.
        """
        if isinstance(self.source, onnx.ModelProto):
            model, digest = self.source, sha256(self.source)
        else:
            file = read_model(self.source)
            model, digest = file.model, file.sha256
        if digest != self.sha256:
            return None
        if not self.is_changed:
            return model
        changed = onnx.ModelProto()
        changed.CopyFrom(model)
        for number, node in enumerate(walk_nodes(changed.graph)):
            if skips_output(node):
                names = [name or f"edgebundle/unread/{number}/{i}" for i, name in enumerate(node.output)]
                node.output[:] = names
            if is_unsorted(node):
                set_attributes(node, ["sorted"], {})
        widen_edges(changed)
        graph = OnnxGraph(changed)
        graph.rewrite(lambda node: rewritten(dynamic_lstm, node, graph) if node.op_type == _ROUNDED else None)
        return changed

    def value(self, name: str, dtype: np.dtype[Any], declared: Sequence[object]) -> NDArray[Any]:
        """Return what the user fixed an input to.

        `declared`: its dimensions in the file. A number fills them, or those that were given; unknown ones
            are 1.
        """
        array = np.asarray(self.values[name]).astype(dtype)
        if array.ndim:
            return array
        shape = self.shapes.get(name) or [dim if isinstance(dim, int) else 1 for dim in declared]
        return np.full(tuple(shape), array)


def operators_of(model: onnx.ModelProto) -> frozenset[str]:
    """Return the types of a model's nodes, in subgraphs and in the bodies of its functions, too."""
    functions = {(function.domain, function.name) for function in model.functions}
    return frozenset(
        node.op_type
        for graph in (model.graph, *model.functions)
        for node in walk_nodes(graph)
        if (node.domain, node.op_type) not in functions
    )


def has_rounded_lstm(operators: Collection[str]) -> bool:
    """Whether nodes of these types are an LSTM that rounds its steps."""
    return _ROUNDED in operators


def skips_output(node: onnx.NodeProto) -> bool:
    """Whether a node leaves its first output unnamed, or is a Split that leaves any."""
    return "" in (node.output if node.op_type == "Split" else node.output[:1])


def is_unsorted(node: onnx.NodeProto) -> bool:
    """Whether a node is a TopK whose results may have any order; ours is that of the values."""
    return node.op_type == "TopK" and any(each.name == "sorted" and not each.i for each in node.attribute)


def masked_of(model: onnx.ModelProto) -> frozenset[str]:
    """Return the scores that an Attention has as its fourth output.

    Where a mask forbids one, it is minus infinity by ONNX's definition, and in ONNX Runtime the least number.
    """
    return frozenset(
        name for node in model.graph.node if node.op_type == "Attention" for name in node.output[3:4]
    )


def keys_of(model: onnx.ModelProto) -> dict[str, tuple[Any, ...]]:
    """Return the keys of each value that a ZipMap makes, in the order of its scores."""
    found: dict[str, tuple[Any, ...]] = {}
    for node in model.graph.node:
        if node.op_type == "ZipMap":
            numbers, texts = attribute(node, "classlabels_int64s"), attribute(node, "classlabels_strings")
            if numbers is not None and numbers.ints:
                found[node.output[0]] = tuple(numbers.ints)
            elif texts is not None:
                found[node.output[0]] = tuple(text.decode("utf-8", "replace") for text in texts.strings)
    return found
