"""What ai.onnx.ml does to features before a model sees them: scale, fill in, encode, choose, join.

Source: ONNX operator specification, ai.onnx.ml-5; where it is silent, the rules are ONNX Runtime's.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from builder.importer.onnx_graph import OnnxGraph, attributes
from builder.importer.rewrites.layout import concat_without_empty
from builder.importer.rewrites.replacement import Nodes, Replacement

# An encoder compares each element with each key, unless the keys are consecutive.
MAX_KEYS: Final = 1 << 16
# Fewer products than this are computed one by one; factors of one product.
LEAST_PRODUCTS: Final = 4
MAX_DEGREE: Final = 16
# A declared width is completed with zeros, so a file could ask for any number of them.
MAX_WIDTH: Final = 1 << 20


def scaler(new: Replacement) -> Nodes | None:
    """(x - offset) * scale, in float32; doubles are rounded at the end."""
    found = new.type_of(new.inputs[0])
    given = new.attributes
    dtype = np.float64 if found.dtype == np.float64 else np.float32
    x = new.inputs[0] if found.dtype == dtype else new.cast(new.inputs[0], TensorProto.FLOAT)
    shifted = new.op("Sub", x, new.constant(given.get("offset") or [0.0], dtype))
    scale = new.constant(given.get("scale") or [1.0], dtype)
    if dtype == np.float64:
        new.cast(new.op("Mul", shifted, scale), TensorProto.FLOAT, to=new.outputs[0])
    else:
        new.op("Mul", shifted, scale, to=new.outputs[0])
    return new.nodes


def normalizer(new: Replacement) -> Nodes | None:
    """Each sample divided by its largest value, or by its L1 or L2 norm; zeros stay zeros."""
    found = new.type_of(new.inputs[0])
    if found.shape is None:
        return None
    x = new.inputs[0] if found.dtype == np.float32 else new.cast(new.inputs[0], TensorProto.FLOAT)
    axis = [len(found.shape) - 1]
    operator = {"MAX": "ReduceMax", "L1": "ReduceL1", "L2": "ReduceL2"}[new.attributes.get("norm", "MAX")]
    norm = new.reduce(operator, x, axis, keep=True)
    zero = new.op("Equal", norm, new.constant(0, np.float32))
    divisor = new.op("Where", zero, new.constant(1, np.float32), norm)
    return new.result("Div", x, divisor)


def imputer(new: Replacement) -> Nodes | None:
    """Values in place of those that are missing, which are NaN or a given number."""
    found = new.type_of(new.inputs[0])
    given = new.attributes
    whole = found.dtype.kind in "iu"
    kind = "int64" if whole else "float"
    values, missing = given.get(f"imputed_value_{kind}s"), given.get(f"replaced_value_{kind}", 0)
    if not values:
        return None
    x = new.inputs[0]
    if not whole and math.isnan(missing):
        absent = new.op("IsNaN", x)
    else:
        absent = new.op("Equal", x, new.constant(missing, found.dtype))
    return new.result("Where", absent, new.constant(values, found.dtype), x)


def binarizer(new: Replacement) -> Nodes | None:
    """1 for what is above a threshold, else 0."""
    found = new.type_of(new.inputs[0])
    threshold = new.constant(new.attributes.get("threshold", 0.0), found.dtype)
    return new.cast_result(new.op("Greater", new.inputs[0], threshold), found.elem_type)


def feature_vectorizer(new: Replacement) -> Nodes | None:
    """Join features; each input is cut to its declared width, or completed with zeros."""
    widths = new.attributes.get("inputdimensions", [])
    if len(widths) != len(new.inputs):
        return None
    parts = []
    for name, width in zip(new.inputs, widths, strict=True):
        shape = new.graph.shape_of(name)
        if not shape or not 1 <= width <= MAX_WIDTH:
            return None
        samples, own = shape[0], math.prod(shape[1:])
        part = new.op("Reshape", new.cast(name, TensorProto.FLOAT), new.ints(samples, own))
        if own > width:
            part = new.op("Slice", part, new.ints(0), new.ints(width), new.ints(1))
        parts.append(part)
        if own < width:
            parts.append(new.constant(np.zeros((samples, width - own)), np.float32))
    return new.result("Concat", *parts, axis=1)


def one_hot_encoder(new: Replacement) -> Nodes | None:
    """1 at the place of a category, 0 elsewhere; a category that is not listed is all zeros."""
    categories = new.attributes.get("cats_int64s")
    shape = new.shape_of(new.inputs[0])
    if not categories:
        return None
    whole = new.cast(new.inputs[0], TensorProto.INT64)
    each = new.op("Unsqueeze", whole, new.ints(len(shape)))
    return new.cast_result(new.op("Equal", each, new.ints(*categories)), TensorProto.FLOAT)


def array_feature_extractor(new: Replacement) -> Nodes | None:
    """Choose features, along the last axis."""
    shape, places = new.graph.shape_of(new.inputs[0]), new.shape_of(new.inputs[1])
    if not shape:
        return None
    count = math.prod(places)
    known = new.graph.constant(new.inputs[1])
    if known is None:
        indices = new.op("Reshape", new.inputs[1], new.ints(count))
    else:
        indices = new.ints(*known.reshape(-1).tolist())
    if len(shape) == 1:
        chosen = new.op("Gather", new.inputs[0], indices, axis=0)
        new.op("Reshape", chosen, new.ints(1, count), to=new.outputs[0])
    else:
        new.op("Gather", new.inputs[0], indices, to=new.outputs[0], axis=len(shape) - 1)
    return new.nodes


def concat(new: Replacement) -> Nodes | None:
    """Concat; products of features, which skl2onnx writes one by one, are computed together."""
    return _products(new) or concat_without_empty(new)


def _products(new: Replacement) -> Nodes | None:
    """Replace products of the same features by one product of gathered features.

    PolynomialFeatures of 10 features and degree 2 has 65 products; each would be a kernel.
    """
    if int(new.attributes.get("axis", 0)) != 1:
        return None
    found = [_factors(name, new.graph) for name in new.inputs]
    sources = {source for source, _ in filter(None, found)}
    columns = sum(len(factors) for _, factors in filter(None, found))
    degree = max((len(one) for _, factors in filter(None, found) for one in factors), default=0)
    if len(sources) != 1 or columns < LEAST_PRODUCTS or degree < 2:
        return None
    source = next(iter(sources))
    known = new.type_of(source)
    if known.static_shape is None or len(known.static_shape) != 2:
        return None
    samples, features = known.static_shape
    # Terms of a lower degree are multiplied by a feature that is 1.
    ones = new.constant(np.ones((samples, 1)), known.dtype)
    extended = new.op("Concat", source, ones, axis=1)
    parts: list[str] = []
    run: list[list[int]] = []

    def finish() -> None:
        if run:
            gathered = [
                new.op(
                    "Gather",
                    extended,
                    new.ints(*(one[k] if k < len(one) else features for one in run)),
                    axis=1,
                )
                for k in range(degree)
            ]
            product = gathered[0]
            for factor in gathered[1:]:
                product = new.op("Mul", product, factor)
            parts.append(product)
            run.clear()

    for name, factors in zip(new.inputs, found, strict=True):
        if factors is None:
            finish()
            parts.append(name)
        else:
            run.extend(factors[1])
    finish()
    return new.result(
        "Concat" if len(parts) > 1 else "Identity", *parts, **{"axis": 1} if len(parts) > 1 else {}
    )


def _factors(name: str, graph: OnnxGraph) -> tuple[str, list[list[int]]] | None:
    """Return the columns of a value as products of columns of another value; None if it is anything else."""
    maker = graph.maker_of(name)
    if maker is None or maker.domain:
        return None
    if maker.op_type == "ReduceProd":
        given = attributes(maker)
        axes = given.get("axes")
        if axes is None and len(maker.input) > 1:
            constant = graph.constant(maker.input[1])
            axes = None if constant is None else constant.reshape(-1).tolist()
        inner = _factors(maker.input[0], graph)
        if inner is None or axes not in ([1], [-1]) or not given.get("keepdims", 1):
            return None
        source, columns = inner
        if any(len(one) > 1 for one in columns) or len(columns) > MAX_DEGREE:
            return None
        return source, [[one[0] for one in columns]]
    if maker.op_type == "Slice":
        return _sliced(maker, graph)
    if maker.op_type != "Gather" or int(attributes(maker).get("axis", 0)) not in (1, -1):
        return None
    places, shape = graph.constant(maker.input[1]), graph.shape_of(maker.input[0])
    if places is None or places.ndim != 1 or shape is None or len(shape) != 2:
        return None
    return maker.input[0], [[int(place) % shape[1]] for place in places]


def _sliced(maker: onnx.NodeProto, graph: OnnxGraph) -> tuple[str, list[list[int]]] | None:
    """Return the columns that a Slice keeps; None if it is along another axis."""
    shape = graph.shape_of(maker.input[0])
    bounds = [graph.constant(name) for name in maker.input[1:4]]
    if shape is None or len(shape) != 2 or len(bounds) != 3 or len(maker.input) != 4:
        return None
    first, last, axis = (None if one is None or one.size != 1 else int(one.reshape(())) for one in bounds)
    if first is None or last is None or axis not in (1, -1):
        return None
    return maker.input[0], [[column] for column in range(shape[1])[first:last]]


def label_encoder(new: Replacement) -> Nodes | None:
    """A number for each number; another number for those that are not listed."""
    found = new.type_of(new.inputs[0])
    table = encoder_table(new.node)
    if found.static_shape is None or table is None:
        return None
    keys, values, default = table
    if keys.size > MAX_KEYS or keys.dtype != found.dtype or not keys.size:
        return None
    shape = found.static_shape
    if keys.dtype.kind in "iu" and np.array_equal(keys, np.arange(keys.size) + keys[0]):
        place = new.op("Sub", new.inputs[0], new.constant(keys[0], keys.dtype))
        # ONNX's clip of indices is for wrong requests; here, what is outside gets the default.
        below = new.op("Less", place, new.constant(0, keys.dtype))
        above = new.op("Greater", place, new.constant(keys.size - 1, keys.dtype))
        unknown = new.op("Or", below, above)
        place = new.op("Where", unknown, new.constant(0, keys.dtype), place)
    else:
        each = new.op("Unsqueeze", new.inputs[0], new.ints(len(shape)))
        same = new.op("Equal", each, new.constant(keys, keys.dtype))
        if keys.dtype.kind == "f" and np.isnan(keys).any():
            is_nan = new.constant(np.isnan(keys), np.bool_)
            same = new.op("Or", same, new.op("And", new.op("IsNaN", each), is_nan))
        matches = new.cast(same, TensorProto.FLOAT)
        best = new.reduce("ReduceMax", matches, [len(shape)], keep=False)
        unknown = new.op("Equal", best, new.constant(0, np.float32))
        place = new.op("ArgMax", matches, axis=len(shape), keepdims=0)
    chosen = new.op("Gather", new.constant(values, values.dtype), place, axis=0)
    return new.result("Where", unknown, new.constant(default, values.dtype), chosen)


def encoder_table(node: onnx.NodeProto) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]] | None:
    """Return a LabelEncoder's keys, its values and its default; None if some are strings or missing."""
    given = attributes(node)
    found: dict[str, NDArray[Any]] = {}
    defaults = {"int64": np.array(-1, np.int64), "float": np.array(-0.0, np.float32)}
    for side in ("keys", "values"):
        tensor = given.get(f"{side}_tensor")
        if tensor is not None:
            if tensor.data_type == TensorProto.STRING:
                return None
            found[side] = np.asarray(numpy_helper.to_array(tensor)).reshape(-1)
        elif f"{side}_int64s" in given:
            found[side] = np.array(given[f"{side}_int64s"], np.int64)
        elif f"{side}_floats" in given:
            found[side] = np.array(given[f"{side}_floats"], np.float32)
        else:
            return None
    keys, values = found["keys"], found["values"]
    if keys.size != values.size:
        return None
    tensor = given.get("default_tensor")
    if tensor is not None and tensor.data_type != TensorProto.STRING:
        return keys, values, np.asarray(numpy_helper.to_array(tensor)).reshape(())
    kind = "int64" if values.dtype.kind in "iu" else "float"
    return keys, values, np.asarray(given.get(f"default_{kind}", defaults[kind])).astype(values.dtype)
