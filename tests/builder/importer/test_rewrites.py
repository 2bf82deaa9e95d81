"""Every rewrite computes what ONNX Runtime computes of the operator that it replaces."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from builder.importer import import_onnx
from builder.importer.rewrites import REWRITES

ModelMaker = Callable[..., onnx.ModelProto]
INT64, BOOL = TensorProto.INT64, TensorProto.BOOL
RTOL, ATOL = 1e-4, 1e-5


@pytest.fixture
def agrees(run_onnx: Any, run_relax: Any) -> Callable[..., onnx.ModelProto]:
    """Import a model; compare the normalised form and the Relax module with the original in ONNX Runtime."""

    def check(
        model: onnx.ModelProto, *inputs: NDArray[Any], rtol: float = RTOL, atol: float = ATOL
    ) -> onnx.ModelProto:
        imported = import_onnx(model)
        weights = {tensor.name for tensor in model.graph.initializer}
        names = [value.name for value in model.graph.input if value.name not in weights]
        assert [spec.name for spec in imported.inputs] == names
        feeds = dict(zip(names, inputs, strict=True))
        expected = run_onnx(model, feeds)
        for got in (run_onnx(imported.onnx, feeds), run_relax(imported.mod, inputs)):
            for found, wanted, spec in zip(got, expected, imported.outputs, strict=True):
                assert found.dtype == wanted.dtype
                assert found.shape == wanted.shape == spec.shape
                np.testing.assert_allclose(found, wanted, rtol=RTOL, atol=atol)
        return imported.onnx

    return check


@pytest.fixture
def noise() -> Callable[..., NDArray[np.float32]]:
    random = np.random.default_rng(7)
    return lambda *shape: random.standard_normal(shape).astype(np.float32)


def operators(model: onnx.ModelProto) -> set[str]:
    return {node.op_type for node in model.graph.node}


def test_the_table_names_operators_that_exist() -> None:
    assert all(onnx.defs.has(operator) for operator in REWRITES)


STEPS, BATCH, WIDTH, HIDDEN = 4, 2, 3, 5


def recurrent(make_model: ModelMaker, noise: Any, kind: str, **options: Any) -> onnx.ModelProto:
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    directions = 2 if options.get("direction") == "bidirectional" else 1
    with_bias, with_state = options.pop("bias", True), options.pop("state", False)
    peephole, lengths = options.pop("peephole", False), options.pop("lengths", None)
    outputs = options.pop("outputs", ["Y", "Y_h", "Y_c"])[: 3 if kind == "LSTM" else 2]
    weights = {
        "W": noise(directions, gates * HIDDEN, WIDTH) * 0.5,
        "R": noise(directions, gates * HIDDEN, HIDDEN) * 0.5,
    }
    inputs = ["X", "W", "R", "", "", "", "", ""]
    if with_bias:
        weights["B"] = noise(directions, 2 * gates * HIDDEN) * 0.5
        inputs[3] = "B"
    if lengths is not None:
        weights["lengths"] = np.array(lengths, np.int32)
        inputs[4] = "lengths"
    state_shape = (directions, BATCH, HIDDEN)
    if with_state:
        weights["h0"] = noise(*state_shape)
        inputs[5] = "h0"
        if kind == "LSTM":
            weights["c0"] = noise(*state_shape)
            inputs[6] = "c0"
    if peephole:
        weights["P"] = noise(directions, 3 * HIDDEN) * 0.5
        inputs[7] = "P"
    while not inputs[-1]:
        inputs.pop()
    node = helper.make_node(kind, inputs, outputs, name="layer", hidden_size=HIDDEN, **options)
    shapes = {"Y": [STEPS, directions, BATCH, HIDDEN], "Y_h": list(state_shape), "Y_c": list(state_shape)}
    return make_model([node], {"X": [STEPS, BATCH, WIDTH]}, {n: shapes[n] for n in outputs if n}, weights)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("LSTM", {}),
        ("LSTM", {"bias": False, "direction": "reverse"}),
        ("LSTM", {"direction": "bidirectional", "state": True}),
        ("LSTM", {"peephole": True, "state": True}),
        ("LSTM", {"clip": 0.3}),
        ("LSTM", {"input_forget": 1}),
        ("LSTM", {"activations": ["Sigmoid", "Relu", "Softsign"]}),
        ("LSTM", {"outputs": ["", "Y_h"]}),
        ("LSTM", {"lengths": [STEPS, STEPS]}),
        ("GRU", {}),
        ("GRU", {"linear_before_reset": 1, "state": True}),
        ("GRU", {"linear_before_reset": 1, "bias": False, "direction": "bidirectional"}),
        ("GRU", {"direction": "reverse", "clip": 0.5}),
        ("RNN", {}),
        ("RNN", {"direction": "bidirectional", "state": True, "activations": ["Relu", "Tanh"]}),
    ],
)
def test_recurrent_layers(
    make_model: ModelMaker, noise: Any, agrees: Any, kind: str, options: dict[str, Any]
) -> None:
    normal = agrees(recurrent(make_model, noise, kind, **options), noise(STEPS, BATCH, WIDTH))
    assert kind not in operators(normal)


def test_a_recurrent_layer_over_shorter_sequences_is_refused(make_model: ModelMaker, noise: Any) -> None:
    with pytest.raises(Exception, match=r"LSTM \(layer\)"):
        import_onnx(recurrent(make_model, noise, "LSTM", lengths=[STEPS, STEPS - 1]))


RESIZES = [
    {"mode": mode, "coordinate_transformation_mode": coordinates, "scales": scales}
    for mode, coordinates, scales in itertools.product(
        ["nearest", "linear", "cubic"],
        ["half_pixel", "pytorch_half_pixel", "asymmetric", "align_corners"],
        [(2.0, 2.0), (0.6, 0.7), (1.3, 1.0)],
    )
]


@pytest.mark.parametrize("options", RESIZES, ids=lambda o: "-".join(str(v) for v in o.values()))
def test_resize_by_scales(make_model: ModelMaker, noise: Any, run_onnx: Any, options: dict[str, Any]) -> None:
    check_resize(make_model, noise, run_onnx, dict(options))


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "nearest", "nearest_mode": mode, "scales": (1.7, 0.4)}
        for mode in ("floor", "ceil", "round_prefer_floor", "round_prefer_ceil")
    ]
    + [
        {"mode": "linear", "sizes": (5, 13)},
        {"mode": "linear", "antialias": 1, "scales": (0.5, 0.6)},
        {"mode": "cubic", "antialias": 1, "scales": (0.5, 0.6)},
        {"mode": "cubic", "exclude_outside": 1, "cubic_coeff_a": -0.5, "scales": (1.5, 0.8)},
        {"mode": "linear", "coordinate_transformation_mode": "align_corners", "sizes": (1, 4)},
        {"mode": "nearest", "sizes": (14, 18)},
    ],
    ids=str,
)
def test_resize_in_other_ways(
    make_model: ModelMaker, noise: Any, run_onnx: Any, options: dict[str, Any]
) -> None:
    check_resize(make_model, noise, run_onnx, dict(options))


def check_resize(make_model: ModelMaker, noise: Any, run_onnx: Any, options: dict[str, Any]) -> None:
    weights = {}
    if "scales" in options:
        weights["scales"] = np.array([1, 1, *options.pop("scales")], np.float32)
        inputs = ["x", "", "scales"]
    else:
        weights["sizes"] = np.array([1, 2, *options.pop("sizes")], np.int64)
        inputs = ["x", "", "", "sizes"]
    node = helper.make_node("Resize", inputs, ["y"], name="resize", **options)
    model = make_model([node], {"x": [1, 2, 7, 9]}, {"y": [None] * 4}, weights, opset=18)
    x = noise(1, 2, 7, 9)
    expected = run_onnx(model, {"x": x})[0]
    np.testing.assert_allclose(run_onnx(import_onnx(model).onnx, {"x": x})[0], expected, rtol=1e-4, atol=1e-5)


def test_an_exact_resize_stays_one_operator(make_model: ModelMaker) -> None:
    node = helper.make_node(
        "Resize", ["x", "", "s"], ["y"], mode="nearest", coordinate_transformation_mode="asymmetric"
    )
    model = make_model(
        [node], {"x": [1, 2, 7, 9]}, {"y": [1, 2, 14, 18]}, {"s": np.array([1, 1, 2, 2], np.float32)}
    )
    assert operators(import_onnx(model).onnx) == {"Resize"}


def test_resize_through_the_whole_way(make_model: ModelMaker, noise: Any, agrees: Any) -> None:
    node = helper.make_node("Resize", ["x", "", "s"], ["y"], mode="linear")
    weights = {"s": np.array([1, 1, 0.6, 1.9], np.float32)}
    agrees(make_model([node], {"x": [1, 2, 7, 9]}, {"y": [1, 2, 4, 17]}, weights), noise(1, 2, 7, 9))


def test_quantised_convolution(make_model: ModelMaker, agrees: Any) -> None:
    random = np.random.default_rng(3)
    weights = {
        "xs": np.float32(0.02),
        "xz": np.uint8(120),
        "w": random.integers(-127, 127, (4, 3, 3, 3)).astype(np.int8),
        "ws": np.array([0.01, 0.02, 0.03, 0.015], np.float32),
        "wz": np.zeros(4, np.int8),
        "ys": np.float32(0.1),
        "yz": np.uint8(130),
        "b": random.integers(-500, 500, 4).astype(np.int32),
    }
    node = helper.make_node(
        "QLinearConv", ["x", "xs", "xz", "w", "ws", "wz", "ys", "yz", "b"], ["y"], pads=[1] * 4
    )
    model = make_model(
        [node], {"x": ([1, 3, 6, 6], TensorProto.UINT8)}, {"y": ([1, 4, 6, 6], TensorProto.UINT8)}, weights
    )
    agrees(model, random.integers(0, 255, (1, 3, 6, 6)).astype(np.uint8), atol=1.01)


def test_quantised_matmul(make_model: ModelMaker, agrees: Any) -> None:
    random = np.random.default_rng(4)
    weights = {
        "as": np.float32(0.02),
        "az": np.uint8(113),
        "b": random.integers(0, 255, (5, 3)).astype(np.uint8),
        "bs": np.float32(0.01),
        "bz": np.uint8(114),
        "ys": np.float32(0.02),
        "yz": np.uint8(118),
    }
    node = helper.make_node("QLinearMatMul", ["a", "as", "az", "b", "bs", "bz", "ys", "yz"], ["y"])
    types = {"a": ([2, 5], TensorProto.UINT8)}, {"y": ([2, 3], TensorProto.UINT8)}
    agrees(make_model([node], *types, weights), random.integers(0, 255, (2, 5)).astype(np.uint8), atol=1.01)


def test_integer_convolution(make_model: ModelMaker, agrees: Any) -> None:
    random = np.random.default_rng(5)
    weights = {
        "w": random.integers(0, 255, (2, 3, 3, 3)).astype(np.uint8),
        "xz": np.uint8(7),
        "wz": np.uint8(9),
    }
    node = helper.make_node("ConvInteger", ["x", "w", "xz", "wz"], ["y"])
    types = {"x": ([1, 3, 5, 5], TensorProto.UINT8)}, {"y": ([1, 2, 3, 3], TensorProto.INT32)}
    agrees(make_model([node], *types, weights), random.integers(0, 255, (1, 3, 5, 5)).astype(np.uint8))


def test_quantised_weights_stay_quantised(make_model: ModelMaker, noise: Any, agrees: Any) -> None:
    weights = {"w": np.arange(12, dtype=np.int8).reshape(4, 3), "s": np.float32(0.1), "z": np.int8(1)}
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s", "z"], ["wf"]),
        helper.make_node("MatMul", ["x", "wf"], ["y"]),
    ]
    normal = agrees(make_model(nodes, {"x": [2, 4]}, {"y": [2, 3]}, weights), noise(2, 4))
    assert "DequantizeLinear" in operators(normal)


def test_a_split_sequence_is_taken_apart(make_model: ModelMaker, noise: Any, agrees: Any) -> None:
    nodes = [
        helper.make_node("SplitToSequence", ["x", "sizes"], ["s"], axis=1),
        helper.make_node("SequenceAt", ["s", "last"], ["tail"]),
        helper.make_node("SequenceInsert", ["s", "tail", "first"], ["longer"]),
        helper.make_node("SequenceErase", ["longer", "last"], ["shorter"]),
        helper.make_node("SequenceLength", ["shorter"], ["n"]),
        helper.make_node("ConcatFromSequence", ["shorter"], ["y"], axis=1),
    ]
    weights = {"sizes": np.array([2, 4]), "last": np.array(-1), "first": np.array(0)}
    model = make_model(nodes, {"x": [3, 6]}, {"y": [3, 6], "n": ([], INT64)}, weights)
    assert not any("Sequence" in op for op in operators(agrees(model, noise(3, 6))))


def test_a_stack_of_a_constructed_sequence(make_model: ModelMaker, noise: Any, agrees: Any) -> None:
    nodes = [
        helper.make_node("SequenceConstruct", ["x", "x", "w"], ["s"]),
        helper.make_node("ConcatFromSequence", ["s"], ["y"], axis=-1, new_axis=1),
    ]
    agrees(
        make_model(nodes, {"x": [2, 3]}, {"y": [2, 3, 3]}, {"w": np.ones((2, 3), np.float32)}), noise(2, 3)
    )


def test_a_loop_that_collects_rows(make_model: ModelMaker, noise: Any, agrees: Any) -> None:
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["on"]),
            helper.make_node("Mul", ["s", "factor"], ["scaled"]),
            helper.make_node("Gather", ["x", "i"], ["row"], axis=0),
            helper.make_node("Add", ["scaled", "row"], ["t"]),
            helper.make_node("Add", ["t", "t"], ["seen"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", INT64, []),
            helper.make_tensor_value_info("go", BOOL, []),
            helper.make_tensor_value_info("s", TensorProto.FLOAT, [3]),
        ],
        [
            helper.make_tensor_value_info("on", BOOL, []),
            helper.make_tensor_value_info("t", TensorProto.FLOAT, [3]),
            helper.make_tensor_value_info("seen", TensorProto.FLOAT, [3]),
        ],
        initializer=[numpy_helper.from_array(np.float32(0.5), "factor")],
    )
    node = helper.make_node("Loop", ["count", "go_on", "start"], ["last", "rows"], body=body)
    weights = {"count": np.array(4), "go_on": np.array(True), "start": np.ones(3, np.float32)}
    model = make_model([node], {"x": [4, 3]}, {"last": [3], "rows": [4, 3]}, weights)
    assert "Loop" not in operators(agrees(model, noise(4, 3)))


@pytest.mark.parametrize("backwards", [0, 1])
def test_a_scan(make_model: ModelMaker, noise: Any, agrees: Any, backwards: int) -> None:
    body = helper.make_graph(
        [helper.make_node("Add", ["s", "e"], ["t"]), helper.make_node("Identity", ["t"], ["o"])],
        "body",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [3]) for name in "se"],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [3]) for name in "to"],
    )
    node = helper.make_node(
        "Scan",
        ["start", "x"],
        ["last", "rows"],
        body=body,
        num_scan_inputs=1,
        scan_input_axes=[1],
        scan_input_directions=[backwards],
        scan_output_directions=[backwards],
    )
    model = make_model(
        [node], {"x": [3, 4]}, {"last": [3], "rows": [4, 3]}, {"start": np.zeros(3, np.float32)}
    )
    agrees(model, noise(3, 4))


def one(op: str, inputs: Sequence[str], outputs: Sequence[str] = ("y",), **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, list(inputs), list(outputs), name="node", **attributes)


INTEGERS = np.arange(24, dtype=np.int64).reshape(2, 3, 4) % 7

SINGLE: dict[str, tuple[onnx.NodeProto, dict[str, Any], Any]] = {
    "lp normalisation": (one("LpNormalization", ["x"], axis=1), {}, [2, 3, 4]),
    "lp normalisation by sums": (one("LpNormalization", ["x"], axis=-1, p=1), {}, [2, 3, 4]),
    "mean and variance": (one("MeanVarianceNormalization", ["x"], axes=[0, 2]), {}, [2, 3, 4]),
    "dropout": (one("Dropout", ["x"]), {}, [2, 3, 4]),
    "infinity of one sign": (one("IsInf", ["x"], detect_negative=0), {}, ([2, 3, 4], BOOL)),
    "eye": (one("EyeLike", ["w"], k=1, dtype=1), {"w": np.zeros((3, 4), np.int32)}, [3, 4]),
    "gather one": (one("Gather", ["x", "i"], axis=1), {"i": np.array(-1)}, [2, 4]),
    "gather a run": (one("Gather", ["x", "i"], axis=2), {"i": np.array([1, 2])}, [2, 3, 2]),
    "gather others": (one("Gather", ["x", "i"], axis=2), {"i": np.array([[3, 0], [1, 1]])}, [2, 3, 2, 2]),
    "split with an empty part": (
        one("Split", ["x", "s"], ["y", "empty"], axis=2), {"s": np.array([4, 0])}, [2, 3, 4],
    ),
    "power of another type": (one("Pow", ["x", "e"]), {"e": np.array(2, np.int64)}, [2, 3, 4]),
    "transform": (one("DFT", ["z"], axis=1), {}, [2, 3, 2]),
    "short transform": (one("DFT", ["z", "n"], axis=1, onesided=0), {"n": np.array(2)}, [2, 2, 2]),
    "long transform": (one("DFT", ["z", "n"], axis=1), {"n": np.array(6)}, [2, 6, 2]),
    "inverse transform": (one("DFT", ["z"], axis=1, inverse=1), {}, [2, 3, 2]),
    "onesided transform": (one("DFT", ["r"], axis=1, onesided=1), {}, [2, 3, 2]),
    "short-time transform": (
        one("STFT", ["r", "step", "window"]),
        {"step": np.array(2), "window": np.hanning(4).astype(np.float32)}, [2, 1, 3, 2],
    ),
    "reversed sequences": (
        one("ReverseSequence", ["x", "n"], batch_axis=0, time_axis=1), {"n": np.array([2, 3])}, [2, 3, 4],
    ),
    "reversed in time first": (one("ReverseSequence", ["x", "n"]), {"n": np.array([2, 1, 2])}, [2, 3, 4]),
    "activation defined by others": (one("Celu", ["x"], alpha=0.7), {}, [2, 3, 4]),
    "hard swish": (one("HardSwish", ["x"]), {}, [2, 3, 4]),
    "einsum": (one("Einsum", ["x", "x"], equation="bij,bkj->bik"), {}, [2, 3, 3]),
}  # fmt: skip


@pytest.mark.parametrize("case", SINGLE, ids=str)
def test_single_operators(make_model: ModelMaker, noise: Any, agrees: Any, case: str) -> None:
    node, weights, output = SINGLE[case]
    used = {"x": (2, 3, 4), "z": (2, 3, 2), "r": (2, 5 if node.op_type == "STFT" else 4, 1)}
    inputs = {name: list(used[name]) for name in dict.fromkeys(node.input) if name in used}
    outputs = {"y": output}
    if "split" in case:
        outputs["empty"] = [2, 3, 0]
        del outputs["empty"]
    agrees(make_model([node], inputs, outputs, weights), *(noise(*used[name]) for name in inputs))


def test_integer_powers(make_model: ModelMaker, agrees: Any) -> None:
    model = make_model(
        [one("Pow", ["x", "e"])], {"x": ([2, 3, 4], INT64)}, {"y": ([2, 3, 4], INT64)}, {"e": np.array(3)}
    )
    agrees(model, INTEGERS)


@pytest.mark.parametrize(
    "attributes",
    [
        {"output_shape": [10, 8], "strides": [3, 2]},
        {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
        {"auto_pad": "SAME_LOWER", "strides": [2, 2]},
        {"strides": [2, 2], "output_padding": [1, 1], "pads": [1, 0, 0, 1]},
    ],
    ids=str,
)
def test_transposed_convolution(
    make_model: ModelMaker, noise: Any, agrees: Any, attributes: dict[str, Any]
) -> None:
    node = one("ConvTranspose", ["x", "w"], **attributes)
    agrees(
        make_model([node], {"x": [1, 2, 3, 4]}, {"y": [None] * 4}, {"w": noise(2, 3, 3, 3)}),
        noise(1, 2, 3, 4),
    )


def test_batch_normalisation_in_training_mode_uses_the_batch(
    make_model: ModelMaker, noise: Any, agrees: Any
) -> None:
    weights = {name: np.abs(noise(3)) + 0.5 for name in ("s", "b", "m", "v")}
    node = one("BatchNormalization", ["x", "s", "b", "m", "v"], ["y", "nm", "nv"], training_mode=1)
    model = make_model([node], {"x": [2, 3, 4]}, {"y": [2, 3, 4], "nm": [3], "nv": [3]}, weights)
    agrees(model, noise(2, 3, 4))


@pytest.mark.parametrize(
    ("op", "indices", "shape"),
    [
        ("Gather", [[0, 2], [-1, 1]], [2, 2, 4]),
        ("GatherElements", [[0, 2, 1, -3]], [1, 4]),
        ("GatherND", [[0, 3], [-1, -4]], [2]),
    ],
)
def test_indices_that_come_with_a_request_select_and_stay_in_bounds(
    make_model: ModelMaker, noise: Any, agrees: Any, run_relax: Any, op: str, indices: Any, shape: list[int]
) -> None:
    table, places = noise(3, 4), np.array(indices)
    model = make_model([one(op, ["t", "i"])], {"i": (list(places.shape), INT64)}, {"y": shape}, {"t": table})
    agrees(model, places)
    far = np.full_like(places, 2**40)
    found = run_relax(import_onnx(model).mod, [far])[0]
    assert np.isin(found, table).all()


def test_scattering_beyond_the_tensor_stays_inside(
    make_model: ModelMaker, noise: Any, run_relax: Any
) -> None:
    node = one("ScatterElements", ["x", "i", "u"], axis=0)
    model = make_model(
        [node], {"x": [3, 2], "i": ([1, 2], INT64)}, {"y": [3, 2]}, {"u": np.full((1, 2), 9, np.float32)}
    )
    found = run_relax(import_onnx(model).mod, [noise(3, 2), np.array([[2**40, -(2**40)]])])[0]
    assert found[2, 0] == found[0, 1] == 9
