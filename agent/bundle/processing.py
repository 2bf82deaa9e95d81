"""What is done to an image before the model and to tensors after it, as declared in the manifest.

Promises values within range. Leaves doing it to `agent.runtime.preprocess` and
`agent.runtime.postprocess`, and names such as `imagenet` to the builder: the manifest holds the expanded
form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Final

# Larger images than any model here takes; a bound on what a resize may allocate (3 x 16384^2 floats stay
# checked against the model's own input shape by the runtime).
MAX_SIDE: Final = 16384
# One mean and deviation a channel; colour images have three.
MAX_CHANNELS: Final = 4
MAX_LIST: Final = 100_000

COLOURS: Final = ("RGB", "BGR", "GRAY")
RESIZE_MODES: Final = ("stretch", "shortest", "letterbox")
INTERPOLATIONS: Final = ("bilinear", "bicubic", "nearest", "area")
LAYOUTS: Final = ("NCHW", "NHWC")
BOX_FORMATS: Final = ("corners", "centre")


@dataclass(frozen=True, slots=True)
class Preprocess:
    """From a decoded image to the model's input: `(pixel * scale - mean) / std`.

    Attributes
    ----------
    input
        Name of the input that takes the image.
    colour
        Order of the channels: `RGB`, `BGR` or `GRAY`.
    resize
        Height and width, or None for the size as sent.
    resize_mode
        `stretch` to exactly that size; `shortest` keeps the ratio and covers it; `letterbox` keeps the
        ratio, fits into it and fills the rest with zero pixels.
    interpolation
        `bilinear`, `bicubic`, `nearest` or `area`.
    crop
        Height and width that are cut out of the centre, or None.
    scale
        Applied to pixels of 0 to 255.
    mean, std
        One value, or one a channel, in the order of `colour`.
    layout
        `NCHW` or `NHWC`.
    invert
        Whether pixels become `255 - pixel` first.
    """

    input: str
    colour: str
    resize: tuple[int, int] | None
    resize_mode: str
    interpolation: str
    crop: tuple[int, int] | None
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    layout: str
    invert: bool = False

    def __post_init__(self) -> None:
        _one_of("colour", self.colour, COLOURS)
        _one_of("resize_mode", self.resize_mode, RESIZE_MODES)
        _one_of("interpolation", self.interpolation, INTERPOLATIONS)
        _one_of("layout", self.layout, LAYOUTS)
        for name, size in (("resize", self.resize), ("crop", self.crop)):
            if size is not None and not (len(size) == 2 and all(1 <= side <= MAX_SIDE for side in size)):
                raise ValueError(f"{name} is a height and a width from 1 to {MAX_SIDE}, not {size}")
        channels = 1 if self.colour == "GRAY" else 3
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, channels):
                raise ValueError(f"{name} has 1 or {channels} values for {self.colour}, not {len(values)}")
            if not all(math.isfinite(value) for value in values):
                raise ValueError(f"{name} has a value that is not finite")
        if 0 in self.std:
            raise ValueError("std has a zero, by which it would be divided")
        if not math.isfinite(self.scale) or self.scale == 0:
            raise ValueError(f"scale is finite and not zero, not {self.scale}")


@dataclass(frozen=True, slots=True)
class Softmax:
    """Replace an output by its softmax along an axis."""

    kind: ClassVar[str] = "softmax"
    output: str
    axis: int = -1

    def __post_init__(self) -> None:
        if not -16 <= self.axis < 16:
            raise ValueError(f"axis is from -16 to 15, not {self.axis}")


@dataclass(frozen=True, slots=True)
class TopK:
    """Replace an output by its k largest values, their indices and, where there are any, their labels."""

    kind: ClassVar[str] = "top_k"
    output: str
    k: int

    def __post_init__(self) -> None:
        if not 1 <= self.k <= MAX_LIST:
            raise ValueError(f"k is from 1 to {MAX_LIST}, not {self.k}")


@dataclass(frozen=True, slots=True)
class Detect:
    """Replace boxes and scores by the detections that non-maximum suppression leaves.

    Attributes
    ----------
    boxes, scores
        Names of the outputs, [1, n, 4] and [1, n, classes].
    score_threshold, iou_threshold
        From 0 to 1.
    max_detections
        How many are answered at most.
    format
        `corners` (x0, y0, x1, y1) or `centre` (x, y, width, height).
    normalised
        Whether boxes are fractions of the model's input, rather than its pixels.
    background
        Whether class 0 stands for nothing, and is left out.
    """

    kind: ClassVar[str] = "detect"
    boxes: str
    scores: str
    score_threshold: float
    iou_threshold: float
    max_detections: int
    format: str
    normalised: bool
    background: bool = False

    def __post_init__(self) -> None:
        _one_of("format", self.format, BOX_FORMATS)
        for name, value in (("score_threshold", self.score_threshold), ("iou_threshold", self.iou_threshold)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} is from 0 to 1, not {value}")
        if not 1 <= self.max_detections <= MAX_LIST:
            raise ValueError(f"max_detections is from 1 to {MAX_LIST}, not {self.max_detections}")


Step = Softmax | TopK | Detect


@dataclass(frozen=True, slots=True)
class Postprocess:
    """Steps from the model's outputs to what is answered, in order."""

    steps: tuple[Softmax | TopK | Detect, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.steps) <= 16:
            raise ValueError(f"postprocess has 1 to 16 steps, not {len(self.steps)}")

    @property
    def outputs(self) -> frozenset[str]:
        """Names of the model's outputs that the steps read."""
        names: set[str] = set()
        for step in self.steps:
            names |= {step.boxes, step.scores} if isinstance(step, Detect) else {step.output}
        return frozenset(names)


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is one of {', '.join(choices)}, not {value!r:.80}")
