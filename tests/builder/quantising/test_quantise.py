"""From a float network to int8: what becomes of each kind of block, judged by ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from builder.errors import AccuracyError, ModelError
from builder.importer import import_onnx
from builder.quantising.agreement import Noise
from builder.quantising.quantise import Limits, QuantisedModel, quantize
from builder.quantising.session import Session
from tests.builder.quantising.networks import (
    Array,
    Network,
    constants,
    maker,
    node,
    operators,
    readers,
    samples,
)

ANY = Limits(metric="sqnr", min_sqnr_db=-200.0)  # a network with random weights has no classes to keep


def quantise(model: onnx.ModelProto, data: dict[str, Array], limits: Limits = ANY) -> QuantisedModel:
    return quantize(import_onnx(model), data, activations="uint8", limits=limits)


def ratio_db(result: QuantisedModel, model: onnx.ModelProto, data: dict[str, Array]) -> float:
    """Signal to noise on samples of ours, measured apart from the quantiser."""
    float_session, int8_session = Session(import_onnx(model).onnx), Session(result.onnx)
    noise = Noise()
    for i in range(len(next(iter(data.values())))):
        sample = {name: value[i : i + 1] for name, value in data.items()}
        for reference, value in zip(float_session.run(sample), int8_session.run(sample), strict=True):
            noise.add(reference, value)
    return noise.ratio_db


def plain(net: Network) -> str:
    x = net.op("Relu", net.conv(net.input("x", [1, 3, 12, 12]), 3, 8))
    return net.conv(net.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2]), 8, 4)


def residual(net: Network) -> str:
    x = net.op("Relu", net.conv(net.input("x", [1, 3, 12, 12]), 3, 8))
    y = net.conv(net.op("Relu", net.conv(x, 8, 8)), 8, 8)
    return net.conv(net.op("Relu", net.op("Add", x, y)), 8, 4)


def depthwise(net: Network) -> str:
    """Inverted residual with ReLU6, whose batch norm is not folded yet."""
    x = net.conv(net.input("x", [1, 3, 12, 12]), 3, 16, bias=False)
    tables = [net.constant(net.rng.uniform(0.5, 1.5, 16)) for _ in range(2)]
    tables += [net.constant(net.rng.standard_normal(16) * 0.1), net.constant(net.rng.uniform(0.5, 2, 16))]
    x = net.op("Clip", net.op("BatchNormalization", x, *tables), net.constant(0), net.constant(6))
    return net.conv(net.op("Clip", net.conv(x, 16, 16, group=16), net.constant(0), net.constant(6)), 16, 4, 1)


def branches(net: Network) -> str:
    x = net.op("Relu", net.conv(net.input("x", [1, 3, 12, 12]), 3, 8))
    parts = [net.op("Relu", net.conv(x, 8, 4)), net.op("AveragePool", x, kernel_shape=[3, 3], pads=[1] * 4)]
    return net.conv(net.op("Concat", *parts, axis=1), 12, 4)


def mobilenet_v3(net: Network) -> str:
    """Hard swish, and squeeze and excitation."""
    x = net.op("HardSwish", net.conv(net.input("x", [1, 3, 12, 12]), 3, 8))
    s = net.op("Relu", net.conv(net.op("GlobalAveragePool", x), 8, 4, 1))
    s = net.op("HardSigmoid", net.conv(s, 4, 8, 1), alpha=1 / 6)
    return net.conv(net.op("Mul", x, s), 8, 4, 1)


def swish(net: Network) -> str:
    x = net.conv(net.input("x", [1, 3, 12, 12]), 3, 8)
    x = net.op("Mul", x, net.op("Sigmoid", x))
    x = net.op("Resize", x, "", net.constant([1, 1, 2, 2]), mode="nearest")
    return net.conv(net.op("Transpose", net.op("Transpose", x, perm=[0, 2, 3, 1]), perm=[0, 3, 1, 2]), 8, 4)


def torch_classifier(net: Network) -> str:
    """A dynamic batch, Conv without bias, Flatten, Gemm with transB, as PyTorch exports them."""
    x = net.op("Relu", net.conv(net.input("x", ["batch", 3, 12, 12]), 3, 8, bias=False))
    x = net.op("Flatten", net.op("GlobalAveragePool", x), axis=1)
    weight, bias = net.rng.standard_normal((10, 8)), net.rng.standard_normal(10)
    return net.op("Gemm", x, net.constant(weight), net.constant(bias), transB=1, alpha=0.5, beta=2.0)


@pytest.mark.parametrize(
    ("build", "kept", "least_db"),
    [
        (plain, ["Conv", "MaxPool", "Conv"], 37),
        (residual, ["Conv", "Conv", "Conv", "Add", "Conv"], 32),
        (depthwise, ["Conv", "Conv", "Conv"], 35),
        (branches, ["Conv", "Conv", "AveragePool", "Concat", "Conv"], 33.5),
        (mobilenet_v3, None, 28.5),
        (swish, ["Conv", "Sigmoid", "Mul", "Resize", "Conv"], 33),
        (torch_classifier, ["Conv", "GlobalAveragePool", "Flatten", "Gemm"], 36),
    ],
)
def test_network_in_int8_agrees_with_its_float_form(
    build: Callable[[Network], str], kept: list[str] | None, least_db: float, network: Network
) -> None:
    """Also: clamps are gone, because the range of the levels does their work."""
    model = network.model(build(network))
    result = quantise(model, {"x": samples(40, (3, 12, 12))})
    unseen = {"x": samples(10, (3, 12, 12), seed=7)}
    assert ratio_db(result, model, unseen) >= least_db
    assert result.report.int8_share == 100
    assert result.report.agreement.sqnr_db is not None
    assert kept is None or operators(result.onnx) == kept
    assert all(block.precision == "int8" for block in result.report.blocks)
    onnx.checker.check_model(result.onnx, full_check=True)


def test_every_product_reads_levels_and_int8_weights_for_each_channel(network: Network) -> None:
    model = network.model(torch_classifier(network))
    result = quantise(model, {"x": samples(40, (3, 12, 12))}).onnx
    values = constants(result)
    for kind, axis, channels in (("Conv", 0, 8), ("Gemm", 0, 10)):
        product = node(result, kind)
        assert [maker(result, name) for name in product.input] == ["DequantizeLinear"] * 3
        data, weight, bias = (
            next(n for n in result.graph.node if name in n.output) for name in product.input
        )
        assert maker(result, data.input[0]) == "QuantizeLinear"
        assert values[weight.input[0]].dtype == np.int8
        assert values[weight.input[0]].min() >= -127
        assert (
            np.abs(values[weight.input[0]]).max(axis=tuple(range(1, values[weight.input[0]].ndim))).min() > 60
        )
        assert (values[weight.input[2]] == 0).all()
        assert [a.i for a in weight.attribute if a.name == "axis"] == [axis]
        assert values[bias.input[0]].dtype == np.int32
        assert len(bias.input) == 2
        np.testing.assert_array_equal(values[bias.input[1]], values[data.input[1]] * values[weight.input[1]])
        assert values[weight.input[1]].shape == (channels,)
    assert result.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 1


@pytest.mark.parametrize(("activations", "lowest"), [("uint8", 0), ("int8", -128)])
def test_zero_after_relu_is_the_lowest_level(activations: str, lowest: int, network: Network) -> None:
    model = import_onnx(network.model(plain(network)))
    result = quantize(model, {"x": samples(40, (3, 12, 12))}, activations=activations, limits=ANY).onnx  # type: ignore[arg-type]
    pool = node(result, "MaxPool")
    source = next(n for n in result.graph.node if pool.input[0] in n.output)
    zero_point = constants(result)[source.input[2]]
    assert zero_point.dtype == activations
    assert zero_point == lowest
    # What only moves values keeps scale and zero point.
    after = next(n for n in result.graph.node if n.op_type == "QuantizeLinear" and n.input[0] in pool.output)
    assert list(after.input[1:]) == list(source.input[1:])


def test_both_types_of_activations_give_the_same_numbers(network: Network) -> None:
    model = import_onnx(network.model(residual(network)))
    data = samples(40, (3, 12, 12))
    results = [quantize(model, {"x": data}, activations=kind, limits=ANY).onnx for kind in ("uint8", "int8")]
    ours, theirs = (Session(result).run({"x": data[:1]})[0] for result in results)
    np.testing.assert_array_equal(ours, theirs)


def test_type_of_activations_follows_the_target(network: Network) -> None:
    model = import_onnx(network.model(plain(network)))
    data = {"x": samples(4, (3, 12, 12))}
    assert quantize(model, data, target="rpi4", limits=ANY).report.activations == "int8"
    assert quantize(model, data, target="x86-64-v3", limits=ANY).report.activations == "uint8"


def test_weights_fit_sums_of_16_bits_if_the_target_adds_so(network: Network) -> None:
    """The second layer's: the first one has few inputs, the depthwise one adds rows."""
    x = network.op("Relu", network.conv(network.input("x", [1, 3, 12, 12]), 3, 16))
    x = network.op("Relu", network.conv(x, 16, 16, group=16))
    x = network.conv(x, 16, 24, kernel=1)
    model, data = import_onnx(network.model(x)), {"x": samples(4, (3, 12, 12))}

    def largest(target: str) -> tuple[int, int]:
        result = quantize(model, data, target=target, limits=ANY)
        [levels] = [v.astype(int) for v in constants(result.onnx).values() if v.shape == (24, 16, 1, 1)]
        fours = np.abs(levels).reshape(24, 2, 4, 2).sum(axis=2)
        return int(fours.max()), len(result.report.widened)

    for target in ("rpi3", "rpi4"):
        most, layers = largest(target)
        assert 230 < most <= 255
        assert layers == 1
    most, layers = largest("rpi5")
    assert most > 257
    assert layers == 0


