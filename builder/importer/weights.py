"""Remove a model's large weights for libraries that only need the graph, and put them back.

Shape inference and opset conversion copy the whole model twice as a byte string, but read no large weights.
The nodes of trees have their weights as attributes: placeholders stand for such nodes.
"""

from __future__ import annotations

import math
from typing import Final

import onnx
from onnx import TensorProto, helper

from builder.importer.classic.kept import PLACEHOLDER_DOMAIN, is_kept, restore, with_placeholders
from builder.importer.onnx_graph import is_known_type

# Shapes, axes, scales and other values that inference reads are far smaller.
LARGE_BYTES: Final = 1 << 14
_FOUR_BITS: Final = frozenset({TensorProto.INT4, TensorProto.UINT4, TensorProto.FLOAT4E2M1})


def tensor_bytes(tensor: onnx.TensorProto) -> int:
    """Return the bytes of a weight's numbers, from its type and shape: protobuf would write them to count."""
    if tensor.data_type == TensorProto.STRING or not is_known_type(tensor.data_type):
        return int(tensor.ByteSize())
    count = math.prod(int(dim) for dim in tensor.dims)
    if tensor.data_type in _FOUR_BITS:
        return (count + 1) // 2
    return count * int(helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)


def is_large(tensor: onnx.TensorProto) -> bool:
    """Whether a weight is larger than `LARGE_BYTES`."""
    return tensor_bytes(tensor) > LARGE_BYTES


def without_large_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of a model with inputs in place of large weights, and without recorded value types.

    Placeholders stand for the nodes of `builder.importer.classic.kept`.
    """
    shell = onnx.ModelProto(ir_version=model.ir_version)
    shell.opset_import.extend(model.opset_import)
    shell.graph.name = model.graph.name or "graph"
    shell.graph.node.extend(with_placeholders(model.graph.node))
    if any(is_kept(node) for node in model.graph.node):
        shell.opset_import.append(helper.make_opsetid(PLACEHOLDER_DOMAIN, 1))
    shell.graph.input.extend(model.graph.input)
    for output in model.graph.output:
        # Without a shape from an earlier inference, which may be less precise.
        kind = onnx.TypeProto(tensor_type=onnx.TypeProto.Tensor(elem_type=output.type.tensor_type.elem_type))
        shell.graph.output.append(onnx.ValueInfoProto(name=output.name, type=kind))
    for tensor in model.graph.initializer:
        if is_large(tensor):
            info = helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
            shell.graph.input.append(info)
        else:
            shell.graph.initializer.append(tensor)
    return shell


def put_back(shell: onnx.ModelProto, model: onnx.ModelProto) -> None:
    """Put the large weights of `model` back into `shell`, which was made by `without_large_weights`."""
    restore(shell.graph, model.graph.node)
    imports = [entry for entry in shell.opset_import if entry.domain != PLACEHOLDER_DOMAIN]
    if len(imports) != len(shell.opset_import):
        kept = [(entry.domain, entry.version) for entry in imports]
        del shell.opset_import[:]
        shell.opset_import.extend(helper.make_opsetid(domain, version) for domain, version in kept)
    large = {tensor.name: tensor for tensor in model.graph.initializer if is_large(tensor)}
    for index in range(len(shell.graph.input) - 1, -1, -1):
        if shell.graph.input[index].name in large:
            del shell.graph.input[index]
    shell.graph.initializer.extend(large.values())
