"""Read a JPEG or PNG that a stranger sent: upright, in one mode, and no larger than is needed.

Promises that an image is not decoded if its header declares too many pixels, and that only the readers of
these two formats are loaded.

A JPEG may be decoded at a half, a quarter or an eighth of its size, which takes a fraction of the time: the
decoder then computes fewer pixels of each block of 8 x 8. The rule, which is the same on every machine: the
smallest of these sizes whose width and height are both at least those that the caller names.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import numpy as np

# `Image.open` is not used: it loads every format that Pillow knows, and each is more code that parses a
# stranger's bytes. Exif needs the TIFF module; Pillow would import it on first use, inside the sandbox.
from PIL import Image, JpegImagePlugin, PngImagePlugin, TiffImagePlugin  # noqa: F401

from agent.errors import InputError, MediaTypeError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# Enough for a 24-megapixel camera; decoded, its image takes 72 MB, and Pillow holds two while it converts.
MAX_PIXELS: Final = 25_000_000

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
_SIDEWAYS: Final = frozenset({5, 6, 7, 8})  # orientations that exchange width and height
# Orientations whose transposition moves the last column, or row, of the result's axis to its beginning.
_MIRRORED_X: Final = frozenset({2, 3, 6, 7})
_MIRRORED_Y: Final = frozenset({3, 4, 7, 8})

Region = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class Picture:
    """A decoded image, upright, which may be reduced; `width` and `height` are those of the image as sent.

    `region` is the part of `image`, in its pixels, that shows the image as sent: left, top, right, bottom. A
    reduced image is rounded up to whole pixels, so its last ones are only partly covered.
    """

    image: Image.Image
    width: int
    height: int
    region: Region


def read_picture(
    data: ReadableBuffer,
    content_type: str,
    mode: str,
    max_pixels: int = MAX_PIXELS,
    smallest: Callable[[int, int], tuple[int, int]] = lambda width, height: (width, height),
) -> Picture:
    """Decode an image and turn it upright.

    Parameters
    ----------
    data
        The image file, untrusted.
    content_type
        `image/jpeg` or `image/png`.
    mode
        `RGB` or `L`, both of 8 bits per channel.
    max_pixels
        Largest number of pixels of an image that is decoded.
    smallest
        Returns, for the width and height of the upright image, the smallest ones in which a JPEG may be
        decoded.

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
        size = image.size
        if size[0] * size[1] > max_pixels:
            raise InputError(f"expected an image of at most {max_pixels} pixels, got {size[0]} x {size[1]}")
        orientation = _orientation(image) if content_type == "image/jpeg" else None
        covered: tuple[float, float] = size
        if content_type == "image/jpeg":
            sideways = orientation in _SIDEWAYS
            wanted = smallest(*(size[::-1] if sideways else size))
            # The mode stays as it is: None.
            drafted = image.draft(None, wanted[::-1] if sideways else wanted)
            covered = covered if drafted is None else drafted[1][2:]
        image.load()
        if orientation is None:
            orientation = _orientation(image)  # a PNG may have it at its end
        turn = _UPRIGHT.get(orientation)
        if turn is not None:
            image = image.transpose(turn)
        if orientation in _SIDEWAYS:
            size, covered = size[::-1], covered[::-1]
        return Picture(_convert(image, mode), *size, _region(image.size, covered, orientation))
    except _READER_ERRORS as error:
        reason = " ".join(str(error).split())
        raise InputError(f"the {content_type} image cannot be read: {reason:.120}") from error


def _orientation(image: Image.Image) -> int:
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except _READER_ERRORS:
        # Cameras write broken Exif blocks; treat such an image as one without Exif.
        return 1
    return value if isinstance(value, int) else 1


def _region(size: tuple[int, int], covered: tuple[float, float], orientation: int) -> Region:
    left = size[0] - covered[0] if orientation in _MIRRORED_X else 0.0
    top = size[1] - covered[1] if orientation in _MIRRORED_Y else 0.0
    return left, top, left + covered[0], top + covered[1]


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
