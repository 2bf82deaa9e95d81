"""Pre- and postprocessing, as a manifest declares them: from an image to the model, from outputs to answers.

Promises values within range. Leaves the work to `agent.runtime.preprocess` and `agent.runtime.postprocess`.
Leaves names such as `imagenet` to the builder: the manifest holds the values that they stand for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final

from agent.bundle.audio import Keywords, Speech
from agent.bundle.canonical_json import LATER
from agent.bundle.detection import MAX_LIST, POINT_ORDERS, Objects, check_thresholds
from agent.bundle.quantisation import Quantised
from agent.bundle.values import one_of, within

# In pixels; no model takes larger images. This limits how much a resize may allocate; the runtime checks the
# result against the shape of the model's input.
MAX_SIDE: Final = 16384
# Enough for a softmax and a list for each of eight outputs.
MAX_STEPS: Final = 16

COLOURS: Final = ("RGB", "BGR", "GRAY")
RESIZE_MODES: Final = ("stretch", "shortest", "letterbox", "line")
INTERPOLATIONS: Final = ("bilinear", "bicubic", "nearest", "area")
LAYOUTS: Final = ("NCHW", "NHWC")
POSITIONS: Final = ("centre", "top_left")
BOX_FORMATS: Final = ("corners", "centre")


@dataclass(frozen=True, slots=True)
class Preprocess:
    """From a decoded image to the model's input: each value is `(pixel * scale - mean) / std`.

    Attributes
    ----------
    input
        Name of the input that takes the image.
    colour
        Order of the channels: `RGB`, `BGR` or `GRAY`.
    resize
        Height and width in pixels, 1 to 16384 each, or None to keep the image's size.
    resize_mode
        `stretch` resizes to exactly that size; `shortest` keeps the aspect ratio and covers that size;
        `letterbox` keeps the ratio, fits into that size and fills the rest with pixels of the value `pad`;
        `line` keeps the ratio at that height, as lines of text need it: a shorter line is filled at its right
        with `pad`, a longer one is squeezed to that width.
    interpolation
        `bilinear`, `bicubic`, `nearest` or `area`.
    crop
        Height and width, in pixels, of the part that is cut out of the centre, or None.
    scale
        Factor for pixels, which are 0 to 255.
    mean, std
        One value, or one per channel in the order of `colour`.
    layout
        `NCHW` or `NHWC`.
    invert
        Whether each pixel is first replaced by `255 - pixel`.
    pad
        Value of the pixels that a letterbox or a line adds, 0 to 255. None, as in early bundles, means 0 for
        a letterbox, and for a line its last column.
    position
        Where a letterbox puts the image: `centre`, or `top_left`. None, as in early bundles, means `centre`.
    reduce
        Whether an image that is much larger than the model's input may be reduced while it is decoded, by the
        rule of `agent.runtime.pictures`. None, as in early bundles, means no.

    Raises
    ------
    ValueError
        If a value is out of its range.
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
    pad: int | None = field(default=None, metadata=LATER)
    position: str | None = field(default=None, metadata=LATER)
    reduce: bool | None = field(default=None, metadata=LATER)

    def __post_init__(self) -> None:
        one_of("colour", self.colour, COLOURS)
        one_of("resize_mode", self.resize_mode, RESIZE_MODES)
        one_of("interpolation", self.interpolation, INTERPOLATIONS)
        one_of("layout", self.layout, LAYOUTS)
        for name, size in (("resize", self.resize), ("crop", self.crop)):
            if size is not None and not (len(size) == 2 and all(1 <= side <= MAX_SIDE for side in size)):
                raise ValueError(f"{name}: expected height and width from 1 to {MAX_SIDE}, got {size}")
        channels = 1 if self.colour == "GRAY" else 3
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, channels):
                raise ValueError(
                    f"{name}: expected 1 or {channels} values for {self.colour}, got {len(values)}"
                )
            if not all(math.isfinite(value) for value in values):
                raise ValueError(f"{name}: expected finite values, got {values}")
        if 0 in self.std:
            raise ValueError(f"std: expected values other than 0, got {self.std}")
        if not math.isfinite(self.scale) or self.scale == 0:
            raise ValueError(f"scale: expected a finite number other than 0, got {self.scale}")
        within("pad", self.pad or 0, 0, 255)
        one_of("position", self.position or "centre", POSITIONS)
        if self.position is not None and self.resize_mode != "letterbox":
            raise ValueError(f"position: expected resize_mode letterbox, got {self.resize_mode}")
        if self.pad is not None and self.resize_mode not in ("letterbox", "line"):
            raise ValueError(f"pad: expected resize_mode letterbox or line, got {self.resize_mode}")


@dataclass(frozen=True, slots=True)
class Softmax:
    """Replace an output by its softmax along an axis, -16 to 15."""

    kind: ClassVar[str] = "softmax"
    output: str
    axis: int = -1

    def __post_init__(self) -> None:
        if not -16 <= self.axis < 16:
            raise ValueError(f"axis: expected -16 to 15, got {self.axis}")


@dataclass(frozen=True, slots=True)
class TopK:
    """Replace an output by its k largest values, their indices and, if the bundle has any, their labels."""

    kind: ClassVar[str] = "top_k"
    output: str
    k: int

    def __post_init__(self) -> None:
        if not 1 <= self.k <= MAX_LIST:
            raise ValueError(f"k: expected 1 to {MAX_LIST}, got {self.k}")


