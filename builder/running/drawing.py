"""Draw an answer on the picture that was asked about: boxes, labels, key points, masks, class maps, captions.

Reads results by the names that `agent.runtime.postprocess` gives them, in pixels of the picture as sent, so
it serves a local run and an answer of a device alike. Uses only numpy and Pillow. Results with nothing to
draw are left out.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from agent.errors import EdgeError
from agent.runtime.pictures import MAX_PIXELS, read_picture
from builder.errors import ModelError

# Twelve colours that are easy to tell apart, on dark and bright pictures; a class keeps its colour.
COLOURS: Final = (
    (230, 60, 60), (60, 160, 255), (70, 200, 90), (255, 170, 30), (190, 90, 240), (0, 200, 200),
    (255, 100, 180), (170, 210, 40), (120, 120, 255), (255, 220, 70), (0, 150, 110), (200, 130, 80),
)  # fmt: skip
_MASK_OPACITY: Final = 0.45
# A key point with a lower confidence is not drawn.
_VISIBLE: Final = 0.25
# The limbs of a person with the 17 key points of COCO (cocodataset.org), by the numbers of their ends.
COCO_POINTS: Final = 17
LIMBS: Final = (
    (0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 6), (5, 6), (5, 7), (7, 9), (6, 8), (8, 10), (5, 11), (6, 12),
    (11, 12), (11, 13), (13, 15), (12, 14), (14, 16),
)  # fmt: skip
_MAX_CAPTION: Final = 80
# An answer that can be drawn has one of these.
_DRAWN: Final = frozenset({"boxes", "class_map", "scores", "text"})
JPEG_QUALITY: Final = 92

Array = npt.NDArray[Any]
Results = Mapping[str, Any]
Area = tuple[int, int, int, int]


def draw(picture: bytes, content_type: str, results: Results) -> Image.Image:
    """Draw results on a picture.

    Parameters
    ----------
    picture
        The file that was sent.
    content_type
        `image/jpeg` or `image/png`.
    results
        Name -> array, or sequence of strings or bytes: `boxes`, `scores`, `labels` ... as
        `agent.runtime.postprocess.Postprocessor` returns them.

    Returns
    -------
    Image
        The picture, upright, in its own size, in mode RGB.

    Raises
    ------
    ModelError
        If nothing in the results can be drawn, the picture cannot be read, or a result does not have the form
        of its name.
    """
    if not _DRAWN & results.keys():
        got = ", ".join(results)[:80] or "nothing"
        raise ModelError(
            f"expected an answer with boxes, classes or a text to draw, got {got}",
            hint="declare what the outputs mean: edgebundle repack BUNDLE --postprocess PRESET",
        )
    try:
        image = read_picture(picture, content_type, "RGB", MAX_PIXELS).image
    except EdgeError as error:
        raise ModelError(str(error), hint=error.hint or "give a JPEG or PNG picture") from error
    try:
        return _drawn(image, results)
    except (ValueError, TypeError, IndexError, KeyError, OverflowError) as error:
        raise ModelError(
            f"the answer cannot be drawn: {str(error)[:120]}",
            hint="leave out --draw: the numbers are in the answer",
        ) from error


def encode(image: Image.Image, suffix: str) -> bytes:
    """Return a picture as a file of the format that a suffix such as `.jpg` names.

    Raises
    ------
    ModelError
        If it names none.
    """
    kind = format_of(suffix)
    file = io.BytesIO()
    image.save(file, kind, **({"quality": JPEG_QUALITY} if kind == "JPEG" else {}))
    return file.getvalue()


def format_of(suffix: str) -> str:
    """Return Pillow's name of the format that a suffix such as `.jpg` names.

    Raises
    ------
    ModelError
        If it names none.
    """
    kind = Image.registered_extensions().get(suffix.lower())
    if kind is None or kind not in Image.SAVE:
        raise ModelError(
            f"expected the suffix of a picture, such as .jpg or .png, got {suffix[:20]!r}",
            hint="give --draw a name such as drawn.png",
        )
    return kind


def read_run_lengths(code: bytes, size: tuple[int, int]) -> Array:
    """Read a mask from COCO's compressed run lengths (see `agent.runtime.masks`).

    Result: bool, shape (height, width).
    Raises `ValueError` if the runs do not have the mask's size.
    """
    height, width = size
    if not 0 < height * width <= MAX_PIXELS:
        raise ValueError(f"expected a mask of 1 to {MAX_PIXELS} pixels, got {height} x {width}")
    counts: list[int] = []
    value = shift = 0
    for character in code:
        bits = character - 48
        if not 0 <= bits < 64 or shift > 30:
            raise ValueError("expected run lengths of a mask")
        value |= (bits & 0x1F) << shift
        shift += 5
        if not bits & 0x20:
            if bits & 0x10:
                value -= 1 << shift
            counts.append(value + (counts[-2] if len(counts) > 2 else 0))
            value = shift = 0
    if min(counts, default=-1) < 0 or sum(counts) != height * width:
        raise ValueError(f"expected run lengths of {height * width} pixels")
    flat = np.repeat(np.arange(len(counts)) % 2 == 1, counts)
    return flat.reshape(width, height).T


def _drawn(image: Image.Image, results: Results) -> Image.Image:
    arrays = {name: np.asarray(value) for name, value in results.items() if name not in ("masks", "labels")}
    texts = {name: strings(results[name]) for name in ("labels", "text") if name in results}
    if "class_map" in arrays:
        image = _with_class_map(image, arrays)
    if "boxes" not in arrays:
        return _with_captions(image, arrays, texts)
    for name in ("boxes", "keypoints"):
        if not np.isfinite(arrays.get(name, 0)).all():
            raise ValueError(f"expected {name} that are finite")
    classes = arrays.get("classes", np.zeros(len(arrays["boxes"]), np.int64)).astype(int)
    if "masks" in results and "mask_size" in arrays:
        image = _with_masks(image, results["masks"], arrays, classes)
    line = max(2, round(min(image.size) / 220))
    pen, font = ImageDraw.Draw(image), _font(max(12, round(min(image.size) / 32)))
    names = texts.get("labels") or [f"class {index}" for index in classes]
    # The best object is drawn last, on top.
    for i in reversed(range(len(arrays["boxes"]))):
        colour = COLOURS[classes[i] % len(COLOURS)]
        x1, y1, x2, y2 = (float(v) for v in arrays["boxes"][i])
        pen.rectangle((min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)), outline=colour, width=line)
        if "keypoints" in arrays:
            _draw_points(pen, arrays["keypoints"][i], line, colour)
        _tag(pen, (x1, y1), f"{names[i]} {float(arrays['scores'][i]):.2f}", colour, font, image.size)
    return image


def _draw_points(pen: ImageDraw.ImageDraw, points: Array, line: int, colour: tuple[int, int, int]) -> None:
    seen = [len(point) < 3 or point[2] >= _VISIBLE for point in points]
    places = [(float(point[0]), float(point[1])) for point in points]
    for first, last in LIMBS if len(points) == COCO_POINTS else ():
        if seen[first] and seen[last]:
            pen.line((*places[first], *places[last]), fill=colour, width=line)
    for x, y in (place for place, is_seen in zip(places, seen, strict=True) if is_seen):
        pen.ellipse((x - line, y - line, x + line, y + line), fill=colour, outline="white")


def _with_masks(image: Image.Image, masks: Sequence[Any], arrays: Results, classes: Array) -> Image.Image:
    size = (int(arrays["mask_size"][0]), int(arrays["mask_size"][1]))
    area = _area(arrays["mask_area"])
    for i in reversed(range(len(masks))):
        code = masks[i] if isinstance(masks[i], bytes) else str(masks[i]).encode("ascii")
        mask = Image.fromarray((read_run_lengths(code, size) * round(255 * _MASK_OPACITY)).astype(np.uint8))
        image = _tinted(image, mask, area, COLOURS[classes[i] % len(COLOURS)])
    return image


def _with_class_map(image: Image.Image, arrays: Results) -> Image.Image:
    class_map = arrays["class_map"]
    if class_map.ndim != 2 or not 0 < class_map.size <= MAX_PIXELS:
        raise ValueError(f"expected a class map, got shape {class_map.shape}")
    area = _area(arrays.get("area", (0, 0, *image.size)))
    palette = np.array([(0, 0, 0), *COLOURS], np.uint8)
    # Class 0 is usually the background, and stays clear.
    colours = np.where(class_map == 0, 0, 1 + (class_map.astype(np.int64) - 1) % len(COLOURS))
    opacity = (np.where(class_map == 0, 0.0, _MASK_OPACITY) * 255).astype(np.uint8)
    layer = Image.fromarray(palette[colours])
    size = _size(area)
    layer = layer.resize(size, Image.Resampling.NEAREST)
    image.paste(layer, area[:2], Image.fromarray(opacity).resize(size, Image.Resampling.NEAREST))
    return image


def _tinted(image: Image.Image, mask: Image.Image, area: Area, colour: Any) -> Image.Image:  # noqa: ANN401
    size = _size(area)
    image.paste(Image.new("RGB", size, colour), area[:2], mask.resize(size, Image.Resampling.BILINEAR))
    return image


def _area(values: Any) -> Area:  # noqa: ANN401 - four numbers, from a device perhaps not
    x1, y1, x2, y2 = (round(float(value)) for value in values)
    return x1, y1, x2, y2


def _size(area: Area) -> tuple[int, int]:
    width, height = area[2] - area[0], area[3] - area[1]
    if not 0 < width * height <= 2 * MAX_PIXELS or width < 1:
        raise ValueError(f"expected an area of a picture, got {area}")
    return width, height


def _with_captions(image: Image.Image, arrays: Results, texts: Mapping[str, list[str]]) -> Image.Image:
    lines = list(texts.get("text", []))
    names = texts.get("labels") or [f"class {index}" for index in arrays.get("indices", ())]
    values = arrays.get("shares") if "class_map" in arrays else arrays.get("scores")
    if values is not None and not lines:
        lines = [f"{name} {float(value):.2f}" for name, value in zip(names, values, strict=False)]
    pen, size = ImageDraw.Draw(image), max(12, round(min(image.size) / 24))
    font = _font(size)
    for row, text in enumerate(lines[:10]):
        colour = COLOURS[row % len(COLOURS)]
        _tag(pen, (0.0, (row + 1) * size * 1.4), text, colour, font, image.size)
    return image


def _tag(
    pen: ImageDraw.ImageDraw,
    corner: tuple[float, float],
    text: str,
    colour: tuple[int, int, int],
    font: Any,  # noqa: ANN401 - Pillow's font classes have no common base
    size: tuple[int, int],
) -> None:
    """Write text on a bar above a corner, inside the picture."""
    text = " ".join(text.split())[:_MAX_CAPTION]
    try:
        left, top, right, bottom = pen.textbbox((0, 0), text, font=font)
    except UnicodeEncodeError:  # the smallest font has only Latin letters
        text = text.encode("latin-1", "replace").decode("latin-1")
        left, top, right, bottom = pen.textbbox((0, 0), text, font=font)
    width, height = right - left + 6, bottom - top + 6
    x = min(max(0.0, corner[0]), max(0.0, size[0] - width))
    y = min(max(0.0, corner[1] - height), max(0.0, size[1] - height))
    pen.rectangle((x, y, x + width, y + height), fill=colour)
    ink = "black" if sum(colour) > 380 else "white"
    pen.text((x + 3 - left, y + 3 - top), text, fill=ink, font=font)


def _font(size: int) -> Any:  # noqa: ANN401 - see above
    try:
        return ImageFont.load_default(size)
    except (TypeError, OSError):  # Pillow before 10.1, or without FreeType
        return ImageFont.load_default()


def strings(values: Any) -> list[str]:  # noqa: ANN401 - a tuple of bytes here, an array of strings of a device
    """Return labels as strings: a tuple of bytes of a local run, or an array of strings of an answer."""
    return [v.decode("utf-8", "replace") if isinstance(v, bytes) else str(v) for v in values]
