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
