"""Inputs that are strings become places in tables of texts, one table for each column.

A device's kernels have no strings, so a row's text is replaced by its place before the model sees it: the
bundle declares the texts. Promises this only where every way from the input ends at an encoder that lists its
texts; any other model keeps its strings, and is refused as before. Leaves outputs that are strings to
`builder.importer.classic.strings`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import onnx
from onnx import TensorProto, numpy_helper

from builder.importer.classic.ensemble import attribute
from builder.importer.classic.strings import strings_of, table_of
from builder.importer.onnx_graph import set_attributes

_DOMAIN: Final = "ai.onnx.ml"
# These keep the order of the columns, as they are used on tables.
_KEEPS: Final = frozenset({"Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze"})
_MAX_COLUMNS: Final = 1 << 12

# An input's name, and the place of a column in it.
_Column: TypeAlias = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Texts:
    """The texts of one column.

    Attributes
    ----------
    categories
        Those that an encoder knows; the model gets the place of one.
    unknown
        What the model gets for any other: -1, which no encoder lists, or None if the model refuses others.
    """

    categories: tuple[str, ...]
    unknown: int | None


def replace_string_inputs(model: onnx.ModelProto) -> Mapping[str, tuple[Texts, ...]]:
    """Let inputs that are strings be whole numbers, in place, if the model only encodes them.

    Result: input -> the texts of each of its columns; empty if no input has strings, or more is done with
        one.
    Raises `ModelError` if a text is not UTF-8, is too long, or there are too many.
    """
    graph = model.graph
    weights = {tensor.name for tensor in graph.initializer}
    inputs = [
        value
        for value in graph.input
        if value.name not in weights and value.type.tensor_type.elem_type == TensorProto.STRING
    ]
    widths = {value.name: _width(value) for value in inputs}
    if not inputs or not all(0 < width <= _MAX_COLUMNS for width in widths.values()):
        return {}
    tables = _Tables(widths)
    encoders = _encoders(graph, tables)
    if encoders is None:
        return {}
    for node, column in encoders:
        _renumber(node, tables.of(column))
    for value in inputs:
        value.type.tensor_type.elem_type = TensorProto.INT64
    return {
        name: tuple(
            Texts(tuple(tables.of((name, place))), tables.unknown((name, place))) for place in range(n)
        )
        for name, n in widths.items()
    }


class _Tables:
    """The texts of columns; columns that one encoder reads together have one table."""

    def __init__(self, widths: Mapping[str, int]) -> None:
        columns = [(name, place) for name, width in widths.items() for place in range(width)]
        self._parent = {column: column for column in columns}
        self._texts: dict[_Column, dict[str, int]] = {column: {} for column in columns}
        self._strict: set[_Column] = set()

    def add(self, columns: Sequence[_Column], texts: Sequence[str], *, strict: bool) -> None:
        """Add the texts of an encoder; a strict one refuses others."""
        first = self._root(columns[0])
        for column in columns[1:]:
            root = self._root(column)
            if root != first:
                self._parent[root] = first
                texts = [*self._texts.pop(root), *texts]
                if root in self._strict:
                    self._strict.add(first)
        table = self._texts[first]
        for text in texts:
            table.setdefault(text, len(table))
        if strict:
            self._strict.add(first)

    def of(self, column: _Column) -> Mapping[str, int]:
        """Return the texts of a column and their places."""
        return self._texts[self._root(column)]

    def unknown(self, column: _Column) -> int | None:
        """Return what the model gets for another text, or None if it refuses one."""
        return None if self._root(column) in self._strict else -1

    def _root(self, column: _Column) -> _Column:
        while self._parent[column] != column:
            column = self._parent[column]
        return column


def _encoders(graph: onnx.GraphProto, tables: _Tables) -> list[tuple[onnx.NodeProto, _Column]] | None:
    """Return the encoders of strings, each with a column that it reads; None if others read strings, too."""
    held: dict[str, list[_Column]] = {}
    for column in tables._parent:
        held.setdefault(column[0], []).append(column)
    constants = {tensor.name: tensor for tensor in graph.initializer}
    constants |= {
        node.output[0]: found.t
        for node in graph.node
        if node.op_type == "Constant" and (found := attribute(node, "value")) is not None
    }
    encoders: list[tuple[onnx.NodeProto, _Column]] = []
    read: set[_Column] = set()
    for node in graph.node:
        columns = held.get(node.input[0]) if node.input else None
        if columns is None:
            if any(name in held for name in node.input):
                return None
            continue
        made: list[_Column] | None = None
        if not node.domain and node.op_type in _KEEPS:
            made = columns
        elif not node.domain and node.op_type == "Concat" and all(name in held for name in node.input):
            axis = attribute(node, "axis")
            made = [each for name in node.input for each in held[name]]
            if axis is None or axis.i not in (1, -1):
                return None
        elif (node.domain, node.op_type) == (_DOMAIN, "ArrayFeatureExtractor") or _gathers_columns(node):
            made = _chosen(columns, constants.get(node.input[1]))
        elif node.domain == _DOMAIN and node.op_type in ("OneHotEncoder", "LabelEncoder"):
            is_label = node.op_type == "LabelEncoder"
            found = strings_of(node, "keys") if is_label else _categories(node)
            zeros = attribute(node, "zeros")
            if not found:
                return None
            tables.add(columns, found, strict=not is_label and zeros is not None and zeros.i == 0)
            encoders.append((node, columns[0]))
            read.update(columns)
            continue
        if made is None:
            return None
        held[node.output[0]] = made
    outputs = {output.name for output in graph.output}
    return encoders if read == set(tables._parent) and outputs.isdisjoint(held) else None


def _chosen(columns: Sequence[_Column], places: onnx.TensorProto | None) -> list[_Column] | None:
    if places is None:
        return None
    chosen = [int(place) for place in numpy_helper.to_array(places).reshape(-1)]
    return [columns[place] for place in chosen] if all(0 <= p < len(columns) for p in chosen) else None


def _gathers_columns(node: onnx.NodeProto) -> bool:
    axis = attribute(node, "axis")
    return not node.domain and node.op_type == "Gather" and axis is not None and axis.i in (1, -1)


def _categories(node: onnx.NodeProto) -> Sequence[str] | None:
    found = attribute(node, "cats_strings")
    return None if found is None else table_of(found.strings)


def _renumber(node: onnx.NodeProto, places: Mapping[str, int]) -> None:
    """Let an encoder list the places of its texts."""
    if node.op_type == "OneHotEncoder":
        numbers = [places[text] for text in _categories(node) or ()]
        set_attributes(node, ["cats_strings"], {"cats_int64s": numbers})
        return
    numbers = [places[text] for text in strings_of(node, "keys") or ()]
    set_attributes(node, ["keys_strings", "keys_tensor"], {"keys_int64s": numbers})


def _width(value: onnx.ValueInfoProto) -> int:
    """Return how many columns an input has; 0 if it does not say."""
    dims = value.type.tensor_type.shape.dim
    if len(dims) == 1:
        return 1
    return dims[1].dim_value if len(dims) == 2 else 0
