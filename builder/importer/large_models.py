"""Models whose weights do not fit into one message of protobuf, which has at most 2 GiB.

In memory such a model is an `onnx.ModelProto` like any other, but it is never written as one byte string.
Libraries that need a byte string get the graph with its small weights, and the large weights separately.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from builder.importer.divisors import with_defined_quotients
from builder.importer.weights import is_large, tensor_bytes

# A larger model is not written as one message: each copy takes as much memory again.
MAX_MESSAGE_BYTES: Final = 1 << 30
# Of all weights in memory. In 4 bits, a bundle has at most a sixth of that.
MAX_WEIGHT_BYTES: Final = 8 << 30
_LOCATION: Final = "weights"  # not a file: the weights are passed in memory


def model_bytes(model: onnx.ModelProto) -> int:
    """Return the bytes of a model's message; for one that is too large an estimate, without writing it."""
    size = _estimated_bytes(model)
    return size if size > MAX_MESSAGE_BYTES else int(model.ByteSize())


def is_too_large(model: onnx.ModelProto) -> bool:
    """Whether a model must not be written as one message."""
    return _estimated_bytes(model) > MAX_MESSAGE_BYTES


def _estimated_bytes(model: onnx.ModelProto) -> int:
    nodes = sum(int(node.ByteSize()) for node in model.graph.node)
    return nodes + sum(map(tensor_bytes, model.graph.initializer))


def sha256(model: onnx.ModelProto) -> str:
    """Return the SHA-256 of a model in memory, in hexadecimal."""
    if not is_too_large(model):
        return hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()
    digest = hashlib.sha256(with_given_weights(model).SerializeToString(deterministic=True))
    for tensor in filter(is_large, model.graph.initializer):
        digest.update(tensor.SerializeToString(deterministic=True))
    return digest.hexdigest()


def with_given_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy whose large weights are external: only their names, types and shapes are in it."""
    shell = _without_weights(model)
    for tensor in filter(is_large, model.graph.initializer):
        given = shell.graph.initializer.add(
            name=tensor.name, dims=tensor.dims, data_type=tensor.data_type, data_location=TensorProto.EXTERNAL
        )
        given.external_data.add(key="location", value=_LOCATION)
    return shell


def with_inputs_for_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy with inputs in place of large weights."""
    shell = _without_weights(model)
    shell.graph.input.extend(inputs_for(filter(is_large, model.graph.initializer)))
    return shell


def inputs_for(weights: Iterable[onnx.TensorProto]) -> list[onnx.ValueInfoProto]:
    """Return inputs with the names, types and shapes of weights."""
    return [helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in weights]


def _without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    shell = onnx.ModelProto(
        ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions
    )
    graph = shell.graph
    graph.name = model.graph.name or "graph"
    graph.node.extend(model.graph.node)
    graph.input.extend(model.graph.input)
    graph.output.extend(model.graph.output)
    graph.value_info.extend(model.graph.value_info)
    graph.initializer.extend(tensor for tensor in model.graph.initializer if not is_large(tensor))
    return shell


def open_session(model: onnx.ModelProto, options: onnxruntime.SessionOptions) -> onnxruntime.InferenceSession:
    """Open a session of ONNX Runtime, in which no quotient of integers ends the process.

    Parameters
    ----------
    model
        The model.
    options
        The session's options. Weights are added to them, so they serve for one session.

    Raises
    ------
    Exception
        If ONNX Runtime refuses the model.
    """
    model = with_defined_quotients(model)
    if not is_too_large(model):
        raw = model.SerializeToString()
    else:
        raw = with_given_weights(model).SerializeToString()
        large = [tensor for tensor in model.graph.initializer if is_large(tensor)]
        options.add_external_initializers(
            [tensor.name for tensor in large],
            [onnxruntime.OrtValue.ortvalue_from_numpy(numpy_helper.to_array(tensor)) for tensor in large],
        )
    return onnxruntime.InferenceSession(raw, options, providers=["CPUExecutionProvider"])
