"""Parity of quantised models: block by block, because rounding differs and grows.

A value halfway between two steps may be rounded to either by two correct implementations. The layers after it
amplify that, so a deep quantised model differs from its reference by percents: ONNX Runtime's integer kernels
differ from its own float ones as much. Comparing outputs would accept a wrong zero point, or refuse what is
right.

So the reference computes each tensor of bytes from the tensors that *we* computed before it. If ours is
right, it differs only where the reference's own number is halfway between two steps, and then by one. A scale
that is wrong by two percent, a wrong zero point, padding with 0, a missing limit or truncation differ
elsewhere, or by more.

Which of our tensors is which of the model's is known from the nodes that each kernel computes: a tensor is
made by the kernel whose last node is the tensor's. A tensor without such a kernel is inside of one, or some
other kernel computed an equal one: then the comparison goes on with any of ours that agrees, or with the
reference's own tensor.

If the kernel's tensor does not agree, it is a suspicion. It is a fault unless the tensor is not what the
kernels after it read: that is known if everything after it agrees, but would not agree if it were computed
from the suspicious one. What no kernel shows is seen at the outputs, which are always compared.

The reference is ONNX Runtime without its optimiser, which computes as the standard defines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from builder.compiling import tolerances
from builder.compiling.block_agreement import (
    BYTES,
    WORDS,
    Array,
    Block,
    Floats,
    Grid,
    Match,
    Step,
    block_of,
    has_order_of,
    is_halfway,
    read_as,
)
from builder.compiling.parity import REFERENCE, Parity, compare, mismatch, run_as_defined
from builder.errors import FAULT, ParityError

UNEXPLAINED: Final = (
    "please report it with the model; --tolerance compares only the outputs, as relative errors"
)

ROUNDS: Final = ("QuantizeLinear", "DynamicQuantizeLinear")


# Of a tensor that a kernel made of which nothing else is known, so many elements may be rounded otherwise.
_MOSTLY: Final = 0.01
# Operators whose results have the numbers of their first input, those of Concat of all inputs.
_MOVERS: Final = frozenset(
    {
        "Concat",
        "DepthToSpace",
        "Expand",
        "Flatten",
        "Gather",
        "Identity",
        "MaxPool",
        "Reshape",
        "Slice",
        "SpaceToDepth",
        "Split",
        "Squeeze",
        "Tile",
        "Transpose",
        "Unsqueeze",
    }
)


@dataclass(frozen=True, slots=True)
class Blocks:
    """The comparison of a model.

    `found`: the tensors of bytes that were found among ours, in the model's order, and the quantised outputs.
    `hidden`: names of those that are not visible between our kernels.
    `expected`: the outputs that the reference computed from our tensors, in the model's order.
    `faults`: names of those of `found` that are wrong, as the kernels after them show.
    """

    found: tuple[Block, ...]
    hidden: tuple[str, ...]
    expected: tuple[Array, ...]
    faults: frozenset[str] = frozenset()

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
        """Refuse a model with a block that differs by more than rounding."""
        for block in self.found:
            if not block.is_rounding:
                raise ParityError(
                    f"quantised tensor {block.name[:80]}: expected differences only where a number is "
                    f"halfway between two steps, got {block.unexplained:.2%} elsewhere, "
                    f"by up to {block.largest:.3g} steps",
                    hint=FAULT if block.name in self.faults else UNEXPLAINED,
                )


def is_quantised(model: onnx.ModelProto) -> bool:
    """Whether a model rounds tensors to bytes while it runs."""
    return any(node.op_type in ROUNDS for node in model.graph.node)


def compare_blocks(
    model: onnx.ModelProto, inputs: Mapping[str, Array], ours: Iterable[Step], outputs: Sequence[Array]
) -> Blocks:
    """Compare a compiled model with the reference, block by block.

    `ours`: the tensors that our kernels computed, in order.
    Raises `ModelError` if ONNX Runtime refuses a part of the model.
    """
    walk = _Walk(model, inputs, list(ours), outputs)
    for node in model.graph.node:
        walk.visit(node)
    return walk.result()


@dataclass(frozen=True, slots=True)
class _Point:
    """A tensor of the model that may be compared.

    `source`: its numbers before they were rounded.
    """

    node: onnx.NodeProto
    grid: Grid
    source: Array

    def read(self, name: str, array: Array, expected: Array) -> Match | None:
        """Read one of our tensors as this one."""
        halfway = is_halfway(self.source, self.grid.dtype, self.grid.scale)
        return read_as(array, name, expected, halfway, self.grid)


class _Walk:
    """The comparison of a model, node by node."""

    def __init__(
        self,
        model: onnx.ModelProto,
        inputs: Mapping[str, Array],
        ours: Sequence[Step],
        outputs: Sequence[Array],
    ) -> None:
        self._model = model
        self._graph = Cuts(model)
        # Ours as far as they were found, and the reference's; only ours.
        self._known: dict[str, Array] = dict(inputs)
        self._own: dict[str, Array] = dict(inputs)
        self._outputs = dict(zip(self._graph.outputs, outputs, strict=True))
        self._ours = [Step(np.asarray(step.array), step.nodes) for step in ours]
        self._makers, self._related = _provenance(model, self._ours)
        self._grids: dict[str, Grid] = {}
        # Of tensors that are not known: what they were before they were rounded.
        self._sources: dict[str, Array] = {}
        self._points: dict[str, _Point] = {}
        self._found: dict[str, Block] = {}
        self._suspects: dict[str, Match] = {}
        self._hidden: list[str] = []

    def visit(self, node: onnx.NodeProto) -> None:
        """Compare what a node makes, if it is quantised and not known yet."""
        if node.op_type in ROUNDS:
            made = [output for output in node.output if output]
            source, *values = self._graph.compute([node.input[0], *made], self._known)
            self._known |= zip(made, values, strict=True)
            expected = values[0]
            if str(expected.dtype) in (*BYTES, *WORDS):
                grid = Grid(*self._graph.parameters(node), str(expected.dtype))
                self._compare(made[0], _Point(node, grid, source), expected)
        elif node.op_type == "DequantizeLinear":
            known = self._grids.get(node.input[0])
            if known is not None and known.is_one:
                self._grids[node.output[0]] = replace(known, is_real=True)
                if node.input[0] in self._sources:
                    self._sources[node.output[0]] = self._sources[node.input[0]]
        elif node.op_type in _MOVERS:
            self._move(node)

    def _move(self, node: onnx.NodeProto) -> None:
        """Compare what a node makes of a quantised tensor that no kernel shows before it."""
        read = list(node.input) if node.op_type == "Concat" else list(node.input[:1])
        grids = [self._grids.get(name) for name in read]
        first = grids[0]
        if first is None or not first.is_one or not all(g is not None and g.equals(first) for g in grids):
            return
        made = [output for output in node.output if output]
        self._grids |= dict.fromkeys(made, first)
        if not any(name in self._sources for name in read):
            return
        before = {name: self._source(name, first) for name in read}
        sources = self._graph.compute(made, before)
        for name, source in zip(made, sources, strict=True):
            (expected,) = self._graph.compute([name], self._known)
            if not np.issubdtype(source.dtype, np.floating):
                continue
            self._compare(name, _Point(node, first, source), expected)

    def _source(self, name: str, grid: Grid) -> Array:
        """Return what a tensor was before it was rounded; of a known one, its own numbers."""
        if name in self._sources:
            return self._sources[name]
        (value,) = self._graph.compute([name], self._known)
        return replace(grid, is_real=True).values_of(grid.steps_of(value))

    def _compare(self, name: str, point: _Point, expected: Array) -> None:
        """Find the tensor of ours that is a tensor of the model."""
        self._grids[name] = point.grid
        self._points[name] = point
        self._known[name] = expected
        rounds = point.node.op_type in ROUNDS
        if name in self._outputs:
            own = self._outputs[name]
            fits = own.shape == expected.shape and own.dtype == expected.dtype
            match = point.read(name, own, expected) if fits else None
            if match is not None and match.block.is_rounding:
                self._known[name] = self._own[name] = own
            return
        makers = self._read(name, point, expected, self._makers.get(point.node.name, ()))
        match = _best(makers)
        if match is None and makers:
            if rounds:
                self._suspects[name] = min(makers, key=lambda each: each.mean)
        elif match is None:
            match = self._alike(name, point, expected)
        if match is None:
            self._sources[name] = point.source
            if rounds:
                self._hidden.append(name)
            return
        self._known[name] = self._own[name] = match.own
        self._found[name] = match.block

    def _alike(self, name: str, point: _Point, expected: Array) -> Match | None:
        """Find a tensor by its numbers, first among those that have to do with it.

        Numbers that are all halfway between two steps agree with many tensors, so the order of the elements
        must be the same, and most of an unrelated tensor. So must some of 16 bits, of which a few steps are
        granted: small numbers would agree with zeros.
        """
        related = self._related.get(point.node.name, ())
        places = [
            place for place, step in enumerate(self._ours) if has_order_of(step.array.shape, expected.shape)
        ]
        matches = self._read(name, point, expected, [place for place in places if place in related])
        if point.grid.dtype in WORDS:
            matches = [match for match in matches if match.block.share < 1]
        found = _best(matches)
        if found is None:
            others = self._read(name, point, expected, places)
            found = _best([match for match in others if match.block.share <= _MOSTLY])
        return found

    def _read(self, name: str, point: _Point, expected: Array, places: Iterable[int]) -> list[Match]:
        matches = (point.read(name, self._ours[place].array, expected) for place in places)
        return [match for match in matches if match is not None]

    def result(self) -> Blocks:
        """Compare the outputs, and tell which suspicions are faults."""
        ends, expected = self._ends(self._known)
        agrees = self._agrees(ends, expected)
        wrong: dict[str, Block] = {}
        faults: set[str] = set()
        for name, match in self._suspects.items():
            is_read = self._explains(name, match.own)
            if is_read:
                faults.add(name)
            if is_read or not agrees:
                wrong[name] = match.block
        found = {**self._found, **wrong}
        ordered = [found[name] for name in self._points if name in found]
        hidden = tuple(name for name in self._hidden if name not in wrong)
        return Blocks((*ordered, *ends), hidden, tuple(expected), frozenset(faults))

    def _ends(self, known: Mapping[str, Array]) -> tuple[list[Block], list[Array]]:
        """Return how the outputs that are steps agree, and what the reference computes for all outputs."""
        rounded = [name for name in self._outputs if name in self._points]
        others = [name for name in self._outputs if name not in self._points]
        found = dict(zip(others, self._graph.compute(others, known), strict=True))
        for name in rounded:
            found |= zip([name], self._graph.compute([name], _without(name, known)), strict=True)
        expected = [found[name] for name in self._outputs]
        outputs = list(self._outputs.values())
        return list(_quantised_outputs(self._graph, self._model, outputs, expected, known)), expected

    def _agrees(self, ends: Sequence[Block], expected: Sequence[Array]) -> bool:
        """Whether the outputs agree."""
        blocks = Blocks(tuple(ends), (), tuple(expected))
        if not all(block.is_rounding for block in ends):
            return False
        return blocks.agreement(self._graph.outputs, list(self._outputs.values())).error <= tolerances.PARITY

    def _explains(self, name: str, own: Array) -> bool:
        """Whether everything that reads a tensor agrees if it is computed from our tensor `own`."""
        for later, block in self._found.items():
            rest = _without(later, self._own)
            if not self._graph.needs(later, name, rest):
                continue
            point = self._points[later]
            source, expected = self._graph.compute([point.node.input[0], later], {**rest, name: own})
            steps = point.grid.steps_of(self._known[later]) - point.grid.steps_of(expected)
            halfway = point.node.op_type in ROUNDS and is_halfway(source, point.grid.dtype, point.grid.scale)
            if not block_of(block.name, steps, halfway, point.grid.dtype).is_rounding:
                return False
        return self._agrees(*self._ends({**self._own, name: own}))


def _without(name: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {each: array for each, array in arrays.items() if each != name}


def _best(matches: Sequence[Match]) -> Match | None:
    """Return the closest of those that agree."""
    agreeing = [match for match in matches if match.block.is_rounding]
    return min(agreeing, key=lambda match: match.mean, default=None)


def _provenance(
    model: onnx.ModelProto, ours: Sequence[Step]
) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Return by node the places of the tensors that it makes last, and of all that it has a part in."""
    before: dict[str, int] = {}  # node -> the nodes that it depends on, and itself, as bits
    bits: dict[str, int] = {}  # value -> the same of the node that makes it
    for index, node in enumerate(model.graph.node):
        own = 1 << index
        for name in node.input:
            own |= bits.get(name, 0)
        before[node.name] = own
        bits |= dict.fromkeys(node.output, own)
    places = {node.name: 1 << index for index, node in enumerate(model.graph.node)}
    makers: dict[str, list[int]] = {}
    related: dict[str, list[int]] = {}
    for place, step in enumerate(ours):
        nodes = [name for name in step.nodes if name in places]
        for name in nodes:
            related.setdefault(name, []).append(place)
            if not any(before[other] & places[name] for other in nodes if other != name):
                makers.setdefault(name, []).append(place)
    return makers, related


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
            given = {each: array for each, array in known.items() if each != rounded.output[0]}
            source, bytes_ = graph.compute([rounded.input[0], rounded.output[0]], given)
            dtype = str(bytes_.dtype)
            halfway = is_halfway(source, dtype, graph.parameters(rounded)[0])
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

    def needs(self, name: str, other: str, known: Mapping[str, Array]) -> bool:
        """Whether `other` is computed on the way from known tensors to `name`."""
        nodes, _, _ = self._needed([name], known)
        return any(other in node.output for node in nodes)

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
            whole = self._model
            model = helper.make_model(part, opset_imports=whole.opset_import, functions=whole.functions)
            model.ir_version = self._model.ir_version
            values = run_as_defined(model, {name: np.asarray(known[name]) for name in used})
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
