"""Random graphs: a few operators behind each other, with odd shapes and attributes.

What other packages ship are models of one operator. These have up to ten, so that fusion, layouts and plans
of memory are tried too. The judge is ONNX Runtime without optimisations. A graph's number is its seed, so a
graph that was wrong once can be made again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from benchmarks.conformance.case import Case
from benchmarks.conformance.sources.makers import Maker

Array = npt.NDArray[Any]

GRAPHS: Final = 1000
_OPSETS: Final = (11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21)
_EXTENTS: Final = (1, 1, 2, 2, 3, 3, 4, 5, 5, 7, 8, 9, 13, 16, 17, 33)
_MOST_NODES: Final = 10
_MOST_TRIES: Final = 60
# Values stay small: rounding must not decide, and a case must be fast.
_MOST_ELEMENTS: Final = 60_000
_LARGEST: Final = 1e4
_RTOL, _ATOL = 1e-3, 1e-4


class _Misfit(Exception):  # noqa: N818 - no error: the next operator is drawn
    """A drawn operator does not fit what is there."""


class Graph:
    """A graph that grows: each node is run when it is added, so all values are known.

    Parameters
    ----------
    seed
        What the graph follows from.
    """

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.opset = int(self.random.choice(_OPSETS))
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, Array] = {}
        self.values: dict[str, Array] = {}
        for number in range(self.below(3) + 1):
            shape = [self.extent() for _ in range(self.one_of(2, 3, 4, 4, 4))]
            self.values[f"x{number}"] = self.floats(*shape)
        if self.perhaps(0.2):
            kind = self.one_of(np.int32, np.int64)
            self.values["i"] = self.random.integers(-3, 9, [self.extent(), self.extent()]).astype(kind)
        self.inputs = dict(self.values)

    def below(self, end: int) -> int:
        """Draw an integer from 0 to `end` - 1."""
        return int(self.random.integers(end))

    def one_of(self, *choices: Any) -> Any:  # noqa: ANN401 - as they are
        """Draw one of some things."""
        return choices[self.below(len(choices))]

    def perhaps(self, share: float) -> bool:
        """Draw True in this share of cases."""
        return bool(self.random.random() < share)

    def many(self, low: int, high: int, count: int) -> list[int]:
        """Draw `count` integers from `low` to `high` - 1."""
        return [int(number) for number in self.random.integers(low, high, count)]

    def extent(self) -> int:
        """Draw the extent of an axis."""
        return int(self.random.choice(_EXTENTS))

    def floats(self, *shape: int) -> Array:
        """Draw normally distributed numbers."""
        return np.asarray(self.random.standard_normal(shape), np.float32)

    def weight(self, values: npt.ArrayLike) -> str:
        """Add a constant and return its name."""
        name = f"c{len(self.weights)}"
        self.weights[name] = np.asarray(values)
        return name

    def ints(self, *values: int) -> str:
        """Add a constant vector of int64 and return its name."""
        return self.weight(np.array(values, np.int64))

    def pick(self, kinds: str = "f", *, ranks: Sequence[int] = (1, 2, 3, 4, 5, 6)) -> str:
        """Draw a value with a kind of dtype and a rank, rather a late one."""
        names = [
            name
            for name, value in self.values.items()
            if value.dtype.kind in kinds
            and value.ndim in ranks
            and (value.dtype.kind != "f" or value.dtype == np.float32)
        ]
        if not names:
            raise _Misfit
        chances = np.arange(1.0, len(names) + 1) ** 2
        return str(self.random.choice(names, p=chances / chances.sum()))

    def axis(self, name: str) -> int:
        """Draw an axis of a value, counted from either end."""
        rank = self.values[name].ndim
        return int(self.random.integers(-rank, rank))

    def add(self, operator: str, *inputs: str, count: int = 1, **options: Any) -> str:  # noqa: ANN401 - attributes
        """Add a node and return the name of its first output.

        Raises
        ------
        _Misfit
            If ONNX Runtime refuses the node, or its outputs are large or not finite.
        """
        outputs = [f"v{len(self.values)}_{place}" for place in range(count)]
        node = helper.make_node(operator, inputs, outputs, **options)
        known = {name: self.values[name] for name in inputs if name in self.values}
        try:
            results = _run(self._model([node], known, outputs), known)
        except Exception as error:
            raise _Misfit from error
        for result in results:
            if not 0 < result.size <= _MOST_ELEMENTS:
                raise _Misfit
            if result.dtype.kind == "f" and not np.abs(result).max() <= _LARGEST:
                raise _Misfit
        self.nodes.append(node)
        self.values.update(zip(outputs, results, strict=True))
        return outputs[0]

    def grow(self) -> None:
        """Add a drawn operator, if it fits."""
        before = len(self.nodes), dict(self.weights), dict(self.values)
        try:
            _OPERATORS[self.below(len(_OPERATORS))](self)
        except _Misfit:
            del self.nodes[before[0] :]
            self.weights, self.values = before[1:]

    def finished(self) -> tuple[onnx.ModelProto, dict[str, Array]]:
        """Return the model of all nodes, and its inputs; what no node reads is an output."""
        read = {name for node in self.nodes for name in node.input}
        outputs = [name for node in self.nodes for name in node.output if name not in read]
        inputs = {name: value for name, value in self.inputs.items() if name in read}
        return self._model(self.nodes, inputs, outputs), inputs

    def _model(
        self, nodes: list[onnx.NodeProto], inputs: dict[str, Array], outputs: list[str]
    ) -> onnx.ModelProto:
        read = {name for node in nodes for name in node.input}
        graph = helper.make_graph(
            nodes,
            "random",
            [
                helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
                for name, value in inputs.items()
            ],
            [self._output(name) for name in outputs],
            [numpy_helper.from_array(value, name) for name, value in self.weights.items() if name in read],
        )
        return helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=8 + 2 * (self.opset > 19)
        )

    def _output(self, name: str) -> onnx.ValueInfoProto:
        value = self.values.get(name)
        if value is None:
            return onnx.ValueInfoProto(name=name)
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), None)


def makers() -> Iterator[Maker]:
    """Return the graphs."""
    for seed in range(GRAPHS):
        yield f"graph_{seed}", functools.partial(make, seed)


def make(seed: int, folder: Path) -> Case:
    """Make the case of a seed; its model is written into a folder.

    Raises
    ------
    ValueError
        If no operator fitted.
    """
    graph = Graph(seed)
    wanted = 2 + graph.below(_MOST_NODES - 1)
    for _ in range(_MOST_TRIES):
        if len(graph.nodes) >= wanted:
            break
        graph.grow()
    model, inputs = graph.finished()
    if not inputs:
        raise ValueError("expected a node that reads an input, got none")
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    operators = " ".join(node.op_type for node in model.graph.node)
    outputs = _run(model, inputs)
    return Case("random_graphs", f"graph_{seed}", operators, path, inputs, outputs, _RTOL, _ATOL)


def _run(model: onnx.ModelProto, inputs: dict[str, Array]) -> list[Array]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    results = ort.InferenceSession(model.SerializeToString(), options).run(None, inputs)
    return [np.asarray(result) for result in results]


def _unary(graph: Graph) -> None:
    names = (
        "Abs Atan Ceil Celu Cos Elu Erf Exp Floor HardSigmoid HardSwish Identity LeakyRelu Log Mish Neg "
        "Reciprocal Relu Round Selu Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Tanh ThresholdedRelu Gelu"
    )
    graph.add(graph.one_of(*names.split()), graph.pick())


def _binary(graph: Graph) -> None:
    left = graph.pick()
    right = graph.pick()
    if graph.perhaps(0.4):
        shape = [extent if graph.perhaps(0.6) else 1 for extent in graph.values[left].shape]
        right = graph.weight(graph.floats(*shape[graph.below(len(shape)) :]))
    pair = (left, right) if graph.perhaps(0.8) else (right, left)
    operator = graph.one_of(
        *["Add", "Add", "Sub", "Sub", "Mul", "Mul", "Div", "Max", "Min", "Pow", "PRelu", "Mod", "Mean"]
    )
    graph.add(operator, *pair, **({"fmod": 1} if operator == "Mod" else {}))


def _choice(graph: Graph) -> None:
    left, other = graph.pick(), graph.weight(graph.floats())
    comparison = graph.one_of("Less", "Greater", "Equal")
    flags = graph.add(comparison, left, graph.pick() if graph.perhaps(0.5) else other)
    if graph.perhaps(0.3):
        flags = graph.add("Not", flags)
    if graph.perhaps(0.2):
        flags = graph.add(graph.one_of("And", "Or", "Xor"), flags, graph.pick("b"))
    if graph.perhaps(0.3):
        graph.add("Cast", flags, to=graph.one_of(TensorProto.FLOAT, TensorProto.INT64, TensorProto.UINT8))
    else:
        graph.add("Where", flags, graph.pick(), other)


def _reduce(graph: Graph) -> None:
    name = graph.pick()
    rank = graph.values[name].ndim
    axes = sorted(set(graph.many(0, rank, 1 + graph.below(rank))))
    keep = graph.below(2)
    kinds = ["Max", "Mean", "Min", "Sum", "L1", "L2", "LogSum", "LogSumExp", "Prod", "SumSquare"]
    operator = "Reduce" + graph.one_of(*kinds)
    if graph.opset >= (13 if operator == "ReduceSum" else 18):
        graph.add(operator, name, graph.ints(*axes), keepdims=keep)
    else:
        graph.add(operator, name, axes=axes, keepdims=keep)


def _place_of_largest(graph: Graph) -> None:
    name = graph.pick()
    options = {"select_last_index": graph.below(2)} if graph.opset > 11 else {}
    graph.add(
        graph.one_of("ArgMax", "ArgMin"), name, axis=graph.axis(name), keepdims=graph.below(2), **options
    )


def _sorted(graph: Graph) -> None:
    name = graph.pick()
    axis = graph.axis(name)
    count = 1 + graph.below(graph.values[name].shape[axis])
    graph.add("TopK", name, graph.ints(count), count=2, axis=axis, largest=graph.below(2))


def _along_an_axis(graph: Graph) -> None:
    name = graph.pick()
    graph.add(graph.one_of("Softmax", "Softmax", "LogSoftmax", "Hardmax"), name, axis=graph.axis(name))


def _running_sum(graph: Graph) -> None:
    name = graph.pick()
    axis = graph.weight(np.int64(graph.axis(name)))
    graph.add("CumSum", name, axis, exclusive=graph.below(2), reverse=graph.below(2))


def _transpose(graph: Graph) -> None:
    name = graph.pick("fiub")
    graph.add("Transpose", name, perm=[int(at) for at in graph.random.permutation(graph.values[name].ndim)])


def _reshape(graph: Graph) -> None:
    name = graph.pick("fiub")
    left, shape = graph.values[name].size, []
    for _ in range(graph.below(4)):
        shape.append(graph.one_of(*(n for n in range(1, left + 1) if left % n == 0)))
        left //= shape[-1]
    graph.add("Reshape", name, graph.ints(*shape, graph.one_of(left, -1)))


def _shuffle(graph: Graph) -> None:
    name = graph.pick(ranks=[4])
    batch, channels, *plane = graph.values[name].shape
    groups = graph.one_of(*(n for n in range(1, channels + 1) if channels % n == 0))
    apart = graph.add("Reshape", name, graph.ints(batch, groups, channels // groups, *plane))
    swapped = graph.add("Transpose", apart, perm=[0, 2, 1, 3, 4])
    graph.add("Reshape", swapped, graph.ints(batch, channels, *plane))


def _blocks(graph: Graph) -> None:
    name, size = graph.pick(ranks=[4]), graph.one_of(2, 3)
    if graph.perhaps(0.5):
        graph.add("DepthToSpace", name, blocksize=size, mode=graph.one_of("DCR", "CRD"))
    else:
        graph.add("SpaceToDepth", name, blocksize=size)


def _slice(graph: Graph) -> None:
    name = graph.pick("fiub")
    parts = []
    for axis, extent in enumerate(graph.values[name].shape):
        low, high = sorted(graph.many(0, extent + 1, 2))
        if low == high or graph.perhaps(0.5):
            continue
        if graph.perhaps(0.7):
            parts.append(
                (graph.one_of(low, low - extent), graph.one_of(high, 2**62), axis, 1 + graph.below(3))
            )
        else:
            parts.append((high - 1, low - 1 if low else -(2**31), axis, -1 - graph.below(2)))
    if not parts:
        raise _Misfit
    graph.add("Slice", name, *(graph.ints(*column) for column in zip(*parts, strict=True)))


def _pad(graph: Graph) -> None:
    name = graph.pick()
    shape = graph.values[name].shape
    mode = graph.one_of("constant", "reflect", "edge")
    widths = graph.many(-1 if mode == "constant" and graph.perhaps(0.3) else 0, 4, 2 * len(shape))
    if mode == "reflect":
        widths = [min(width, shape[at % len(shape)] - 1) for at, width in enumerate(widths)]
    value = [graph.weight(graph.floats())] if mode == "constant" and graph.perhaps(0.5) else []
    graph.add("Pad", name, graph.ints(*widths), *value, mode=mode)


def _concat(graph: Graph) -> None:
    name = graph.pick()
    axis, shape = graph.axis(name), list(graph.values[name].shape)
    shape[axis] = graph.extent()
    parts = [name, graph.weight(graph.floats(*shape)), *[name] * graph.below(2)]
    graph.add("Concat", *(str(part) for part in graph.random.permutation(parts)), axis=axis)


def _split(graph: Graph) -> None:
    name = graph.pick()
    axis = graph.axis(name)
    extent = graph.values[name].shape[axis]
    first = 1 + graph.below(extent)
    if graph.opset < 13:
        graph.add("Split", name, count=2, axis=axis, split=[first, extent - first])
    else:
        graph.add("Split", name, graph.ints(first, extent - first), count=2, axis=axis)


def _repeat(graph: Graph) -> None:
    name = graph.pick("fi")
    shape = graph.values[name].shape
    if graph.perhaps(0.5):
        graph.add("Tile", name, graph.ints(*graph.many(1, 4, len(shape))))
    else:
        graph.add("Expand", name, graph.ints(*(n if n > 1 else graph.extent() for n in (1, *shape))))


def _gather(graph: Graph) -> None:
    name = graph.pick("fi")
    axis = graph.axis(name)
    shape = list(graph.values[name].shape)
    places = [graph.extent() for _ in range(graph.below(3))]
    operator = graph.one_of("Gather", "GatherElements")
    if operator == "GatherElements":
        places = [1 + graph.below(extent) for extent in shape]
        places[axis] = graph.extent()
    graph.add(
        operator, name, graph.weight(graph.random.integers(-shape[axis], shape[axis], places)), axis=axis
    )


def _gather_rows(graph: Graph) -> None:
    name = graph.pick()
    shape = graph.values[name].shape
    same = graph.below(min(2, len(shape))) if graph.opset > 11 else 0
    depth = 1 + graph.below(len(shape) - same)
    extents = shape[same : same + depth]
    places = graph.random.integers([-n for n in extents], extents, (*shape[:same], graph.extent(), depth))
    graph.add("GatherND", name, graph.weight(places), **({"batch_dims": same} if same else {}))


def _scatter(graph: Graph) -> None:
    name = graph.pick()
    axis, shape = graph.axis(name), graph.values[name].shape
    places = [1 + graph.below(extent) for extent in shape]
    order = np.argsort(graph.random.random([*places[: axis % len(shape)], shape[axis]]), -1)
    order = order[..., : places[axis]]
    indices = np.broadcast_to(order.reshape(*order.shape, *[1] * (len(shape) - order.ndim)), places)
    options = {}
    if graph.opset >= 18 and graph.perhaps(0.6):
        options["reduction"] = graph.one_of("add", "mul", "max", "min")
        indices = graph.random.integers(-shape[axis], shape[axis], places)
    graph.add(
        "ScatterElements",
        name,
        graph.weight(indices),
        graph.weight(graph.floats(*places)),
        axis=axis,
        **options,
    )


def _scatter_rows(graph: Graph) -> None:
    name = graph.pick()
    shape = graph.values[name].shape
    depth = 1 + graph.below(len(shape))
    chosen = graph.random.permutation(math.prod(shape[:depth]))[: graph.extent()]
    indices = np.stack(np.unravel_index(chosen, shape[:depth]), -1)
    options = {"reduction": graph.one_of("add", "mul")} if graph.opset >= 16 and graph.perhaps(0.5) else {}
    updates = graph.weight(graph.floats(len(chosen), *shape[depth:]))
    graph.add("ScatterND", name, graph.weight(indices), updates, **options)


def _product(graph: Graph) -> None:
    name = graph.pick()
    shape = graph.values[name].shape
    other = graph.weight(graph.floats(shape[-1], graph.extent()) / 3)
    if len(shape) > 1 and graph.perhaps(0.3):
        other = graph.add("Transpose", name, perm=[*range(len(shape) - 2), len(shape) - 1, len(shape) - 2])
    graph.add("MatMul", *((name, other) if graph.perhaps(0.85) else (other, name)))


def _general_product(graph: Graph) -> None:
    name = graph.pick(ranks=[2])
    rows, depth = graph.values[name].shape
    left, right, columns = graph.below(2), graph.below(2), graph.extent()
    if left:
        rows, depth = depth, rows
    weights = graph.floats(*((columns, depth) if right else (depth, columns))) / 3
    bias = graph.floats(*graph.one_of((columns,), (rows, 1), (1, columns), (rows, columns), (1,)))
    factors = {"alpha": graph.one_of(1.0, 0.5, 2.0), "beta": graph.one_of(1.0, 0.5, 0.0)}
    graph.add("Gemm", name, graph.weight(weights), graph.weight(bias), transA=left, transB=right, **factors)


def _sum_of_products(graph: Graph) -> None:
    name = graph.pick(ranks=[2, 3, 4])
    letters = "abcd"[: graph.values[name].ndim]
    axis = graph.below(len(letters))
    weights = graph.floats(graph.values[name].shape[axis], graph.extent()) / 3
    result = "".join(graph.random.permutation([*letters.replace(letters[axis], "z")]))
    if graph.opset > 11:
        graph.add("Einsum", name, graph.weight(weights), equation=f"{letters},{letters[axis]}z->{result}")


def _windows(graph: Graph, rank: int) -> dict[str, Any]:
    """Draw strides, dilations and padding."""
    options: dict[str, Any] = {}
    if graph.perhaps(0.5):
        options["strides"] = graph.many(1, 4, rank)
    if graph.perhaps(0.2):
        return {**options, "auto_pad": graph.one_of("SAME_UPPER", "SAME_LOWER", "VALID")}
    if graph.perhaps(0.3):
        options["dilations"] = graph.many(1, 4, rank)
    return {**options, "pads": graph.many(0, 3, 2 * rank)}


def _convolution(graph: Graph) -> None:
    name = graph.pick(ranks=[3, 4, 5])
    channels, *extents = graph.values[name].shape[1:]
    groups = graph.one_of(1, *(n for n in range(1, channels + 1) if channels % n == 0))
    filters, kernel = groups * (1 + graph.below(4)), graph.many(1, 5, len(extents))
    options = _windows(graph, len(extents))
    if graph.perhaps(0.7):
        weights = graph.floats(filters, channels // groups, *kernel) / 3
        graph.add(
            "Conv", name, graph.weight(weights), graph.weight(graph.floats(filters)), group=groups, **options
        )
    elif len(extents) < 3:
        weights = graph.floats(channels, 1 + graph.below(4), *kernel) / 3
        graph.add("ConvTranspose", name, graph.weight(weights), group=groups, **options)


def _pool(graph: Graph) -> None:
    name = graph.pick(ranks=[3, 4, 5])
    rank = graph.values[name].ndim - 2
    if graph.perhaps(0.1):
        graph.add(graph.one_of("GlobalAveragePool", "GlobalMaxPool"), name)
        return
    kernel = graph.many(1, 5, rank)
    options = _windows(graph, rank)
    options.pop("dilations", None)
    if "pads" in options:
        options["pads"] = [min(n, (kernel[at % rank] - 1) // 2) for at, n in enumerate(options["pads"])]
        options["ceil_mode"] = graph.below(2)
    if graph.perhaps(0.5):
        options["count_include_pad"] = graph.below(2)
        graph.add("AveragePool", name, kernel_shape=kernel, **options)
    else:
        graph.add("MaxPool", name, kernel_shape=kernel, **options)


def _resize(graph: Graph) -> None:
    name = graph.pick(ranks=[3, 4])
    shape = graph.values[name].shape
    mode = graph.one_of("nearest", "nearest", "linear", "linear", "cubic")
    ways = ["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"]
    options: dict[str, Any] = {"mode": mode, "coordinate_transformation_mode": graph.one_of(*ways)}
    if mode == "nearest":
        roundings = ["floor", "ceil", "round_prefer_floor", "round_prefer_ceil"]
        options["nearest_mode"] = graph.one_of(*roundings)
    elif graph.opset >= 18:
        options["antialias"] = graph.below(2)
    if mode == "cubic":
        options |= {"cubic_coeff_a": graph.one_of(-0.75, -0.5), "exclude_outside": graph.below(2)}
    nothing = "" if graph.opset > 12 else graph.weight(np.zeros(0, np.float32))
    if graph.perhaps(0.5):
        scales = [1.0, 1.0, *(graph.one_of(2.0, 0.5, 1.5, 3.0, 0.7, 1.0, 1.25) for _ in shape[2:])]
        graph.add("Resize", name, nothing, graph.weight(np.array(scales, np.float32)), **options)
    else:
        sizes = graph.ints(*shape[:2], *(graph.extent() for _ in shape[2:]))
        graph.add("Resize", name, nothing, nothing, sizes, **options)


def _sample(graph: Graph) -> None:
    name = graph.pick(ranks=[4])
    grid = graph.random.uniform(-1.2, 1.2, (graph.values[name].shape[0], graph.extent(), graph.extent(), 2))
    mode = graph.one_of("bilinear", "nearest", "bicubic")
    if graph.opset > 19:
        mode = mode.removeprefix("bi")
    padding = graph.one_of("zeros", "border", "reflection")
    options = {"mode": mode, "padding_mode": padding, "align_corners": graph.below(2)}
    graph.add("GridSample", name, graph.weight(grid.astype(np.float32)), **options)


def _norm(graph: Graph) -> None:
    name = graph.pick(ranks=[3, 4, 5])
    shape = graph.values[name].shape
    kind = graph.one_of("Batch", "Instance", "Layer", "LRN", "Lp")
    channel = [graph.weight(np.abs(graph.floats(shape[1])) + 0.1) for _ in range(4)]
    if kind == "Batch":
        graph.add("BatchNormalization", name, *channel)
    elif kind == "Instance":
        graph.add("InstanceNormalization", name, *channel[:2], epsilon=1e-3)
    elif kind == "Layer":
        axis = graph.axis(name)
        graph.add(
            "LayerNormalization", name, graph.weight(graph.floats(*shape[axis:])), axis=axis, epsilon=1e-3
        )
    elif kind == "LRN":
        graph.add("LRN", name, size=graph.one_of(1, 3, 5), alpha=0.1)
    else:
        graph.add("LpNormalization", name, axis=graph.axis(name), p=1 + graph.below(2))


def _recurrent(graph: Graph) -> None:
    name, width = graph.pick(ranks=[3]), graph.one_of(1, 3, 4, 5, 8)
    operator, gates = graph.one_of(("LSTM", 4), ("GRU", 3), ("RNN", 1))
    direction = graph.one_of("forward", "reverse", "bidirectional")
    ways = 1 + (direction == "bidirectional")
    shapes = (gates * width, graph.values[name].shape[2]), (gates * width, width), (2 * gates * width,)
    weights = [graph.weight(graph.floats(ways, *shape) * 0.4) for shape in shapes]
    options = {"linear_before_reset": graph.below(2)} if operator == "GRU" else {}
    graph.add(operator, name, *weights, count=2, hidden_size=width, direction=direction, **options)


def _integers(graph: Graph) -> None:
    name = graph.pick("iu")
    value = graph.values[name]
    if graph.perhaps(0.3):
        graph.add("Cast", name, to=graph.one_of(TensorProto.FLOAT, TensorProto.INT8, TensorProto.INT32))
    elif graph.perhaps(0.2):
        axis = graph.below(value.ndim + 1)
        bounds = graph.weight(np.array([0, 1], np.float32))
        graph.add("OneHot", name, graph.ints(2 + graph.below(7)), bounds, axis=axis)
    else:
        shape = [extent if graph.perhaps(0.5) else 1 for extent in value.shape]
        other = graph.weight(graph.random.integers(1, 9, shape).astype(value.dtype))
        graph.add(
            graph.one_of(*["Add", "Sub", "Mul", "Div", "Mod", "Max", "Min", "Equal", "Less"]), name, other
        )


def _rounding(graph: Graph) -> None:
    name = graph.pick()
    kind = graph.one_of(TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.INT32, TensorProto.BOOL)
    cast = graph.add("Cast", name, to=kind)
    if kind in (TensorProto.DOUBLE, TensorProto.FLOAT16):
        graph.add("Cast", graph.add("Neg", cast), to=TensorProto.FLOAT)


def _quantised(graph: Graph) -> None:
    name, kind = graph.pick(), graph.one_of(np.int8, np.uint8)
    largest = np.abs(graph.values[name]).max()
    scale = graph.weight(np.float32(largest / 100 + 0.01))
    zero = graph.weight(np.asarray(graph.below(100)).astype(kind))
    graph.add("DequantizeLinear", graph.add("QuantizeLinear", name, scale, zero), scale, zero)


def _clip(graph: Graph) -> None:
    low, high = np.sort(graph.floats(2))
    bounds = graph.one_of((low, high), (low,), (None, high))
    graph.add("Clip", graph.pick(), *("" if bound is None else graph.weight(bound) for bound in bounds))


_OPERATORS: Final[tuple[Callable[[Graph], None], ...]] = (
    *(_unary,) * 6,
    *(_binary,) * 5,
    *(_choice, _reduce, _place_of_largest, _sorted, _along_an_axis),
    *(_running_sum, _transpose, _transpose, _reshape, _shuffle, _blocks, _slice, _slice, _pad, _concat),
    *(_split, _repeat, _gather, _gather_rows, _scatter, _scatter_rows, _product, _general_product),
    *(_sum_of_products, _convolution, _convolution, _convolution, _pool, _resize, _sample, _norm),
    *(_recurrent, _integers, _rounding, _quantised, _clip),
)