def test_head_of_a_detector_stays_in_float(network: Network) -> None:
    """What follows the last convolutions: reshapes, decoders, concatenation, sigmoid."""
    x = network.op("Relu", network.conv(network.input("x", [1, 3, 12, 12]), 3, 8))
    rows = network.constant([1, 144, 4], np.int64)
    raw = network.op("Reshape", network.conv(x, 8, 4), rows)
    boxes = network.op("Mul", network.op("Sigmoid", raw), network.constant(320))
    deltas = network.op("Exp", network.op("Reshape", network.conv(x, 8, 4), rows))
    scores = network.op("Softmax", network.op("Reshape", network.conv(x, 8, 4), rows), axis=2)
    model = network.model(network.op("Concat", boxes, deltas, scores, axis=2))
    result = quantise(model, {"x": samples(40, (3, 12, 12))})
    for which in (1, 2, 3):
        assert readers(result.onnx, node(result.onnx, "Conv", which).output[0]) == ["Reshape"]
    assert sum(n.op_type == "QuantizeLinear" for n in result.onnx.graph.node) == 2
    assert result.report.int8_share == 100
    assert {b.kind for b in result.report.blocks if b.precision == "float"} >= {"Concat", "Exp"}
    assert ratio_db(result, model, {"x": samples(10, (3, 12, 12), seed=7)}) > 34


