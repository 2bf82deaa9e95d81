"""Caches that grow: an input of length `past`, and an output of length `past + steps` that is the next input.

Decoders are exported with their keys and values like this. A device's memory is planned, so such a cache gets
a capacity, and its length becomes an input and an output of its own. The real part of the input is a Slice
with a computed end, which `builder.importer.bounded` follows through the graph. Promises a model whose caches
have fixed shapes, so that a device can keep them as states, and which computes the same as long as the length
stays within the capacity. Leaves refusing a step beyond it to `agent.runtime.state`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import onnx
from numpy.typing import ArrayLike
from onnx import TensorProto, helper, numpy_helper

from builder.errors import ModelError, ShapeError
from builder.importer.bounded_shapes import Bounds, Parsed
from builder.importer.cache_length import length_input, length_state
from builder.importer.control_flow import rename
from builder.importer.input_shapes import SHAPES_HINT, VALUES_HINT
from builder.importer.model_file import read_model
from builder.importer.onnx_graph import remove_dead_nodes
from builder.importer.onnx_import import ImportedModel, import_onnx
from builder.importer.relax_module import to_relax
from builder.importer.state_patterns import expand_states

# Since opset 13, Slice and Squeeze take what they need as inputs.
OLDEST: Final = 13
_NUMBER: Final = re.compile("[0-9]{1,9}")
_HINT: Final = (
    'write --state "past_key_values.*:present.*" --input-shapes "input_ids:[1,1] '
    'past_key_values.0.key:[1,8,0..255,64]", with the names and sizes of your model'
)


@dataclass(frozen=True, slots=True)
class Cache:
    """A cache that grows.

    `shape`: the input's shape, with the capacity.
    `steps`: by how much a run makes it longer; None if the model's file does not say.
    """

    input: str
    output: str
    axis: int
    shape: tuple[int, ...]
    steps: int | None


@dataclass(frozen=True, slots=True)
class Growth:
    """What grows in a model, and the shapes of all that does not.

    `caches`: at least one; all have the same length.
    `shapes`: input name -> shape, of the other inputs that the user gave one.
    `sizes`: symbol in the model's file -> its size.
    `symbols`: symbols that stand for the length of the caches before a run.
    """

    caches: tuple[Cache, ...]
    capacity: int
    shapes: Mapping[str, tuple[int, ...]]
    sizes: Mapping[str, int]
    symbols: frozenset[str]


def find_growth(model: onnx.ModelProto, shapes: Parsed, states: Sequence[str]) -> Growth:
    """Find the caches among a model's states.

    `shapes`: what `parse_bounded_shapes` returned; bounds from 0 mark an axis that grows.
    `states`: each `INPUT:OUTPUT`.
    Raises `ShapeError` if bounds do not begin at 0, a shape does not fit, or the caches differ in length.
    """
    declared = {value.name: _dims(value) for value in model.graph.input}
    made = {value.name: _dims(value) for value in model.graph.output}
    sizes: dict[str, int] = {}
    symbols: set[str] = set()
    capacities: set[int] = set()
    for name, dims in shapes.items():
        known = declared.get(name)
        if known is None or len(known) != len(dims):
            expected = ", ".join(declared) if known is None else f"{len(known)} dimensions"
            raise ShapeError(
                f"input shapes: expected {expected[:200]}, got '{name[:80]}' with {len(dims)}",
                hint=SHAPES_HINT,
            )
        for dim, symbol in zip(dims, known, strict=True):
            if isinstance(dim, int) and isinstance(symbol, str):
                sizes[symbol] = dim
            if isinstance(dim, Bounds):
                if dim.low:
                    raise ShapeError(
                        f"input '{name}': expected bounds from 0 beside a state, got {dim.low}..{dim.high}",
                        hint=_HINT,
                    )
                capacities.add(dim.high)
                symbols |= {each for each in (dim.name, symbol) if isinstance(each, str) and each}
    if len(capacities) != 1:
        raise ShapeError(f"expected one largest length of all caches, got {sorted(capacities)}", hint=_HINT)
    [capacity] = capacities
    caches = []
    for state in states:
        pair = next(((a, b) for a in declared for b in made if state == f"{a}:{b}"), None)
        if pair is None:
            continue
        wanted: tuple[object, ...] = shapes.get(pair[0]) or declared[pair[0]]
        axes = [axis for axis, dim in enumerate(wanted) if isinstance(dim, Bounds) or dim in symbols]
        if not axes:
            continue
        extents = [capacity if axis in axes else _size(dim, sizes) for axis, dim in enumerate(wanted)]
        if len(axes) > 1 or None in extents:
            raise ShapeError(
                f"input '{pair[0]}': expected one axis that grows, and sizes of the others", hint=_HINT
            )
        after = made[pair[1]][axes[0]] if axes[0] < len(made[pair[1]]) else None
        shape = tuple(extent for extent in extents if extent is not None)
        caches.append(Cache(*pair, axes[0], shape, _steps(after, sizes, symbols)))
    if not caches:
        raise ShapeError("expected a state whose input has bounds from 0, got none", hint=_HINT)
    grown = {cache.input for cache in caches}
    fixed = {
        name: tuple(dim for dim in dims if isinstance(dim, int))
        for name, dims in shapes.items()
        if name not in grown
    }
    return Growth(tuple(caches), capacity, fixed, sizes, frozenset(symbols))


def _dims(value: onnx.ValueInfoProto) -> tuple[int | str | None, ...]:
    return tuple(
        dim.dim_value if dim.HasField("dim_value") else (dim.dim_param or None)
        for dim in value.type.tensor_type.shape.dim
    )


def _size(dim: object, sizes: Mapping[str, int]) -> int | None:
    return dim if isinstance(dim, int) else sizes.get(dim) if isinstance(dim, str) else None


def _steps(dim: object, sizes: Mapping[str, int], symbols: set[str] | frozenset[str]) -> int | None:
    """Return n of a dimension such as `past + n`; None for any other."""
    if not isinstance(dim, str):
        return None
    terms = [term.strip() for term in dim.split("+")]
    others = [term for term in terms if term not in symbols]
    numbers = [int(term) if _NUMBER.fullmatch(term) else sizes.get(term) for term in others]
    if len(others) != len(terms) - 1 or None in numbers:
        return None
    return sum(number for number in numbers if number is not None)


def grow(model: onnx.ModelProto, growth: Growth, values: Mapping[str, ArrayLike]) -> dict[str, ArrayLike]:
    """Give the caches of a model a capacity, in place.

    `values`: inputs that become constants. One that fills a tensor as long as the caches after a run, such as
        an attention mask of ones, is written into the model.
    Raises `ModelError` if the model's opset is too old.
    Raises `ShapeError` if the length of an input is not known.
    """
    opset = next((each.version for each in model.opset_import if each.domain in ("", "ai.onnx")), 1)
    if opset < OLDEST:
        raise ModelError(
            f"a cache that grows: expected opset {OLDEST} or newer, got {opset}",
            hint=f"export it again with opset_version={OLDEST} or newer",
        )
    work = _Growing(model, growth)
    for cache in growth.caches:
        work.add(cache)
    rest = dict(values)
    for value in [value for value in model.graph.input if value.name in values]:
        if any(isinstance(dim, str) and dim not in growth.sizes for dim in _dims(value)):
            work.fill(value, rest.pop(value.name))
    grown = {cache.input for cache in growth.caches}
    for value in model.graph.input:
        if value.name not in grown and any(
            _steps(dim, growth.sizes, growth.symbols) is not None for dim in _dims(value)
        ):
            raise ShapeError(
                f"input '{value.name}' grows with the caches: expected a value to fill it, got none",
                hint=f"for an attention mask, --input-values {value.name}=1",
            )
    work.finish()
    return rest


class _Growing:
    """The nodes that are put before and behind those of a model."""

    def __init__(self, model: onnx.ModelProto, growth: Growth) -> None:
        self._graph = model.graph
        self._growth = growth
        self._before: list[onnx.NodeProto] = []
        self._behind: list[onnx.NodeProto] = []
        self._length = length_input(growth.capacity)
        self._names: dict[str, str] = {}

    def add(self, cache: Cache) -> None:
        """Give one cache its capacity."""
        real, grown = f"{cache.input}/real", f"{cache.output}/grown"
        zero, axis = self._ints(0), self._ints(cache.axis)
        self._names |= {cache.input: real, cache.output: grown}
        self._before.append(helper.make_node("Slice", [cache.input, zero, self._length, axis], [real]))
        capacity = self._ints(self._growth.capacity)
        self._behind.append(helper.make_node("Slice", [grown, zero, capacity, axis], [cache.output]))
        for value in self._graph.input:
            if value.name == cache.input:
                elem_type = value.type.tensor_type.elem_type
                value.CopyFrom(helper.make_tensor_value_info(value.name, elem_type, cache.shape))

    def fill(self, value: onnx.ValueInfoProto, number: ArrayLike) -> None:
        """Write an input that is as long as the caches after a run into the model."""
        dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        if np.ndim(number) or isinstance(number, str):
            raise ShapeError(
                f"input '{value.name}': expected one number to fill it, got {number!r:.60}", hint=VALUES_HINT
            )
        growth = self._growth
        parts = []
        for dim in _dims(value):
            size = _size(dim, growth.sizes)
            if size is not None:
                parts.append(self._ints(size))
                continue
            steps = _steps(dim, growth.sizes, growth.symbols)
            steps = growth.caches[0].steps if steps is None else steps
            if steps is None:
                raise ShapeError(
                    f"input '{value.name}': its length is not known",
                    hint=f"name the length of '{growth.caches[0].output}' `past + steps` at the export",
                )
            dims, past, total = (f"{value.name}/{name}" for name in ("dims", "past", "total"))
            cache = growth.caches[0]
            self._before += [
                helper.make_node("Shape", [f"{cache.input}/real"], [dims]),
                helper.make_node("Gather", [dims, self._ints(cache.axis)], [past], axis=0),
                helper.make_node("Add", [past, self._ints(steps)], [total]),
            ]
            parts.append(total)
        shape = f"{value.name}/shape"
        self._before.append(helper.make_node("Concat", parts, [shape], axis=0))
        filled = numpy_helper.from_array(np.full(1, number).astype(dtype))
        self._before.append(helper.make_node("ConstantOfShape", [shape], [value.name], value=filled))
        self._graph.input.remove(value)

    def finish(self) -> None:
        """Put the new nodes in their places."""
        for node in self._graph.node:
            rename(node, self._names)
        first = self._growth.caches[0]
        after = f"{self._length}/next"
        dims = f"{first.output}/dims"
        self._behind.append(helper.make_node("Shape", [f"{first.output}/grown"], [dims]))
        self._behind.append(helper.make_node("Gather", [dims, self._ints(first.axis)], [after], axis=0))
        nodes = [*self._before, *self._graph.node, *self._behind]
        copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del self._graph.node[:]
        self._graph.node.extend(copies)
        del self._graph.value_info[:]
        self._graph.input.append(helper.make_tensor_value_info(self._length, TensorProto.INT64, [1]))
        self._graph.output.append(helper.make_tensor_value_info(after, TensorProto.INT64, [1]))

    def _ints(self, number: int) -> str:
        name = f"edgebundle/cache/number/{number}"
        if all(tensor.name != name for tensor in self._graph.initializer):
            self._graph.initializer.append(numpy_helper.from_array(np.array([number]), name))
        return name


def load_growing(
    path: str | os.PathLike[str],
    shapes: Parsed,
    states: Sequence[str],
    values: Mapping[str, ArrayLike],
    progress: Callable[[str], None],
) -> tuple[ImportedModel, tuple[str, ...]]:
    """Import a model with caches that grow.

    Parameters
    ----------
    path
        An ONNX file.
    shapes
        What `parse_bounded_shapes` returned.
    states
        As `expand_states` takes them.
    values, progress
        As in `import_onnx`.

    Returns
    -------
    ImportedModel, tuple
        The model, and its states as `builder.compiling.states` takes them.

    Raises
    ------
    InputFault
        If an argument does not fit, or the model cannot be imported.
    """
    file = read_model(Path(path))
    graph = file.model.graph
    named = expand_states(states, [v.name for v in graph.input], [v.name for v in graph.output])
    growth = find_growth(file.model, shapes, named)
    rest = grow(file.model, growth, values)
    model = import_onnx(file.model, input_shapes=growth.shapes, input_values=rest, progress=progress)
    model = without_lengths(model, [cache.output for cache in growth.caches])
    model = replace(model, source_sha256=file.sha256, name=Path(path).stem)
    return model, (*named, length_state(growth.capacity))


def without_lengths(model: ImportedModel, outputs: Sequence[str]) -> ImportedModel:
    """Return a model whose caches, the named outputs, are whole: their lengths are no outputs.

    The file's caches are as long as their contents, so the file cannot judge it.
    """
    counts = {length.count for length in model.lengths if length.output in outputs}
    copy = onnx.ModelProto()
    copy.CopyFrom(model.onnx)
    for value in [value for value in copy.graph.output if value.name in counts]:
        copy.graph.output.remove(value)
    remove_dead_nodes(copy.graph)
    relax = to_relax(copy)
    lengths = tuple(length for length in model.lengths if length.count not in counts)
    return replace(model, mod=relax.mod, outputs=relax.outputs, onnx=copy, lengths=lengths, original=None)
