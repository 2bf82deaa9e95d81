"""From a JPEG or PNG to a model's input.

Promises the manifest's `(pixel * scale - mean) / std` exactly, one rounding to the input's datatype, and
that no image is decoded whose header announces more pixels than are allowed. Resizing is Pillow's, which
filters when it shrinks, as torchvision's does for images.
"""

from __future__ import annotations

import io
import math
import struct
import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np

# Pillow's own registry is not used: `Image.open` loads every format it knows, and each is code that parses a
# stranger's bytes. Exif needs the TIFF module, which Pillow would import on first use, behind the sandbox.
from PIL import Image, JpegImagePlugin, PngImagePlugin, TiffImagePlugin  # noqa: F401

from agent.bundle.processing import Preprocess
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import FormatError, InputError, MediaTypeError
from agent.runtime.placement import Placement
from agent.runtime.storage import Array

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# A camera of 24 megapixels fits; decoded, that is 72 MB, and Pillow holds two of them while it converts.
MAX_PIXELS: Final = 25_000_000
# A resize that keeps the ratio of an image of 20000 x 1 pixels must not become 4480000 x 224.
MAX_RESIZED_PIXELS: Final = 4 * MAX_PIXELS

IMAGE_TYPES: Final = MappingProxyType(
    {"image/jpeg": JpegImagePlugin.JpegImageFile, "image/png": PngImagePlugin.PngImageFile}
)
# What Pillow's readers raise for damaged files is not documented; these were seen.
_READER_ERRORS: Final = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    OverflowError,
    LookupError,
    TypeError,
    struct.error,
    zlib.error,
)
# Exif 2.3, 4.6.4, tag Orientation: what turns each of its values upright.
_ORIENTATION: Final = 0x0112
_UPRIGHT: Final = MappingProxyType(
    {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
)
_RESAMPLING: Final[Mapping[str, Image.Resampling]] = MappingProxyType(
    {
        "bilinear": Image.Resampling.BILINEAR,
        "bicubic": Image.Resampling.BICUBIC,
        "nearest": Image.Resampling.NEAREST,
        "area": Image.Resampling.BOX,
    }
)


class Preprocessor:
    """One model's declared preprocessing, set up once.

    Parameters
    ----------
    declared
        The manifest's.
    spec
        The input that takes the image: one image, its channels and size where the declared layout has them.
    max_pixels
        Of the largest image that is decoded.

    Raises
    ------
    FormatError
        If the declaration does not lead to the input's shape.
    """

    def __init__(self, declared: Preprocess, spec: TensorSpec, max_pixels: int = MAX_PIXELS) -> None:
        self.input = spec.name
        self._declared = declared
        self._spec = spec
        self._max_pixels = max_pixels
        self._channels = 1 if declared.colour == "GRAY" else 3
        nchw = declared.layout == "NCHW"
        shape = spec.shape
        if len(shape) != 4 or shape[0] != 1 or shape[1 if nchw else 3] != self._channels:
            raise FormatError(
                f"preprocess makes {declared.colour} images in {declared.layout}, which {spec} does not take"
            )
        self._size = (shape[2], shape[3]) if nchw else (shape[1], shape[2])
        leads_to = declared.crop or (declared.resize if declared.resize_mode != "shortest" else None)
        if leads_to is not None and leads_to != self._size:
            raise FormatError(f"preprocess leads to {leads_to} pixels, and {spec} takes {self._size}")
        self._tables = _tables(declared, spec, self._channels)

    def decode(self, data: ReadableBuffer, content_type: str) -> Image.Image:
        """Decode an image and turn it upright.

        Parameters
        ----------
        content_type
            `image/jpeg` or `image/png`.

        Returns
        -------
        Image
            In mode `RGB`, or `L` for models that take grey images.

        Raises
        ------
        MediaTypeError
            If it is of another content type.
        InputError
            If the data is not such an image, is damaged, or is larger than allowed.
        """
        reader = IMAGE_TYPES.get(content_type)
        if reader is None:
            raise MediaTypeError(f"an image is one of {', '.join(IMAGE_TYPES)}, not {content_type!r:.80}")
        try:
            # Opening reads the header alone, so the size is known before anything is decoded.
            image: Image.Image = reader(io.BytesIO(data))
            if image.width * image.height > self._max_pixels:
                size = f"{image.width} x {image.height}"
                raise InputError(f"an image has at most {self._max_pixels} pixels, this one is {size}")
            image.load()
            return _convert(_upright(image), "L" if self._channels == 1 else "RGB")
        except _READER_ERRORS as error:
            reason = " ".join(str(error).split())
            raise InputError(f"this {content_type} image cannot be read: {reason:.120}") from error

    def __call__(self, image: Image.Image, out: Array) -> Placement:
        """Resize, crop and normalise an image into the model's input.

        Parameters
        ----------
        image
            As `decode` returns it.
        out
            The input's memory, of its shape and dtype.

        Raises
        ------
        InputError
            If the image is too small, or of another size where no resize is declared.
        """
        width, height = image.size
        image, scale_x, scale_y, offset_x, offset_y = self._resize(image)
        if self._declared.crop is not None:
            image, left, top = _crop(image, self._declared.crop)
            offset_x, offset_y = offset_x - left, offset_y - top
        if (image.height, image.width) != self._size:
            raise InputError(
                f"input {self._spec.name!r} expects an image of {self._size[1]} x {self._size[0]} pixels, "
                f"came {image.width} x {image.height}"
            )
        self._normalise(np.asarray(image), out)
        return Placement(width, height, scale_x, scale_y, offset_x, offset_y, self._size[1], self._size[0])

    def _resize(self, image: Image.Image) -> tuple[Image.Image, float, float, float, float]:
        declared = self._declared
        if declared.resize is None:
            return image, 1.0, 1.0, 0.0, 0.0
        height, width = declared.resize
        if declared.resize_mode == "stretch":
            new = (width, height)
        else:
            ratios = (width / image.width, height / image.height)
            ratio = max(ratios) if declared.resize_mode == "shortest" else min(ratios)
            # The side that decides is met exactly; the other is cut down to whole pixels, as torchvision's
            # Resize does.
            new = (
                width if ratios[0] == ratio else max(1, math.floor(image.width * ratio)),
                height if ratios[1] == ratio else max(1, math.floor(image.height * ratio)),
            )
        if new[0] * new[1] > MAX_RESIZED_PIXELS:
            raise InputError(
                f"an image of {image.width} x {image.height} pixels cannot be resized to {new[0]} x {new[1]}"
            )
        scale_x, scale_y = new[0] / image.width, new[1] / image.height
        if new != image.size:
            image = image.resize(new, _RESAMPLING[declared.interpolation])
        if declared.resize_mode != "letterbox" or new == (width, height):
            return image, scale_x, scale_y, 0.0, 0.0
        left, top = (width - new[0]) // 2, (height - new[1]) // 2
        box = Image.new(image.mode, (width, height))
        box.paste(image, (left, top))
        return box, scale_x, scale_y, float(left), float(top)

    def _normalise(self, pixels: Array, out: Array) -> None:
        # There are 256 values a channel, so the formula is a table: computed once in float64, and exact.
        nchw = self._declared.layout == "NCHW"
        planes = pixels[..., None] if pixels.ndim == 2 else pixels
        for channel, table in enumerate(self._tables):
            source = 2 - channel if self._declared.colour == "BGR" else channel
            target = out[0, channel] if nchw else out[0, :, :, channel]
            np.take(table, planes[:, :, source], out=target, mode="clip")


def _tables(declared: Preprocess, spec: TensorSpec, channels: int) -> list[Array]:
    pixel = np.arange(256, dtype=np.float64)
    if declared.invert:
        pixel = 255 - pixel
    tables = []
    for channel in range(channels):
        mean = declared.mean[channel % len(declared.mean)]
        std = declared.std[channel % len(declared.std)]
        values = (pixel * declared.scale - mean) / std
        dtype = np.dtype(spec.dtype)
        if dtype.kind in "iu":
            # A quantised input: to the nearest integer, within what it holds.
            limits = np.iinfo(dtype)
            values = np.clip(np.rint(values), limits.min, limits.max)
        tables.append(values.astype(dtype))
    return tables


def _upright(image: Image.Image) -> Image.Image:
    try:
        turn = _UPRIGHT.get(image.getexif().get(_ORIENTATION, 1))
    except _READER_ERRORS:
        # Cameras write broken Exif blocks; the picture is as good as one without.
        turn = None
    return image if turn is None else image.transpose(turn)


def _convert(image: Image.Image, mode: str) -> Image.Image:
    if image.mode == mode:
        return image
    if image.mode in {"I;16", "I;16B", "I;16L", "I"}:
        # Sixteen bits of grey; Pillow's own conversion clips them at 255.
        image = Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8))
    if image.mode == "P":
        # Through RGBA: a palette with transparency is else converted with a warning.
        image = image.convert("RGBA")
    return image.convert(mode)


def _crop(image: Image.Image, size: tuple[int, int]) -> tuple[Image.Image, int, int]:
    height, width = size
    if image.width < width or image.height < height:
        raise InputError(
            f"an image of {width} x {height} pixels is cut out, and there are {image.width} x {image.height}"
        )
    left, top = round((image.width - width) / 2), round((image.height - height) / 2)
    return image.crop((left, top, left + width, top + height)), left, top
