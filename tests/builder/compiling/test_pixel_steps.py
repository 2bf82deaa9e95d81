"""What presets make of pixels for inputs of bytes."""

from __future__ import annotations

import numpy as np
import pytest

from agent.bundle.quantisation import Quantisation, Quantised
from agent.bundle.tensor_spec import TensorSpec
from agent.runtime.preprocess import channel_values
from agent.runtime.quantisation import to_input
from builder.compiling.declarations import preprocess
from builder.compiling.pixel_steps import cut_off_note
from builder.errors import ModelError
from builder.importer.edge_scales import EdgeScales

SHAPES = {"NCHW": (1, 3, 8, 8), "NHWC": (1, 8, 8, 3)}


def levels(preset: str, datatype: str, scale: float | None, zero: int, layout: str = "NHWC") -> np.ndarray:
    """What the 256 values of the first channel become."""
    spec = TensorSpec("picture", datatype, SHAPES[layout])
    quantised = None if scale is None else Quantised("picture", scale, zero)
    scales = EdgeScales(Quantisation(() if quantised is None else (quantised,)))
    declared = preprocess(preset, [spec], scales)
    assert declared.layout == layout
    return to_input(channel_values(declared)[0], spec.dtype, quantised)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize(("datatype", "zero"), [("INT8", -128), ("UINT8", 0)])
def test_unit_is_the_picture_itself_for_a_scale_of_1_255(datatype: str, zero: int, layout: str) -> None:
    found = levels("unit", datatype, 1 / 255, zero, layout)
    np.testing.assert_array_equal(found, np.arange(256) + zero)


@pytest.mark.parametrize("preset", ["unit", "symmetric", "imagenet", "yolov8", "ultraface"])
@pytest.mark.parametrize(("scale", "zero"), [(0.02, -14), (0.0186, 5), (1 / 64, 0)])
def test_real_numbers_come_back_within_half_a_step(preset: str, scale: float, zero: int) -> None:
    real = channel_values(preprocess(preset, [TensorSpec("picture", "FP32", (1, 3, 8, 8))]))[0]
    found = (levels(preset, "INT8", scale, zero).astype(float) - zero) * scale
    held = (real >= (-128 - zero) * scale) & (real <= (127 - zero) * scale)
    assert held.mean() > 0.6
    np.testing.assert_allclose(found[held], real[held], atol=scale / 2 + 1e-9)


@pytest.mark.parametrize(("scale", "zero"), [(None, 0), (1.0, 0), (1 / 255, 0), (1 / 128, 128), (0.02, 114)])
def test_raw_gives_an_unsigned_input_the_bytes(scale: float | None, zero: int) -> None:
    np.testing.assert_array_equal(levels("raw", "UINT8", scale, zero), np.arange(256))
    np.testing.assert_array_equal(levels("raw-bgr", "UINT8", scale, zero), np.arange(256))


@pytest.mark.parametrize(
    ("scale", "zero"), [(None, 0), (1.0, -128), (1 / 255, -128), (1 / 128, 0), (0.02, -14)]
)
def test_raw_gives_a_signed_input_the_bytes_from_minus_128(scale: float | None, zero: int) -> None:
    np.testing.assert_array_equal(levels("raw", "INT8", scale, zero), np.arange(256) - 128)


@pytest.mark.parametrize("preset", ["unit", "symmetric", "imagenet", "yolov8"])
@pytest.mark.parametrize("datatype", ["UINT8", "INT8"])
def test_bytes_without_a_scale_are_not_fractions(preset: str, datatype: str) -> None:
    with pytest.raises(ModelError, match=r"256 levels to differ .* the input holds whole numbers") as caught:
        levels(preset, datatype, None, 0)
    assert caught.value.hint is not None and "--preprocess raw" in caught.value.hint


def test_a_range_that_the_input_does_not_hold_is_refused_or_told() -> None:
    with pytest.raises(ModelError, match=r"the preprocess makes -127 to 128, .* holds -0.5 to 0.496"):
        levels("yolov8,scale=1.0,mean=[127.0]", "INT8", 1 / 256, 0)


def test_an_input_with_several_scales_is_refused() -> None:
    spec = TensorSpec("picture", "INT8", (1, 3, 8, 8))
    with pytest.raises(ModelError, match="expected one scale for input 'picture', got several scales"):
        preprocess("unit", [spec], EdgeScales(obstacles={"picture": "several scales"}))


def test_much_that_is_cut_off_is_told() -> None:
    spec, unit = TensorSpec("picture", "INT8", (1, 3, 8, 8)), Quantised("picture", 1 / 255, -128)
    scales = EdgeScales(Quantisation((unit,)))
    note = cut_off_note(preprocess("imagenet", [spec], scales), spec, unit)
    assert note is not None and "the preprocess makes -2.12 to 2.64, the input holds 0 to 1" in note
    assert cut_off_note(preprocess("unit", [spec], scales), spec, unit) is None
    assert cut_off_note(preprocess("raw", [spec], scales), spec, unit) is None
