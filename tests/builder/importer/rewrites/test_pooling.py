"""Poolings whose padding follows from the shape of their output."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx.shape_inference
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import helper

from builder.importer import import_onnx
from tests.builder.importer.rewrites.cases import ModelMaker, one

# The last window of the rows begins in the padding at the end, or beyond the input; that of the columns not.
LEFT_OUT = [
    {"kernel_shape": [2, 2], "strides": [2, 2], "pads": [1, 1, 1, 1]},
    {"kernel_shape": [1, 3], "strides": [3, 2], "pads": [0, 1, 0, 1]},
    {"kernel_shape": [2, 3], "strides": [3, 2], "dilations": [2, 1], "pads": [1, 0, 1, 1]},
]
OPERATORS = [("MaxPool", {}), ("AveragePool", {}), ("AveragePool", {"count_include_pad": 1}), ("LpPool", {})]


@pytest.mark.parametrize("opset", [19, 22])
@pytest.mark.parametrize("window", LEFT_OUT, ids=str)
@pytest.mark.parametrize(("op", "how"), OPERATORS, ids=str)
def test_a_window_that_would_begin_in_the_padding_is_left_out(
    make_model: ModelMaker, noise: Any, agrees: Any, op: str, how: dict[str, Any], window: Any, opset: int
) -> None:
    nodes = [
        one(op, ["x"], ["p"], ceil_mode=1, **window, **how),
        helper.make_node("Relu", ["p"], ["y"], name="relu"),
    ]
    agrees(make_model(nodes, {"x": [1, 2, 5, 8]}, {"y": [None] * 4}, opset=opset), noise(1, 2, 5, 8))


@pytest.mark.parametrize("p", [1, 2, 3])
def test_a_norm_counts_no_place_beyond_the_input(
    make_model: ModelMaker, noise: Any, agrees: Any, p: int
) -> None:
    node = one("LpPool", ["x"], p=p, kernel_shape=[3, 2], strides=[2, 3], ceil_mode=1)
    agrees(make_model([node], {"x": [1, 2, 6, 7]}, {"y": [None] * 4}, opset=19), noise(1, 2, 6, 7))


@pytest.mark.parametrize("mode", ["SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize(("op", "how"), OPERATORS, ids=str)
def test_the_output_has_the_shape_of_the_input(
    make_model: ModelMaker, noise: Any, agrees: Any, op: str, how: dict[str, Any], mode: str
) -> None:
    node = one(op, ["x"], kernel_shape=[3, 2], strides=[2, 1], auto_pad=mode, **how)
    agrees(make_model([node], {"x": [1, 2, 6, 7]}, {"y": [None] * 4}, opset=19), noise(1, 2, 6, 7))


@pytest.mark.parametrize("mode", ["half_pixel", "output_half_pixel"])
def test_regions_are_scaled_before_half_a_pixel_is_subtracted(
    make_model: ModelMaker, noise: Any, agrees: Any, mode: str
) -> None:
    window: dict[str, Any] = {
        "output_height": 3,
        "output_width": 2,
        "sampling_ratio": 2,
        "spatial_scale": 0.25,
    }
    node = one("RoiAlign", ["x", "r", "b"], coordinate_transformation_mode=mode, **window)
    regions = np.array([[1, 2, 25, 21], [0, 0, 32, 32]], np.float32)
    weights = {"b": np.array([1, 0], np.int64)}
    agrees(
        make_model([node], {"x": [2, 3, 8, 8], "r": [2, 4]}, {"y": [None] * 4}, weights),
        noise(2, 3, 8, 8),
        regions,
    )


def axis_of(size: int, k: int, s: int, d: int, pads: Any, *, ceils: bool) -> tuple[list[range], int, int]:
    """Return the places of each window along an axis, and the first and last place that padding adds."""
    span = (k - 1) * d + 1
    if isinstance(pads, str) and pads.startswith("SAME"):
        total = max((-(-size // s) - 1) * s + span - size, 0)
        pads, ceils = ((total + (pads == "SAME_LOWER")) // 2,), False
        pads = (pads[0], total - pads[0])
    before, after = pads if not isinstance(pads, str) else (0, 0)
    starts = [start for start in range(-before, size + after, s) if ceils or start + span <= size + after]
    # One that is not whole is the last one, and does not begin in the padding.
    if ceils:
        whole = [start for start in starts if start + span <= size + after]
        rest = starts[len(whole) : len(whole) + 1] if whole[-1] + span < size + after else []
        starts = [*whole, *[start for start in rest if start < size]]
    return [range(start, start + span, d) for start in starts], -before, size + after


def by_definition(op: str, x: NDArray[Any], how: dict[str, Any]) -> NDArray[Any]:
    """Pool `x`, [N, C, ...], window by window."""
    rank = x.ndim - 2
    ones = [1] * rank
    pads: Sequence[Any] = [how["auto_pad"]] * rank if "auto_pad" in how else []
    if not pads:
        given = how.get("pads", [0] * 2 * rank)
        pads = list(zip(given[:rank], given[rank:], strict=True))
    axes = [
        axis_of(*one, ceils=bool(how.get("ceil_mode", 0)))
        for one in zip(
            x.shape[2:], how["kernel_shape"], how.get("strides", ones), how.get("dilations", ones), pads,
            strict=True,
        )
    ]  # fmt: skip
    result = np.zeros((*x.shape[:2], *[len(windows) for windows, _, _ in axes]))
    for at in np.ndindex(*result.shape[2:]):
        windows = [axes[axis][0][index] for axis, index in enumerate(at)]
        inside = [[p for p in w if 0 <= p < n] for w, n in zip(windows, x.shape[2:], strict=True)]
        values = np.stack([x[(..., *place)] for place in itertools.product(*inside)]).astype("f8")
        counted = inside
        if how.get("count_include_pad", 0):
            counted = [
                [p for p in w if low <= p < high] for w, (_, low, high) in zip(windows, axes, strict=True)
            ]
        if op == "MaxPool":
            value = values.max(axis=0)
        elif op == "AveragePool":
            value = values.sum(axis=0) / np.prod([len(each) for each in counted])
        else:
            value = (np.abs(values) ** how["p"]).sum(axis=0) ** (1 / how["p"])
        result[(..., *at)] = value
    return result


@st.composite
def poolings(draw: Any) -> tuple[str, list[int], dict[str, Any], int]:
    """Draw an operator, the shape of its input, its attributes, and an opset."""
    op = draw(st.sampled_from(["MaxPool", "AveragePool", "LpPool"]))
    rank = draw(st.sampled_from([1, 2, 3]))

    def several(low: int, high: int, count: int = rank) -> list[int]:
        return draw(st.lists(st.integers(low, high), min_size=count, max_size=count))

    how: dict[str, Any] = {
        "kernel_shape": several(1, 4),
        "strides": several(1, 4),
        "ceil_mode": several(0, 1, 1)[0],
    }
    if draw(st.booleans()):
        how["dilations"] = several(1, 3)
    spans = [
        (k - 1) * d + 1 for k, d in zip(how["kernel_shape"], how.get("dilations", [1] * rank), strict=True)
    ]
    mode = draw(st.sampled_from(["NOTSET", "NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"]))
    if mode == "NOTSET":
        how["pads"] = [draw(st.integers(0, k - 1)) for k in how["kernel_shape"] * 2]
    else:
        how["auto_pad"] = mode
    sizes = [draw(st.integers(span, span + 6)) for span in spans]
    if op == "AveragePool":
        how["count_include_pad"] = several(0, 1, 1)[0]
    if op == "LpPool":
        how["p"] = draw(st.sampled_from([1, 2, 3]))
    return op, [draw(st.integers(1, 2)), 2, *sizes], how, draw(st.sampled_from([19, 21, 22]))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(poolings())
def test_any_pooling(
    make_model: ModelMaker, run_onnx: Any, case: tuple[str, list[int], dict[str, Any], int]
) -> None:
    op, shape, how, opset = case
    x = np.random.default_rng(len(str(case))).standard_normal(shape).astype("f4")
    model = make_model([one(op, ["x"], **how)], {"x": shape}, {"y": [None] * len(shape)}, opset=opset)
    want = by_definition(op, x, how)
    imported = import_onnx(model)
    assert imported.outputs[0].shape == want.shape
    np.testing.assert_allclose(run_onnx(imported.onnx, {"x": x})[0], want, rtol=1e-4, atol=1e-5)
    # With SAME, ONNX Runtime forgets dilations, and refuses windows that are smaller than the stride.
    is_same = how.get("auto_pad", "").startswith("SAME")
    if not is_same or ("dilations" not in how and np.all(np.array(how["kernel_shape"]) >= how["strides"])):
        np.testing.assert_allclose(run_onnx(model, {"x": x})[0], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pads", [[2, 2], [0, 3]], ids=str)
@pytest.mark.parametrize(("op", "how"), OPERATORS, ids=str)
def test_padding_may_be_larger_than_the_window(
    make_model: ModelMaker,
    run_onnx: Any,
    run_relax: Any,
    noise: Any,
    op: str,
    how: dict[str, Any],
    pads: list[int],
) -> None:
    """As with `auto_pad` and dilations; ONNX Runtime takes no such padding, so it is an operator apart."""
    how = {"kernel_shape": [2], "dilations": [4], "strides": [2], "pads": pads, "p": 2} | how
    how = how if op == "LpPool" else {key: value for key, value in how.items() if key != "p"}
    imported = import_onnx(make_model([one(op, ["x"], **how)], {"x": [1, 2, 9]}, {"y": [None] * 3}, opset=19))
    x = noise(1, 2, 9)
    want = by_definition(op, x, how)
    for got in (run_onnx(imported.onnx, {"x": x}), run_relax(imported.mod, [x])):
        np.testing.assert_allclose(got[0], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("op", "how"), OPERATORS, ids=str)
def test_a_window_may_be_larger_than_its_input(
    make_model: ModelMaker, noise: Any, agrees: Any, op: str, how: dict[str, Any]
) -> None:
    """By less than a stride: so engines count, though no window fits."""
    node = one(op, ["x"], kernel_shape=[3, 2], strides=[2, 3], pads=[0, 1, 0, 0], **how)
    agrees(make_model([node], {"x": [1, 2, 2, 4]}, {"y": [None] * 4}, opset=19), noise(1, 2, 2, 4))


@pytest.mark.parametrize("mode", ["SAME_UPPER", "SAME_LOWER", "VALID"])
def test_the_places_of_a_maximum_follow_auto_pad_and_ceil_mode(
    make_model: ModelMaker, noise: Any, agrees: Any, mode: str
) -> None:
    node = one("MaxPool", ["x"], ["y", "i"], kernel_shape=[2, 3], strides=[3, 2], ceil_mode=1, auto_pad=mode)
    outputs = {"y": [None] * 4, "i": ([None] * 4, onnx.TensorProto.INT64)}
    agrees(make_model([node], {"x": [2, 3, 6, 8]}, outputs), noise(2, 3, 6, 8))
