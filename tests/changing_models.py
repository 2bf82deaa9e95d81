"""Small ONNX models whose dimensions change, for tests of buckets, and how to compile them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

if TYPE_CHECKING:
    from builder.bundles.package import Package

WIDTH, TOKENS = 4, 11


def _model(
    nodes: list[onnx.NodeProto],
    inputs: Sequence[tuple[str, int, Sequence[int | str]]],
    outputs: Sequence[tuple[str, int, Sequence[int | str]]],
    weights: dict[str, np.ndarray],
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "changing",
        [helper.make_tensor_value_info(*each) for each in inputs],
        [helper.make_tensor_value_info(*each) for each in outputs],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _random(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def attention(*, masked: bool = True) -> onnx.ModelProto:
    """Tokens attend to all tokens that the mask shows: `tokens` [batch, sequence, 4] and `first` [batch, 4].

    Inputs `ids` and `mask`, INT64 [batch, sequence]. Without `masked` there is no input `mask`.
    """
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["x"]),
        helper.make_node("MatMul", ["x", "wq"], ["q"]),
        helper.make_node("Transpose", ["x"], ["xt"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["q", "xt"], ["scores"]),
    ]
    weights = {"table": _random(TOKENS, WIDTH), "wq": _random(WIDTH, WIDTH)}
    if masked:
        weights |= {"one": np.array(1, np.float32), "low": np.array(-1e9, np.float32), "axis": np.array([1])}
        nodes += [
            helper.make_node("Cast", ["mask"], ["seen"], to=TensorProto.FLOAT),
            helper.make_node("Sub", ["one", "seen"], ["hidden"]),
            helper.make_node("Mul", ["hidden", "low"], ["bias"]),
            helper.make_node("Unsqueeze", ["bias", "axis"], ["row"]),
            helper.make_node("Add", ["scores", "row"], ["shown"]),
        ]
    nodes += [
        helper.make_node("Softmax", ["shown" if masked else "scores"], ["p"], axis=-1),
        helper.make_node("MatMul", ["p", "x"], ["tokens"]),
        helper.make_node("Gather", ["tokens", "zero"], ["first"], axis=1),
    ]
    weights["zero"] = np.array(0)
    shape = ("batch", "sequence")
    inputs = [("ids", TensorProto.INT64, shape)] + ([("mask", TensorProto.INT64, shape)] if masked else [])
    outputs = [("tokens", TensorProto.FLOAT, (*shape, WIDTH)), ("first", TensorProto.FLOAT, ("batch", WIDTH))]
    return _model(nodes, inputs, outputs, weights)


def rows() -> onnx.ModelProto:
    """A layer on each row of a batch: `x` [batch, 3] to `y` [batch, 2]."""
    return _model(
        [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])],
        [("x", TensorProto.FLOAT, ("batch", 3))],
        [("y", TensorProto.FLOAT, ("batch", 2))],
        {"w": _random(3, 2)},
    )


def centred_rows() -> onnx.ModelProto:
    """Rows less their mean over the batch: its rows see each other."""
    return _model(
        [
            helper.make_node("ReduceMean", ["x"], ["m"], axes=[0], keepdims=1),
            helper.make_node("Sub", ["x", "m"], ["y"]),
        ],
        [("x", TensorProto.FLOAT, ("batch", 3))],
        [("y", TensorProto.FLOAT, ("batch", 3))],
        {},
    )


def largest() -> onnx.ModelProto:
    """The maximum over a length, which zeros change only if all numbers are negative."""
    return _model(
        [helper.make_node("ReduceMax", ["x"], ["y"], axes=[1], keepdims=0)],
        [("x", TensorProto.FLOAT, (1, "length"))],
        [("y", TensorProto.FLOAT, (1,))],
        {},
    )


def frames() -> onnx.ModelProto:
    """A strided convolution without padding: `x` [1, 1, length] to `y` [1, 2, (length - 5) // 4 + 1]."""
    return _model(
        [helper.make_node("Conv", ["x", "w", "b"], ["y"], kernel_shape=[5], strides=[4])],
        [("x", TensorProto.FLOAT, (1, 1, "length"))],
        [("y", TensorProto.FLOAT, (1, 2, "frames"))],
        {"w": _random(2, 1, 5), "b": _random(2)},
    )


def smooth() -> onnx.ModelProto:
    """Two convolutions with a border: what is beyond the end of a length changes what is before it."""
    conv = {"kernel_shape": [3], "pads": [1, 1]}
    return _model(
        [
            helper.make_node("Conv", ["x", "w", "b"], ["h"], **conv),
            helper.make_node("Conv", ["h", "w", "b"], ["y"], **conv),
        ],
        [("x", TensorProto.FLOAT, (1, 1, "length"))],
        [("y", TensorProto.FLOAT, (1, 1, "length"))],
        {"w": _random(1, 1, 3), "b": np.array([0.7], np.float32)},
    )


def compiled(
    model: onnx.ModelProto,
    folder: Path,
    bounds: str,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Package:
    """Compile a model for this machine; the options are those of `builder.Options`."""
    from builder import Options, compile

    path = folder / "model.onnx"
    onnx.save(model, str(path))
    return compile(path, options=Options(input_shapes=bounds, **options), progress=progress)


def compiled_attention(folder: Path) -> Package:
    """Compile `attention` into four buckets; tokens are padded with 7."""
    return compiled(
        attention(),
        folder,
        "ids:[batch=1..3,sequence=1..16]",
        buckets={"batch": (1, 3), "sequence": (4, 16)},
        pad={"ids": ("constant", 7.0)},
    )
