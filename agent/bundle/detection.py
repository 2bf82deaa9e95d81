"""The step `objects` of a manifest: where a detector's raw outputs hold what, and how it is encoded.

Promises values within range. The step names no family of models: YOLOX, YOLOv5, YOLOv8, NanoDet, SSD,
RetinaFace, YuNet and DETR differ only in the values of these fields, which the builder's presets know. Leaves
the decoding to `agent.runtime.objects`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

from agent.bundle.canonical_json import LATER
from agent.bundle.values import one_of, within

# Entries of a top-k or of a list of detections; an answer is made in memory.
MAX_LIST: Final = 100_000
# Candidate boxes of a model: YOLOv5 at 1280 x 1280 has 102,000. Decoding takes some 100 bytes for each.
MAX_ROWS: Final = 1 << 20
# Outputs that hold one quantity: one for each level of a feature pyramid, which has 3 to 7.
MAX_PARTS: Final = 16
# Anchor boxes of a cell; SSD has 6, YOLO 3.
MAX_ANCHORS: Final = 64
# Bins of a distance's distribution; NanoDet has 8, YOLOv8 16.
MAX_BINS: Final = 64
# Strides, sizes of anchors, and values of a row; no model has more.
_MAX_EXTENT: Final = 1 << 16

CODINGS: Final = ("corners", "corners_yx", "centre", "grid", "distances", "anchors")
# What is not relative to a grid.
ABSOLUTE: Final = ("corners", "corners_yx", "centre")
ACTIVATIONS: Final = ("none", "sigmoid", "softmax")
JOINT_SCORES: Final = ("product", "geometric_mean")
BACKGROUNDS: Final = ("none", "first", "last")
POINT_ORDERS: Final = ("xy", "yx")
PROTOTYPE_ORDERS: Final = ("channels_first", "channels_last")


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive values of each row of an output.

    Attributes
    ----------
    output
        The output's name. It has a row for each candidate box: shape (1, n, values) or (n, values); with
        `Objects.transposed` (1, values, n) or (values, n); or (1, values, height, width). A quantity of one
        value a row may also be (n,) or (1, n), where n is the number of boxes.
    first
        Index of the first value.
    count
        Number of values.
    """

    output: str
    first: int
    count: int

    def __post_init__(self) -> None:
        within("first", self.first, 0, _MAX_EXTENT)
        within("count", self.count, 1, _MAX_EXTENT)


@dataclass(frozen=True, slots=True)
class Level:
    """One grid of cells over the model's input; the rows of an output go through its cells line by line.

    Attributes
    ----------
    rows, columns
        Number of cells in height and width.
    stride
        Distance of two cells, in pixels of the model's input.
    anchors
        Width and height of each cell's anchor boxes, in pixels of the model's input. A cell has a row for
        each of them, or one row if there are none.
    """

    rows: int
    columns: int
    stride: float
    anchors: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        within("rows", self.rows, 1, _MAX_EXTENT)
        within("columns", self.columns, 1, _MAX_EXTENT)
        _positive("stride", self.stride)
        within("number of anchors", len(self.anchors), 0, MAX_ANCHORS)
        for width, height in self.anchors:
            _positive("anchors", width)
            _positive("anchors", height)

    @property
    def count(self) -> int:
        """Number of rows that the level has in an output."""
        return self.rows * self.columns * max(1, len(self.anchors))


