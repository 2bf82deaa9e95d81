"""Small models with a state, and what ONNX Runtime makes of them when it is called in a loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

WINDOW, HOP, RATE = 32, 16, 8000
STATES = ("h:hn",)

Array = np.ndarray[Any, Any]


def recurrent(values: int = 4, hidden: int = 8, classes: int = 1, seed: int = 0) -> onnx.ModelProto:
    """y = sigmoid(hn V), hn = tanh(x W + h U + b): inputs x, h; outputs y, hn."""
    rng = np.random.default_rng(seed)
    shapes = {"W": (values, hidden), "U": (hidden, hidden), "b": (1, hidden), "V": (hidden, classes)}
    weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    nodes = [
        helper.make_node("MatMul", ["x", "W"], ["xw"]),
        helper.make_node("MatMul", ["h", "U"], ["hu"]),
        helper.make_node("Add", ["xw", "hu"], ["sum"]),
        helper.make_node("Add", ["sum", "b"], ["biased"]),
        helper.make_node("Tanh", ["biased"], ["hn"]),
        helper.make_node("MatMul", ["hn", "V"], ["score"]),
        helper.make_node("Sigmoid", ["score"], ["y"]),
    ]

    def tensor(name: str, *shape: int) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    graph = helper.make_graph(
        nodes,
        "recurrent",
        [tensor("x", 1, values), tensor("h", 1, hidden)],
        [tensor("y", 1, classes), tensor("hn", 1, hidden)],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


def decoder(tokens: int = 11, width: int = 8, most: int = 32, seed: int = 0) -> onnx.ModelProto:
    """One layer of attention over all tokens so far, as a decoder is exported: its caches grow.

    Inputs `ids` [1, 1], `mask` [1, past + 1], `past.key` and `past.value` [1, past, width]; outputs `logits`
    [1, 1, tokens], `present.key` and `present.value` [1, past + 1, width].
    """
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]> decoder
        (int64[1,1] ids, int64[1,total] mask,
         float[1,past,{width}] past_key, float[1,past,{width}] past_value)
        => (float[1,1,{tokens}] logits,
            float[1,total,{width}] present_key, float[1,total,{width}] present_value)
        {{
            at = Shape<start = 1, end = 2>(past_key) place = Gather(places, at) token = Gather(table, ids)
            x = Add(token, place) q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv)
            present_key = Concat<axis = 1>(past_key, k) present_value = Concat<axis = 1>(past_value, v)
            turned = Transpose<perm = [0, 2, 1]>(present_key) scores = MatMul(q, turned)
            seen = Cast<to = 1>(mask) one = Constant<value_float = 1.0>() hidden = Sub(one, seen)
            low = Constant<value_float = -1e9>() bias = Mul(hidden, low)
            axis = Constant<value_ints = [1]>() row = Unsqueeze(bias, axis) shown = Add(scores, row)
            share = Softmax<axis = -1>(shown) mixed = MatMul(share, present_value) logits = MatMul(mixed, wo)
        }}"""
    )
    rng = np.random.default_rng(seed)
    shapes = {
        "table": (tokens, width),
        "places": (most, width),
        **dict.fromkeys(("wq", "wk", "wv"), (width, width)),
        "wo": (width, tokens),
    }
    for name, shape in shapes.items():
        weight = rng.normal(size=shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(weight, name))
    text = {"past_key": "past.key", "past_value": "past.value"}
    text |= {"present_key": "present.key", "present_value": "present.value"}
    for node in model.graph.node:
        node.input[:] = [text.get(name, name) for name in node.input]
        node.output[:] = [text.get(name, name) for name in node.output]
    for value in (*model.graph.input, *model.graph.output):
        value.name = text.get(value.name, value.name)
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == "total":
                dim.dim_param = "past + 1"
    return model


def decoded(model: onnx.ModelProto, ids: list[int], width: int = 8) -> list[Array]:
    """The logits of each token, by ONNX Runtime with caches that grow."""
    session = ort.InferenceSession(model.SerializeToString())
    key = value = np.zeros((1, 0, width), np.float32)
    found = []
    for step, token in enumerate(ids):
        feeds = {"ids": np.array([[token]]), "mask": np.ones((1, step + 1), np.int64)}
        logits, key, value = session.run(None, {**feeds, "past.key": key, "past.value": value})
        found.append(np.asarray(logits))
    return found


class Loop:
    """ONNX Runtime called by hand, one state after the other."""

    def __init__(self, model: onnx.ModelProto | Path, initial: float = 0.0) -> None:
        source = str(model) if isinstance(model, Path) else model.SerializeToString()
        self._session = ort.InferenceSession(source)
        self._initial = initial
        self.reset()

    def reset(self) -> None:
        shape = next(each.shape for each in self._session.get_inputs() if each.name == "h")
        self.state: Array = np.full(shape, self._initial, np.float32)

    def __call__(self, x: Array) -> Array:
        y, self.state = self._session.run(["y", "hn"], {"x": x, "h": self.state})
        return np.asarray(y)


def windows(samples: Array, lead: int = 0) -> list[Array]:
    """Cut a recording as a device does: `lead` zeros before it, and zeros behind it."""
    padded = np.concatenate((np.zeros(lead, np.float32), samples))
    count = max(1, -(-(padded.size - (WINDOW - HOP)) // HOP))
    padded = np.pad(padded, (0, (count - 1) * HOP + WINDOW - padded.size if count else 0))
    return [padded[i * HOP : i * HOP + WINDOW] for i in range(count)]


def wav(samples: Array, rate: int = RATE) -> bytes:
    """A WAV file of float32."""
    from edgebundle.request import Request

    return Request.samples(samples.astype(np.float32), rate).body


def probabilities(loop: Loop, samples: Array) -> Array:
    loop.reset()
    return np.array([float(loop(window[None]).reshape(-1)[0]) for window in windows(samples)])
