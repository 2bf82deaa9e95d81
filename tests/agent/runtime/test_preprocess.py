from __future__ import annotations

import io
import struct
import subprocess
import sys
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from agent.bundle.processing import Preprocess
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import FormatError, InputError, MediaTypeError
from agent.runtime.placement import Placement
from agent.runtime.preprocess import Preprocessor

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def declare(**changes: Any) -> Preprocess:
    fields: dict[str, Any] = {
        "input": "x",
        "colour": "RGB",
        "resize": None,
        "resize_mode": "stretch",
        "interpolation": "bilinear",
        "crop": None,
        "scale": 1.0,
        "mean": (0.0,),
        "std": (1.0,),
        "layout": "NCHW",
    }
    return Preprocess(**(fields | changes))


def run(
    image: Image.Image | bytes, shape: tuple[int, ...], dtype: str = "FP32", kind: str = "PNG", **changes: Any
) -> tuple[np.ndarray, Placement]:
    spec = TensorSpec("x", dtype, shape)
    preprocessor = Preprocessor(declare(**changes), spec)
    out = np.full(shape, 99, spec.dtype)
    data = image if isinstance(image, bytes) else encoded(image, kind)
    return out, preprocessor(preprocessor.decode(data, f"image/{kind.lower()}"), out)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def photograph(width: int = 320, height: int = 240) -> Image.Image:
    """A picture with edges and gradients, which shows a wrong order, filter or corner."""
    y, x = np.mgrid[0:height, 0:width]
    red = 255 * x / width
    green = 127 + 127 * np.sin(y / 9)
    blue = 255 * ((x // 16 + y // 16) % 2)
    return Image.fromarray(np.stack((red, green, blue), axis=-1).astype(np.uint8))


def test_the_tutorials_preprocessing_of_a_photograph() -> None:
    # As TVMC's tutorial computes it: resize, /255, ImageNet's mean and deviation, NCHW, a batch of 1.
    picture = photograph()
    data = encoded(picture, "JPEG", quality=90)
    img_data = np.asarray(Image.open(io.BytesIO(data)).resize((224, 224), Image.Resampling.BICUBIC)).astype(
        "float32"
    )
    img_data = np.transpose(img_data, (2, 0, 1))
    mean, std = np.array(MEAN).reshape(3, 1, 1), np.array(STD).reshape(3, 1, 1)
    expected = np.expand_dims(((img_data / 255 - mean) / std).astype(np.float32), 0)
    out, _ = run(
        data,
        (1, 3, 224, 224),
        kind="JPEG",
        resize=(224, 224),
        interpolation="bicubic",
        scale=1 / 255,
        mean=MEAN,
        std=STD,
    )
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("width", "height"), [(320, 240), (240, 320), (500, 333), (224, 224), (256, 256)])
def test_torchvisions_resize_and_centre_crop(width: int, height: int) -> None:
    picture = photograph(width, height)
    short = min(width, height)
    new = (int(256 * width / short), int(256 * height / short))
    resized = np.asarray(picture.resize(new, Image.Resampling.BILINEAR))
    top, left = round((new[1] - 224) / 2.0), round((new[0] - 224) / 2.0)
    expected = resized[top : top + 224, left : left + 224].transpose(2, 0, 1)[None].astype(np.float32)
    out, _ = run(picture, (1, 3, 224, 224), resize=(256, 256), resize_mode="shortest", crop=(224, 224))
    np.testing.assert_array_equal(out, expected)


def test_channel_order_and_layout() -> None:
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    image = Image.fromarray(pixels)
    rgb, _ = run(image, (1, 2, 4, 3), layout="NHWC")
    np.testing.assert_array_equal(rgb[0], pixels)
    bgr, _ = run(image, (1, 3, 2, 4), colour="BGR", mean=(1, 2, 3))
    np.testing.assert_array_equal(
        bgr[0], pixels[..., ::-1].transpose(2, 0, 1) - np.array([1.0, 2, 3]).reshape(3, 1, 1)
    )


def test_grey_and_inverted() -> None:
    image = Image.fromarray(np.array([[0, 255], [100, 50]], np.uint8))
    out, _ = run(image, (1, 1, 2, 2), colour="GRAY", scale=1 / 255, invert=True)
    np.testing.assert_allclose(out[0, 0], np.array([[1, 0], [155 / 255, 205 / 255]]), rtol=1e-6)
    of_colour, _ = run(Image.new("RGB", (2, 2), (10, 200, 30)), (1, 1, 2, 2), colour="GRAY")
    # ITU-R 601-2.
    np.testing.assert_array_equal(
        of_colour, np.full((1, 1, 2, 2), round(0.299 * 10 + 0.587 * 200 + 0.114 * 30))
    )


def test_quantised_inputs_are_rounded_and_bounded() -> None:
    image = Image.fromarray(np.array([[0, 127], [128, 255]], np.uint8))
    signed, _ = run(image, (1, 1, 2, 2), "INT8", colour="GRAY", scale=1.0, mean=(128,), std=(0.9,))
    assert signed.ravel().tolist() == [-128, -1, 0, 127]
    plain, _ = run(image, (1, 1, 2, 2), "UINT8", colour="GRAY")
    assert plain.ravel().tolist() == [0, 127, 128, 255]


def test_a_letterbox_keeps_the_ratio_and_reports_where_the_image_is() -> None:
    out, placement = run(
        Image.new("RGB", (200, 100), "white"),
        (1, 3, 64, 64),
        resize=(64, 64),
        resize_mode="letterbox",
        mean=(5,),
    )
    assert (out[0, :, 16:48] == 250).all()
    assert (out[0, :, :16] == -5).all()
    assert (out[0, :, 48:] == -5).all()
    assert placement == Placement(200, 100, 0.32, 0.32, 0, 16, 64, 64)


@pytest.mark.parametrize(("pad", "fill"), [(127, 127), (0, 0), (None, 255)])
def test_a_line_keeps_its_ratio_and_is_filled_at_its_right(pad: int | None, fill: int) -> None:
    image = Image.new("L", (31, 20), "black")
    image.paste(255, (20, 0, 31, 20))
    out, placement = run(image, (1, 1, 10, 40), colour="GRAY", resize=(10, 40), resize_mode="line", pad=pad)
    # 15.5 pixels, rounded up as PaddleOCR and EasyOCR do.
    assert placement == Placement(31, 20, 16 / 31, 0.5, 0, 0, 40, 10)
    assert (out[0, 0, :, :9] == 0).all() and (out[0, 0, :, 12:16] == 255).all()
    assert (out[0, 0, :, 16:] == fill).all()


def test_a_line_that_is_too_long_is_squeezed() -> None:
    out, placement = run(
        Image.new("RGB", (200, 20), "white"), (1, 3, 10, 40), resize=(10, 40), resize_mode="line", pad=127
    )
    assert (out == 255).all()
    assert placement == Placement(200, 20, 0.2, 0.5, 0, 0, 40, 10)


def test_a_crop_reports_where_the_image_is() -> None:
    _, placement = run(
        photograph(400, 200), (1, 3, 80, 60), resize=(100, 100), resize_mode="shortest", crop=(80, 60)
    )
    assert placement == Placement(400, 200, 0.5, 0.5, -70, -10, 60, 80)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photograph_is_turned_upright(orientation: int) -> None:
    upright = photograph(64, 48)
    # The image that a camera stores, from which the rule of Exif 2.3, 4.6.4 restores `upright`.
    stored = {
        1: upright,
        2: upright.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        3: upright.transpose(Image.Transpose.ROTATE_180),
        4: upright.transpose(Image.Transpose.FLIP_TOP_BOTTOM),
        5: upright.transpose(Image.Transpose.TRANSPOSE),
        6: upright.transpose(Image.Transpose.ROTATE_90),
        7: upright.transpose(Image.Transpose.TRANSVERSE),
        8: upright.transpose(Image.Transpose.ROTATE_270),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    for kind in ("PNG", "JPEG"):
        options = {"quality": 100, "subsampling": 0} if kind == "JPEG" else {}
        out, placement = run(encoded(stored, kind, exif=exif, **options), (1, 3, 48, 64), kind=kind)
        np.testing.assert_allclose(
            out[0], np.asarray(upright).transpose(2, 0, 1), atol=0 if kind == "PNG" else 12
        )
        assert (placement.width, placement.height) == (64, 48)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_broken_exif_is_ignored() -> None:
    data = encoded(photograph(8, 8), "JPEG")
    segment = b"Exif\0\0II*\0\xff\xff\xff\xff"
    broken = data[:2] + b"\xff\xe1" + struct.pack(">H", len(segment) + 2) + segment + data[2:]
    run(broken, (1, 3, 8, 8), kind="JPEG")


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
def test_every_mode_of_a_png_is_read(mode: str) -> None:
    if mode == "I;16":
        image = Image.fromarray(np.full((2, 2), 200 << 8, np.uint16))
    else:
        image = Image.new("RGB", (2, 2), "white").convert(mode)
    out, _ = run(image, (1, 3, 2, 2))
    assert (out == (200 if mode == "I;16" else 255)).all()


def test_a_cmyk_jpeg_is_read() -> None:
    out, _ = run(Image.new("CMYK", (8, 8), (0, 0, 0, 0)), (1, 3, 8, 8), kind="JPEG")
    assert (out > 250).all()


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_of(width: int, height: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )


def test_an_image_that_declares_too_many_pixels_is_not_decoded() -> None:
    with pytest.raises(InputError, match="at most 25000000 pixels, got 100000 x 100000"):
        run(png_of(100_000, 100_000), (1, 3, 8, 8), resize=(8, 8))


def test_a_narrow_image_is_not_enlarged_without_limit() -> None:
    with pytest.raises(InputError, match="cannot be resized"):
        run(
            Image.new("L", (1, 20_000)),
            (1, 1, 224, 224),
            colour="GRAY",
            resize=(224, 224),
            resize_mode="shortest",
            crop=(224, 224),
        )


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_damaged_image_is_refused(kind: str) -> None:
    data = encoded(photograph(64, 64), kind)
    for bad in (b"", data[: len(data) // 2], data[8:], b"\0" * 100, png_of(8, 8)):
        with pytest.raises(InputError, match="cannot be read"):
            run(bad, (1, 3, 64, 64), kind=kind)


PICTURES = {kind: encoded(photograph(32, 32), kind) for kind in ("PNG", "JPEG")}


@given(
    kind=st.sampled_from(["PNG", "JPEG"]),
    flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), max_size=8),
)
def test_any_damage_is_read_or_refused(kind: str, flips: list[tuple[int, int]]) -> None:
    data = bytearray(PICTURES[kind])
    for at, mask in flips:
        data[at % len(data)] ^= mask
    try:
        run(bytes(data), (1, 3, 32, 32), kind=kind)
    except InputError as error:
        assert "\n" not in str(error)


def test_an_image_of_another_format_than_its_content_type_is_refused() -> None:
    with pytest.raises(InputError, match="cannot be read"):
        run(encoded(photograph(8, 8), "PNG"), (1, 3, 8, 8), kind="JPEG")
    with pytest.raises(MediaTypeError, match="image/gif"):
        run(b"GIF89a", (1, 3, 8, 8), kind="GIF")


def test_an_image_of_another_size_is_refused_if_no_resize_is_declared() -> None:
    with pytest.raises(InputError, match="expected an image of 8 x 8 pixels, got 9 x 8"):
        run(Image.new("L", (9, 8)), (1, 1, 8, 8), colour="GRAY")
    with pytest.raises(InputError, match="8 x 8 pixels to cut out"):
        run(Image.new("L", (9, 7)), (1, 1, 8, 8), colour="GRAY", crop=(8, 8))


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        ((3, 8, 8), {}),
        ((2, 3, 8, 8), {}),
        ((1, 1, 8, 8), {}),
        ((1, 3, 8, 8), {"layout": "NHWC"}),
        ((1, 3, 8, 8), {"resize": (9, 8)}),
        ((1, 3, 8, 8), {"resize": (8, 8), "crop": (4, 4)}),
    ],
)
def test_a_declaration_that_does_not_give_the_inputs_shape_is_refused(
    shape: tuple[int, ...], changes: Any
) -> None:
    with pytest.raises(FormatError):
        Preprocessor(declare(**changes), TensorSpec("x", "FP32", shape))


def test_only_the_two_formats_are_loaded() -> None:
    script = """if True:
        import io, sys
        import numpy as np
        from agent.runtime.preprocess import Preprocessor
        from agent.bundle.processing import Preprocess
        from agent.bundle.tensor_spec import TensorSpec
        p = Preprocessor(Preprocess("x", "RGB", None, "stretch", "bilinear", None, 1.0, (0,), (1,), "NCHW"),
                         TensorSpec("x", "FP32", (1, 3, 32, 32)))
        p(p.decode(bytes.fromhex(sys.argv[1]), "image/png"), np.zeros((1, 3, 32, 32), np.float32))
        print(sorted(m for m in sys.modules if m.startswith("PIL.") and m.endswith("Plugin")))
    """
    done = subprocess.run(
        [sys.executable, "-c", script, PICTURES["PNG"].hex()], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "['PIL.JpegImagePlugin', 'PIL.PngImagePlugin', 'PIL.TiffImagePlugin']"
