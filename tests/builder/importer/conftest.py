"""Small ONNX models, run by ONNX Runtime and by TVM."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Arrays = Mapping[str, NDArray[Any]]
ModelMaker = Callable[..., onnx.ModelProto]
Runner = Callable[[onnx.ModelProto, Arrays], list[NDArray[Any]]]

# What LLVM's optimiser does is no matter of the importer's, and would take most of the time of these tests.
UNOPTIMISED = {"kind": "llvm", "opt-level": 0}


@pytest.fixture
def make_model() -> ModelMaker:
    """Build a model: nodes, inputs and outputs as name -> shape or (shape, type), weights as arrays."""

    def info(name: str, what: Any) -> onnx.ValueInfoProto:
        shape, dtype = what if isinstance(what, tuple) else (what, TensorProto.FLOAT)
        return helper.make_tensor_value_info(name, dtype, shape)

    def make(
        nodes: Sequence[onnx.NodeProto],
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        weights: Arrays | None = None,
        opset: int = 17,
        ir_version: int = 8,
    ) -> onnx.ModelProto:
        graph = helper.make_graph(
            list(nodes),
            "graph",
            [info(*item) for item in inputs.items()],
            [info(*item) for item in outputs.items()],
            initializer=[numpy_helper.from_array(np.asarray(v), k) for k, v in (weights or {}).items()],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)

    return make


@pytest.fixture
def run_onnx() -> Runner:
    """Run a model in ONNX Runtime without optimisations: the reference."""

    def run(model: onnx.ModelProto, feeds: Arrays) -> list[NDArray[Any]]:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        return list(session.run(None, dict(feeds)))

    return run


@pytest.fixture
def run_relax() -> Callable[[Any, Sequence[NDArray[Any]]], list[NDArray[Any]]]:
    """Run a Relax module built with TVM's defaults: slow, and independent of our kernels."""
    import tvm
    from tvm import relax

    from tests.builder.importer.recurrent_reference import register as register_recurrent

    register_recurrent()

    def run(mod: Any, inputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        built = tvm.compile(mod, target=tvm.target.Target(UNOPTIMISED))
        machine = relax.VirtualMachine(built, tvm.cpu())
        # With its shape: NumPy makes a vector of a scalar.
        given = (np.ascontiguousarray(array).reshape(np.shape(array)) for array in inputs)
        results = machine["main"](*map(tvm.runtime.tensor, given))
        return [r.numpy() for r in ([results] if isinstance(results, tvm.runtime.Tensor) else results)]

    return run


@pytest.fixture
def relu(make_model: ModelMaker) -> onnx.ModelProto:
    """The smallest model: y = Relu(x), [2, 3]."""
    return make_model([helper.make_node("Relu", ["x"], ["y"], name="relu")], {"x": [2, 3]}, {"y": [2, 3]})
