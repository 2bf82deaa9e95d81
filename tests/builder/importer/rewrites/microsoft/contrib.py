"""Single operators of com.microsoft: the original in ONNX Runtime, and what the importer makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from builder.importer import import_onnx

RTOL = 2e-5
_state = np.random.RandomState(1)


def randn(*shape: int) -> NDArray[np.float32]:
    return _state.standard_normal(shape).astype("f4")


def ints(*shape: int, high: int = 9) -> NDArray[np.int32]:
    return _state.randint(0, high, shape).astype("i4")


def bits(*shape: int) -> NDArray[np.int32]:
    """Zeros and ones; the first of each row is one."""
    mask = (_state.uniform(size=shape) > 0.3).astype("i4")
    mask[..., 0] = 1
    return mask


@dataclass
class Node:
    """A node: its inputs (None for one that is absent), which are weights, which outputs are read.

    The first `named` outputs have names, read or not.
    """

    op: str
    inputs: Sequence[NDArray[Any] | None]
    weights: Sequence[int] = ()
    outputs: Sequence[int] = (0,)
    domain: str = "com.microsoft"
    opset: int = 17
    attributes: dict[str, Any] = field(default_factory=dict)
    named: int = 0

    def feeds(self) -> dict[str, NDArray[Any]]:
        return {f"i{k}": a for k, a in enumerate(self.inputs) if a is not None and k not in self.weights}

    def model(self, results: Sequence[NDArray[Any]] | None = None) -> onnx.ModelProto:
        """The model of only this node, with the types of its results if they are known."""
        names = ["" if a is None else f"i{k}" for k, a in enumerate(self.inputs)]
        count = max(self.named, *(k + 1 for k in self.outputs))
        made = [f"o{k}" if k in self.outputs or k < self.named else "" for k in range(count)]
        node = helper.make_node(self.op, names, made, name="node", domain=self.domain, **self.attributes)
        inputs = [_info(name, array) for name, array in self.feeds().items()]
        outputs = [onnx.ValueInfoProto(name=f"o{k}") for k in sorted(self.outputs)]
        if results is not None:
            outputs = [_info(o.name, array) for o, array in zip(outputs, results, strict=True)]
        elif "Attention" in self.op:
            outputs = [helper.make_tensor_value_info(o.name, onnx.TensorProto.FLOAT, None) for o in outputs]
        weights = [
            numpy_helper.from_array(array, f"i{k}")
            for k, array in enumerate(self.inputs)
            if array is not None and k in self.weights
        ]
        graph = helper.make_graph([node], "graph", inputs, outputs, initializer=weights)
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def _info(name: str, array: NDArray[Any]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)


def run_unoptimised(model: onnx.ModelProto, feeds: dict[str, NDArray[Any]]) -> list[NDArray[Any]]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return list(session.run(None, feeds))


def imported_outputs(node: Node, results: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Import the model of a node, and run the normalised model."""
    imported = import_onnx(node.model(results))
    assert not any(made.domain for made in imported.onnx.graph.node)
    feeds = node.feeds()
    return run_unoptimised(imported.onnx, {spec.name: feeds[spec.name] for spec in imported.inputs})


def check(node: Node, expected: Sequence[NDArray[Any]] | None = None) -> None:
    """Compare with ONNX Runtime, or with `expected` where it has no kernel for this processor."""
    wanted = run_unoptimised(node.model(), node.feeds()) if expected is None else expected
    for found, want in zip(imported_outputs(node, wanted), wanted, strict=True):
        assert found.dtype == want.dtype
        np.testing.assert_allclose(found, want, rtol=RTOL, atol=RTOL * max(float(np.abs(want).max()), 0.01))
