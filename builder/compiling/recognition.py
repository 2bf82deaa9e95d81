"""Recognise a model by its outputs and its file's hints, and propose the presets that fit it.

Promises only proposals whose presets can be built for the model. A shape is evidence and no proof, so every
proposal says how sure it is; nothing is applied without the user.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from agent.bundle.detection import ABSOLUTE, Objects
from agent.bundle.processing import ClassMap, Postprocess, Softmax, Step
from agent.bundle.tensor_spec import TensorSpec
from builder.compiling.hints import NO_HINTS, Hints
from builder.compiling.output_presets import (
    COCO_POINTS,
    NANODET_BINS,
    YOLO_MASK_FACTORS,
    is_ambiguous,
    step_of,
)
from builder.compiling.pixel_steps import preset_for
from builder.compiling.signature import PYRAMIDS, Signature
from builder.errors import ModelError

# Classes of ImageNet -> the usual preprocess. TensorFlow's models have one more, the background.
_CLASSIFIERS: Final = {1000: "imagenet-crop", 1001: "symmetric"}
ROTATED: Final = "obb"  # Ultralytics' task whose boxes have an angle
_ADDS_UP: Final = "that add up to 1"
_ANGLES: Final = "the model computes a sine and a cosine, as for boxes with an angle, which no preset decodes"
_TOP: Final = 5
_SCORES: Final = ("Softmax", "Sigmoid")
_FEWEST_CHARACTERS: Final = 37  # ten digits, 26 letters and the blank
_COCO_CLASSES: Final = (80, 91)
_WITHOUT_BACKGROUND: Final = (80, 90)
# Class maps have the size of the input, or a half, a quarter or an eighth of it.
_PICTURE_DIMENSIONS: Final = 4
# Of a score in integers. As for the levels of an input, fewer than 16 are rather another number's.
LARGEST_STEP: Final = 1 / 16
_MAP_STRIDES: Final = (1, 2, 4, 8)
_MOST_CLASSES: Final = 182  # of COCO-Stuff; more are rather features
_POSE_VALUES: Final = 5 + 3 * COCO_POINTS  # a person's box, score and key points
_MOVENET_PERSONS: Final = 6


@dataclass(frozen=True, slots=True)
class Proposal:
    """Presets that fit a model's outputs.

    Attributes
    ----------
    family
        What the outputs look like, such as `YOLOX`.
    evidence
        The shapes that speak for it, such as `3549 rows of 85 at 416x416`.
    sure
        Whether hardly anything else has these shapes.
    postprocess, preprocess
        Names of the presets; the second is empty for a model that takes no picture.
    doubt
        What the outputs of a sample say against it, or nothing.
    step
        What the postprocess stands for, for a preset of `OUTPUT_PRESETS`.
    others
        Presets that fit less well, for a sample that contradicts this one.
    """

    family: str
    evidence: str
    sure: bool
    postprocess: str
    preprocess: str
    doubt: str = ""
    step: Step | None = field(default=None, compare=False)
    others: tuple[Proposal, ...] = field(default=(), compare=False)

    @property
    def preset(self) -> str:
        """The postprocess without options."""
        return self.postprocess.partition(",")[0]

    def document(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.compare}

    def __str__(self) -> str:
        look = "look like" if self.sure else "may be those of"
        before = f" --preprocess {self.preprocess}" if self.preprocess else ""
        doubt = f"; but {self.doubt}" if self.doubt else ""
        presets = f"--postprocess {self.postprocess}{before}"
        return f"the outputs {look} {self.family} ({self.evidence}): {presets}{doubt}"


def recognise(
    inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], hints: Hints = NO_HINTS
) -> Proposal | None:
    """Return the presets that fit a model, or None if it looks like none of them.

    Parameters
    ----------
    inputs, outputs
        The model's tensors.
    hints
        What its file says.
    """
    signature = Signature.of(inputs, outputs, hints)
    if signature.size is None:
        return _of_rows(inputs, outputs)
    first, *others = [*_fitting(signature, hints, inputs), None]
    return first and replace(first, others=tuple(filter(None, others)))


def _fitting(signature: Signature, hints: Hints, inputs: Sequence[TensorSpec]) -> Iterator[Proposal]:
    """Yield the proposals whose presets can be built, the best first."""
    if hints.task == ROTATED:
        return
    for proposal in _proposals(signature, hints, inputs):
        if proposal.postprocess.startswith(("softmax", "top")):
            yield proposal
            return
        try:
            step = step_of(proposal.preset, signature)
        except ModelError:
            continue
        if _is_coarse(step, hints) or _misread(hints, step):
            continue
        if is_ambiguous(step, signature.outputs):
            return
        options = {}
        if isinstance(step, Objects):
            options = _options(step, hints)
            step = replace(step, **options)
        words = [f"{name}={str(value).lower()}" for name, value in options.items()]
        made = replace(proposal, postprocess=",".join((proposal.postprocess, *words)), step=step)
        yield replace(made, sure=False, doubt=_ANGLES) if _may_be_rotated(hints, step) else made


def _may_be_rotated(hints: Hints, step: Step) -> bool:
    """Return whether a file without a task computes what boxes of YOLO only need if they have an angle."""
    is_yolo = isinstance(step, Objects) and step.coding == "centre" and step.iou_threshold < 1
    return is_yolo and not hints.task and hints.operators >= {"Cos", "Sin"}


def _options(step: Objects, hints: Hints) -> dict[str, Any]:
    """Return what hints add to a preset, so that it is read in the same way without them."""
    options: dict[str, Any] = {}
    if hints.normalised and _in_pixels(step):
        options["normalised"] = True
    if step.prototype_order is not None:
        options["prototype_order"] = step.prototype_order
    if step.keypoints and hints.points is not None and hints.points[1] == 2:
        options["keypoint_values"] = 2
    return options


def _misread(hints: Hints, step: Step) -> str:
    """Return how a step reads classes or points otherwise than the file names them, or nothing."""
    if not isinstance(step, Objects):
        return ""
    if hints.task == "pose" and not step.keypoints and (step.class_ids or step.classes != hints.classes):
        return "no key points"
    if step.classes is not None and hints.classes and step.background == "none":
        return f"scores of {step.classes} classes" if step.classes != hints.classes else ""
    return ""


def _is_coarse(step: Step, hints: Hints) -> bool:
    """Return whether scores are integers in steps that tell few of them apart.

    They are if they share a scale with boxes in pixels, or with numbers of classes.
    """
    if not isinstance(step, Objects) or step.activation != "none":
        return False
    parts = (*step.scores, *step.objectness)
    return any(hints.steps.get(part.output, 0.0) > LARGEST_STEP for part in parts)


def _in_pixels(step: Step) -> bool:
    return isinstance(step, Objects) and step.coding in ABSOLUTE and not step.normalised


def _of_rows(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> Proposal | None:
    """Recognise a classifier of a table's rows, which gives the best class and a score for each class."""
    if len(outputs) != 2 or any(spec.datatype == "BOOL" or len(spec.shape) > 2 for spec in inputs):
        return None
    label, scores = sorted(outputs, key=lambda spec: spec.datatype.startswith("FP"))
    is_label = label.datatype in ("INT64", "INT32") and math.prod(label.shape) == 1
    if not is_label or scores.datatype != "FP32" or len(scores.shape) != 2 or scores.shape[0] != 1:
        return None
    evidence = f"a label and {scores.shape[1]} probabilities"
    return Proposal("a classifier of rows", evidence, False, "top1", "") if scores.shape[1] > 1 else None


