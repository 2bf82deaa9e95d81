"""Operators of any shape, batch and fusion, for any core, as they ship: linked, in the executor.

Every buffer that the executor allocates is filled with NaN before it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from agent.bundle.params import dump_params
from agent.runtime import storage
from builder.codegen.graph_codegen import generate
from builder.codegen.kernel_object import compile_kernels
from builder.codegen.link.linker import link
from builder.compiling import parity
from builder.compiling.lower import lower
from builder.compiling.tolerances import PARITY
from builder.importer import import_onnx
from builder.kernels.decisions import Schedules
from builder.running.in_memory import execute
from builder.target.device_target import DeviceTarget
from tests.builder.kernels.core_models import CORE_COUNTS, CORES
from tests.builder.kernels.machines import machine

OPSET = 18


@dataclass
class Graph:
    """An ONNX graph under construction.

    Attributes
    ----------
    state
        Random numbers for weights and inputs.
    """

    state: np.random.RandomState
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: list[TensorProto] = field(default_factory=list)
    inputs: dict[str, np.ndarray] = field(default_factory=dict)

    def input(self, *shape: int) -> str:
        name = f"in{len(self.inputs)}"
        self.inputs[name] = self.state.randn(*shape).astype("f4")
        return name

    def weight(self, array: np.ndarray) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def random(self, *shape: int, scale: float = 1.0) -> str:
        return self.weight((self.state.randn(*shape) * scale).astype("f4"))

    def node(self, op: str, *inputs: str, **attributes: object) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], **attributes))
        return name

    def model(self, result: str) -> onnx.ModelProto:
        values = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape)
            for name, array in self.inputs.items()
        ]
        out = helper.make_tensor_value_info(result, TensorProto.FLOAT, None)
        graph = helper.make_graph(self.nodes, "any", values, [out], self.weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
        return onnx.shape_inference.infer_shapes(model, strict_mode=True)


Draw = Callable[[st.SearchStrategy[Any]], Any]
Made = tuple[str, tuple[int, ...]]  # a value's name and shape


def extent(draw: Draw, low: int, high: int) -> int:
    return draw(st.integers(low, high))


def image(draw: Draw, graph: Graph, channels: int) -> Made:
    shape = (extent(draw, 1, 2), channels, extent(draw, 5, 18), extent(draw, 5, 18))
    return graph.input(*shape), shape


def convolution(draw: Draw, graph: Graph) -> str:
    groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
    inputs, outputs = groups * extent(draw, 1, 20), groups * extent(draw, 1, 20)
    x, _ = image(draw, graph, inputs)
    kernel = draw(st.sampled_from([(1, 1), (3, 3), (1, 5), (4, 1), (2, 2)]))
    weight = graph.random(outputs, inputs // groups, *kernel, scale=0.3)
    pads = draw(st.lists(st.integers(0, 2), min_size=4, max_size=4))
    strides, dilations = (draw(st.lists(st.integers(1, 2), min_size=2, max_size=2)) for _ in range(2))
    dilations = [d if k < 4 else 1 for d, k in zip(dilations, kernel, strict=True)]
    bias = [graph.random(outputs)] if draw(st.booleans()) else []
    how = {"kernel_shape": kernel, "pads": pads, "strides": strides, "dilations": dilations, "group": groups}
    return graph.node("Conv", before(draw, graph, x), weight, *bias, **how)


def depthwise(draw: Draw, graph: Graph) -> str:
    channels = extent(draw, 2, 40)
    x, _ = image(draw, graph, channels)
    size = draw(st.sampled_from([(3, 3), (5, 5), (1, 7), (3, 1)]))
    weight = graph.random(channels, 1, *size, scale=0.3)
    pads = [size[0] // 2, size[1] // 2] * 2
    stride = extent(draw, 1, 2)
    how = {"kernel_shape": size, "pads": pads, "strides": [stride] * 2, "group": channels}
    return graph.node("Conv", before(draw, graph, x), weight, **how)


def transposed(draw: Draw, graph: Graph) -> str:
    inputs, outputs, size = extent(draw, 1, 20), extent(draw, 1, 20), extent(draw, 2, 4)
    x, _ = image(draw, graph, inputs)
    weight = graph.random(inputs, outputs, size, size, scale=0.3)
    how = {"kernel_shape": [size] * 2, "strides": [extent(draw, 1, 3)] * 2, "pads": [extent(draw, 0, 1)] * 4}
    return graph.node("ConvTranspose", before(draw, graph, x), weight, **how)


def matmul(draw: Draw, graph: Graph) -> str:
    rows = draw(st.sampled_from([(1,), (1, 1), (1, 7), (2, 13), (3, 2, 5), (70,), (1, 33)]))
    depth, columns = extent(draw, 1, 80), extent(draw, 1, 80)
    x = graph.input(*rows, depth)
    return graph.node("MatMul", before(draw, graph, x), graph.random(depth, columns, scale=0.3))


def attention(draw: Draw, graph: Graph) -> str:
    batch, heads, width = extent(draw, 1, 2), extent(draw, 1, 4), extent(draw, 2, 20)
    queries, keys = extent(draw, 1, 40), extent(draw, 2, 40)
    q, v = graph.input(batch, heads, queries, width), graph.input(batch, heads, keys, width)
    k = graph.node("Transpose", graph.input(batch, heads, keys, width), perm=[0, 1, 3, 2])
    scores = graph.node("MatMul", q, k)
    scores = graph.node("Mul", scores, graph.weight(np.array(1 / math.sqrt(width), "f4")))
    if draw(st.booleans()):
        masked = np.where(np.arange(keys) < extent(draw, 1, keys), 0, -3.4e38).astype("f4")
        scores = graph.node("Add", scores, graph.weight(masked.reshape(1, 1, 1, keys)))
    return graph.node("MatMul", graph.node("Softmax", scores, axis=-1), v)


def pooling(draw: Draw, graph: Graph) -> str:
    x, _ = image(draw, graph, extent(draw, 1, 40))
    x = before(draw, graph, x)
    op = draw(st.sampled_from(["MaxPool", "AveragePool", "GlobalAveragePool"]))
    if op == "GlobalAveragePool":
        return graph.node(op, x)
    size, pad = extent(draw, 2, 4), extent(draw, 0, 1)
    how: dict[str, Any] = {"kernel_shape": [size] * 2, "strides": [extent(draw, 1, 3)] * 2, "pads": [pad] * 4}
    if op == "AveragePool":
        how["count_include_pad"] = extent(draw, 0, 1)
    return graph.node(op, x, **how)


def rows(draw: Draw, graph: Graph) -> str:
    shape = tuple(draw(st.lists(st.integers(1, 40), min_size=2, max_size=3)))
    x = before(draw, graph, graph.input(*shape))
    op = draw(st.sampled_from(["Softmax", "LogSoftmax", "LayerNormalization", "ReduceMean", "ReduceMax"]))
    if op == "LayerNormalization":
        return graph.node(op, x, graph.random(shape[-1]), graph.random(shape[-1]), axis=-1)
    axis = extent(draw, -len(shape), len(shape) - 1)
    if op.startswith("Reduce"):
        return graph.node(op, x, graph.weight(np.array([axis], "i8")), keepdims=1)
    return graph.node(op, x, axis=axis)


def resize(draw: Draw, graph: Graph) -> str:
    x, shape = image(draw, graph, extent(draw, 1, 24))
    sizes = graph.weight(np.array([*shape[:2], extent(draw, 3, 40), extent(draw, 3, 40)], "i8"))
    mode, transform = draw(
        st.sampled_from([("nearest", "asymmetric"), ("linear", "half_pixel"), ("linear", "align_corners")])
    )
    how = {"nearest_mode": "floor"} if mode == "nearest" else {}
    x = before(draw, graph, x)
    return graph.node("Resize", x, "", "", sizes, mode=mode, coordinate_transformation_mode=transform, **how)


def signals(draw: Draw, graph: Graph) -> str:
    return chain(draw, graph, (extent(draw, 6, 30),))


def pictures(draw: Draw, graph: Graph) -> str:
    return chain(draw, graph, (extent(draw, 4, 9), extent(draw, 4, 20)))


def videos(draw: Draw, graph: Graph) -> str:
    return chain(draw, graph, (extent(draw, 3, 6), extent(draw, 4, 6), extent(draw, 4, 7)))


def computed_weights(draw: Draw, graph: Graph) -> str:
    channels, kernel = extent(draw, 2, 36), [extent(draw, 1, 3), extent(draw, 1, 3)]
    x, _ = image(draw, graph, channels)
    if draw(st.booleans()):
        weight = graph.node("Tanh", graph.input(channels, 1, *kernel))
        return graph.node("Conv", before(draw, graph, x), weight, kernel_shape=kernel, group=channels)
    weight = graph.node("Tanh", graph.input(extent(draw, 1, 36), channels, *kernel))
    return graph.node("Conv", before(draw, graph, x), weight, kernel_shape=kernel, pads=[1, 0, 1, 2])


def chain(draw: Draw, graph: Graph, extents: tuple[int, ...]) -> str:
    """A convolution, whose channels are packed, and what stands between it and the next one."""
    channels, outputs = extent(draw, 2, 20), extent(draw, 4, 36)
    ones = [1] * len(extents)
    x = graph.input(extent(draw, 1, 2), channels, *extents)
    x = graph.node("Conv", x, graph.random(outputs, channels, *ones, scale=0.3), kernel_shape=ones)
    for _ in range(extent(draw, 1, 3)):
        x = draw(st.sampled_from(BETWEEN))(draw, graph, x, shape_of(graph, x))
    if draw(st.booleans()):
        weight = graph.random(5, shape_of(graph, x)[1], *ones, scale=0.3)
        x = graph.node("Conv", x, weight, kernel_shape=ones)
    return x


def shape_of(graph: Graph, x: str) -> list[int]:
    return [each.dim_value for each in graph.model(x).graph.output[0].type.tensor_type.shape.dim]


def cut(draw: Draw, graph: Graph, x: str, shape: list[int]) -> str:
    axis = extent(draw, 1, len(shape) - 1)
    begin = extent(draw, 0, shape[axis] - 1)
    end, step = extent(draw, begin + 1, shape[axis]), extent(draw, 1, 2)
    bounds = [graph.weight(np.array([number], "i8")) for number in (begin, end, axis, step)]
    return graph.node("Slice", x, *bounds)


def halves(draw: Draw, graph: Graph, x: str, shape: list[int]) -> str:
    if shape[1] % 2:
        return x
    x = graph.node("Split", x, axis=1, num_outputs=2)
    graph.nodes[-1].output.append(f"{x}b")
    return graph.node("Mul", x, f"{x}b") if draw(st.booleans()) else f"{x}b"


def padded(draw: Draw, graph: Graph, x: str, shape: list[int]) -> str:
    mode = draw(st.sampled_from(["constant", "reflect", "edge"]))
    most = [0, 0, *(min(2, extent - 1) for extent in shape[2:])]
    widths = [extent(draw, 0, limit) for limit in most * 2]
    return graph.node("Pad", x, graph.weight(np.array(widths, "i8")), mode=mode)


def joined(draw: Draw, graph: Graph, x: str, shape: list[int]) -> str:
    parts = [x, graph.node("Relu", x), *[graph.node("Neg", x)] * extent(draw, 0, 1)]
    return graph.node("Concat", *parts, axis=extent(draw, 1, len(shape) - 1))


def gated(draw: Draw, graph: Graph, x: str, shape: list[int]) -> str:
    axes = draw(st.sets(st.integers(1, len(shape) - 1), min_size=1))
    op = draw(st.sampled_from(["ReduceMean", "ReduceMax", "ReduceMin", "ReduceSum"]))
    number = graph.node(op, x, graph.weight(np.array(sorted(axes), "i8")), keepdims=1)
    return graph.node("Mul", x, graph.node("Tanh", number))


def sloped(draw: Draw, graph: Graph, x: str, shape: list[int]) -> str:
    channels = draw(st.sampled_from([1, shape[1]]))
    return graph.node("PRelu", x, graph.random(channels, *[1] * (len(shape) - 2)))


def normalised(draw: Draw, graph: Graph, x: str, shape: list[int]) -> str:
    if draw(st.booleans()):
        return graph.node("InstanceNormalization", x, graph.random(shape[1]), graph.random(shape[1]))
    axis = graph.weight(np.array([1], "i8"))
    less = graph.node("Sub", x, graph.node("ReduceMean", x, axis))
    square = graph.node("Pow", less, graph.weight(np.array(2, "f4")))
    root = graph.node(
        "Sqrt", graph.node("Add", graph.node("ReduceMean", square, axis), graph.weight(np.array(1e-3, "f4")))
    )
    return graph.node("Div", less, root)


def pooled(draw: Draw, graph: Graph, x: str, shape: list[int]) -> str:
    size = [extent(draw, 1, min(3, each)) for each in shape[2:]]
    return graph.node(
        draw(st.sampled_from(["MaxPool", "AveragePool"])), x, kernel_shape=size, strides=[1] * len(size)
    )


Between = Callable[[Draw, Graph, str, list[int]], str]
BETWEEN: tuple[Between, ...] = (cut, halves, padded, joined, gated, sloped, normalised, pooled)
OPERATORS: dict[str, Callable[[Draw, Graph], str]] = {
    each.__name__: each
    for each in (
        convolution,
        depthwise,
        transposed,
        matmul,
        attention,
        pooling,
        rows,
        resize,
        signals,
        pictures,
        videos,
        computed_weights,
    )
}
ACTIVATIONS = ("Relu", "Sigmoid", "Tanh", "HardSwish", "LeakyRelu", "Erf", "Softplus")


def before(draw: Draw, graph: Graph, x: str) -> str:
    """Put an activation before an operator, or nothing."""
    op = draw(st.sampled_from(["", "", "Relu", "Sigmoid"]))
    return graph.node(op, x) if op else x


def after(draw: Draw, graph: Graph, x: str) -> str:
    """Put up to three element-wise operators behind an operator: they are fused with it."""
    shape = shape_of(graph, x)
    for kind in draw(st.lists(st.sampled_from(["activation", "bias", "residual", "gate"]), max_size=3)):
        if kind == "activation":
            x = graph.node(draw(st.sampled_from(ACTIVATIONS)), x)
        elif kind == "bias":
            axis = 1 if len(shape) == 4 else len(shape) - 1
            x = graph.node("Add", x, graph.random(shape[axis], *[1] * (len(shape) - 1 - axis)))
        elif kind == "residual":
            x = graph.node("Add", x, graph.input(*shape))
        else:
            x = graph.node("Mul", x, graph.node("Sigmoid", x))
    return x


def poisoned(nbytes: int) -> storage.Block:
    block = ALLOCATE(nbytes)
    block[:] = 0xFF
    return block


ALLOCATE = storage.allocate


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("operator", OPERATORS)
def test_any_operator(operator: str, lanes: int) -> None:
    @settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def check(data: st.DataObject) -> None:
        graph = Graph(np.random.RandomState(data.draw(st.integers(0, 999))))
        model = graph.model(after(data.draw, graph, OPERATORS[operator](data.draw, graph)))
        names = [value.name for value in model.graph.output]
        target = machine(lanes, data.draw(CORES), data.draw(CORE_COUNTS))
        got = run_as_shipped(model, graph.inputs, target)
        agreement = parity.compare(names, got, parity.run_as_defined(model, graph.inputs))
        assert agreement.error <= PARITY

    check()


def run_as_shipped(
    model: onnx.ModelProto, inputs: dict[str, np.ndarray], target: DeviceTarget
) -> list[np.ndarray]:
    """Compile a model, and run it in the executor, whose memory is full of NaN."""
    imported = import_onnx(model)
    lowered = lower(imported.mod, target, Schedules(strict=True))
    named = [s.name for s in imported.inputs], [s.name for s in imported.outputs]
    made = generate(lowered.main, *named)
    code = link(compile_kernels(lowered.kernels, target).code, target)
    params = dump_params((spec, array.data) for spec, array in made.params)
    with mock.patch("agent.runtime.memory.allocate", poisoned):
        return execute(code, made.graph, params, {name: inputs[name] for name in named[0]})
