"""Labels that are strings become numbers, and their names a table; ZipMap is left out.

A kernel has no strings, and a device needs none: the bundle has a file of labels. So a string is replaced
by its place in a table, from the node that makes it to the output, and the model's outputs are integers. A
ZipMap makes a list of dictionaries from the scores of the classes: the scores themselves become the output,
under the same name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from builder.errors import ModelError
from builder.importer.classic.ensemble import attribute
from builder.importer.model_path import EXPORT_HINT
from builder.importer.onnx_graph import copy_node, set_attributes

Table = tuple[str, ...]

_DOMAIN: Final = "ai.onnx.ml"
# Classifier -> its attribute for labels that are integers.
_CLASSIFIERS: Final[Mapping[str, str]] = {
    "LinearClassifier": "classlabels_ints",
    "SVMClassifier": "classlabels_ints",
    "TreeEnsembleClassifier": "classlabels_int64s",
}
# Their last output is scores.
_SCORERS: Final = frozenset({*_CLASSIFIERS, "LinearRegressor", "SVMRegressor", "TreeEnsembleRegressor"})
# Operators that move the elements of their first input.
_MOVES: Final = frozenset(
    {"ArrayFeatureExtractor", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Squeeze", "Transpose",
     "Unsqueeze"}
)  # fmt: skip
# A bundle's file of labels is limited to a megabyte; no classifier has more classes.
MAX_LABELS: Final = 1 << 16
MAX_LABEL_BYTES: Final = 256
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f\u2028\u2029]")


def replace_strings(model: onnx.ModelProto) -> Mapping[str, Table]:
    """Replace ZipMaps and strings, in place.

    Result: output -> the labels that its numbers stand for, for each output that was a tensor of strings.
    """
    graph = model.graph
    _drop_zip_maps(graph)
    tables: dict[str, Table] = {}
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.STRING:
            tables[tensor.name] = table_of(tensor.string_data)
            _number(tensor)
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        _replace(node, tables)
        if node.op_type == "Concat" and all(name in tables for name in node.input):
            nodes += _of_one_table(node, tables)
        nodes.append(copy_node(node))
    del graph.node[:]
    graph.node.extend(nodes)
    _declare_scores(graph)
    labels = {}
    for output in graph.output:
        found = tables.get(output.name)
        tensor = output.type.tensor_type
        if found is not None and tensor.elem_type == TensorProto.STRING:
            tensor.elem_type = TensorProto.INT64
            labels[output.name] = found
    return labels


def _drop_zip_maps(graph: onnx.GraphProto) -> None:
    """Let each output of a ZipMap be the tensor that it reads."""
    outputs = {output.name: output for output in graph.output}
    for node in graph.node:
        if node.op_type != "ZipMap" or node.domain != _DOMAIN:
            continue
        output = outputs.get(node.output[0])
        if output is not None:
            output.CopyFrom(helper.make_tensor_value_info(output.name, TensorProto.FLOAT, None))
        identity = helper.make_node("Identity", [node.input[0]], [node.output[0]], name=node.name)
        node.CopyFrom(identity)


def _declare_scores(graph: onnx.GraphProto) -> None:
    """Declare outputs that are scores as float32, which ONNX defines, whatever the features are.

    For a data frame, whose columns are float64, skl2onnx declares float64; ONNX Runtime refuses such a file.
    """
    scores: set[str] = set()
    for node in graph.node:
        if node.domain == _DOMAIN and node.op_type in _SCORERS:
            scores.add(node.output[-1])
        elif node.op_type in _MOVES and node.input and node.input[0] in scores:
            scores.add(node.output[0])
    for output in graph.output:
        tensor = output.type.tensor_type
        if output.name in scores and tensor.elem_type == TensorProto.DOUBLE:
            tensor.elem_type = TensorProto.FLOAT


def _replace(node: onnx.NodeProto, tables: dict[str, Table]) -> None:
    """Replace the strings that a node makes or moves."""
    if node.domain == _DOMAIN and node.op_type in _CLASSIFIERS:
        found = attribute(node, "classlabels_strings")
        if found is not None and found.strings:
            tables[node.output[0]] = table_of(found.strings)
            count = len(found.strings)
            set_attributes(node, ["classlabels_strings"], {_CLASSIFIERS[node.op_type]: list(range(count))})
    elif node.op_type == "Constant" and not node.domain:
        _replace_constant(node, tables)
    elif node.domain == _DOMAIN and node.op_type == "LabelEncoder":
        _replace_encoder(node, tables)
    elif node.input and node.input[0] in tables:
        if node.op_type in _MOVES:
            tables[node.output[0]] = tables[node.input[0]]
        elif node.op_type == "Cast" and node.attribute and node.attribute[0].i == TensorProto.STRING:
            identity = helper.make_node("Identity", [node.input[0]], [node.output[0]], name=node.name)
            node.CopyFrom(identity)
            tables[node.output[0]] = tables[node.input[0]]


def _of_one_table(node: onnx.NodeProto, tables: dict[str, Table]) -> list[onnx.NodeProto]:
    """Let all that a Concat reads be places in the same table; return the nodes that this needs before it."""
    joined = tuple(dict.fromkeys(text for name in node.input for text in tables[name]))
    tables[node.output[0]] = joined
    added = []
    for place, name in enumerate(node.input):
        own = tables[name]
        if own == joined[: len(own)]:
            continue
        moved, numbers = (f"{node.output[0]}/{place}/{kind}" for kind in ("moved", "places"))
        added += [
            helper.make_node("Constant", [], [numbers], value_ints=[joined.index(text) for text in own]),
            helper.make_node("Gather", [numbers, name], [moved], name=moved),
        ]
        node.input[place] = moved
    return added


def _replace_constant(node: onnx.NodeProto, tables: dict[str, Table]) -> None:
    found = attribute(node, "value")
    if found is not None and found.t.data_type == TensorProto.STRING:
        tables[node.output[0]] = table_of(found.t.string_data)
        _number(found.t)
        return
    found = attribute(node, "value_strings")
    if found is not None and found.strings:
        tables[node.output[0]] = table_of(found.strings)
        set_attributes(node, ["value_strings"], {"value_ints": list(range(len(found.strings)))})


def _replace_encoder(node: onnx.NodeProto, tables: dict[str, Table]) -> None:
    """Replace the strings among a LabelEncoder's keys and values."""
    keys, values = strings_of(node, "keys"), strings_of(node, "values")
    if keys is not None:
        source = tables.get(node.input[0])
        if source is None:
            return
        places = {name: place for place, name in enumerate(source)}
        # A key that is in no table is never asked for; it gets a number that no element has.
        numbers = [places.get(key, len(source) + place) for place, key in enumerate(keys)]
        set_attributes(node, ["keys_strings", "keys_tensor"], {"keys_int64s": numbers})
    if values is not None:
        default = attribute(node, "default_string")
        tensor = attribute(node, "default_tensor")
        unknown = "_Unused"
        if default is not None:
            unknown = _text(default.s)
        elif tensor is not None and tensor.t.data_type == TensorProto.STRING and tensor.t.string_data:
            unknown = _text(tensor.t.string_data[0])
        table = tuple(dict.fromkeys([*values, unknown]))
        places = {name: place for place, name in enumerate(table)}
        set_attributes(
            node,
            ["values_strings", "values_tensor", "default_string", "default_tensor"],
            {"values_int64s": [places[value] for value in values], "default_int64": places[unknown]},
        )
        tables[node.output[0]] = table