@dataclass(frozen=True, slots=True)
class Detect:
    """Replace boxes and scores by the detections that remain after non-maximum suppression.

    Attributes
    ----------
    boxes, scores
        Names of the outputs, of shape (1, n, 4) and (1, n, classes).
    score_threshold
        Detections with a score up to this are dropped; 0 to 1.
    iou_threshold
        A box whose intersection over union with a better box of its class exceeds this is dropped; 0 to 1.
    max_detections
        Largest number of detections in the answer.
    format
        `corners` (x0, y0, x1, y1) or `centre` (x, y, width, height).
    normalised
        Whether boxes are fractions of the model's input instead of its pixels.
    background
        Whether class 0 is the background, which is never a detection.
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
        one_of("format", self.format, BOX_FORMATS)
        check_thresholds(self.score_threshold, self.iou_threshold, self.max_detections)


@dataclass(frozen=True, slots=True)
class ClassMap:
    """Replace a segmenter's scores by the best class of each pixel.

    With a threshold, the output has one channel, the score of class 1: a pixel whose score is not larger is
    background, class 0.

    Attributes
    ----------
    output
        Name of the output, of shape (1, classes, height, width), or with `channels_last`
        (1, height, width, classes).
    channels_last
        Whether classes are the last axis.
    threshold
        The score above which a pixel is of class 1, such as 0.5, or 0 for a model without a sigmoid at its
        end; None if there are several channels.
    """

    kind: ClassVar[str] = "class_map"
    output: str
    channels_last: bool = False
    threshold: float | None = field(default=None, metadata=LATER)

    def __post_init__(self) -> None:
        if self.threshold is not None and not math.isfinite(self.threshold):
            raise ValueError(f"threshold: expected a finite number, got {self.threshold}")


@dataclass(frozen=True, slots=True)
class Normalise:
    """Divide an output by its Euclidean length along an axis, -16 to 15, as embeddings need it."""

    kind: ClassVar[str] = "normalise"
    output: str
    axis: int = -1

    def __post_init__(self) -> None:
        if not -16 <= self.axis < 16:
            raise ValueError(f"axis: expected -16 to 15, got {self.axis}")


@dataclass(frozen=True, slots=True)
class Ctc:
    """Replace the scores of each time step by a text (connectionist temporal classification).

    The best class of each step is taken, repetitions are joined, and blanks are dropped.

    Attributes
    ----------
    output
        Name of the output, of shape (1, steps, classes) or (steps, 1, classes).
    blank
        Whether the `first` or the `last` class is the blank.
    activation
        What turns the output into scores: `none` or `softmax`.
    """

    kind: ClassVar[str] = "ctc"
    output: str
    blank: str = "first"
    activation: str = "none"

    def __post_init__(self) -> None:
        one_of("blank", self.blank, ("first", "last"))
        one_of("activation", self.activation, ("none", "softmax"))


@dataclass(frozen=True, slots=True)
class Pose:
    """Replace the key points of persons, which a model finds without boxes, by objects with key points.

    A person's score is the mean confidence of its points above `point_threshold`; its box is the smallest one
    that holds them.

    Attributes
    ----------
    output
        Name of the output, of shape (1, persons, points, 3): two coordinates of each point, and a confidence.
    order
        Which coordinate is the first: `xy` or `yx`.
    normalised
        Whether coordinates are fractions of the model's input instead of its pixels.
    point_threshold, score_threshold
        Points with a confidence, and persons with a score, up to these are dropped; 0 to 1.
    """

    kind: ClassVar[str] = "pose"
    output: str
    order: str = "xy"
    normalised: bool = False
    point_threshold: float = 0.1
    score_threshold: float = 0.25

    def __post_init__(self) -> None:
        one_of("order", self.order, POINT_ORDERS)
        for name in ("point_threshold", "score_threshold"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: expected 0 to 1, got {getattr(self, name)}")


Step = Softmax | TopK | Detect | Objects | Pose | ClassMap | Normalise | Ctc | Speech | Keywords


def outputs_of(step: Step) -> tuple[str, ...]:
    """Return the names of the outputs that a step reads."""
    match step:
        case Detect():
            return (step.boxes, step.scores)
        case Objects():
            return step.outputs
        case _:
            return (step.output,)


@dataclass(frozen=True, slots=True)
class Postprocess:
    """The steps from the model's outputs to the answer, in order; 1 to 16."""

    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.steps) <= MAX_STEPS:
            raise ValueError(f"postprocess: expected 1 to {MAX_STEPS} steps, got {len(self.steps)}")

    @property
    def outputs(self) -> frozenset[str]:
        """Names of the outputs that the steps read."""
        return frozenset(name for step in self.steps for name in outputs_of(step))


def real_outputs(declared: Postprocess | None, quantised: Mapping[str, Quantised]) -> dict[str, Quantised]:
    """Return the quantised outputs whose real numbers the steps of a postprocess read, by name."""
    # The best class of a pixel is the same in integers, and a map of them is large.
    steps = (
        step
        for step in (declared.steps if declared else ())
        if not isinstance(step, ClassMap) or step.threshold is not None
    )
    return {name: quantised[name] for step in steps for name in outputs_of(step) if name in quantised}