def test_concatenation_of_unlike_ranges_stays_in_float(network: Network) -> None:
    x = network.op("Relu", network.conv(network.input("x", [1, 3, 12, 12]), 3, 8))
    wide = network.op("Mul", network.conv(x, 8, 4), network.constant(50))  # a factor that weights take in
    model = network.model(network.conv(network.op("Concat", wide, network.conv(x, 8, 4), axis=1), 8, 4))
    result = quantise(model, {"x": samples(40, (3, 12, 12))})
    concat = node(result.onnx, "Concat")
    assert [maker(result.onnx, name) for name in concat.input] == [
        "Conv",
        "Conv",
    ]  # the factor is in the weights
    assert [b.precision for b in result.report.blocks if b.kind == "Concat"] == ["float"]


def test_transformer_block_keeps_norms_softmax_and_attention_in_float(network: Network) -> None:
    x = network.input("x", [1, 6, 16])
    first = network.op("LayerNormalization", x, network.constant(np.ones(16)), network.constant(np.zeros(16)))

    def linear(value: str, inputs: int, outputs: int) -> str:
        weight = network.constant(network.rng.standard_normal((inputs, outputs)) / np.sqrt(inputs))
        bias = network.constant(network.rng.standard_normal(outputs) * 0.1)
        return network.op("Add", network.op("MatMul", value, weight), bias)

    q, k, v = (linear(first, 16, 16) for _ in range(3))
    scores = network.op("MatMul", q, network.op("Transpose", k, perm=[0, 2, 1]))
    scores = network.op("Softmax", network.op("Mul", scores, network.constant(0.25)), axis=-1)
    y = network.op("Add", x, linear(network.op("MatMul", scores, v), 16, 16))
    inner = network.op("Gelu", linear(y, 16, 32), approximate="tanh") if network.opset >= 20 else None
    inner = inner or network.op("Relu", linear(y, 16, 32))
    model = network.model(network.op("Add", y, linear(inner, 32, 16)))
    result = quantise(model, {"x": samples(40, (6, 16))})
    assert ratio_db(result, model, {"x": samples(10, (6, 16), seed=7)}) > 32
    softmax = node(result.onnx, "Softmax")
    assert readers(result.onnx, softmax.output[0]) == ["MatMul"]
    products = [n for n in result.onnx.graph.node if n.op_type in ("Gemm", "MatMul")]
    quantised = [n for n in products if maker(result.onnx, n.input[1]) == "DequantizeLinear"]
    assert (len(products), len(quantised)) == (8, 6)
    assert 60 < result.report.int8_share < 100
    norm = node(result.onnx, "LayerNormalization")
    assert maker(result.onnx, norm.input[0]) == "input"


