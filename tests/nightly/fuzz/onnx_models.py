"""ONNX models to damage, and hostile ones: bombs, loops, nesting, calls, lengths."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto, defs, helper, numpy_helper

_CLASSIC: Final = "ai.onnx.ml"
_KIND: Final = defs.OpSchema.AttrType
# One value for each type of attribute.
_SAMPLES: Final = {
    _KIND.FLOAT: 0.5,
    _KIND.INT: 1,
    _KIND.STRING: "a",
    _KIND.FLOATS: [0.5, 1.0],
    _KIND.INTS: [0, 1],
    _KIND.STRINGS: ["a", "b"],
}


def _info(name: str, shape: Sequence[int | str], kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def _model(
    nodes: Sequence[onnx.NodeProto], weights: dict[str, np.ndarray], shape: Sequence[int | str] = (1, 3, 8, 8)
) -> onnx.ModelProto:
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    output = onnx.ValueInfoProto(name=nodes[-1].output[0])
    output.type.tensor_type.elem_type = TensorProto.FLOAT
    graph = helper.make_graph(list(nodes), "fuzz", [_info("x", shape)], [output], tensors)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def sound_models() -> list[onnx.ModelProto]:
    """Small models of many kinds of nodes, to damage."""
    state = np.random.RandomState(0)

    def weight(*shape: int) -> np.ndarray:
        return state.standard_normal(shape).astype("f4")

    node = helper.make_node
    conv = [
        node("Conv", ["x", "w", "b"], ["a"], name="conv", pads=[1, 1, 1, 1]),
        node("Relu", ["a"], ["r"], name="relu"),
        node("Resize", ["r", "", "s"], ["u"], name="up", mode="nearest"),
        node("GlobalAveragePool", ["u"], ["g"], name="pool"),
        node("Reshape", ["g", "t"], ["h"], name="flat"),
        node("Gemm", ["h", "m"], ["y"], name="dense", transB=1),
    ]
    weights = {
        "w": weight(4, 3, 3, 3), "b": weight(4), "m": weight(2, 4), "s": np.array([1, 1, 2, 2], "f4"),
        "t": np.array([1, -1]),
    }  # fmt: skip
    attend = [
        node("Reshape", ["x", "t"], ["q"], name="q"),
        node("Attention", ["q", "w"], ["a"], name="attend", domain="com.microsoft", num_heads=2),
        node("SkipLayerNormalization", ["q", "a", "g"], ["n"], name="norm", domain="com.microsoft"),
        node("Split", ["n", "s"], ["p", "r"], name="split", axis=2),
        node("Concat", ["r", "p"], ["y"], name="join", axis=2),
    ]
    more = {"t": np.array([1, 24, 8]), "w": weight(8, 24), "g": weight(8), "s": np.array([3, 5])}
    body = helper.make_graph(
        [node("Identity", ["go"], ["on"]), node("Add", ["c", "c"], ["d"])],
        "body",
        [_info("i", [], TensorProto.INT64), _info("go", [], TensorProto.BOOL), _info("c", [1, 3, 8, 8])],
        [_info("on", [], TensorProto.BOOL), _info("d", [1, 3, 8, 8])],
    )
    loop = [node("Loop", ["n", "", "x"], ["l"], name="loop", body=body), node("Relu", ["l"], ["y"])]
    dense = [
        node("Transpose", ["x"], ["t"], perm=[0, 2, 3, 1]),
        node("Slice", ["t", "b", "e"], ["s"]),
        node("Pad", ["s", "p"], ["d"]),
        node("Gather", ["d", "i"], ["g"], axis=1),
        node("Expand", ["g", "z"], ["v"]),
        node("ReduceMean", ["v"], ["y"], axes=[1]),
    ]
    places = {
        "b": np.array([0, 1]), "e": np.array([1, 7]), "p": np.array([0, 1, 0, 0, 0, 0, 1, 0]),
        "i": np.array([0, 2]), "z": np.array([2, 1, 1, 1, 1]),
    }  # fmt: skip
    return [
        _model(conv, weights),
        _model(attend, more),
        _model(loop, {"n": np.array(3)}),
        _model(dense, places),
    ]


def operators_behind_nothing() -> list[onnx.ModelProto]:
    """A model for each operator of ai.onnx.ml, which reads an input and a value that has no type."""
    models = []
    for schema in defs.get_all_schemas():
        if schema.domain != _CLASSIC:
            continue
        count = max(1, schema.min_input)
        for first in ("x", "unknown"):
            options = {
                name: _SAMPLES[attribute.type]
                for name, attribute in schema.attributes.items()
                if attribute.type in _SAMPLES
            }
            outputs = [f"y{i}" if i else "y" for i in range(max(1, schema.min_output))]
            nodes = [
                helper.make_node("Unknown", ["x"], ["unknown"], domain="elsewhere"),
                helper.make_node(schema.name, [first] * count, outputs, domain=_CLASSIC, **options),
            ]
            model = _model(nodes, {}, (1, 3))
            model.opset_import.extend([helper.make_opsetid(_CLASSIC, 3), helper.make_opsetid("elsewhere", 1)])
            models.append(model)
    return models


def changed_types(model: onnx.ModelProto, choice: random.Random) -> bytes:
    """A model with other types and shapes, or none, and with other edges."""
    graph = model.graph
    for _ in range(choice.choice([1, 2, 4])):
        node = choice.choice(graph.node)
        names = ["", "x", *(name for one in graph.node for name in one.output)]
        info = choice.choice([*graph.input, *graph.output, *graph.value_info])
        match choice.randrange(6):
            case 0:
                info.type.tensor_type.elem_type = choice.randrange(30)
            case 1:
                info.type.tensor_type.ClearField("shape")
            case 2:
                info.ClearField("type")
            case 3:
                shape = [choice.choice([-1, 0, 1, 3, 1 << 20]) for _ in range(choice.randrange(6))]
                graph.value_info.append(_info(choice.choice(names) or "x", shape, choice.randrange(1, 17)))
            case 4 if node.input:
                node.input[choice.randrange(len(node.input))] = choice.choice(names)
            case _ if node.attribute:
                del node.attribute[choice.randrange(len(node.attribute))]
    return bytes(model.SerializeToString())


def changed_numbers(model: onnx.ModelProto, choice: random.Random) -> bytes:
    """A model with well-formed, hostile numbers: extents, attributes, constants."""
    numbers = [-(2**63), -(2**31), -2, -1, 0, 1, 2, 7, 1 << 20, 2**31 - 1, 2**31, 2**40, 2**63 - 1]
    for _ in range(choice.choice([1, 1, 2, 3])):
        node = choice.choice(model.graph.node)
        tensors = [t for t in model.graph.initializer if t.data_type == TensorProto.INT64]
        match choice.randrange(6):
            case 0 if node.attribute:
                attribute = choice.choice(node.attribute)
                if attribute.ints:
                    attribute.ints[choice.randrange(len(attribute.ints))] = choice.choice(numbers)
                else:
                    attribute.i = choice.choice(numbers)
            case 1 if tensors:
                tensor = choice.choice(tensors)
                if math.prod(tensor.dims) * 8 != len(tensor.raw_data):
                    continue  # changed before
                value = np.array(numpy_helper.to_array(tensor))
                value.reshape(-1)[choice.randrange(value.size)] = choice.choice(numbers)
                tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
            case 2:
                tensor = choice.choice(model.graph.initializer)
                tensor.dims[:] = [choice.choice(numbers) for _ in range(choice.randrange(5))]
            case 3:
                dims = model.graph.input[0].type.tensor_type.shape.dim
                dims[choice.randrange(len(dims))].dim_value = choice.choice(numbers)
            case 4 if node.input:
                values = [name for n in model.graph.node for name in (*n.input, *n.output)]
                node.input[choice.randrange(len(node.input))] = choice.choice(values)
            case _:
                node.op_type = choice.choice(
                    [
                        "Tile",
                        "ConstantOfShape",
                        "OneHot",
                        "Range",
                        "Upsample",
                        "Relu",
                        "Loop",
                        "If",
                        "Scan",
                        "Expand",
                    ]
                )
    return bytes(model.SerializeToString())


def _bomb(shape: Sequence[int]) -> onnx.ModelProto:
    """A small file whose constants are huge: ConstantOfShape, Expand and Tile of nothing."""
    nodes = [
        helper.make_node("ConstantOfShape", ["s"], ["c"]),
        helper.make_node("Tile", ["c", "n"], ["t"]),
        helper.make_node("ReduceSum", ["t"], ["r"], keepdims=0),
        helper.make_node("Add", ["x", "r"], ["y"]),
    ]
    return _model(nodes, {"s": np.array(shape), "n": np.array([1 << 12] * len(shape))})


def _nested(depth: int) -> onnx.ModelProto:
    """Ifs within Ifs."""
    relu, outputs = helper.make_node("Relu", ["x"], ["o"]), [_info("o", [1, 3, 8, 8])]
    leaf = graph = helper.make_graph([relu], "leaf", [], outputs)
    for level in range(depth):
        node = helper.make_node("If", ["go"], ["o"], then_branch=graph, else_branch=leaf)
        graph = helper.make_graph([node], f"g{level}", [], outputs)
    go = helper.make_node("Cast", ["m"], ["go"], to=TensorProto.BOOL)
    first = helper.make_node("ReduceMax", ["x"], ["m"], keepdims=0)
    return _model([first, go, *graph.node], {})


def _functions(depth: int) -> onnx.ModelProto:
    """Functions that call the next one twice: 2 ** depth nodes when they are inlined."""
    model = _model([helper.make_node("f0", ["x"], ["y"], domain="local")], {})
    model.opset_import.append(helper.make_opsetid("local", 1))
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
    for level in range(depth):
        last = level == depth - 1
        name, domain = ("Relu", "") if last else (f"f{level + 1}", "local")
        nodes = [
            helper.make_node(name, ["a"], ["b"], domain=domain),
            helper.make_node(name, ["b"], ["c"], domain=domain),
        ]
        model.functions.append(helper.make_function("local", f"f{level}", ["a"], ["c"], nodes, opsets))
    return model


def _recursive() -> onnx.ModelProto:
    model = _functions(2)
    model.functions[1].node[0].op_type = "f0"
    model.functions[1].node[0].domain = "local"
    return model


def _long_loop(trips: int) -> onnx.ModelProto:
    model = sound_models()[2]
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.array(trips), "n"))
    return model


def _chain(length: int) -> onnx.ModelProto:
    names = ["x", *(f"v{i}" for i in range(length - 1)), "y"]
    return _model([helper.make_node("Relu", [a], [b]) for a, b in itertools.pairwise(names)], {})


HOSTILE: Final[tuple[Callable[[], onnx.ModelProto], ...]] = (
    lambda: _bomb([1 << 20, 1 << 10]),
    lambda: _bomb([1 << 30]),
    lambda: _bomb([1, 1, 1, 1, 1, 1]),
    lambda: _nested(7),
    lambda: _nested(28),
    lambda: _functions(12),
    lambda: _functions(40),
    _recursive,
    lambda: _long_loop(2**40),
    lambda: _long_loop(100_000),
    lambda: _long_loop(-5),
    lambda: _chain(3000),
)