def contradicts(proposal: Proposal, declared: Postprocess) -> bool:
    """Return whether a declared postprocess reads the outputs otherwise than a proposal that is sure.

    Parameters
    ----------
    proposal
        What `recognise` returned for the model.
    declared
        What the user declares.
    """
    expected, given = proposal.step, declared.steps[0]
    if not proposal.sure or expected is None:
        return False
    if isinstance(expected, Objects) and isinstance(given, Objects):
        names = ("boxes", "scores", "objectness", "coding", "levels", "transposed", "keypoints")
        return any(getattr(expected, name) != getattr(given, name) for name in names)
    return expected.kind != given.kind


def check_hints(
    hints: Hints, declared: Postprocess | None, *, is_explicit: bool = True, is_preset: bool = False
) -> None:
    """Check that a postprocess can decode what the model's file says about its outputs.

    `is_explicit`: whether the user says himself which unit boxes have.
    `is_preset`: whether presets say which values are scores and points, and not the user himself.
    Raises `ModelError` if it decodes upright boxes, and the model's have an angle; if it takes them for
        pixels, and they are fractions; or if a preset takes other values for scores than the file has names
        of classes.
    """
    steps = declared.steps if declared is not None else ()
    if hints.task == ROTATED and any(isinstance(step, Objects) for step in steps):
        raise ModelError(
            "--postprocess: expected upright boxes, got a model whose file says that its boxes have an angle "
            f"(task {ROTATED})",
            hint="leave out --postprocess: answers then are the model's own outputs",
        )
    for step in steps if is_preset else ():
        if read := _misread(hints, step):
            points = "" if hints.points is None else f", {hints.points[0]} points of {hints.points[1]} values"
            raise ModelError(
                f"--postprocess: expected {hints.classes} classes{points}, as the file says, got {read}",
                hint=f"take the preset of its task, {hints.task or 'detect'}: compile without --postprocess "
                "proposes one; or declare the outputs in a TOML file (docs/your-detector.md)",
            )
    if hints.normalised and not is_explicit and any(map(_in_pixels, steps)):
        raise ModelError(
            "--postprocess: expected boxes as pixels of the input, got a file of Ultralytics for TensorFlow "
            "Lite, whose boxes are fractions of the picture",
            hint="add normalised=true to the preset, or normalised=false if they are pixels after all",
        )


