"""Resize in every mode."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper

from builder.importer import import_onnx
from tests.builder.importer.rewrites.cases import ModelMaker, operators

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
        {"mode": "linear", "coordinate_transformation_mode": "asymmetric", "scales": (1.1, 1.1)},
        {"mode": "nearest", "nearest_mode": "ceil", "scales": (1.1, 1.05)},
        {"mode": "cubic", "antialias": 1, "scales": (1.1, 1.0)},
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


@pytest.mark.parametrize(
    ("mode", "chosen"),
    [("floor", [0, 3, 7, 10]), ("ceil", [0, 4, 7, 11]), ("round_prefer_floor", [0, 3, 7, 10])],
)
def test_a_quotient_that_float32_rounds_down(
    make_model: ModelMaker, run_onnx: Any, run_relax: Any, mode: str, chosen: list[int]
) -> None:
    # 2 / float32(4 / 14) is 6.9999995 in float32: ONNX Runtime takes pixel 6, ONNX's formula says 7.
    options = {"coordinate_transformation_mode": "asymmetric", "mode": "nearest", "nearest_mode": mode}
    node = helper.make_node("Resize", ["x", "", "", "n"], ["y"], **options)
    model = make_model([node], {"x": [1, 1, 1, 14]}, {"y": [1, 1, 1, 4]}, {"n": np.array([1, 1, 1, 4])})
    imported = import_onnx(model)
    x = np.arange(14, dtype=np.float32).reshape(1, 1, 1, 14)
    for found in (run_onnx(imported.onnx, {"x": x})[0], run_relax(imported.mod, [x])[0]):
        assert found.reshape(-1).tolist() == chosen


def test_an_exact_resize_stays_one_operator(make_model: ModelMaker) -> None:
    node = helper.make_node(
        "Resize", ["x", "", "s"], ["y"], mode="nearest", coordinate_transformation_mode="asymmetric"
    )
    model = make_model(
        [node], {"x": [1, 2, 7, 9]}, {"y": [1, 2, 14, 18]}, {"s": np.array([1, 1, 2, 2], np.float32)}
    )
    assert operators(import_onnx(model).onnx) == {"Resize"}


def test_resize_agrees_after_the_whole_import(make_model: ModelMaker, noise: Any, agrees: Any) -> None:
    node = helper.make_node("Resize", ["x", "", "s"], ["y"], mode="linear")
    weights = {"s": np.array([1, 1, 0.6, 1.9], np.float32)}
    agrees(make_model([node], {"x": [1, 2, 7, 9]}, {"y": [1, 2, 4, 17]}, weights), noise(1, 2, 7, 9))


@pytest.mark.parametrize("mode", ["nearest", "linear"])  # ONNX Runtime has no cubic one
@pytest.mark.parametrize("coordinates", ["half_pixel", "pytorch_half_pixel", "asymmetric", "align_corners"])
@pytest.mark.parametrize("scale", [2.0, 0.5, 1.5])
def test_a_signal(
    make_model: ModelMaker,
    noise: Any,
    run_onnx: Any,
    run_relax: Any,
    mode: str,
    coordinates: str,
    scale: float,
) -> None:
    how = {"mode": mode, "coordinate_transformation_mode": coordinates}
    node = helper.make_node("Resize", ["x", "", "s"], ["y"], name="resize", **how)
    weights = {"s": np.array([1, 1, scale], np.float32)}
    model = make_model([node], {"x": [2, 3, 8]}, {"y": [2, 3, int(8 * scale)]}, weights, opset=18)
    x = noise(2, 3, 8)
    imported = import_onnx(model)
    expected = run_onnx(model, {"x": x})[0]
    for found in (run_onnx(imported.onnx, {"x": x})[0], run_relax(imported.mod, [x])[0]):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_long_signal_needs_no_matrix(make_model: ModelMaker) -> None:
    node = helper.make_node("Resize", ["x", "", "s"], ["y"], name="resize", mode="linear")
    model = make_model(
        [node], {"x": [1, 2, 90_000]}, {"y": [1, 2, 180_000]}, {"s": np.array([1, 1, 2], "f4")}
    )
    imported = import_onnx(model)
    assert max(tensor.ByteSize() for tensor in imported.onnx.graph.initializer) < 1000
    assert imported.outputs[0].shape == (1, 2, 180_000)


EMPTY = np.zeros(0, np.float32)


@pytest.mark.parametrize("opset", [11, 12, 13, 18])
@pytest.mark.parametrize(("mode", "shape"), [("nearest", (10, 4)), ("linear", (9, 5)), ("cubic", (8, 3))])
def test_sizes_beside_empty_scales(
    make_model: ModelMaker, noise: Any, agrees: Any, opset: int, mode: str, shape: tuple[int, int]
) -> None:
    # As PyTorch writes interpolate(size=...) for opsets 11 and 12, and its older releases for later ones.
    nothing = [
        helper.make_node("Constant", [], [name], value=numpy_helper.from_array(EMPTY, name)) for name in "rs"
    ]
    node = helper.make_node("Resize", ["x", "r", "s", "n"], ["y"], mode=mode)
    sizes = np.array([1, 2, *shape], np.int64)
    # In opsets 11 and 12 as weights too.
    nodes, weights = (
        ([*nothing, node], {"n": sizes}) if opset % 2 else ([node], {"n": sizes, "r": EMPTY, "s": EMPTY})
    )
    model = make_model(nodes, {"x": [1, 2, 5, 4]}, {"y": [1, 2, *shape]}, weights, opset=opset)
    agrees(model, noise(1, 2, 5, 4))


def test_a_region_that_is_not_read(make_model: ModelMaker, noise: Any, agrees: Any) -> None:
    node = helper.make_node("Resize", ["x", "r", "s"], ["y"], mode="linear")
    weights = {"r": np.array([0] * 4 + [1] * 4, np.float32), "s": np.array([1, 1, 2, 2], np.float32)}
    agrees(
        make_model([node], {"x": [1, 2, 5, 4]}, {"y": [1, 2, 10, 8]}, weights, opset=11), noise(1, 2, 5, 4)
    )


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize(
    "region",
    [[0.1, 0.2, 0.8, 0.9], [-0.4, 0.6, 0.5, 1.7], [0.9, 0.7, 0.1, 0.2], [0.5, 0.5, 0.5, 0.5]],
    ids=str,
)
@pytest.mark.parametrize("size", [(6, 3), (1, 7)], ids=str)
def test_a_region_of_the_request(
    make_model: ModelMaker, noise: Any, run_onnx: Any, mode: str, region: list[float], size: tuple[int, int]
) -> None:
    node = helper.make_node(
        "Resize",
        ["x", "roi", "", "n"],
        ["y"],
        mode=mode,
        coordinate_transformation_mode="tf_crop_and_resize",
        extrapolation_value=7.5,
    )
    weights = {"n": np.array([1, 2, *size], np.int64)}
    model = make_model([node], {"x": [1, 2, 5, 4], "roi": [8]}, {"y": [1, 2, *size]}, weights, opset=18)
    top, left, bottom, right = region
    feeds = {"x": noise(1, 2, 5, 4), "roi": np.array([0, 0, top, left, 1, 1, bottom, right], np.float32)}
    found = run_onnx(import_onnx(model).onnx, feeds)[0]
    np.testing.assert_allclose(found, run_onnx(model, feeds)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["uint8", "int8", "int32"])
@pytest.mark.parametrize("coordinates", ["half_pixel", "align_corners", "asymmetric"])
@pytest.mark.parametrize("scales", [(2.0, 2.0), (1.6, 0.7), (0.5, 0.5)])
def test_integers_are_resized_as_numbers(
    make_model: ModelMaker, run_onnx: Any, name: str, coordinates: str, scales: tuple[float, float]
) -> None:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(name))
    how = {"mode": "linear", "coordinate_transformation_mode": coordinates}
    node = helper.make_node("Resize", ["x", "", "s"], ["y"], name="resize", **how)
    weights = {"s": np.array([1, 1, *scales], np.float32)}
    model = make_model([node], {"x": ([1, 2, 5, 10], kind)}, {"y": (None, kind)}, weights)
    low, high = (0, 256) if name == "uint8" else (-128, 128)
    x = np.random.default_rng(3).integers(low, high, (1, 2, 5, 10)).astype(name)
    wanted = run_onnx(model, {"x": x})[0].astype(int)
    found = run_onnx(import_onnx(model).onnx, {"x": x})[0].astype(int)
    # ONNX Runtime rounds what is just below an integer down.
    assert np.abs(found).sum() >= np.abs(wanted).sum()
    assert np.abs(found - wanted).max() <= 1
    assert (found != wanted).mean() < 0.1