def test_bias_of_a_matmul_is_added_to_the_sums(network: Network) -> None:
    """In their scale, and before anything rounds."""
    weight, bias = network.rng.standard_normal((16, 8)), network.rng.standard_normal(8)
    product = network.op("MatMul", network.input("x", [2, 6, 16]), network.constant(weight))
    model = network.model(network.op("Relu", network.op("Add", network.constant(bias), product)))
    imported = replace(import_onnx(model), onnx=model)  # onnxslim would make it a Gemm
    result = quantize(imported, {"x": samples(40, (2, 6, 16))}, activations="uint8", limits=ANY).onnx
    add = node(result, "Add")
    assert [maker(result, name) for name in add.input] == ["DequantizeLinear", "MatMul"]
    assert [n.op_type for n in result.graph.node if "x" in n.input] == ["QuantizeLinear"]
    values = constants(result)
    levels = next(n for n in result.graph.node if add.input[0] in n.output)
    assert values[levels.input[0]].dtype == np.int32
    noise = Noise()
    for sample in samples(3, (2, 6, 16), seed=7):
        expected = np.maximum(sample @ weight + bias, 0)
        noise.add(expected, Session(result).run({"x": sample})[0])
    assert noise.ratio_db > 36


def test_recurrent_layer_stays_as_it_is(network: Network) -> None:
    x = network.input("x", [5, 1, 8])
    w, r = (network.constant(network.rng.standard_normal((1, 16, n)) * 0.3) for n in (8, 4))
    lstm = network.op("LSTM", x, w, r, outputs=1, hidden_size=4)
    flat = network.op("Reshape", lstm, network.constant([1, 20], np.int64))
    weight = network.constant(network.rng.standard_normal((20, 3)))
    model = network.model(network.op("MatMul", flat, weight))
    data = {"x": samples(40, (5, 1, 8))}
    result = quantise(model, data)
    assert maker(result.onnx, node(result.onnx, "LSTM").input[0]) == "input"
    assert 0 < result.report.int8_share < 20
    assert result.report.agreement.sqnr_db is not None
    assert result.report.agreement.sqnr_db > 34


def test_mask_of_huge_numbers_does_not_set_a_range(network: Network) -> None:
    x = network.conv(network.input("x", [1, 3, 4, 4]), 3, 8)
    masked = network.op(
        "Add", x, network.op("Mul", network.input("mask", [1, 8, 4, 4]), network.constant(-3e38))
    )
    model = network.model(network.conv(masked, 8, 4))
    mask = np.zeros((40, 8, 4, 4), np.float32)
    mask[:, 0] = 1
    result = quantise(model, {"x": samples(40, (3, 4, 4)), "mask": mask})
    assert [b.precision for b in result.report.blocks if b.kind == "Conv"] == ["int8", "float"]
    assert any("not finite" in text for text in result.report.warnings)


def test_samples_of_which_only_infinities_are_made_are_refused(network: Network) -> None:
    """All blocks would stay in float, and NaN agrees with NaN."""
    x = network.op("Log", network.input("x", [1, 3, 4, 4]))
    model = network.model(network.conv(x, 3, 8))
    with pytest.raises(ModelError, match=r"expected samples .* finite numbers, got none: ") as caught:
        quantise(model, {"x": np.zeros((40, 3, 4, 4), np.float32)})
    assert caught.value.hint is not None


def test_same_input_gives_the_same_bytes(network: Network) -> None:
    model = network.model(mobilenet_v3(network))
    data = {"x": samples(40, (3, 12, 12))}
    assert quantise(model, data).to_bytes() == quantise(model, data).to_bytes()