def hint_note(hints: Hints, declared: Postprocess | None) -> str | None:
    """Return a line on what the file says about the outputs and the postprocess ignores; None if nothing."""
    if hints.task == ROTATED and declared is None:
        return "the model finds boxes with an angle, which no preset decodes: answers are its own outputs"
    for step in declared.steps if declared is not None else ():
        if _may_be_rotated(hints, step):
            return _ANGLES
        if isinstance(step, Softmax) and hints.ends_in_softmax(step.output):
            return f"{step.output} is made by a Softmax already: leave out softmax, or all scores are alike"
    return None


def _proposals(signature: Signature, hints: Hints, inputs: Sequence[TensorSpec]) -> Iterator[Proposal]:
    shapes = [spec.shape for spec in signature.outputs]
    if len(shapes) >= 3:
        yield from _finished(signature, inputs)
    rows = [shape for shape in shapes if len(shape) == 3 and shape[0] == 1]
    maps = [shape for shape in shapes if len(shape) == 4 and shape[0] == 1]
    if len(rows) == 1 and len(shapes) == 1:
        yield from _one_output(signature, rows[0], hints)
        yield from _text(signature, rows[0][1], rows[0][2], hints, inputs)
    elif len(rows) == 1 and len(maps) == 1 and len(shapes) == 2:
        yield from _with_prototypes(signature, rows[0])
    elif len(rows) == len(shapes) > 1:
        yield from _several_outputs(signature, rows, hints)
    elif maps == shapes == [(1, 1, COCO_POINTS, 3)]:
        yield Proposal("MoveNet", f"{COCO_POINTS} key points of one person", True, "movenet", "movenet")
    elif maps and len(maps) == len(shapes) and len(set(maps)) == 1:
        yield from _class_map(signature, inputs)
    elif len(shapes) == 1 and len(shapes[0]) == 3 and shapes[0][1] == 1 and shapes[0][0] > 1:
        yield from _text(signature, shapes[0][0], shapes[0][2], hints, inputs)
    elif len(shapes) == 1 and math.prod(shapes[0]) == shapes[0][-1]:
        yield from _one_vector(signature.outputs[0], hints, inputs)


