"""Small models for each operator: odd shapes, every option, float and quantised."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import tflite
from numpy.typing import NDArray

from tests.builder.importer.tflite.tflite_file import FileSubgraph, write

FLOAT: Final = ("float32",)
NARROW: Final = ("float32", "int8", "uint8", "int16")
BYTES: Final = ("float32", "int8", "uint8")
WHOLE: Final = ("int32", "int64")
NUMBERS: Final = ("float32", "int8", "uint8", "int16", "int32", "int64")
RELU: Final = tflite.ActivationFunctionType.RELU
RELU6: Final = tflite.ActivationFunctionType.RELU6
RELU1: Final = tflite.ActivationFunctionType.RELU_N1_TO_1
TANH: Final = tflite.ActivationFunctionType.TANH
SAME: Final = tflite.Padding.SAME
VALID: Final = tflite.Padding.VALID


@dataclass(frozen=True)
class X:
    """An input of the model with numbers from `low` to `high`; `dtype` None takes the variant's."""

    shape: tuple[int, ...]
    low: float = -2.0
    high: float = 2.0
    dtype: str | None = None


@dataclass(frozen=True)
class V:
    """A variable: state that the interpreter keeps, zeros at first."""

    shape: tuple[int, ...]


@dataclass(frozen=True)
class Y:
    """An output; `same` takes the scale of the first input, `fixed` a scale that the operator demands."""

    low: float = -4.0
    high: float = 4.0
    dtype: str | None = None
    same: bool = False
    fixed: Mapping[str, tuple[float, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """An operator with its tensors: `X` inputs, constants as arrays, None for an absent one."""

    code: str
    inputs: Sequence[Any]
    outputs: Sequence[Y] = (Y(),)
    options: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    dtypes: Sequence[str] = FLOAT
    note: str = ""

    def name(self, dtype: str, *, between: bool) -> str:
        shapes = "_".join(
            "x".join(map(str, i.shape)) or "scalar" if isinstance(i, X) else "c"
            for i in self.inputs
            if i is not None
        )
        options = "_".join(f"{k}{v}" for k, v in self.fields.items())
        parts = (self.code, dtype, shapes, options, self.note, "pictures" if between else "")
        return "-".join(part for part in parts if part)


def scale_of(low: float, high: float, dtype: str) -> tuple[float, int]:
    """Scale and zero point for numbers from `low` to `high`; 16 bits are symmetric."""
    limits = np.iinfo(dtype)
    if dtype == "int16":
        return max(abs(low), abs(high)) / 32767, 0
    low, high = min(low, 0.0), max(high, 0.0)
    scale = (high - low) / (limits.max - limits.min)
    return scale, int(np.clip(round(limits.min - low / scale), limits.min, limits.max))


def quantisation(low: float, high: float, dtype: str) -> dict[str, Any]:
    """Fields of a quantised tensor, none for other numbers."""
    if dtype not in ("int8", "uint8", "int16"):
        return {}
    scale, zero = scale_of(low, high, dtype)
    return {"scales": [scale], "zeros": [zero]}


def build(case: Case, dtype: str, *, between: bool = False) -> tuple[bytes, list[Any]]:
    """Write a case as a file.

    With `between`, each picture passes a 1x1 pooling before and after the operator: that changes nothing, but
    the operator then gets and gives pictures with their channels first.

    Returns
    -------
    tuple
        The file, and the inputs' arrays.
    """
    rng = np.random.default_rng(5)
    graph = FileSubgraph()
    indices: list[int] = []
    feeds: list[NDArray[Any]] = []
    first: dict[str, Any] = {}
    for given in case.inputs:
        if given is None:
            indices.append(-1)
        elif isinstance(given, X):
            kind = given.dtype or dtype
            scales = quantisation(given.low, given.high, kind) if given.dtype is None else {}
            first = first or scales
            index = graph.tensor(given.shape, kind, **scales)
            graph.inputs.append(index)
            feeds.append(_numbers(rng, given, kind, scales))
            if between and len(given.shape) == 4 and given.dtype is None:
                index = _pool(graph, index, given.shape, kind, scales)
            indices.append(index)
        elif isinstance(given, V):
            indices.append(graph.tensor(given.shape, variable=True))
        elif isinstance(given, dict):
            indices.append(graph.constant(**given))
        else:
            indices.append(graph.constant(given))
    outputs = []
    for wanted in case.outputs:
        kind = wanted.dtype or dtype
        scales = quantisation(wanted.low, wanted.high, kind) if wanted.dtype is None else {}
        if wanted.same and scales:
            scales = first
        if kind in wanted.fixed:
            scales = {"scales": [wanted.fixed[kind][0]], "zeros": [wanted.fixed[kind][1]]}
        outputs.append((graph.tensor((), kind, **scales), kind, scales))
    graph.op(case.code, indices, [index for index, _, _ in outputs], case.options, **case.fields)
    for index, kind, scales in outputs:
        last = index
        if between and kind == dtype:
            last = _pool(graph, index, (), kind, scales)
        graph.outputs.append(last)
    return write(graph), feeds


def _numbers(rng: np.random.Generator, given: X, dtype: str, scales: Mapping[str, Any]) -> NDArray[Any]:
    values = rng.uniform(given.low, given.high, given.shape)
    if dtype == "bool":
        return np.asarray(rng.random(given.shape) < 0.5)
    if scales:
        limits = np.iinfo(dtype)
        numbers = np.round(values / scales["scales"][0]) + scales["zeros"][0]
        return np.asarray(np.clip(numbers, limits.min, limits.max), dtype)
    if dtype.startswith("f"):
        return np.asarray(values, dtype)
    return np.asarray(np.floor(values if given.dtype else values * 8), dtype)


def _pool(
    graph: FileSubgraph, index: int, shape: Sequence[int], dtype: str, scales: Mapping[str, Any]
) -> int:
    result = graph.tensor(shape, dtype, **scales)
    fields = {"StrideH": 1, "StrideW": 1, "FilterHeight": 1, "FilterWidth": 1, "Padding": VALID}
    graph.op("AVERAGE_POOL_2D", [index], [result], "Pool2DOptions", **fields)
    return result


def _rows(*rows: Any) -> tuple[Any, ...]:
    """Rows of a table whose types differ."""
    return rows


def _i(*values: int) -> NDArray[np.int32]:
    return np.asarray(values, np.int32)


def _weights(
    shape: Sequence[int], dtype: str, axis: int, *, seed: int = 3, per_axis: bool = True
) -> dict[str, Any]:
    """A weight as constant: quantised per slice of `axis` if `dtype` is int8."""
    real = np.random.default_rng(seed).uniform(-1, 1, shape)
    if dtype == "float32":
        return {"values": real.astype(np.float32)}
    if dtype == "uint8":
        scale, zero = scale_of(-1, 1, "uint8")
        numbers = np.clip(np.round(real / scale) + zero, 0, 255).astype(np.uint8)
        return {"values": numbers, "scales": [scale], "zeros": [zero]}
    count = shape[axis] if per_axis else 1
    scales = np.linspace(0.5, 1.0, count) / 127
    wide = scales.reshape([count if a == axis and per_axis else 1 for a in range(len(shape))])
    numbers = np.clip(np.round(real / wide), -127, 127).astype(np.int8)
    return {"values": numbers, "scales": list(map(float, scales)), "zeros": [0] * count, "axis": axis}


def _bias(
    count: int, dtype: str, weight: Mapping[str, Any], low: float = -2.0, high: float = 2.0
) -> dict[str, Any]:
    real = np.random.default_rng(4).uniform(-1, 1, count)
    if dtype == "float32":
        return {"values": real.astype(np.float32)}
    scale = scale_of(low, high, dtype)[0]
    scales = [scale * s for s in weight["scales"]]
    wide = np.asarray(scales if len(scales) == count else scales * count)
    kind = "int64" if dtype == "int16" else "int32"
    return {
        "values": np.round(real / wide).astype(kind),
        "dtype": kind,
        "scales": scales,
        "zeros": [0] * len(scales),
    }


def weighted() -> Iterator[tuple[Case, str]]:
    """Convolutions and products, in every combination of datatypes."""
    for dtype, kind in _rows(
        ("float32", "float32"),
        ("int8", "int8"),
        ("uint8", "uint8"),
        ("int16", "int8"),
        ("float32", "int8"),
    ):
        hybrid = "hybrid" if (dtype, kind) == ("float32", "int8") else ""
        for padding, stride, dilation, act, shape, k in _rows(
            (SAME, 1, 1, 0, (1, 5, 7, 3), (3, 3)),
            (SAME, 2, 1, RELU, (2, 6, 5, 4), (3, 2)),
            (VALID, 2, 1, RELU6, (1, 7, 6, 2), (1, 4)),
            (SAME, 1, 2, RELU1, (1, 9, 8, 3), (3, 3)),
            (VALID, 3, 1, 0, (1, 8, 11, 1), (2, 5)),
        ):
            w = _weights((5, *k, shape[-1]), kind, 0)
            fields = {
                "StrideH": stride,
                "StrideW": stride,
                "Padding": padding,
                "FusedActivationFunction": act,
                "DilationHFactor": dilation,
                "DilationWFactor": dilation,
            }
            bias = _bias(5, dtype, w)
            high = 8.0
            yield (
                Case(
                    "CONV_2D", [X(shape), w, bias], [Y(-high, high)], "Conv2DOptions", fields, (dtype,), kind
                ),
                hybrid,
            )
            multiplier = 2 if shape[-1] < 4 else 1
            d = _weights((1, *k, shape[-1] * multiplier), kind, 3)
            d_bias = _bias(shape[-1] * multiplier, dtype, d)
            yield (
                Case(
                    "DEPTHWISE_CONV_2D",
                    [X(shape), d, d_bias],
                    [Y(-high, high)],
                    "DepthwiseConv2DOptions",
                    fields | {"DepthMultiplier": multiplier},
                    (dtype,),
                    kind,
                ),
                hybrid,
            )
        # Grouped: three groups of two channels.
        w = _weights((6, 3, 3, 2), kind, 0)
        if kind != "uint8" and dtype != "int16":
            yield (
                Case(
                    "CONV_2D",
                    [X((1, 5, 5, 6)), w, _bias(6, dtype, w)],
                    [Y(-8, 8)],
                    "Conv2DOptions",
                    {"StrideH": 1, "StrideW": 1, "Padding": SAME},
                    (dtype,),
                    kind + "-grouped",
                ),
                hybrid,
            )
        for keep, act, per_axis, shape in _rows(
            (False, 0, False, (3, 7)),
            (True, RELU, True, (2, 3, 7)),
            (False, RELU6, False, (2, 7, 2)),
        ):
            columns = shape[-1] if keep else 7
            w = _weights((5, columns), kind, 0, per_axis=per_axis)
            for bias in _rows(_bias(5, dtype, w), None):
                yield (
                    Case(
                        "FULLY_CONNECTED",
                        [X(shape), w, bias],
                        [Y(-8, 8)],
                        "FullyConnectedOptions",
                        {"KeepNumDims": keep, "FusedActivationFunction": act},
                        (dtype,),
                        kind,
                    ),
                    hybrid,
                )
        for padding, stride, k, out in _rows(
            (SAME, 2, 3, (1, 8, 6, 4)),
            (VALID, 2, 3, (1, 9, 7, 4)),
            (VALID, 1, 2, (1, 5, 4, 4)),
            (SAME, 2, 3, (1, 7, 5, 4)),
            (SAME, 3, 2, (1, 12, 9, 4)),
        ):
            w = _weights((4, k, k, 3), kind, 0)
            yield (
                Case(
                    "TRANSPOSE_CONV",
                    [_i(*out), w, X((1, 4, 3, 3)), _bias(4, dtype, w) if dtype != "uint8" else None],
                    [Y(-8, 8)],
                    "TransposeConvOptions",
                    {"Padding": padding, "StrideH": stride, "StrideW": stride},
                    (dtype,),
                    kind,
                ),
                hybrid,
            )
        for adj, shapes in _rows(
            ((False, False), ((2, 3, 4), (2, 4, 5))), ((True, True), ((2, 4, 3), (2, 5, 4)))
        ):
            w = _weights(shapes[1], kind, 0, per_axis=False)
            yield (
                Case(
                    "BATCH_MATMUL",
                    [X(shapes[0]), w],
                    [Y(-8, 8)],
                    "BatchMatMulOptions",
                    {"AdjX": adj[0], "AdjY": adj[1]},
                    (dtype,),
                    kind + "-constant",
                ),
                hybrid,
            )
    for dtype in _rows("float32", "int8", "int16"):
        for adj, shapes in _rows(
            ((False, False), ((2, 1, 3, 4), (5, 4, 2))),
            ((True, False), ((4, 3), (4, 5))),
            ((False, True), ((1, 3, 4), (2, 5, 4))),
        ):
            yield (
                Case(
                    "BATCH_MATMUL",
                    [X(shapes[0]), X(shapes[1])],
                    [Y(-10, 10)],
                    "BatchMatMulOptions",
                    {"AdjX": adj[0], "AdjY": adj[1]},
                    (dtype,),
                ),
                "",
            )
    w3 = np.random.default_rng(1).uniform(-1, 1, (2, 3, 2, 3, 4)).astype(np.float32)
    b3 = np.linspace(-1, 1, 4).astype(np.float32)
    for padding, stride, dilation in _rows((SAME, 1, 1), (VALID, 2, 1), (SAME, 1, 2)):
        fields = {
            "Padding": padding,
            "StrideD": stride,
            "StrideH": stride,
            "StrideW": stride,
            "DilationDFactor": dilation,
            "DilationHFactor": dilation,
            "DilationWFactor": dilation,
        }
        yield Case("CONV_3D", [X((1, 5, 6, 4, 3)), w3, b3], [Y()], "Conv3DOptions", fields), ""
    t3 = np.random.default_rng(1).uniform(-1, 1, (2, 3, 2, 4, 3)).astype(np.float32)
    for padding, stride, out in _rows((SAME, 2, (1, 6, 8, 10, 4)), (VALID, 2, (1, 6, 9, 10, 4))):
        fields = {"Padding": padding, "StrideD": stride, "StrideH": stride, "StrideW": stride}
        yield (
            Case("CONV_3D_TRANSPOSE", [_i(*out), t3, X((1, 3, 4, 5, 3)), b3], [Y()], "Conv3DOptions", fields),
            "",
        )


_HALF: Final = {"int8": (1 / 256, -128), "uint8": (1 / 256, 0), "int16": (1 / 32768, 0)}
_UNIT: Final = {"int8": (1 / 128, 0), "uint8": (1 / 128, 128), "int16": (1 / 32768, 0)}
_LOG: Final = {"int8": (16 / 256, 127), "uint8": (16 / 256, 255)}
PICTURE: Final = (1, 5, 3, 4)
SHAPES: Final = ((7,), (2, 3), (2, 3, 5), PICTURE)


def elementwise() -> Iterator[Case]:
    """Functions of one or two numbers."""
    for code, low, high, output, dtypes in _rows(
        ("ABS", -2, 2, Y(0, 2), ("float32", "int8", "int16", "int32")),
        ("CEIL", -2, 2, Y(), FLOAT),
        ("COS", -4, 4, Y(), FLOAT),
        ("ELU", -3, 3, Y(-1, 3), ("float32", "int8")),
        ("EXP", -2, 2, Y(0, 8), ("float32", "int8", "int16")),
        ("FLOOR", -2, 2, Y(), FLOAT),
        ("HARD_SWISH", -4, 4, Y(-1, 4), BYTES),
        ("LOG", 0.1, 4, Y(-3, 2), ("float32", "int8", "int16")),
        ("LOGISTIC", -6, 6, Y(0, 1, fixed=_HALF), NARROW),
        ("NEG", -2, 2, Y(), ("float32", "int32", "int64")),
        ("RELU", -2, 2, Y(0, 2), NARROW),
        ("RELU6", -2, 8, Y(0, 6), NARROW),
        ("RELU_0_TO_1", -2, 2, Y(0, 1), BYTES),
        ("RELU_N1_TO_1", -2, 2, Y(-1, 1), BYTES),
        ("ROUND", -4, 4, Y(), FLOAT),
        ("RSQRT", 0.1, 4, Y(0, 4), ("float32", "int8", "int16")),
        ("SIGN", -1, 1, Y(), FLOAT),
        ("SIN", -4, 4, Y(), FLOAT),
        ("SQRT", 0, 4, Y(), FLOAT),
        ("SQUARE", -2, 2, Y(), FLOAT),
        ("TANH", -3, 3, Y(-1, 1, fixed=_UNIT), NARROW),
        ("ZEROS_LIKE", -2, 2, Y(), ("float32", "int32", "int64")),
    ):
        for shape in SHAPES:
            yield Case(code, [X(shape, low, high)], [output], dtypes=dtypes)
    yield Case("LOGICAL_NOT", [X((2, 5))], dtypes=("bool",))
    for shape in SHAPES:
        yield Case("LEAKY_RELU", [X(shape)], [Y(-1, 2)], "LeakyReluOptions", {"Alpha": 0.3}, NARROW)
        for approximate in _rows(True, False):
            yield Case(
                "GELU",
                [X(shape)],
                [Y(-0.3, 2)],
                "GeluOptions",
                {"Approximate": approximate},
                ("float32", "int8"),
            )
    for shapes in _rows(
        ((2, 3), (2, 3)),
        ((2, 1, 5), (3, 1)),
        ((4,), ()),
        (PICTURE, (4,)),
        (PICTURE, PICTURE),
        (PICTURE, (1, 1, 1, 4)),
        ((1, 1, 3, 1), PICTURE),
    ):
        a, b = X(shapes[0]), X(shapes[1], -1, 3)
        for code in _rows("ADD", "SUB", "MUL"):
            act = {"ADD": RELU, "SUB": 0, "MUL": RELU6}[code]
            numbers = (
                ("float32", "int8", "uint8", "int16", "int32", "int64")
                if act == 0 or code == "ADD"
                else NARROW
            )
            yield Case(
                code, [a, b], [Y(-6, 6)], f"{code.title()}Options", {"FusedActivationFunction": act}, numbers
            )
        yield Case("DIV", [a, X(shapes[1], 1, 3)], [Y()], "DivOptions", {}, ("float32", "uint8", "int32"))
        for code in _rows("MAXIMUM", "MINIMUM"):
            same = X(shapes[1])
            yield Case(code, [a, same], [Y(same=True)], "MaximumMinimumOptions", {}, NUMBERS)
        for code in _rows("EQUAL", "NOT_EQUAL", "GREATER", "GREATER_EQUAL", "LESS", "LESS_EQUAL"):
            compared = ("float32", "int8", "uint8", "int32", "int64")
            yield Case(code, [a, b], [Y(dtype="bool")], dtypes=compared)
        yield Case("SQUARED_DIFFERENCE", [a, b], [Y(-2, 24)], dtypes=("float32", "int8", "int32"))
        yield Case("POW", [X(shapes[0], 0.2, 3), b], [Y()], dtypes=FLOAT)
        yield Case("POW", [X(shapes[0], -0.5, 0.5), X(shapes[1], 0.1, 0.5)], [Y()], dtypes=("int32",))
        yield Case("FLOOR_DIV", [a, X(shapes[1], 1, 3)], [Y()], dtypes=("float32", "int32", "int16", "int8"))
        yield Case("FLOOR_DIV", [a, X(shapes[1], -3, -1)], [Y()], dtypes=("float32", "int32"))
        least = X(shapes[0], -(2.0**28), 1 - 2.0**28)  # times 8
        yield Case("FLOOR_DIV", [least, X(shapes[1], 1, 3)], [Y()], dtypes=("int32",))
        yield Case("FLOOR_MOD", [a, X(shapes[1], 1, 3)], [Y()], dtypes=("float32", "int32", "int64"))
        yield Case("FLOOR_MOD", [a, X(shapes[1], -3, -1)], [Y()], dtypes=("float32", "int32", "int64"))
        if shapes[0] == shapes[1]:
            yield Case("ATAN2", [a, b], [Y()])
        yield Case("LOGICAL_AND", [a, b], dtypes=("bool",))
        yield Case("LOGICAL_OR", [a, b], dtypes=("bool",))
        yield Case("BITWISE_XOR", [a, b], dtypes=("int32", "bool"), note="bits")
        yield Case("RIGHT_SHIFT", [a, X(shapes[1], 0, 1)], dtypes=("int32", "int16", "int8"))
        yield Case(
            "SELECT_V2",
            [X(shapes[0], dtype="bool"), X(shapes[1]), X(shapes[0])],
            [Y(same=True)],
            dtypes=NUMBERS,
        )
    yield Case("ADD", [X(PICTURE), np.linspace(-1, 1, 4).astype(np.float32)], [Y()], "AddOptions")
    yield Case("MUL", [X(PICTURE), _weights((1, 1, 4), "float32", 0)], [Y()], "MulOptions", {})
    yield Case("ADD_N", [X((2, 3)), X((2, 3)), X((2, 3))], dtypes=("float32", "int32"))
    for condition, shape in _rows(((2,), (2, 3)), ((2, 3), (2, 3)), ((), ())):
        yield Case("SELECT", [X(condition, dtype="bool"), X(shape), X(shape)], [Y(same=True)], dtypes=NUMBERS)
    for kind in _rows("float32", "int8", "uint8", "int16", "int32", "int64", "bool"):
        for wanted in _rows("float32", "int32", "int64", "bool", "uint8", "int8"):
            yield Case("CAST", [X((2, 3), 0, 9, kind)], [Y(dtype=wanted)], note=f"{kind}to{wanted}")
    for shape, slope in _rows((PICTURE, (1, 1, 4)), ((2, 3), (3,)), (PICTURE, (5, 3, 4))):
        yield Case("PRELU", [X(shape), _weights(slope, "float32", 0)], [Y(-2, 2)])
        yield Case("PRELU", [X(shape), X(slope, -1, 1)], [Y(-2, 2)], dtypes=BYTES)
    for size, low, high, narrow in _rows((8, -1.0, 1.0, False), (8, 0.0, 6.0, True), (4, -0.3, 2.0, False)):
        yield Case(
            "FAKE_QUANT",
            [X((3, 7))],
            [Y()],
            "FakeQuantOptions",
            {"Min": low, "Max": high, "NumBits": size, "NarrowRange": narrow},
        )
    for kind in _rows("int8", "uint8", "int16"):
        scale, zero = scale_of(-2, 2, kind)
        yield Case(
            "QUANTIZE",
            [X((2, 9), dtype="float32")],
            [Y(fixed={kind: (scale, zero)}, dtype=kind)],
            dtypes=(kind,),
        )
        yield Case("QUANTIZE", [X((2, 9))], [Y(-1, 3)], dtypes=(kind,))
        yield Case("DEQUANTIZE", [X((2, 9))], [Y(dtype="float32")], dtypes=(kind,))
    yield Case(
        "QUANTIZE",
        [X((2, 9))],
        [Y(dtype="uint8", fixed={"uint8": scale_of(-1, 2, "uint8")})],
        dtypes=("int8",),
    )
    half = np.linspace(-3, 3, 8).astype(np.float16)
    yield Case("DEQUANTIZE", [half], [Y(dtype="float32")], note="half")
    for shape in _rows((3, 7), (2, 3, 5), (7,), PICTURE):
        for beta in _rows(1.0, 0.5):
            yield Case(
                "SOFTMAX", [X(shape, -4, 4)], [Y(0, 1, fixed=_HALF)], "SoftmaxOptions", {"Beta": beta}, NARROW
            )
        yield Case("LOG_SOFTMAX", [X(shape, -4, 4)], [Y(-16, 0, fixed=_LOG)], "", {}, BYTES)
        yield Case("L2_NORMALIZATION", [X(shape)], [Y(-1, 1, fixed=_UNIT)], "L2NormOptions", {}, BYTES)
    for radius, bias, alpha, beta in _rows((2, 1.0, 0.5, 0.75), (1, 2.0, 1.0, 0.5)):
        fields = {"Radius": radius, "Bias": bias, "Alpha": alpha, "Beta": beta}
        yield Case(
            "LOCAL_RESPONSE_NORMALIZATION",
            [X((1, 3, 4, 7))],
            [Y()],
            "LocalResponseNormalizationOptions",
            fields,
        )


def shaping() -> Iterator[Case]:
    """Values that are moved, cut, joined and looked up."""
    same = [Y(same=True)]
    for shape, wanted in _rows(((2, 6), (3, -1)), ((1, 2, 3, 4), (2, 12)), ((6,), (1, 2, 3)), ((1,), ())):
        yield Case("RESHAPE", [X(shape), _i(*wanted)], same, dtypes=NUMBERS)
        if wanted:
            yield Case("RESHAPE", [X(shape)], same, "ReshapeOptions", {"NewShape": list(wanted)}, NARROW)
    yield Case("SQUEEZE", [X((1, 3, 1, 2))], same, "SqueezeOptions", {"SqueezeDims": [0, -2]}, NARROW)
    yield Case("SQUEEZE", [X((1, 3, 1, 2))], same, "SqueezeOptions", {}, NARROW)
    for axis in _rows(0, 1, -1):
        yield Case("EXPAND_DIMS", [X((2, 3)), _i(axis)], same, dtypes=NARROW)
    for shape, order in _rows(
        ((2, 3), (1, 0)),
        ((2, 3, 4), (2, 0, 1)),
        (PICTURE, (0, 3, 1, 2)),
        (PICTURE, (0, 2, 3, 1)),
        (PICTURE, (3, 2, 1, 0)),
        ((1, 2, 3, 2, 2), (0, 4, 1, 3, 2)),
    ):
        yield Case("TRANSPOSE", [X(shape), _i(*order)], same, dtypes=NUMBERS)
    for shape, axis in _rows(((2, 3), 0), ((2, 3), 1), (PICTURE, 3), (PICTURE, -3), (PICTURE, 0)):
        yield Case(
            "CONCATENATION",
            [X(shape), X(shape), X(shape)],
            same,
            "ConcatenationOptions",
            {"Axis": axis},
            NUMBERS,
        )
        yield Case(
            "CONCATENATION",
            [X(shape), X(shape, -1, 4)],
            [Y()],
            "ConcatenationOptions",
            {"Axis": axis},
            ("float32", "uint8"),
        )
        yield Case("SPLIT", [_i(1), X((2, 6, 3, 2))], same * 3, "SplitOptions", {"NumSplits": 3}, NARROW)
        yield Case(
            "PACK", [X(shape), X(shape)], same, "PackOptions", {"ValuesCount": 2, "Axis": axis}, NUMBERS
        )
    yield Case("SPLIT", [_i(-1), X(PICTURE)], same * 2, "SplitOptions", {"NumSplits": 2}, NARROW)
    yield Case(
        "SPLIT_V", [X((2, 7, 3, 2)), _i(2, -1, 1), _i(1)], same * 3, "SplitVOptions", {"NumSplits": 3}, NARROW
    )
    yield Case(
        "SPLIT_V", [X((1, 2, 3, 7)), _i(2, 5), _i(3)], same * 2, "SplitVOptions", {"NumSplits": 2}, NARROW
    )
    for axis in _rows(0, -1):
        yield Case("UNPACK", [X((3, 2, 3))], same * 3, "UnpackOptions", {"Num": 3, "Axis": axis}, NUMBERS)
    for shape, repeats in _rows(((2, 3), (2, 1)), ((3,), (3,)), (PICTURE, (1, 2, 1, 2))):
        yield Case("TILE", [X(shape), _i(*repeats)], same, dtypes=(*NUMBERS, "bool"))
    for shape, wanted in _rows(((3, 1), (2, 3, 4)), ((4,), (3, 4)), ((), (2,))):
        yield Case("BROADCAST_TO", [X(shape), _i(*wanted)], same, dtypes=NUMBERS)
    for axes in _rows((0,), (1,), (2,)):
        yield Case(
            "REVERSE_V2",
            [X((2, 3, 4)), _i(*axes)],
            same,
            dtypes=("float32", "uint8", "int16", "int32", "int64"),
        )
    for seq, batch in _rows((1, 0), (0, 1), (2, 0)):
        lengths = np.asarray([1, 2] if batch == 0 else [1, 2, 2], np.int32)
        yield Case(
            "REVERSE_SEQUENCE",
            [X((2, 3, 4)), lengths],
            same,
            "ReverseSequenceOptions",
            {"SeqDim": seq, "BatchDim": batch},
            ("float32", "int32", "uint8"),
        )
    for size in _rows(2, 3):
        yield Case(
            "SPACE_TO_DEPTH", [X((2, 6, 12, 2))], same, "SpaceToDepthOptions", {"BlockSize": size}, BYTES
        )
        yield Case(
            "DEPTH_TO_SPACE", [X((1, 2, 3, 36))], same, "DepthToSpaceOptions", {"BlockSize": size}, BYTES
        )
    for block, edges in _rows(((2, 2), (0, 0, 0, 0)), ((3, 2), (1, 2, 1, 0))):
        yield Case(
            "SPACE_TO_BATCH_ND",
            [X((2, 6, 6, 2) if block == (2, 2) else (1, 3, 5, 2)), _i(*block), _i(*edges).reshape(2, 2)],
            same,
            dtypes=BYTES,
        )
        yield Case(
            "BATCH_TO_SPACE_ND",
            [X((12, 2, 3, 2)), _i(*block), _i(0, 1, 1, 0).reshape(2, 2)],
            same,
            dtypes=BYTES,
        )
    yield Case("SPACE_TO_BATCH_ND", [X((2, 5, 3)), _i(2), _i(0, 1).reshape(1, 2)], same, dtypes=BYTES)
    for shape, edges in _rows(
        ((2, 3), (1, 0, 2, 3)),
        (PICTURE, (0, 0, 1, 2, 0, 1, 0, 0)),
        (PICTURE, (0, 0, 1, 0, 0, 0, 1, 2)),
        ((2, 3, 4), (0, 0, 1, 1, 2, 0)),
    ):
        pads = _i(*edges).reshape(-1, 2)
        yield Case("PAD", [X(shape), pads], same, dtypes=NUMBERS)
        yield Case("PADV2", [X(shape), pads, np.asarray(1.5, np.float32)], same)
        yield Case(
            "PADV2", [X(shape), pads, X((), 0.5, 0.5)], same, dtypes=("int8", "uint8", "int32", "int64")
        )
        for mode in _rows(0, 1):
            yield Case(
                "MIRROR_PAD",
                [X(shape), np.minimum(pads, 1 if mode == 0 else 2)],
                same,
                "MirrorPadOptions",
                {"Mode": mode},
                ("float32", "int8", "uint8", "int32"),
            )
    for shape, begin, size in _rows(
        ((4, 5), (1, 2), (2, -1)),
        (PICTURE, (0, 1, 0, 2), (1, 3, 3, 2)),
        ((6,), (2,), (3,)),
    ):
        yield Case("SLICE", [X(shape), _i(*begin), _i(*size)], same, dtypes=(*NUMBERS, "bool"))
    yield from _strided()
    for shape, indices, axis, batch in _rows(
        ((4, 3), (2,), 0, 0),
        ((2, 5, 3), (2, 3), 1, 0),
        ((2, 5, 3), (2, 3), 1, 1),
        ((2, 2, 5), (2, 3), -1, 1),
        ((2, 2, 5, 3), (2, 2, 4), 2, 2),
        ((7,), (), 0, 0),
    ):
        places = {"values": np.random.default_rng(2).integers(0, shape[axis], indices).astype(np.int32)}
        yield Case(
            "GATHER", [X(shape), places], same, "GatherOptions", {"Axis": axis, "BatchDims": batch}, NUMBERS
        )
        yield Case(
            "GATHER",
            [X(shape), X(indices, 0, 1.9, "int64")],
            same,
            "GatherOptions",
            {"Axis": axis, "BatchDims": batch},
            FLOAT,
        )
    for indices in _rows((2, 1), (2, 2), (3, 2, 1)):
        yield Case(
            "GATHER_ND",
            [X((3, 4, 2)), X(indices, 0, 2.9, "int32")],
            same,
            dtypes=("float32", "int8", "uint8", "int16", "int32", "int64"),
        )
    for indices, updates, shape in _rows(((3, 1), (3, 2), (4, 2)), ((2, 2), (2,), (3, 3))):
        yield Case(
            "SCATTER_ND",
            [X(indices, 0, 2.9, "int32"), X(updates), _i(*shape)],
            dtypes=("float32", "int32", "int64", "uint8", "int8"),
            note="scatter",
        )
    yield Case("EMBEDDING_LOOKUP", [X((5,), 0, 3.9, "int32"), _weights((4, 3), "float32", 0)])
    yield Case(
        "EMBEDDING_LOOKUP",
        [X((5,), 0, 3.9, "int32"), _weights((4, 3), "int8", 0, per_axis=False)],
        [Y(dtype="float32")],
        note="hybrid",
    )
    for axis, on in _rows((-1, 1.0), (0, 5.0), (1, 2.0)):
        yield Case(
            "ONE_HOT",
            [
                X((2, 3), -1, 4.9, "int32"),
                _i(4).reshape(()),
                np.asarray(on, np.float32),
                np.asarray(-1.0, np.float32),
            ],
            [Y()],
            "OneHotOptions",
            {"Axis": axis},
        )
        yield Case(
            "ONE_HOT",
            [
                X((2, 3), -1, 4.9, "int32"),
                _i(4).reshape(()),
                np.asarray(on, np.int8),
                np.asarray(-1, np.int8),
            ],
            [Y(dtype="int8")],
            "OneHotOptions",
            {"Axis": axis},
            note="int8",
        )
    for shape, k in _rows(((7,), 3), ((2, 5), 5), ((2, 3, 4), 1)):
        yield Case(
            "TOPK_V2",
            [X(shape), _i(k).reshape(())],
            [Y(same=True), Y(dtype="int32")],
            dtypes=("float32", "int32", "int64", "uint8", "int8"),
        )
    for start in _rows((1, 0), (5, 1)):
        yield Case(
            "DYNAMIC_UPDATE_SLICE",
            [X((3, 4)), X((2, 2)), _i(*start)],
            same,
            dtypes=("float32", "int32", "int64"),
        )
    yield Case(
        "DYNAMIC_UPDATE_SLICE",
        [X((3, 4)), X((2, 2)), X((2,), 0, 3.9, "int32")],
        same,
        dtypes=("float32", "int8"),
    )
    sparse = [_i(0, 2, 3), _i(5), X((3,)), X((), 0.5, 0.5)]
    yield Case("SPARSE_TO_DENSE", sparse, dtypes=("float32", "int32", "int64"))
    yield Case(
        "SPARSE_TO_DENSE",
        [_i(0, 1, 2, 0).reshape(2, 2), _i(3, 2), X(()), X((), 0.5, 0.5)],
        dtypes=("float32", "int32"),
    )
    yield Case("SEGMENT_SUM", [X((5, 2)), _i(0, 0, 1, 2, 2)], dtypes=("float32", "int32"))
    for reduction in _rows("SUM", "PROD", "MAX", "MIN"):
        yield Case(
            f"UNSORTED_SEGMENT_{reduction}",
            [X((5, 2)), _i(2, 0, -1, 0, 2), _i(4).reshape(())],
            dtypes=("float32", "int32"),
        )
    yield Case(
        "BUCKETIZE",
        [X((2, 7))],
        [Y(dtype="int32")],
        "BucketizeOptions",
        {"Boundaries": np.asarray([-1.0, 0.0, 1.5], np.float32)},
        ("float32", "int32", "int64"),
    )
    yield Case(
        "MATRIX_DIAG",
        [X((2, 3))],
        dtypes=("float32", "int32", "int64", "int8", "uint8", "int16"),
        note="diag",
    )
    for rows, columns in _rows((3, 3), (2, 4), (4, 2)):
        yield Case(
            "MATRIX_SET_DIAG",
            [X((2, rows, columns)), X((2, min(rows, columns)))],
            [Y(same=True)],
            dtypes=("float32", "int32", "int64", "int8"),
        )
    for steps in _rows((1, 2), (3, 1)):
        yield Case("DILATE", [X((2, 3)), _i(*steps), np.asarray(-1.0, np.float32)], [Y()])
        yield Case("DILATE", [X((2, 3)), _i(*steps), np.asarray(7, np.int32)], [Y()], dtypes=("int32",))
    for kind in _rows("int32", "int64"):
        code = tflite.TensorType.INT32 if kind == "int32" else tflite.TensorType.INT64
        yield Case("SHAPE", [X((2, 3, 4))], [Y(dtype=kind)], "ShapeOptions", {"OutType": code})
    yield Case("RANK", [X((2, 3, 4))], [Y(dtype="int32")])
    yield Case(
        "FILL", [_i(2, 3), X(())], [Y(same=True)], dtypes=("float32", "int32", "int64", "int8", "int16")
    )
    yield Case("BROADCAST_ARGS", [_i(2, 1), _i(3)], [Y(dtype="int32")])
    yield Case("BROADCAST_ARGS", [X((3,), 1, 1.5, "int32"), _i(3)], [Y(dtype="int32")])
    yield Case("BROADCAST_ARGS", [np.array([2, 3]), X((2,), 1, 1.5, "int64")], [Y(dtype="int64")])
    yield Case("BITCAST", [X((2, 3))], [Y(dtype="int32")])
    yield Case("BITCAST", [X((2, 3), -99, 99, "int32")], [Y(dtype="float32")])
    yield Case("BITCAST", [X((1, 3, 2, 5), -99, 99, "int8")], [Y(dtype="uint8")])
    yield Case("RANGE", [_i(2).reshape(()), _i(11).reshape(()), _i(3).reshape(())], [Y(dtype="int32")])
    yield Case("RANGE", [np.float32(1), np.float32(-2), np.float32(-0.5)], [Y()])


def _strided() -> Iterator[Case]:
    same = [Y(same=True)]
    for shape, begin, end, step, masks in _rows(
        ((4, 5), (1, 0), (3, 5), (1, 2), {}),
        ((4, 5), (3, -1), (0, -5), (-1, -2), {}),
        ((4, 5), (2, 1), (0, 0), (1, 1), {"BeginMask": 1, "EndMask": 3}),
        ((4, 5), (0, 2), (1, 3), (1, 1), {"ShrinkAxisMask": 1}),
        ((4, 5), (-1, 0), (0, 5), (1, 1), {"ShrinkAxisMask": 1}),
        ((4, 5), (0, 0, 1), (0, 2, 4), (1, 1, 1), {"NewAxisMask": 1}),
        ((2, 3, 4, 5), (0, 1), (0, 4), (1, 2), {"EllipsisMask": 1}),
        ((2, 3, 4, 5), (1, 0, 2), (2, 0, 3), (1, 1, 1), {"EllipsisMask": 2, "ShrinkAxisMask": 4}),
        ((4, 5), (1, 1), (2, 3), (1, 1), {"Offset": True}),
        ((5,), (4,), (0,), (-2,), {"EndMask": 1}),
        ((5,), (9,), (-9,), (-1,), {}),
        ((5,), (-9,), (9,), (2,), {}),
    ):
        fields = {"BeginMask": 0, "EndMask": 0, **masks}
        yield Case(
            "STRIDED_SLICE",
            [X(shape), _i(*begin), _i(*end), _i(*step)],
            same,
            "StridedSliceOptions",
            fields,
            NUMBERS,
        )


def pictures() -> Iterator[Case]:
    """Pooling, resizing and reductions."""
    for padding, stride, k, act, shape in _rows(
        (SAME, 2, (3, 3), 0, (1, 7, 6, 3)),
        (VALID, 1, (2, 3), RELU, (2, 5, 5, 2)),
        (SAME, 1, (5, 4), RELU6, (1, 4, 7, 1)),
        (VALID, 4, (4, 5), 0, (1, 4, 5, 3)),
    ):
        fields = {
            "StrideH": stride,
            "StrideW": stride,
            "FilterHeight": k[0],
            "FilterWidth": k[1],
            "Padding": padding,
            "FusedActivationFunction": act,
        }
        for code in _rows("AVERAGE_POOL_2D", "MAX_POOL_2D"):
            yield Case(code, [X(shape)], [Y(same=True)], "Pool2DOptions", fields, NARROW)
        yield Case("L2_POOL_2D", [X(shape)], [Y()], "Pool2DOptions", fields)
    for shape, size in _rows(
        ((1, 3, 4, 2), (6, 8)),
        ((2, 5, 4, 3), (3, 7)),
        ((1, 4, 4, 1), (1, 5)),
        ((1, 1, 1, 2), (3, 2)),
        ((1, 33, 9, 1), (257, 140)),  # rounded to 1024ths, the places are off by an eighth of an element
    ):
        for align, half in _rows((False, False), (True, False), (False, True)):
            fields = {"AlignCorners": align, "HalfPixelCenters": half}
            yield Case(
                "RESIZE_BILINEAR",
                [X(shape), _i(*size)],
                [Y(same=True)],
                "ResizeBilinearOptions",
                fields,
                NARROW,
            )
            yield Case(
                "RESIZE_NEAREST_NEIGHBOR",
                [X(shape), _i(*size)],
                [Y(same=True)],
                "ResizeNearestNeighborOptions",
                fields,
                NARROW,
            )
    for shape, axes in _rows(
        ((2, 3, 5), (1,)),
        (PICTURE, (1, 2)),
        (PICTURE, (3,)),
        (PICTURE, (-2,)),
        (PICTURE, (0,)),
        ((7,), (0,)),
        (PICTURE, (0, 1, 2, 3)),
    ):
        for keep in _rows(True, False):
            fields = {"KeepDims": keep}
            yield Case(
                "MEAN",
                [X(shape), _i(*axes)],
                [Y(-1, 1)],
                "ReducerOptions",
                fields,
                ("float32", "int8", "uint8", "int16", "int32"),
            )
            yield Case(
                "SUM",
                [X(shape), _i(*axes)],
                [Y(-12, 12)],
                "ReducerOptions",
                fields,
                ("float32", "int8", "uint8", "int32", "int64"),
            )
            if np.prod([shape[axis] for axis in axes]) < 8:  # more would overflow
                yield Case(
                    "REDUCE_PROD",
                    [X(shape), _i(*axes)],
                    [Y(-12, 12)],
                    "ReducerOptions",
                    fields,
                    ("float32", "int32"),
                )
            for code in _rows("REDUCE_MAX", "REDUCE_MIN"):
                yield Case(code, [X(shape), _i(*axes)], [Y(same=True)], "ReducerOptions", fields, NUMBERS)
            for code in _rows("REDUCE_ANY", "REDUCE_ALL"):
                yield Case(code, [X(shape), _i(*axes)], [Y()], "ReducerOptions", fields, ("bool",))
    for shape, axis in _rows(((2, 5), 1), (PICTURE, -1), ((2, 3, 4), 0)):
        for code, options in _rows(("ARG_MAX", "ArgMaxOptions"), ("ARG_MIN", "ArgMinOptions")):
            for kind, out in _rows(("int32", tflite.TensorType.INT32), ("int64", tflite.TensorType.INT64)):
                yield Case(
                    code,
                    [X(shape), _i(axis)],
                    [Y(dtype=kind)],
                    options,
                    {"OutputType": out},
                    ("float32", "int8", "uint8", "int32"),
                )
        for exclusive, reverse in _rows((False, False), (True, False), (False, True), (True, True)):
            yield Case(
                "CUMSUM",
                [X(shape), _i(axis).reshape(())],
                [Y()],
                "CumsumOptions",
                {"Exclusive": exclusive, "Reverse": reverse},
                ("float32", "int32", "int64"),
            )


def recurrent() -> Iterator[tuple[Case, str]]:
    """Sequences and single steps, float and with 8-bit weights."""

    def w(kind: str, *shape: int, seed: int = 0) -> dict[str, Any]:
        return _weights(shape, kind, 0, seed=seed, per_axis=False)

    def gates(kind: str, cells: int, n: int, out: int, *, coupled: bool, seed: int) -> list[Any]:
        found: list[Any] = [w(kind, cells, n, seed=seed + i) for i in range(4)]
        found += [w(kind, cells, out, seed=seed + 4 + i) for i in range(4)]
        if coupled:
            found[0] = found[4] = None
        return found

    def biases(cells: int, *, coupled: bool) -> list[Any]:
        found: list[Any] = [w("float32", cells, seed=20 + i) for i in range(4)]
        return [None, *found[1:]] if coupled else found

    for kind in _rows("float32", "int8"):
        note = "hybrid" if kind == "int8" else ""
        for steps, coupled, hole, project, clip, norm, major in _rows(
            (4, False, False, False, 0.0, False, False),
            (3, True, False, False, 0.0, False, True),
            (3, False, True, False, 0.0, False, False),
            (3, True, True, False, 0.3, False, False),
            (3, False, False, True, 0.5, False, True),
            (3, False, False, True, 0.0, True, False),
        ):
            n, cells, batch = 5, 6, 2
            out = 4 if project else cells
            weights = gates(kind, cells, n, out, coupled=coupled, seed=1)
            holes: list[Any] = [None] * 3
            if hole:
                holes = [w(kind, cells, seed=30 + i) for i in range(3)]
                holes = [None, *holes[1:]] if coupled else holes
            last = [w(kind, out, cells, seed=40), w("float32", out, seed=41)] if project else [None, None]
            state = [V((batch, out)), V((batch, cells))]
            norms = [w("float32", cells, seed=50 + i) for i in range(4)] if norm else []
            shape = (steps, batch, n) if major else (batch, steps, n)
            fields = {"FusedActivationFunction": TANH, "CellClip": clip, "ProjClip": clip}
            rest = [*weights, *holes, *biases(cells, coupled=coupled), *last, *state, *norms]
            yield (
                Case(
                    "UNIDIRECTIONAL_SEQUENCE_LSTM",
                    [X(shape), *rest],
                    [Y()],
                    "UnidirectionalSequenceLSTMOptions",
                    {**fields, "TimeMajor": major},
                    note=f"{note}-{coupled}-{hole}-{project}-{norm}",
                ),
                note,
            )
            if not major:
                yield Case("LSTM", [X((batch, n)), *rest], [Y()], "LSTMOptions", fields, note=note), note
        for merge in _rows(True, False):
            both = [
                x
                for seed in (1, 61)
                for x in (
                    *gates(kind, 3, 5, 3, coupled=False, seed=seed),
                    *[None] * 3,
                    *biases(3, coupled=False),
                    None,
                    None,
                )
            ]
            # The interpreter reads memory that nothing wrote if it merges and the batch comes first.
            inputs = [X((4, 2, 5) if merge else (2, 4, 5)), *both, *[V((2, 3))] * 4, *[None] * 9]
            fields = {"FusedActivationFunction": TANH, "MergeOutputs": merge, "TimeMajor": merge}
            outputs = [Y()] * (1 if merge else 2)
            yield (
                Case(
                    "BIDIRECTIONAL_SEQUENCE_LSTM",
                    inputs,
                    outputs,
                    "BidirectionalSequenceLSTMOptions",
                    fields,
                    note=note,
                ),
                note,
            )
            one = [w(kind, 3, 5), w(kind, 3, 3, seed=2), w("float32", 3), V((2, 3))]
            fields = {"FusedActivationFunction": RELU, "MergeOutputs": merge, "TimeMajor": False}
            yield (
                Case(
                    "BIDIRECTIONAL_SEQUENCE_RNN",
                    [X((2, 4, 5)), *one, *one, *[None] * 3],
                    outputs,
                    "BidirectionalSequenceRNNOptions",
                    fields,
                    note=note,
                ),
                note,
            )
        for act, major in _rows((TANH, False), (RELU, True), (RELU6, False)):
            one = [w(kind, 3, 5), w(kind, 3, 3, seed=2), w("float32", 3), V((2, 3))]
            fields = {"FusedActivationFunction": act, "TimeMajor": major}
            shape = (4, 2, 5) if major else (2, 4, 5)
            yield (
                Case(
                    "UNIDIRECTIONAL_SEQUENCE_RNN",
                    [X(shape), *one],
                    [Y()],
                    "SequenceRNNOptions",
                    fields,
                    note=note,
                ),
                note,
            )
            yield (
                Case(
                    "RNN", [X((2, 5)), *one], [Y()], "RNNOptions", {"FusedActivationFunction": act}, note=note
                ),
                note,
            )
        for rank, bias in _rows((1, True), (2, False)):
            svdf = [
                w(kind, 6, 5),
                w(kind, 6, 4, seed=3),
                w("float32", 6 // rank) if bias else None,
                V((2, 24)),
            ]
            fields = {"Rank": rank, "FusedActivationFunction": RELU}
            yield Case("SVDF", [X((2, 5)), *svdf], [Y()], "SVDFOptions", fields, note=note), note


def cases() -> Iterator[tuple[Case, str, bool, str]]:
    """All cases as (case, dtype, with pictures between, "hybrid" or empty)."""
    found: list[tuple[Case, str]] = [*weighted(), *recurrent()]
    found += [(case, "") for source in (elementwise, shaping, pictures) for case in source()]
    for case, kind in found:
        for dtype in case.dtypes:
            case_kind = kind or ("hybrid" if case.note == "hybrid" else "")
            yield case, dtype, False, case_kind
            first = next((i for i in case.inputs if isinstance(i, X) and i.dtype is None), None)
            if first is not None and len(first.shape) == 4 and dtype in ("float32", "int8"):
                yield case, dtype, True, case_kind