def test_saved_model_is_complete_and_smaller(network: Network, tmp_path: Path) -> None:
    x = network.op("Relu", network.conv(network.input("x", [1, 3, 6, 6]), 3, 64))
    model = network.model(network.conv(x, 64, 128))
    result = quantise(model, {"x": samples(40, (3, 6, 6))})
    result.save(tmp_path / "small.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["small.onnx"]
    assert (tmp_path / "small.onnx").stat().st_size == result.report.bytes
    assert result.report.bytes < 0.29 * result.report.float_bytes
    assert import_onnx(tmp_path / "small.onnx").outputs == result.imported().outputs


def outlying(network: Network) -> onnx.ModelProto:
    """One small block whose output has a few huge values and many small ones that decide the class."""
    x = network.op("Relu", network.conv(network.input("x", [1, 3, 8, 8]), 3, 8))
    narrow = network.op("Flatten", network.op("GlobalAveragePool", x))
    weight = network.rng.standard_normal((8, 16))
    weight[:, 0] *= 3000
    y = network.op("Gemm", narrow, network.constant(weight))
    undo = network.rng.standard_normal((16, 10))
    undo[0] = 0
    y = network.op("Gemm", y, network.constant(undo))
    for _ in range(2):  # most of the work is elsewhere
        x = network.op("Relu", network.conv(x, 8, 8))
    other = network.op("Flatten", network.op("GlobalAveragePool", x))
    small = network.op("Gemm", other, network.constant(network.rng.standard_normal((8, 10)) * 0.01))
    return network.model(network.op("Add", y, small))


def test_sensitive_block_is_left_in_float_until_the_drop_is_met(network: Network) -> None:
    model, data = outlying(network), {"x": samples(60, (3, 8, 8))}
    free = quantise(model, data, Limits(max_drop=100))
    assert free.report.agreement.drop is not None
    assert free.report.agreement.drop > 5
    result = quantise(model, data, Limits(max_drop=0))
    assert result.report.agreement.drop == 0
    assert len(result.report.excluded) in (1, 2)
    assert result.report.int8_share > 95
    floats = {block.name for block in result.report.blocks if block.precision == "float"}
    assert set(result.report.excluded) <= floats
    with pytest.raises(AccuracyError, match=r"expected a drop of at most 0 points, got .* 0 % of the work"):
        quantise(model, data, Limits(max_drop=0, max_float=0))


def test_noise_limit_of_a_model_without_classes_is_only_strict_if_it_is_stated(network: Network) -> None:
    model = network.model(plain(network))
    data = {"x": samples(40, (3, 12, 12))}
    with pytest.raises(AccuracyError, match="expected at least 90 dB, got 3"):
        quantise(model, data, Limits(min_sqnr_db=90))
    assert quantise(model, data, Limits()).report.excluded == ()


def test_noise_without_any_signal_is_not_enough() -> None:
    net = Network()
    x = net.input("x", [1, 3, 12, 12])
    # Small whole numbers, so that the sum is exactly 0 in float; each product has a scale of its own in int8.
    first, second = net.rng.integers(-9, 10, (2, 4, 3, 3, 3))
    products = [net.op("Conv", x, net.constant(weight)) for weight in (first, second, -first - second)]
    model = net.model(net.op("Add", net.op("Add", *products[:2]), products[2]))
    with pytest.raises(AccuracyError, match=r"expected at least 10 dB, got 0\.0 dB"):
        quantise(model, {"x": np.rint(samples(40, (3, 12, 12)))}, Limits(metric="sqnr", min_sqnr_db=10))


def test_few_samples_give_a_warning(network: Network) -> None:
    report = quantise(network.model(plain(network)), {"x": samples(31, (3, 12, 12))}).report
    assert any("only 31 calibration samples" in text for text in report.warnings)
    report = quantise(network.model(plain(Network())), {"x": samples(32, (3, 12, 12))}).report
    assert report.warnings == ()


def test_quantised_model_is_refused(network: Network) -> None:
    result = quantise(network.model(plain(network)), {"x": samples(32, (3, 12, 12))})
    with pytest.raises(ModelError, match="expected a float model, got one with DequantizeLinear") as caught:
        quantise(result.onnx, {"x": samples(32, (3, 12, 12))})
    assert caught.value.hint == "it is quantised already: compile it as it is"


def test_model_without_weights_is_refused(network: Network) -> None:
    model = network.model(network.op("Relu", network.input("x", [1, 3])))
    with pytest.raises(ModelError, match="expected convolutions or matrix products"):
        quantise(model, {"x": samples(32, (3,))})


def test_half_precision_model_keeps_the_types_of_its_interface(network: Network) -> None:
    half = TensorProto.FLOAT16
    x = network.op("Cast", network.input("x", [1, 3, 8, 8], half), to=TensorProto.FLOAT)
    y = network.op("Cast", network.conv(network.op("Relu", network.conv(x, 3, 8)), 8, 4), to=half)
    model = network.model(y)
    result = quantise(model, {"x": samples(40, (3, 8, 8)).astype(np.float16)})
    assert result.onnx.graph.input[0].type.tensor_type.elem_type == half
    assert result.report.int8_share == 100