def _finished(signature: Signature, inputs: Sequence[TensorSpec]) -> Iterator[Proposal]:
    """Recognise detections that need no more decoding, by their names."""
    names = [spec.name.lower() for spec in signature.outputs]
    from_tensorflow = bool(signature.hints.roles) or any("detection" in name for name in names)
    evidence = f"boxes, scores and classes as {len(names)} outputs"
    if from_tensorflow:
        before = _pictures(inputs, signature.hints, "symmetric")
        yield Proposal("a detector of TensorFlow", evidence, True, "tf-detections", before)
    before = _pictures(inputs, signature.hints, "unit")
    yield Proposal("a detector that ends in the suppression", evidence, False, "detections", before)


def _pictures(inputs: Sequence[TensorSpec], hints: Hints, usual: str) -> str:
    """Return the preprocess of a model whose family does not say it; empty if its file does."""
    if hints.is_prepared:
        return ""
    [spec] = [spec for spec in inputs if len(spec.shape) == _PICTURE_DIMENSIONS]
    return preset_for(spec, hints.scales.get(spec.name), usual)


def _one_vector(spec: TensorSpec, hints: Hints, inputs: Sequence[TensorSpec]) -> Iterator[Proposal]:
    count = spec.shape[-1]
    if hints.ends_in_softmax(spec.name) and count > 1:
        evidence = f"{count} values {_ADDS_UP}"
        before = _pictures(inputs, hints, _CLASSIFIERS.get(count, ""))
        if hints.task == "classify":  # whose pictures are neither shifted nor scaled
            before = "unit,resize_mode=shortest,crop=model"
        yield Proposal("a classifier", evidence, True, f"top{min(_TOP, count)}", before)
    elif count in _CLASSIFIERS:
        before = _pictures(inputs, hints, _CLASSIFIERS[count])
        yield Proposal("a classifier of ImageNet", f"{count} values", False, f"softmax,top{_TOP}", before)
    elif "embed" in spec.name.lower():
        yield Proposal("an embedding", f"{spec.name}, {count} values", False, "embedding", "")


