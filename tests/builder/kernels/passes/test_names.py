"""Kernels that fuse many operators keep names that a graph allows."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

from builder import compile, run
from builder.importer import import_onnx
from builder.kernels.passes.names import MAX_CHARS


def chain(length: int) -> onnx.ModelProto:
    """Alternating operators on one tensor, which become one kernel."""
    operators = ("Sigmoid", "Neg", "Tanh", "Abs")
    nodes = [helper.make_node(operators[i % len(operators)], [f"v{i}"], [f"v{i + 1}"]) for i in range(length)]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in ("v0", f"v{length}")]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_a_long_chain_is_one_kernel_with_a_short_name() -> None:
    package = compile(import_onnx(chain(60)))
    x = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
    result = run(package, {"v0": x}).get_output("output_0")
    for i in range(60):
        x = (lambda v: 1 / (1 + np.exp(-v)), np.negative, np.tanh, np.abs)[i % 4](x)
    np.testing.assert_allclose(result, x, rtol=1e-5)
    names = [word for word in package.members["mod.json"].decode().split('"') if word.startswith("fused_")]
    assert names and max(map(len, names)) <= MAX_CHARS + 20
