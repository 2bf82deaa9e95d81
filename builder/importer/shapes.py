"""Infer the types and shapes of all values with ONNX's own inference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import onnx
from onnx import helper

from agent.bundle.tensor_spec import MAX_TENSOR_BYTES
from builder.errors import ModelError, NativeCrashError, NativeError
from builder.importer import native
from builder.importer.classic.kept import is_kept, output_types
from builder.importer.onnx_graph import reads, value_type
from builder.importer.silence import FOREIGN_FAILURES, first_line
from builder.importer.weights import without_large_weights


def refuse_huge_values(model: onnx.ModelProto) -> None:
    """Refuse a model with a value that no device can hold: a small file may ask for any size.

    Raises `ModelError` if the recorded shape of a value takes more than a tensor of a bundle may.
    """
    for value in (*model.graph.value_info, *model.graph.input, *model.graph.output):
        found = value_type(value)
        shape = None if found is None else found.static_shape
        if found is None or shape is None or found.elem_type == onnx.TensorProto.STRING:
            continue
        if math.prod(shape) * found.dtype.itemsize > MAX_TENSOR_BYTES:
            raise ModelError(
                f"expected values of at most {MAX_TENSOR_BYTES} bytes, got '{value.name}' of {list(shape)}",
                hint="check the sizes at the export: a constant may be wrong",
            )


def infer_shapes(model: onnx.ModelProto, *, strict: bool = True) -> None:
    """Record the type and shape of every value in the model, in place.

    Parameters
    ----------
    model
        The model, with known input shapes.
    strict
        Whether to refuse a graph whose shapes contradict each other; otherwise they stay unknown.

    Raises
    ------
    ModelError
        If `strict` is true and a node cannot take the types and shapes that it gets.
    """
    shell = without_large_weights(model)
    kept = {node.output[0]: node for node in model.graph.node if is_kept(node)}
    try:
        # ONNX does not infer the shapes of some of these, and may crash on what reads a value without a type.
        while kept and _add_known(shell, native.infer_shapes(_before(shell, kept), strict=False), kept):
            pass
        inferred = native.infer_shapes(shell, strict=strict)
    except NativeCrashError as error:
        raise _death(shell, error, strict=strict) from error
    except FOREIGN_FAILURES as error:
        reason = first_line(error).removeprefix("[ShapeInferenceError] ").removeprefix("Inference error(s): ")
        raise ModelError(
            f"the model's shapes contradict each other: {reason}",
            hint="check --input-shapes: the model may accept only some sizes",
        ) from error
    del model.graph.value_info[:]
    model.graph.value_info.extend(inferred.graph.value_info)
    known = {output.name: output for output in inferred.graph.output}
    for output in model.graph.output:
        output.CopyFrom(known[output.name])


def _death(model: onnx.ModelProto, error: NativeCrashError, *, strict: bool) -> ModelError:
    """Explain the death of ONNX's inference: halve the graph until the node is known that it died on."""
    node = _crashing(model, strict=strict) if error.is_repeatable else None
    where = "" if node is None else f" on node '{node.name}' ({node.op_type})"
    return ModelError(
        f"{error}{where}",
        hint="export the model again with a newer exporter, and look at that node's inputs: it may be of a "
        "type that the operator does not take",
    )


def _crashing(model: onnx.ModelProto, *, strict: bool) -> onnx.NodeProto | None:
    """The first node without which ONNX's inference lives; None if there is none."""
    nodes = list(model.graph.node)
    lives, dies = 0, len(nodes)
    while dies - lives > 1:
        middle = (lives + dies) // 2
        part = onnx.ModelProto()
        part.CopyFrom(model)
        del part.graph.node[middle:]
        try:
            native.infer_shapes(part, strict=strict)
        except NativeCrashError:
            dies = middle
            continue
        except NativeError:
            pass
        lives = middle
    return nodes[lives] if nodes else None


def _before(shell: onnx.ModelProto, kept: Mapping[str, onnx.NodeProto]) -> onnx.ModelProto:
    """Return a model of the nodes that read nothing that follows from kept nodes."""
    part = onnx.ModelProto()
    part.CopyFrom(shell)
    obscure = {name for node in kept.values() for name in node.output}
    nodes = []
    for node in shell.graph.node:
        if node.output[0] in kept or reads(node) & obscure:
            obscure.update(node.output)
        else:
            nodes.append(node)
    del part.graph.node[:]
    part.graph.node.extend(nodes)
    made = {name for node in nodes for name in node.output}
    outputs = [output for output in shell.graph.output if output.name in made]
    del part.graph.output[:]
    part.graph.output.extend(outputs)
    return part


def _add_known(shell: onnx.ModelProto, inferred: onnx.ModelProto, kept: dict[str, onnx.NodeProto]) -> bool:
    """Record the outputs of kept nodes whose inputs are known now; return whether there were any."""
    if not kept:
        return False
    graph = inferred.graph
    infos = {info.name: info for info in (*graph.value_info, *graph.input)}
    found = {}
    for name, node in kept.items():
        info = infos.get(node.input[0]) if node.input else None
        known = None if info is None else value_type(info)
        if known is not None and known.static_shape:
            found[name] = output_types(node, known.elem_type, known.static_shape)
    for name, types in found.items():
        node = kept.pop(name)
        for output, (elem_type, shape) in zip(node.output, types, strict=False):
            if output:
                info = helper.make_tensor_value_info(output, elem_type, list(shape))
                if not _replace(shell.graph.output, info):
                    shell.graph.value_info.append(info)
    return bool(found)


def _replace(outputs: Sequence[onnx.ValueInfoProto], info: onnx.ValueInfoProto) -> bool:
    """Give one of a model's outputs a type; return whether it is among them."""
    for output in outputs:
        if output.name == info.name:
            output.CopyFrom(info)
            return True
    return False
