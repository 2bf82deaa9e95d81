"""Normalisations of com.microsoft, with the additions that ONNX Runtime fuses into them.

Source: ONNX Runtime's operator documentation, ContribOperators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from numpy.typing import DTypeLike
from onnx import TensorProto, helper

from builder.importer.rewrites.replacement import Nodes, Replacement

# The defaults of ONNX Runtime's schemas.
_SKIP_EPSILON: Final = 1e-12
_EPSILON: Final = 1e-5


def layer_normalization(new: Replacement) -> Nodes | None:
    """LayerNormalization, which ONNX Runtime also writes into models older than ONNX's own."""
    options = {"axis": -1, "epsilon": _EPSILON, **new.attributes}
    return [
        helper.make_node(new.node.op_type, list(new.inputs), list(new.outputs), name=new.node.name, **options)
    ]


def rms(
    new: Replacement,
    x: str,
    scale: str,
    axes: Sequence[int],
    epsilon: float,
    dtype: DTypeLike,
    to: str = "",
    inverse: str = "",
) -> str:
    """Divide x by the root of its mean square over some axes, and multiply it by a scale.

    The value called `inverse`, if any, is the reciprocal of the root.
    """
    mean = new.reduce("ReduceMean", new.op("Mul", x, x), axes, keep=True)
    root = new.op("Sqrt", new.op("Add", mean, new.constant(epsilon, dtype)))
    if inverse:
        new.op("Reciprocal", root, to=inverse)
    return new.op("Mul", new.op("Div", x, root), scale, to=to)


def simplified_layer_normalization(new: Replacement) -> Nodes | None:
    """SimplifiedLayerNormalization: RMS normalisation from an axis on."""
    options = new.attributes
    found = new.type_of(new.inputs[0])
    if found.shape is None:
        return None
    rank = len(found.shape)
    axes = list(range(int(options.get("axis", -1)) % rank, rank))
    rms(
        new,
        new.inputs[0],
        new.inputs[1],
        axes,
        float(options.get("epsilon", _EPSILON)),
        found.dtype,
        new.outputs[0],
        new.output(1),
    )
    return new.nodes


def skip_layer_normalization(new: Replacement) -> Nodes | None:
    """SkipLayerNormalization of x, skip, gamma, beta, bias: LayerNormalization(x + skip + bias)."""
    if new.output(1) or new.output(2):
        return None
    total = _sum(new, new.input(4))
    gamma, beta = new.inputs[2], new.input(3)
    epsilon = float(new.attributes.get("epsilon", _SKIP_EPSILON))
    shift = [beta] if beta else []
    return new.result("LayerNormalization", total, gamma, *shift, axis=-1, epsilon=epsilon)


def skip_simplified_layer_normalization(new: Replacement) -> Nodes | None:
    """SkipSimplifiedLayerNormalization of x, skip, gamma, bias: the RMS normalisation of x + skip + bias."""
    found = new.type_of(new.inputs[0])
    if new.output(1) or new.output(2):
        return None
    total = _sum(new, new.input(3))
    epsilon = float(new.attributes.get("epsilon", _SKIP_EPSILON))
    rms(new, total, new.inputs[2], [-1], epsilon, found.dtype, new.outputs[0])
    return new.nodes


def _sum(new: Replacement, bias: str) -> str:
    """Add x, skip and bias, under the name of the output that returns it, if there is one."""
    wanted = new.output(3)
    total = new.op("Add", new.inputs[0], new.inputs[1], to="" if bias else wanted)
    return new.op("Add", total, bias, to=wanted) if bias else total


def embed_layer_normalization(new: Replacement) -> Nodes | None:
    """EmbedLayerNormalization: the sum of two or three embeddings, normalised; and how long each row is.

    Inputs: ids, segments, words, positions, segment table, gamma, beta, mask, position ids.
    """
    shape = new.shape_of(new.inputs[0])
    if len(shape) != 2:
        return None
    batch, length = shape
    ids, segments, words, positions, segment_table, gamma, beta = new.inputs[:7]
    total = new.op("Gather", words, ids, axis=0)
    if places := new.input(8):
        total = new.op("Add", total, new.op("Gather", positions, places, axis=0))
    else:
        bounds = [new.ints(value) for value in (0, length, 0)]
        total = new.op("Add", total, new.op("Slice", positions, *bounds))
    if segments:
        table = new.op("Gather", segment_table, segments, axis=0)
        total = new.op("Add", total, table)
    if wanted := new.output(2):
        total = new.op("Identity", total, to=wanted)
    epsilon = float(new.attributes.get("epsilon", _SKIP_EPSILON))
    new.op("LayerNormalization", total, gamma, beta, to=new.outputs[0], axis=-1, epsilon=epsilon)
    if lengths := new.output(1):
        if mask := new.input(7):
            ones = new.cast(new.op("Equal", mask, new.constant(1, "int32")), TensorProto.INT32)
            new.reduce("ReduceSum", ones, [1], keep=False, to=lengths)
        else:
            new.op("Expand", new.constant(0, "int32"), new.ints(batch), to=lengths)
    return new.nodes
