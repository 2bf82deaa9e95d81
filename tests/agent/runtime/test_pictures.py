"""Pictures that are decoded smaller: what they show, and where their pixels are in the picture as sent."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from agent.bundle.processing import Preprocess
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import InputError
from agent.runtime.pictures import Picture, read_picture
from agent.runtime.placement import Placement
from agent.runtime.preprocess import REDUCED_PIXELS, Preprocessor

SIDE = 96
# Neither is a multiple of 8: the last pixels of a reduced picture are only partly covered.
WIDTH, HEIGHT = 1501, 1003
assert WIDTH * HEIGHT > REDUCED_PIXELS


def photograph() -> Image.Image:
    """Smooth, different at each corner, and with one bright square."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    planes = [200 * x / WIDTH, 200 * y / HEIGHT, np.full(x.shape, 60.0)]
    pixels = np.stack(planes, axis=-1)
    pixels[600:800, 1000:1200] = 255
    return Image.fromarray(pixels.astype(np.uint8))


def encoded(kind: str, orientation: int = 1) -> bytes:
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = orientation
    photograph().save(file, kind, exif=exif, **({"quality": 95} if kind == "JPEG" else {"compress_level": 1}))
    return file.getvalue()


def prepared(kind: str, data: bytes, **changes: Any) -> tuple[np.ndarray, Placement, tuple[int, int]]:
    fields: dict[str, Any] = {
        "input": "x", "colour": "RGB", "resize": (SIDE, SIDE), "resize_mode": "letterbox",
        "interpolation": "bilinear", "crop": None, "scale": 1.0, "mean": (0.0,), "std": (1.0,),
        "layout": "NHWC",
    }  # fmt: skip
    out = np.empty((1, SIDE, SIDE, 3), np.float32)
    preprocessor = Preprocessor(Preprocess(**fields | changes), TensorSpec("x", "FP32", out.shape))
    picture = preprocessor.decode(data, f"image/{kind.lower()}")
    return out[0], preprocessor(picture, out), picture.image.size


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_reduced_jpeg_shows_the_same_at_the_same_place(orientation: int) -> None:
    data = encoded("JPEG", orientation)
    whole, where, size = prepared("JPEG", data)
    assert sorted(size) == [HEIGHT, WIDTH]
    reduced, same, smaller = prepared("JPEG", data, reduce=True)
    assert sorted(smaller) == [251, 376]  # a quarter, rounded up: an eighth would be below twice 96
    assert same == where
    # A shift of half a pixel of the model's input would be some 80 grey levels at the square's edges.
    assert np.abs(reduced - whole).max() <= 24
    assert np.abs(reduced - whole).mean() <= 0.7


def middles(picture: Picture, axis: int, side: int) -> list[float]:
    """Where the two bright squares are along an axis, in pixels of the picture as sent."""
    levels = np.asarray(picture.image, np.float64)[..., 0].mean(axis=axis)
    levels = np.where(levels > 2, levels, 0)
    low, high = picture.region[axis], picture.region[axis + 2]
    positions = (np.arange(len(levels)) + 0.5 - low) * side / (high - low)
    halves = (positions < side / 2, positions >= side / 2)
    return [float((levels * positions)[half].sum() / levels[half].sum()) for half in halves]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_region_of_a_reduced_picture_is_exact(orientation: int) -> None:
    pixels = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    pixels[60:180, 70:190], pixels[700:900, 1300:1450] = 250, 250
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(file, "JPEG", quality=95, exif=exif)
    whole = read_picture(file.getvalue(), "image/jpeg", "RGB")
    reduced = read_picture(file.getvalue(), "image/jpeg", "RGB", smallest=lambda *_: (250, 250))
    assert sorted(reduced.image.size) == [251, 376]
    assert (whole.width, whole.height) == (reduced.width, reduced.height)
    for axis, side in ((0, whole.width), (1, whole.height)):
        # A pixel of the reduced picture is four of the picture as sent.
        np.testing.assert_allclose(middles(reduced, axis, side), middles(whole, axis, side), atol=0.3)


def test_a_png_is_reduced_only_after_it_is_decoded() -> None:
    data = encoded("PNG")
    whole, where, _ = prepared("PNG", data)
    reduced, same, size = prepared("PNG", data, reduce=True)
    assert (same, size) == (where, (WIDTH, HEIGHT))
    assert 0 < np.abs(reduced - whole).max() <= 24


def test_small_pictures_nearest_pixels_and_other_declarations_are_not_reduced() -> None:
    data = encoded("JPEG")
    for changes in ({"interpolation": "nearest", "reduce": True}, {"reduce": None}, {"reduce": False}):
        assert prepared("JPEG", data, **changes)[2] == (WIDTH, HEIGHT)
    file = io.BytesIO()
    photograph().resize((800, 600)).save(file, "JPEG")
    assert prepared("JPEG", file.getvalue(), reduce=True)[2] == (800, 600)


def test_a_large_picture_is_refused_before_it_is_reduced() -> None:
    with pytest.raises(InputError, match="at most 1000000 pixels, got 1501 x 1003"):
        read_picture(encoded("JPEG"), "image/jpeg", "RGB", 1_000_000, lambda *_: (1, 1))


def test_a_letterbox_is_filled_and_placed_as_declared() -> None:
    data = encoded("PNG")
    grey, where, _ = prepared("PNG", data, pad=114, position="top_left")
    assert (where.offset_x, where.offset_y) == (0, 0)
    height = int(HEIGHT * SIDE / WIDTH)
    assert (grey[height:] == 114).all()
    assert (grey[:height] != 114).any(axis=-1).all()
    centred, where, _ = prepared("PNG", data, pad=7, position="centre")
    assert where.offset_y == (SIDE - height) // 2
    np.testing.assert_array_equal(centred[int(where.offset_y) :][:height], grey[:height])
    black, _, _ = prepared("PNG", data)
    assert (black[0] == 0).all()


def test_a_letterbox_has_the_same_factor_in_both_directions() -> None:
    _, where, _ = prepared("PNG", encoded("PNG"))
    assert where.scale_x == where.scale_y == SIDE / WIDTH
