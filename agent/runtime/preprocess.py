"""From a JPEG or PNG to a model's input.

Promises exactly the manifest's `(pixel * scale - mean) / std`, rounded once to the input's datatype or to the
steps of its scale. Pillow resizes, with an antialiasing filter when it shrinks, as torchvision does for
images. Leaves reading the file to `pictures`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np
from PIL import Image

from agent.bundle.processing import Preprocess
from agent.bundle.quantisation import Quantised
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import FormatError, InputError
from agent.runtime.pictures import MAX_PIXELS, Picture, read_picture
from agent.runtime.placement import Placement
from agent.runtime.quantisation import to_input
from agent.runtime.storage import Array

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# A resize that keeps the aspect ratio must not turn an image of 20000 x 1 pixels into 4480000 x 224.
MAX_RESIZED_PIXELS: Final = 4 * MAX_PIXELS
# With `reduce`, an image of more pixels than this is first reduced, by averaging pixels, to at least
# `REDUCED_MULTIPLE` times its new size. A smaller one takes only milliseconds, and a rounding less.
REDUCED_PIXELS: Final = 1 << 20
REDUCED_MULTIPLE: Final = 2

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
    quantised
        How the input is quantised, or None.

    Raises
    ------
    FormatError
        If the declared preprocessing does not give the input's shape.
    """

    def __init__(
        self,
        declared: Preprocess,
        spec: TensorSpec,
        max_pixels: int = MAX_PIXELS,
        quantised: Quantised | None = None,
    ) -> None:
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
        self._tables = [to_input(values, spec.dtype, quantised) for values in channel_values(declared)]

    def decode(self, data: ReadableBuffer, content_type: str) -> Picture:
        """Decode an image and turn it upright; with `reduce`, a large JPEG only as large as is needed.

        Parameters
        ----------
        data
            The image file, untrusted.
        content_type
            `image/jpeg` or `image/png`.

        Returns
        -------
        Picture
            8 bits per channel, in mode `RGB`, or `L` for models that take grey images.

        Raises
        ------
        MediaTypeError
            If the content type is neither of these.
        InputError
            If the data is not such an image, is damaged, or has too many pixels.
        """
        mode = "L" if self._channels == 1 else "RGB"
        return read_picture(data, content_type, mode, self._max_pixels, self._smallest)

    def __call__(self, picture: Picture, out: Array) -> Placement:
        """Resize, crop and normalise an image into the model's input.

        Parameters
        ----------
        picture
            What `decode` returned.
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
        image, scale_x, scale_y, offset_x, offset_y = self._resize(picture)
        if self._declared.crop is not None:
            image, left, top = _crop(image, self._declared.crop)
            offset_x, offset_y = offset_x - left, offset_y - top
        if (image.height, image.width) != self._size:
            raise InputError(
                f"input {self._spec.name!r}: expected an image of {self._size[1]} x {self._size[0]} pixels, "
                f"got {image.width} x {image.height}"
            )
        self._normalise(np.asarray(image), out)
        height, width = self._size
        return Placement(picture.width, picture.height, scale_x, scale_y, offset_x, offset_y, width, height)

    def _reduces(self, width: int, height: int) -> bool:
        declared = self._declared
        return (
            bool(declared.reduce)
            and declared.resize is not None
            and declared.interpolation != "nearest"
            and width * height > REDUCED_PIXELS
        )

    def _smallest(self, width: int, height: int) -> tuple[int, int]:
        """Return the smallest size that an image of this size may be decoded in."""
        if not self._reduces(width, height):
            return width, height
        (new_width, new_height), _ = self._new_size(width, height)
        return REDUCED_MULTIPLE * new_width, REDUCED_MULTIPLE * new_height

    def _new_size(self, width: int, height: int) -> tuple[tuple[int, int], tuple[float, float]]:
        """Return the size that an image of this size is resized to, and both factors."""
        declared = self._declared
        assert declared.resize is not None
        high, wide = declared.resize
        if declared.resize_mode == "stretch":
            return (wide, high), (wide / width, high / height)
        if declared.resize_mode == "line":
            new_width = min(wide, math.ceil(high * width / height))
            return (new_width, high), (new_width / width, high / height)
        ratios = (wide / width, high / height)
        ratio = max(ratios) if declared.resize_mode == "shortest" else min(ratios)
        # The side that sets the ratio fits exactly; the other is rounded down, as torchvision does.
        new = (
            wide if ratios[0] == ratio else max(1, math.floor(width * ratio)),
            high if ratios[1] == ratio else max(1, math.floor(height * ratio)),
        )
        if declared.resize_mode == "shortest":
            return new, (new[0] / width, new[1] / height)
        # A letterbox has one factor: what the rounding takes off is cut off and not squeezed.
        return new, (max(ratio, new[0] / width), max(ratio, new[1] / height))

    def _resize(self, picture: Picture) -> tuple[Image.Image, float, float, float, float]:
        declared, image = self._declared, picture.image
        if declared.resize is None:
            return image, 1.0, 1.0, 0.0, 0.0
        height, width = declared.resize
        new, (scale_x, scale_y) = self._new_size(picture.width, picture.height)
        if new[0] * new[1] > MAX_RESIZED_PIXELS:
            raise InputError(
                f"an image of {picture.width} x {picture.height} pixels cannot be resized to "
                f"{new[0]} x {new[1]}"
            )
        left, top, right, bottom = picture.region
        across, down = (right - left) / picture.width, (bottom - top) / picture.height
        # Rounded, so that a crop of the whole picture does not lose a pixel.
        right = round(left + new[0] / scale_x * across, 6)
        bottom = round(top + new[1] / scale_y * down, 6)
        box = (left, top, min(right, image.width), min(bottom, image.height))
        if new != image.size or box != (0, 0, *image.size):
            gap = float(REDUCED_MULTIPLE) if self._reduces(picture.width, picture.height) else None
            image = image.resize(new, _RESAMPLING[declared.interpolation], box, gap)
        if declared.resize_mode not in ("letterbox", "line") or new == (width, height):
            return image, scale_x, scale_y, 0.0, 0.0
        left, top = 0, 0
        if declared.resize_mode == "line" and declared.pad is None:
            last = image.crop((new[0] - 1, 0, new[0], new[1]))
            filled = last.resize((width, height), Image.Resampling.NEAREST)
            filled.paste(image, (0, 0))
            return filled, scale_x, scale_y, 0.0, 0.0
        if declared.resize_mode == "letterbox" and declared.position != "top_left":
            left, top = (width - new[0]) // 2, (height - new[1]) // 2
        pad = declared.pad or 0
        filled = Image.new(image.mode, (width, height), pad if self._channels == 1 else (pad, pad, pad))
        filled.paste(image, (left, top))
        return filled, scale_x, scale_y, float(left), float(top)

    def _normalise(self, pixels: Array, out: Array) -> None:
        # A channel has 256 possible values, so the formula is a table, computed once in float64 and exact.
        nchw = self._declared.layout == "NCHW"
        planes = pixels[..., None] if pixels.ndim == 2 else pixels
        for channel, table in enumerate(self._tables):
            source = 2 - channel if self._declared.colour == "BGR" else channel
            target = out[0, channel] if nchw else out[0, :, :, channel]
            np.take(table, planes[:, :, source], out=target, mode="clip")


def channel_values(declared: Preprocess) -> list[Array]:
    """Return the real number of each of the 256 pixel values, float64, for each channel of the input."""
    pixel = np.arange(256, dtype=np.float64)
    if declared.invert:
        pixel = 255 - pixel
    return [
        (pixel * declared.scale - declared.mean[channel % len(declared.mean)])
        / declared.std[channel % len(declared.std)]
        for channel in range(1 if declared.colour == "GRAY" else 3)
    ]


def _crop(image: Image.Image, size: tuple[int, int]) -> tuple[Image.Image, int, int]:
    height, width = size
    if image.width < width or image.height < height:
        raise InputError(
            f"expected at least {width} x {height} pixels to cut out, got {image.width} x {image.height}"
        )
    left, top = round((image.width - width) / 2), round((image.height - height) / 2)
    return image.crop((left, top, left + width, top + height)), left, top
