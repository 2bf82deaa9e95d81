"""Parity of quantised models: block by block, because rounding differs and grows.

A value halfway between two steps may be rounded to either by two correct implementations. The layers after it
amplify that, so a deep quantised model differs from its reference by percents: ONNX Runtime's integer kernels
differ from its own float ones as much. Comparing outputs would accept a wrong zero point, or refuse what is
right.

So the reference computes each tensor of bytes from the tensors that *we* computed before it. If ours is
right, it differs only where the reference's own number is halfway between two steps, and then by one. A scale
that is wrong by two percent, a wrong zero point, padding with 0, a missing limit or truncation differ
elsewhere, or by more. Fusion, layouts and byte types leave no names, so which of our tensors is which of the
model's is found by their numbers (`block_search.py`). If none agrees, the comparison goes on with the
reference's own tensor, and the next block is larger. A fault that leaves none close is seen at the outputs,
which are always compared.

The reference is ONNX Runtime without its optimiser, which computes as the standard defines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from builder.compiling.block_search import BYTES, WORDS, Array, Block, Floats, Search, block_of, is_halfway
from builder.compiling.parity import REFERENCE, Parity, compare, mismatch, run_as_defined
from builder.errors import ParityError

_ROUNDS: Final = ("QuantizeLinear", "DynamicQuantizeLinear")


@dataclass(frozen=True, slots=True)
class Blocks:
    """The comparison of a model.

    Attributes
    ----------
    found
        The tensors of bytes that were found among ours, in the model's order, and the quantised outputs.
    hidden
        Names of those that are not visible between our kernels.
    expected
        The outputs that the reference computed from our tensors, in the model's order.
    """

    found: tuple[Block, ...]
    hidden: tuple[str, ...]
    expected: tuple[Array, ...]

    @property
    def worst(self) -> Block | None:
        """The block with the largest share of differences."""
        return max(self.found, key=lambda block: (block.unexplained, block.share), default=None)

    def summary(self) -> str:
        """Return the comparison as one line."""
        worst = self.worst
        share = 0.0 if worst is None else worst.share
        return f"{len(self.found)} quantised tensors agree: at most {share:.3%} of one is rounded otherwise"

    def agreement(self, names: Sequence[str], outputs: Sequence[Array]) -> Parity:
        """Return how far the outputs are from `expected`, without those that were compared by steps."""
        by_steps = {block.name for block in self.found}
        rest = [at for at, name in enumerate(names) if name not in by_steps]
        if not rest:
            return Parity(0.0, names[0], REFERENCE)
        ours, theirs = [outputs[at] for at in rest], [self.expected[at] for at in rest]
        return compare([names[at] for at in rest], ours, theirs)

    def check(self) -> None:
        """Refuse a model with a block that differs by more than rounding.

        Raises
        ------
        ParityError
            If there is one.
        """
        for block in self.found:
            if not block.is_rounding:
                raise ParityError(
                    f"quantised tensor {block.name[:80]}: expected differences only where a number is "
                    f"halfway between two steps, got {block.unexplained:.2%} elsewhere, "
                    f"by up to {block.largest:.3g} steps",
                    hint="this is a fault of the compiler, not of the model: please report it with the model",
                )


def is_quantised(model: onnx.ModelProto) -> bool:
    """Whether a model rounds tensors to bytes while it runs."""
    return any(node.op_type in _ROUNDS for node in model.graph.node)


def compare_blocks(
    model: onnx.ModelProto, inputs: Mapping[str, Array], ours: Iterable[Array], outputs: Sequence[Array]
) -> Blocks:
    """Compare a compiled model with the reference, block by block.

    Parameters
    ----------
    model
        The normalised model.
    inputs
        Input name -> array.
    ours
        The tensors that our kernels computed, in order, in whichever layout they are.
    outputs
        Our outputs, in the model's order.

    Raises
    ------
    ModelError
        If ONNX Runtime refuses a part of the model.
    """
    graph = Cuts(model)
    search = Search([np.asarray(array) for array in ours])
    known: dict[str, Array] = dict(inputs)
    for node in model.graph.node:
        if node.op_type not in _ROUNDS:
            continue
        name = node.output[0]
        made = [output for output in node.output if output]
        source, *values = graph.compute([node.input[0], *made], known)
        known |= zip(made, values, strict=True)
        expected = known[name]
        if str(expected.dtype) not in (*BYTES, *WORDS):
            continue
        if name in graph.outputs:
            search.exclude(source, expected, *graph.parameters(node))
            continue
        own = search.find(name, source, expected, *graph.parameters(node))
        if own is not None:
            known[name] = own
    _explain(search, graph, known)
    found, hidden = search.result()
    expected_outputs = graph.compute(graph.outputs, known)
    found += _quantised_outputs(graph, model, outputs, expected_outputs, known)
    return Blocks(tuple(found), tuple(hidden), tuple(expected_outputs))


def _explain(search: Search, graph: Cuts, known: Mapping[str, Array]) -> None:
    """Clear those of our tensors of a suspicion that are float tensors of the model, such as a Relu's.

    What follows a dequantisation is often fused with it, and close to the numbers that it reads.
    """
    suspects = search.suspects()
    names = graph.floats({size for _, size in suspects.values()}, known)
    if not names:
        return
    for value in graph.compute(names, known):
        for at, (scale, size) in suspects.items():
            if str(value.dtype) == "float32" and value.size == size:
                search.compare(at, value, scale)


def _quantised_outputs(
    graph: Cuts,
    model: onnx.ModelProto,
    outputs: Sequence[Array],
    expected: Sequence[Array],
    known: Mapping[str, Array],
) -> Iterator[Block]:
    """Yield the outputs that are bytes, or were dequantised from bytes."""
    producers = {node.output[0]: node for node in model.graph.node}
    for name, own, theirs in zip(graph.outputs, outputs, expected, strict=True):
        if own.shape != theirs.shape or own.dtype != theirs.dtype:
            raise mismatch(name, own, theirs)
        step = 1.0
        node = producers.get(name)
        if str(theirs.dtype) not in (*BYTES, *WORDS):
            if node is None or node.op_type != "DequantizeLinear":
                continue
            scale, _ = graph.parameters(node)
            source = producers.get(node.input[0])
            if scale.size != 1 or source is None or not graph.makes_steps(source):
                continue
            step = float(scale.item())
        rounded = node
        if node is not None and node.op_type == "DequantizeLinear":
            rounded = producers.get(node.input[0])
        halfway: npt.NDArray[np.bool_] | bool = False
        dtype = str(theirs.dtype)
        if rounded is not None and rounded.op_type == "QuantizeLinear":
            source, bytes_ = graph.compute([rounded.input[0], rounded.output[0]], known)
            halfway = is_halfway(source, bytes_, graph.parameters(rounded)[0])
            dtype = str(bytes_.dtype)
        yield block_of(name, (own.astype(np.float64) - theirs.astype(np.float64)) / step, halfway, dtype)


class Cuts:
    """Parts of a model that begin at known tensors."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._model = model
        self._producers = {output: node for node in model.graph.node for output in node.output}
        self._constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self.outputs = [value.name for value in model.graph.output]

    def parameters(self, node: onnx.NodeProto) -> tuple[Floats, Floats]:
        """Return the scale and zero point of QuantizeLinear or DequantizeLinear; empty if not constant."""
        if node.op_type == "DynamicQuantizeLinear":
            return np.zeros(0), np.zeros(0)
        values: list[Floats] = []
        for name in (*node.input[1:3], *[""] * (3 - len(node.input))):
            tensor = self._constants.get(name)
            absent = np.zeros(1) if not name else np.zeros(0)
            values.append(absent if tensor is None else numpy_helper.to_array(tensor).astype(np.float64))
        return values[0], values[1]

    def floats(self, sizes: set[int], known: Mapping[str, Array]) -> list[str]:
        """Return the unknown float32 tensors of the model that have one of these numbers of elements."""
        values = (*self._model.graph.value_info, *self._model.graph.output)
        found = []
        for value in values:
            kind = value.type.tensor_type
            size = int(np.prod([d.dim_value for d in kind.shape.dim], dtype=np.int64))
            node = self._producers.get(value.name)
            if node is None or value.name in known:
                continue
            if node.op_type == "DequantizeLinear" and self.parameters(node)[0].size == 1:
                continue  # compared as bytes
            if kind.elem_type == onnx.TensorProto.FLOAT and size in sizes:
                found.append(value.name)
        return list(dict.fromkeys(found))

    def makes_steps(self, node: onnx.NodeProto) -> bool:
        """Whether a node is a QuantizeLinear to one byte or two."""
        if node.op_type != "QuantizeLinear":
            return False
        tensor = self._constants.get(node.input[2]) if len(node.input) > 2 else None
        kind = next((a.i for a in node.attribute if a.name == "output_dtype"), 0)
        kind = kind or (onnx.TensorProto.UINT8 if tensor is None else tensor.data_type)
        known = onnx.TensorProto
        return kind in (known.UINT8, known.INT8, known.UINT16, known.INT16)

    def compute(self, names: Sequence[str], known: Mapping[str, Array]) -> list[Array]:
        """Compute tensors from known ones, by the reference."""
        wanted = [name for name in names if name not in known]
        nodes, used, constants = self._needed(wanted, known)
        results = {name: known[name] for name in names if name in known}
        if wanted:
            part = helper.make_graph(
                nodes,
                "block",
                [_value(name, known[name]) for name in used],
                [onnx.ValueInfoProto(name=name) for name in wanted],
                [self._constants[name] for name in constants],
            )
            model = helper.make_model(part, opset_imports=self._model.opset_import)
            model.ir_version = self._model.ir_version
            values = run_as_defined(model, {name: known[name] for name in used})
            results |= dict(zip(wanted, values, strict=True))
        return [results[name] for name in names]

    def _needed(
        self, names: Sequence[str], known: Mapping[str, Array]
    ) -> tuple[list[onnx.NodeProto], list[str], list[str]]:
        """Return the nodes between known tensors and `names`, those tensors, and the constants."""
        used: dict[str, None] = {}
        constants: dict[str, None] = {}
        wanted: set[int] = set()
        stack = list(names)
        seen: set[str] = set()
        while stack:
            name = stack.pop()
            if not name or name in seen:
                continue
            seen.add(name)
            if name in known:
                used[name] = None
            elif name in self._constants:
                constants[name] = None
            elif (node := self._producers.get(name)) is not None:
                wanted.add(id(node))
                stack.extend(node.input)
                stack.extend(_captured(node))
        return [node for node in self._model.graph.node if id(node) in wanted], list(used), list(constants)


def _captured(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the names that a node's subgraphs may read from around them."""
    for attribute in node.attribute:
        for graph in [*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])]:
            for inner in graph.node:
                yield from inner.input
                yield from _captured(inner)


def _value(name: str, array: Array) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