def _one_output(signature: Signature, shape: tuple[int, ...], hints: Hints) -> Iterator[Proposal]:
    _, second, third = shape
    transposed = signature.is_transposed(shape)
    count, values = (third, second) if transposed else (second, third)
    evidence = f"{count} rows of {values} at {_size(signature)}"
    three, four, fine = (_cells(signature, strides) for strides in PYRAMIDS)
    distances = 4 * NANODET_BINS
    if (second, third) == (_MOVENET_PERSONS, _POSE_VALUES):
        points = f"{COCO_POINTS} key points of {_MOVENET_PERSONS} persons"
        yield Proposal("MoveNet", points, True, "movenet", "movenet")
    # A detector of one class has six values too, for each cell of its grids.
    if not transposed and values == 6 and count not in (three, four, 3 * three, 3 * four):
        yield Proposal("an end-to-end YOLO", evidence, count == 300, "yolov10", "yolov8")
    if not transposed and count == 300 and (hints.task == "pose" or values == _POSE_VALUES + 1):
        yield Proposal("an end-to-end pose model of YOLO", evidence, True, "yolo26-pose", "yolov8")
    if transposed and count in (three, four) and (hints.task == "pose" or values == _POSE_VALUES):
        yield Proposal("a pose model of YOLOv8 or YOLO11", evidence, True, "yolov8-pose", "yolov8")
    if not transposed and count == four and values > distances:
        yield Proposal("NanoDet-Plus", evidence, values - distances in _COCO_CLASSES, "nanodet", "nanodet")
    if not transposed and count == three and values - distances in _COCO_CLASSES:
        yield Proposal("NanoDet", evidence, True, "nanodet", "nanodet")
    upright = Proposal(
        "YOLOv8 with a row for each box", evidence, values - 4 in _COCO_CLASSES, "yolov8", "yolov8"
    )
    if not transposed and count in (three, four, fine) and upright.sure:
        yield upright
    if not transposed and count in (three, four) and values >= 6:
        sure = values - 5 in _COCO_CLASSES
        if "Exp" in hints.operators:  # the exponential of each size is in the model
            yield Proposal("YOLOX with decoded boxes", evidence, sure, "yolox-decoded", "yolox")
        yield Proposal("YOLOX", evidence, sure, "yolox", "yolox")
        yield Proposal("YOLOv6", evidence, sure, "yolox-decoded", "yolov5")
    if not transposed and count == three and values > distances and values - distances not in _COCO_CLASSES:
        yield Proposal("NanoDet", evidence, False, "nanodet", "nanodet")
    if not transposed and count in (three, four, fine) and values >= 5 and not upright.sure:
        yield upright
    if not transposed and count in (3 * three, 3 * four) and values >= 6:
        yield Proposal("YOLOv5 or YOLOv7", evidence, True, "yolov5", "yolov5")
    is_named = hints.task == "detect" and values == 4 + hints.classes
    if transposed and (count in (three, four, fine) or is_named) and values >= 5:
        # Behind one score there may be the points of a pose, of which only an export of Ultralytics tells.
        is_pose = not (is_named or hints.task) and values > 5 and (values - 5) % 3 == 0
        yield Proposal("YOLOv8, YOLO11 or YOLO12", evidence, not is_pose, "yolov8", "yolov8")
        if is_pose and values != _POSE_VALUES:
            yield Proposal("a pose model of YOLOv8 or YOLO11", evidence, False, "yolov8-pose", "yolov8")
    if not transposed and count == 300 and values >= 5:
        yield Proposal("RT-DETR", evidence, values - 4 in _COCO_CLASSES, "rtdetr", "unit")


def _text(
    signature: Signature, steps: int, characters: int, hints: Hints, inputs: Sequence[TensorSpec]
) -> Iterator[Proposal]:
    """Recognise the scores of characters over the width of a picture of one line."""
    height, width = signature.size or (0, 0)
    output = signature.outputs[0].name
    is_likely = characters >= _FEWEST_CHARACTERS or hints.ends_in_softmax(output)
    if is_likely and width >= 2 * height and steps <= width:
        evidence = f"{steps} steps of {characters} characters"
        [picture] = [spec.shape for spec in inputs if len(spec.shape) == _PICTURE_DIMENSIONS]
        preprocess = "easyocr" if 1 in (picture[1], picture[3]) else "paddleocr"
        is_raw = output in hints.makers and not hints.ends_in_softmax(output)
        postprocess = "ctc,activation=softmax" if is_raw else "ctc"
        yield Proposal("text recognition", evidence, False, postprocess, preprocess)


def _with_prototypes(signature: Signature, shape: tuple[int, ...]) -> Iterator[Proposal]:
    transposed = signature.is_transposed(shape)
    count, values = (shape[2], shape[1]) if transposed else (shape[1], shape[2])
    evidence = f"{count} rows of {values} and {YOLO_MASK_FACTORS} prototypes at {_size(signature)}"
    if count == 3 * _cells(signature, PYRAMIDS[0]):
        yield Proposal("a segmenter of YOLOv5", evidence, True, "yolov5-seg", "yolov5")
    elif not transposed and values == 6 + YOLO_MASK_FACTORS:
        yield Proposal("an end-to-end segmenter of YOLO", evidence, True, "yolo26-seg", "yolov8")
    yield Proposal("a segmenter of YOLOv8 or YOLO11", evidence, True, "yolov8-seg", "yolov8")


