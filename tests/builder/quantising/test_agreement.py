"""What agreement means: noise, equal classes, accuracy."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from agent.bundle.tensor_spec import TensorSpec
from builder.errors import ModelError
from builder.quantising.agreement import NOISELESS_DB, Comparison, Noise, class_scores, read_truths
from builder.quantising.calibration import CalibrationData, open_calibration
from tests.builder.quantising.networks import Network


def test_ratio_is_that_of_the_sums_of_squares() -> None:
    noise = Noise()
    noise.add(np.array([3.0, 4.0]), np.array([3.0, 4.5]))
    noise.add(np.array([5.0, np.inf]), np.array([5.0, 7.0]))
    assert noise.ratio_db == pytest.approx(10 * math.log10(50 / 0.25))


def test_extremes_are_finite_numbers() -> None:
    for reference, value, expected in (
        (1, 1, NOISELESS_DB),
        (0, 0, NOISELESS_DB),
        (0, 1, 0.0),
        (1, np.inf, -NOISELESS_DB),
    ):
        noise = Noise()
        noise.add(np.array([reference], np.float32), np.array([value], np.float32))
        assert noise.ratio_db == expected


@pytest.mark.parametrize(
    ("shapes", "found"),
    [
        ([(1, 10)], 0),
        ([(4, 10, 1, 1)], 0),
        ([(1, 1)], None),
        ([(10,)], None),
        ([(1, 5, 4)], None),
        ([(1, 9), (1, 4)], None),
    ],
)
def test_scores_are_the_only_output_with_a_number_for_each_class(
    shapes: list[tuple[int, ...]], found: int | None
) -> None:
    assert class_scores([TensorSpec(f"y{i}", "FP32", shape) for i, shape in enumerate(shapes)]) == found
    assert class_scores([TensorSpec("y", "INT64", (1, 10))]) is None


def scaled(factors: list[float]) -> tuple[Network, str]:
    net = Network()
    return net, net.op("Mul", net.input("x", [1, 3]), net.constant([factors]))


def test_classes_and_labels_are_counted() -> None:
    net, y = scaled([1, 1, 1])
    other, z = scaled([1, 1, 3])
    x = np.array([[3, 1, 2], [5, 1, 1], [1, 2, 0.1], [0, 0, 1]], np.float32)
    data = open_calibration({"x": x}, [TensorSpec("x", "FP32", (1, 3))])
    outputs = [TensorSpec(y, "FP32", (1, 3))]
    comparison = Comparison(net.model(y), outputs, data, {0: 0, 1: 0, 3: 1}, 0, lambda _: None)
    found = comparison.measure(other.model(z))
    assert (found.samples, found.top1) == (4, 75.0)
    assert found.float_accuracy == pytest.approx(200 / 3)
    assert found.accuracy == pytest.approx(100 / 3)
    assert found.drop == pytest.approx(100 / 3)
    assert found.sqnr_db == pytest.approx(
        10 * math.log10((x**2).sum() / ((2 * x[:, 2]) ** 2).sum()), abs=1e-4
    )
    assert comparison.measure(other.model(z), 2).samples == 2


def test_noise_is_that_of_the_worst_output() -> None:
    net, other = Network(), Network()
    ys = [net.op("Mul", net.input("x", [1, 3]), net.constant(1)), net.op("Neg", "x")]
    zs = [other.op("Mul", other.input("x", [1, 3]), other.constant(1.1)), other.op("Neg", "x")]
    data = open_calibration({"x": np.ones((4, 3), np.float32)}, [TensorSpec("x", "FP32", (1, 3))])
    comparison = Comparison(
        net.model(*ys), [TensorSpec(y, "FP32", (1, 3)) for y in ys], data, None, None, print
    )
    assert comparison.measure(other.model(*zs)).sqnr_db == pytest.approx(20, abs=0.01)


def test_large_outputs_are_compared_on_fewer_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builder.quantising.agreement.MAX_KEPT_BYTES", 40)
    net, y = scaled([1, 1, 1])
    data = open_calibration({"x": np.ones((30, 3), np.float32)}, [TensorSpec("x", "FP32", (1, 3))])
    comparison = Comparison(net.model(y), [TensorSpec(y, "FP32", (1, 3))], data, None, 0, lambda _: None)
    assert comparison.indices == [0, 10, 20]


DATA = CalibrationData(("a.png", "b/c.png", "d.png"), lambda _: {})


def test_classes_by_name_with_or_without_titles(tmp_path: Path) -> None:
    path = tmp_path / "classes.csv"
    path.write_text("\ufefffile,class\na.png, 2\nb/c.png,0\n\nelsewhere.png,1\n", encoding="utf-8")
    assert read_truths(path, DATA, 3) == {0: 2, 1: 0}
    path.write_text("d.png,1")
    assert read_truths(path, DATA, 3) == {2: 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"a.png,1\nd.png", "line 2: expected a sample's name and the number of its class, got 'd.png'"),
        (b"a.png,1\nd.png,x", "line 2: expected a sample's name"),
        (b"a.png,1\nd.png,-1", "line 2: expected a sample's name"),
        (b"a.png,1,2", "line 1: expected a sample's name"),
        (b"a.png,3", "line 1: expected a class from 0 to 2, got 3"),
        (b"a.png,99999999999999999999", "line 1: expected a sample's name"),
        (b"\xff\xfe", "expected CSV in UTF-8"),
        (b"", "expected classes of calibration samples, got none that matches"),
        (b"z.png,1", "got none that matches"),
    ],
)
def test_unusable_classes_give_one_line(text: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "classes.csv"
    path.write_bytes(text)
    with pytest.raises(ModelError, match=message):
        read_truths(path, DATA, 3)
