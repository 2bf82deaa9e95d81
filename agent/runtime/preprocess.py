"""From a JPEG or PNG to a model's input.

Promises exactly the manifest's `(pixel * scale - mean) / std`, rounded once to the input's datatype, and that
an image is not decoded if its header declares too many pixels. Pillow resizes, with an antialiasing filter
when it shrinks, as torchvision does for images.
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

# `Image.open` is not used: it loads every format that Pillow knows, and each is more code that parses a
# stranger's bytes. Exif needs the TIFF module; Pillow would import it on first use, inside the sandbox.
from PIL import Image, JpegImagePlugin, PngImagePlugin, TiffImagePlugin  # noqa: F401

from agent.bundle.processing import Preprocess
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import FormatError, InputError, MediaTypeError
from agent.runtime.placement import Placement
from agent.runtime.storage import Array

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# Enough for a 24-megapixel camera; decoded, its image takes 72 MB, and Pillow holds two while it converts.
MAX_PIXELS: Final = 25_000_000
# A resize that keeps the aspect ratio must not turn an image of 20000 x 1 pixels into 4480000 x 224.
MAX_RESIZED_PIXELS: Final = 4 * MAX_PIXELS

IMAGE_TYPES: Final = MappingProxyType(
    {"image/jpeg": JpegImagePlugin.JpegImageFile, "image/png": PngImagePlugin.PngImageFile}
)
# Pillow does not document what its readers raise for damaged files; these were observed.
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
# Exif 2.3, 4.6.4, tag Orientation: value -> the transposition that turns the image upright.
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
        The manifest's `preprocess`.
    spec
        The input that takes the image: shape (1, channels, height, width) or (1, height, width, channels),
        as in the declared layout.
    max_pixels
        Largest number of pixels of an image that is decoded.

    Raises
    ------
    FormatError
        If the declared preprocessing does not give the input's shape.
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
                f"preprocess: expected an input for one {declared.layout} {declared.colour} image, got {spec}"
            )
        self._size = (shape[2], shape[3]) if nchw else (shape[1], shape[2])
        leads_to = declared.crop or (declared.resize if declared.resize_mode != "shortest" else None)
        if leads_to is not None and leads_to != self._size:
            raise FormatError(
                f"preprocess: expected images of {self._size} pixels for {spec}, got {leads_to}"
            )
        self._tables = _tables(declared, spec, self._channels)

    def decode(self, data: ReadableBuffer, content_type: str) -> Image.Image:
        """Decode an image and turn it upright.

        Parameters
        ----------
        data
            The image file, untrusted.
        content_type
            `image/jpeg` or `image/png`.

        Returns
        -------
        Image
            8 bits per channel, in mode `RGB`, or `L` for models that take grey images.

        Raises
        ------
        MediaTypeError
            If the content type is neither of these.
        InputError
            If the data is not such an image, is damaged, or has too many pixels.
        """
        reader = IMAGE_TYPES.get(content_type)
        if reader is None:
            raise MediaTypeError(f"expected one of {', '.join(IMAGE_TYPES)}, got {content_type!r:.80}")
        try:
            # Opening reads only the header, so the size is known before anything is decoded.
            image: Image.Image = reader(io.BytesIO(data))
            if image.width * image.height > self._max_pixels:
                size = f"{image.width} x {image.height}"
                raise InputError(f"expected an image of at most {self._max_pixels} pixels, got {size}")
            image.load()
            return _convert(_upright(image), "L" if self._channels == 1 else "RGB")
        except _READER_ERRORS as error:
            reason = " ".join(str(error).split())
            raise InputError(f"the {content_type} image cannot be read: {reason:.120}") from error

    def __call__(self, image: Image.Image, out: Array) -> Placement:
        """Resize, crop and normalise an image into the model's input.

        Parameters
        ----------
        image
            An image from `decode`.
        out
            The memory of the model's input, in its shape and dtype.

        Returns
        -------
        Placement
            Where the image is in the input.

        Raises
        ------
        InputError
            If the image is smaller than the crop, would be too large after the resize, or does not have the
            input's size and no resize is declared.
        """
        width, height = image.size
        image, scale_x, scale_y, offset_x, offset_y = self._resize(image)
        if self._declared.crop is not None:
            image, left, top = _crop(image, self._declared.crop)
            offset_x, offset_y = offset_x - left, offset_y - top
        if (image.height, image.width) != self._size:
            raise InputError(
                f"input {self._spec.name!r}: expected an image of {self._size[1]} x {self._size[0]} pixels, "
                f"got {image.width} x {image.height}"
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
            # The side that sets the ratio fits exactly; the other is rounded down, as torchvision does.
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
        # A channel has 256 possible values, so the formula is a table, computed once in float64 and exact.
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
            # A quantised input: rounded to the nearest integer, clipped to the range of its dtype.
            limits = np.iinfo(dtype)
            values = np.clip(np.rint(values), limits.min, limits.max)
        tables.append(values.astype(dtype))
    return tables


def _upright(image: Image.Image) -> Image.Image:
    try:
        turn = _UPRIGHT.get(image.getexif().get(_ORIENTATION, 1))
    except _READER_ERRORS:
        # Cameras write broken Exif blocks; treat such an image as one without Exif.
        turn = None
    return image if turn is None else image.transpose(turn)


def _convert(image: Image.Image, mode: str) -> Image.Image:
    if image.mode == mode:
        return image
    if image.mode in {"I;16", "I;16B", "I;16L", "I"}:
        # 16-bit grey: Pillow's own conversion would clip it at 255.
        image = Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8))
    if image.mode == "P":
        # Through RGBA, since Pillow warns when it converts a palette with transparency directly.
        image = image.convert("RGBA")
    return image.convert(mode)


def _crop(image: Image.Image, size: tuple[int, int]) -> tuple[Image.Image, int, int]:
    height, width = size
    if image.width < width or image.height < height:
        raise InputError(
            f"expected at least {width} x {height} pixels to cut out, got {image.width} x {image.height}"
        )
    left, top = round((image.width - width) / 2), round((image.height - height) / 2)
    return image.crop((left, top, left + width, top + height)), left, top