@dataclass(frozen=True, slots=True, kw_only=True)
class Objects:
    """Replace a detector's raw outputs by the objects that remain after non-maximum suppression.

    Each quantity is read from one part, or from several whose rows follow each other, such as one for each
    level of a feature pyramid. All quantities have the same number of rows.

    Attributes
    ----------
    boxes
        4 values a row, or 4 times `bins`.
    coding
        What these are. `corners`: x1, y1, x2, y2. `corners_yx`: y1, x1, y2, x2, as TensorFlow has them.
        `centre`: x, y, width, height. The others are relative to a cell of `levels`, whose centre c is at
        (column + `offset`, row + `offset`) times its stride. `grid`: centre c + stride * (x, y), size
        stride * exp(width, height). `distances`: from c to the left, upper, right and lower edge, in
        strides. `anchors`: centre c + v0 * size * (x, y), size * exp(v1 * (width, height)), where size is
        the cell's anchor and v0, v1 are `variances`.
    normalised
        Whether `corners`, `corners_yx` and `centre` are fractions of the model's input instead of its pixels.
    levels
        The grids, in the order of the rows; empty for `corners`, `corners_yx` and `centre`.
    offset
        Position of a cell's centre in the cell: 0.5, or 0 for its upper left corner.
    bins
        0, or the number of bins of a distribution: each distance is then the mean of 0, 1, ... weighted by
        the softmax of its `bins` values (distribution focal loss).
    variances
        Factors v0 and v1 of `anchors`; 1 for the others.
    scores
        One value for each class.
    activation
        What turns these into scores: `none`, `sigmoid` or `softmax`.
    background
        Whether the `first` or the `last` class is the background, or `none`.
    objectness
        Empty, or one value a row, which is combined with each class's score.
    joint_score
        `product`, or `geometric_mean`, the root of the product of both after they are clipped to 0 to 1.
    class_ids
        Empty, or one value a row: the class of the row, whose `scores` then have only one value.
    keypoints
        Empty, or `keypoint_values` for each key point of a row, encoded as the centre of the box is; without
        levels x, y in pixels, or fractions, of the model's input.
    keypoint_values
        2 (x, y), or 3 (x, y, confidence).
    keypoint_order
        `yx` if y is before x. None, as in early bundles, means `xy`.
    mask_weights
        Empty, or the factors of `prototypes` whose sum is positive inside the object.
    prototypes
        Output of shape (1, factors, height, width) or (1, height, width, factors); or None.
    prototype_order
        `channels_last` or `channels_first`. None, as in early bundles, means the first if the shape fits it.
    transposed
        Whether outputs have shape (1, values, n) instead of (1, n, values).
    multi_label
        Whether a row can be an object of each class over the threshold, not only of its best class.
    class_agnostic
        Whether a box also suppresses boxes of other classes.
    score_threshold
        Objects with a score up to this are dropped; 0 to 1.
    iou_threshold
        A box whose intersection over union with a better box exceeds this is dropped; 0 to 1. 1 drops none.
    max_detections
        Largest number of objects in the answer.

    Raises
    ------
    ValueError
        If a value is out of its range, or the fields contradict each other.
    """

    kind: ClassVar[str] = "objects"
    boxes: tuple[Part, ...]
    coding: str
    normalised: bool = False
    levels: tuple[Level, ...] = ()
    offset: float = 0.0
    bins: int = 0
    variances: tuple[float, float] = (1.0, 1.0)
    scores: tuple[Part, ...]
    activation: str = "none"
    background: str = "none"
    objectness: tuple[Part, ...] = ()
    joint_score: str = "product"
    class_ids: tuple[Part, ...] = ()
    keypoints: tuple[Part, ...] = ()
    keypoint_values: int = 2
    mask_weights: tuple[Part, ...] = ()
    prototypes: str | None = None
    transposed: bool = False
    multi_label: bool = False
    class_agnostic: bool = False
    score_threshold: float = 0.25
    iou_threshold: float = 0.45
    max_detections: int = 300
    keypoint_order: str | None = field(default=None, metadata=LATER)
    prototype_order: str | None = field(default=None, metadata=LATER)

    def __post_init__(self) -> None:
        one_of("coding", self.coding, CODINGS)
        one_of("activation", self.activation, ACTIVATIONS)
        one_of("joint_score", self.joint_score, JOINT_SCORES)
        one_of("background", self.background, BACKGROUNDS)
        for name, parts in self.quantities.items():
            within(f"number of {name}", len(parts), 1 if name in ("boxes", "scores") else 0, MAX_PARTS)
        within("number of levels", len(self.levels), 0, MAX_PARTS)
        self._check_boxes()
        self._check_keypoints_and_masks()
        if self.class_ids and (self._values("scores") != 1 or self.background != "none"):
            raise ValueError("class_ids: expected one score a row and no background")
        for name, parts in (("objectness", self.objectness), ("class_ids", self.class_ids)):
            if any(part.count != 1 for part in parts):
                raise ValueError(f"{name}: expected one value a row")
        check_thresholds(self.score_threshold, self.iou_threshold, self.max_detections)

    @property
    def quantities(self) -> dict[str, tuple[Part, ...]]:
        """The parts of each quantity by its name."""
        names = ("boxes", "scores", "objectness", "class_ids", "keypoints", "mask_weights")
        return {name: getattr(self, name) for name in names}

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs that are read, in the order of their first use."""
        names = [part.output for parts in self.quantities.values() for part in parts]
        return tuple(dict.fromkeys([*names, *([self.prototypes] if self.prototypes is not None else [])]))

    def channels_last(self, shape: Sequence[int]) -> bool:
        """Return whether prototypes of this shape have their factors last."""
        if self.prototype_order is None:
            return shape[1] != self._values("mask_weights")
        return self.prototype_order == "channels_last"

    @property
    def classes(self) -> int | None:
        """Number of classes, the background included, or None if the model names each row's class."""
        return None if self.class_ids else self._values("scores")

    def _values(self, quantity: str) -> int:
        return self.quantities[quantity][0].count

    def _check_boxes(self) -> None:
        for name in ("boxes", "scores", "keypoints", "mask_weights"):
            if len({part.count for part in self.quantities[name]}) > 1:
                raise ValueError(f"{name}: expected parts of the same count")
        within("bins", self.bins, 0, MAX_BINS)
        if self.bins and self.coding != "distances":
            raise ValueError(f"bins: expected coding distances, got {self.coding}")
        if self._values("boxes") != 4 * max(1, self.bins):
            raise ValueError(f"boxes: expected {4 * max(1, self.bins)} values, got {self._values('boxes')}")
        is_absolute = self.coding in ABSOLUTE
        if is_absolute == bool(self.levels):
            raise ValueError(f"levels: expected {'none' if is_absolute else 'some'} for coding {self.coding}")
        if self.normalised and not is_absolute:
            raise ValueError(f"normalised: expected coding {', '.join(ABSOLUTE)}, got {self.coding}")
        if self.coding == "anchors" and not all(level.anchors for level in self.levels):
            raise ValueError("levels: expected anchors at each level for coding anchors")
        if not 0 <= self.offset <= 1:
            raise ValueError(f"offset: expected 0 to 1, got {self.offset}")
        for value in self.variances:
            _positive("variances", value)
        if self.coding != "anchors" and self.variances != (1, 1):
            raise ValueError(f"variances: expected 1 and 1 for coding {self.coding}, got {self.variances}")
        within("number of rows", sum(level.count for level in self.levels), 0, MAX_ROWS)

    def _check_keypoints_and_masks(self) -> None:
        within("keypoint_values", self.keypoint_values, 2, 3)
        one_of("keypoint_order", self.keypoint_order or "xy", POINT_ORDERS)
        if self.keypoints and self._values("keypoints") % self.keypoint_values:
            raise ValueError(
                f"keypoints: expected a multiple of {self.keypoint_values} values, "
                f"got {self._values('keypoints')}"
            )
        if bool(self.mask_weights) != (self.prototypes is not None):
            raise ValueError("expected both mask_weights and prototypes, or neither")
        if self.prototype_order is not None:
            one_of("prototype_order", self.prototype_order, PROTOTYPE_ORDERS)
            if self.prototypes is None:
                raise ValueError("prototype_order: expected prototypes, got none")


def check_thresholds(score_threshold: float, iou_threshold: float, max_detections: int) -> None:
    """Check what every step that makes a list of objects has, or raise ValueError.

    Thresholds are within 0 to 1, and the list's length is within 1 to `MAX_LIST`.
    """
    for name, value in (("score_threshold", score_threshold), ("iou_threshold", iou_threshold)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name}: expected 0 to 1, got {value}")
    within("max_detections", max_detections, 1, MAX_LIST)


def _positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and 0 < value <= _MAX_EXTENT):
        raise ValueError(f"{name}: expected a number above 0 and up to {_MAX_EXTENT}, got {value}")