def _several_outputs(
    signature: Signature, shapes: Sequence[tuple[int, ...]], hints: Hints
) -> Iterator[Proposal]:
    counts = ", ".join(str(count) for count in sorted({shape[1] for shape in shapes}, reverse=True))
    evidence = f"{len(shapes)} outputs with {counts} rows at {_size(signature)}"
    if len(shapes) == 12:
        yield Proposal("YuNet", evidence, True, "yunet", "yunet")
    if len(shapes) == 6:  # eight are rather those of PicoDet, with other places and colours
        yield Proposal("NanoDet", evidence, True, "nanodet", "nanodet")
    if len(shapes) == 3:
        yield Proposal("RetinaFace", evidence, True, "retinaface", "retinaface")
    if len(shapes) == 2:
        count = shapes[0][1]
        classes = next((shape[2] for shape in shapes if shape[2] != 4), 4)
        evidence = f"{count} boxes with {classes} scores at {_size(signature)}"
        is_raw = any("logits" in spec.name.lower() for spec in signature.outputs)
        if count == 100 and (classes >= 5 or is_raw):
            yield Proposal("DETR", evidence, classes - 1 in _COCO_CLASSES, "detr", "detr")
        if count in (300, 900) and classes >= 5:
            if classes == _COCO_CLASSES[1]:  # RT-DETR has 80 of them
                yield Proposal("Deformable or Conditional DETR", evidence, False, "rtdetr", "detr")
            yield Proposal("RT-DETR", evidence, classes == _COCO_CLASSES[0], "rtdetr", "unit")
        if {shape[2] for shape in shapes} == {2, 4} and count == _ultraface_priors(signature):
            yield Proposal("Ultra-Light-Fast face detectors", evidence, True, "ultraface", "ultraface")
        # SSD's preset takes scores, not what they are computed from, and the first ones are the background's.
        scores = [spec.name for spec in signature.outputs if spec.shape[2] != 4]
        is_score = not hints.makers or any(hints.makers.get(name) in _SCORES for name in scores)
        if is_score and classes not in _WITHOUT_BACKGROUND:
            yield Proposal("SSD", evidence, False, "ssd", "ssd")


def _class_map(signature: Signature, inputs: Sequence[TensorSpec]) -> Iterator[Proposal]:
    assert signature.size is not None
    step = step_of("segmentation", signature)
    assert isinstance(step, ClassMap)
    shape, channels_last = signature.outputs[0].shape, step.channels_last
    classes, size = (shape[3], shape[1:3]) if channels_last else (shape[1], shape[2:])
    strides = {round(whole / part) for whole, part in zip(signature.size, size, strict=True) if part}
    # Three channels of the input's size are rather a picture, and 17 are the key points of a person.
    likely = 2 <= classes <= _MOST_CLASSES and classes not in (3, COCO_POINTS)
    if len(strides) == 1 and strides <= set(_MAP_STRIDES) and likely:
        evidence = f"{classes} classes for each of {size[1]}x{size[0]} pixels"
        before = _pictures(inputs, signature.hints, "imagenet")
        yield Proposal("semantic segmentation", evidence, classes in (19, 21), "segmentation", before)


def _cells(signature: Signature, strides: Sequence[int]) -> int:
    return sum(level.count for level in signature.levels(strides))


def _ultraface_priors(signature: Signature) -> int:
    levels = signature.levels((8, 16, 32, 64))
    return sum(level.rows * level.columns * n for level, n in zip(levels, (3, 2, 2, 3), strict=True))


def _size(signature: Signature) -> str:
    assert signature.size is not None
    return f"{signature.size[1]}x{signature.size[0]}"