def strings_of(node: onnx.NodeProto, side: str) -> Table | None:
    """Return the strings that are an encoder's keys or values, None if those are numbers."""
    listed = attribute(node, f"{side}_strings")
    if listed is not None and listed.strings:
        return table_of(listed.strings)
    tensor = attribute(node, f"{side}_tensor")
    if tensor is not None and tensor.t.data_type == TensorProto.STRING:
        return table_of(tensor.t.string_data)
    return None


def _number(tensor: onnx.TensorProto) -> None:
    """Replace strings by 0, 1, 2 ..."""
    shape = list(tensor.dims)
    count = int(np.prod(shape, dtype=np.int64))
    if count != len(tensor.string_data):
        raise ModelError(
            f"weight '{tensor.name}': expected {count} strings, got {len(tensor.string_data)}",
            hint=f"{EXPORT_HINT}: the file is damaged",
        )
    tensor.CopyFrom(numpy_helper.from_array(np.arange(count, dtype=np.int64).reshape(shape), tensor.name))


def table_of(raw: Sequence[bytes]) -> Table:
    """Decode a list of texts."""
    if len(raw) > MAX_LABELS:
        raise ModelError(
            f"expected at most {MAX_LABELS} labels, got {len(raw)}",
            hint="map the labels to numbers before the training",
        )
    return tuple(_text(one) for one in raw)


def _text(raw: bytes) -> str:
    try:
        found = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(
            "expected labels in UTF-8, got other bytes",
            hint="give the classes names in UTF-8, or numbers, before the training",
        ) from error
    if len(raw) > MAX_LABEL_BYTES or _CONTROL.search(found):
        raise ModelError(
            f"expected labels of at most {MAX_LABEL_BYTES} bytes, without control characters, "
            f"got {found!r:.80}",
            hint="give the classes shorter names, or numbers, before the training",
        )
    return found
