"""Presets of outputs: known objects, encoded as each family's authors define it, come out again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from agent.bundle import canonical_json
from agent.bundle.processing import Postprocess
from agent.bundle.tensor_spec import TensorSpec
from agent.runtime.placement import Placement
from agent.runtime.postprocess import Postprocessor
from builder.compiling.hints import Hints
from builder.compiling.output_presets import OUTPUT_PRESETS, step_of
from builder.compiling.signature import Signature
from builder.errors import ModelError

WIDTH, HEIGHT, CLASSES = 320, 256, 20
# Corners in pixels of the model's input, class and score; none overlap.
BOXES = np.array([[40.0, 30.0, 120.0, 110.0], [200.0, 100.0, 300.0, 240.0], [10.0, 180.0, 60.0, 220.0]])
KINDS = np.array([3, 0, 17])
SCORES = np.array([0.9, 0.8, 0.75])
POINTS = BOXES[:, None, :2] + np.array([[5, 5], [20, 6], [12, 12], [6, 20], [21, 19]])[None]
CENTRES, SIZES = (BOXES[:, :2] + BOXES[:, 2:]) / 2, BOXES[:, 2:] - BOXES[:, :2]

UNIT = np.array([WIDTH, HEIGHT] * 2)
Outputs = dict[str, np.ndarray]


def logit(p: Any) -> np.ndarray:
    return np.log(p / (1 - np.asarray(p)))


def cells(strides: tuple[int, ...] = (8, 16, 32), offset: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Centres and strides of all cells, written down independently of the code under test."""
    points, steps = [], []
    for stride in strides:
        for row in range(-(-HEIGHT // stride)):
            for column in range(-(-WIDTH // stride)):
                points.append(((column + offset) * stride, (row + offset) * stride))
                steps.append(stride)
    return np.array(points, np.float64), np.array(steps, np.float64)


def nearest(points: np.ndarray, steps: np.ndarray, stride: int = 16) -> np.ndarray:
    """For each object, the cell of a level that is nearest to its centre."""
    distance = np.abs(points[:, None] - CENTRES[None]).sum(axis=2) + 1e6 * (steps != stride)[:, None]
    return distance.argmin(axis=0)


def one_hot(rows: int, at: np.ndarray, classes: int, values: np.ndarray, rest: float = 0.0) -> np.ndarray:
    scores = np.full((rows, classes), rest)
    scores[at, KINDS % classes] = values
    return scores


def yolox() -> Outputs:
    points, steps = cells()
    at = nearest(points, steps)
    out = np.zeros((len(points), 5 + CLASSES))
    out[at, :2] = (CENTRES - points[at]) / steps[at, None]
    out[at, 2:4] = np.log(SIZES / steps[at, None])
    out[at, 4] = np.sqrt(SCORES)
    out[:, 5:] = one_hot(len(points), at, CLASSES, np.sqrt(SCORES))
    return {"output": out[None]}


def yolov5(factors: int = 0) -> Outputs:
    rows = 3 * len(cells()[0])
    out = np.zeros((rows, 5 + CLASSES + factors))
    at = np.array([5, 1000, 3001])
    out[at, :4] = np.concatenate((CENTRES, SIZES), axis=1)
    out[at, 4] = np.sqrt(SCORES)
    out[:, 5 : 5 + CLASSES] = one_hot(rows, at, CLASSES, np.sqrt(SCORES))
    return {"output0": out[None]}


def yolov8(factors: int = 0, points: int = 0) -> Outputs:
    rows, classes = len(cells()[0]), 1 if points else CLASSES
    out = np.zeros((rows, 4 + classes + 3 * points + factors))
    at = np.array([5, 500, 1001])
    out[at, :4] = np.concatenate((CENTRES, SIZES), axis=1)
    out[:, 4 : 4 + classes] = one_hot(rows, at, classes, SCORES)
    if points:
        visible = np.concatenate((POINTS, np.full((3, points, 1), 0.5)), axis=2)
        out[at, 5:] = visible.reshape(3, -1)
    return {"output0": out.T[None]}


def segmented(make: Callable[[int], Outputs], transposed: bool) -> Outputs:
    """Prototype 7 is 1 in the upper half of the input and -1 below."""
    outputs = make(32)
    found = outputs["output0"][0].T if transposed else outputs["output0"][0]
    found[:, -32 + 7] = 1
    prototypes = np.zeros((1, 32, HEIGHT // 4, WIDTH // 4))
    prototypes[0, 7] = np.where(np.arange(HEIGHT // 4) < HEIGHT // 8, 1, -1)[:, None]
    return outputs | {"output1": prototypes}


def with_channels_last(outputs: Outputs) -> Outputs:
    """Prototypes as TensorFlow Lite's exports have them."""
    return outputs | {"output1": np.moveaxis(outputs["output1"], 1, -1)}


def yolov10() -> Outputs:
    out = np.zeros((300, 6))
    out[:3] = np.concatenate((BOXES, SCORES[:, None], KINDS[:, None]), axis=1)
    return {"output0": out[None]}


def end_to_end(factors: int = 0, points: int = 0) -> Outputs:
    """YOLO26's rows, after its own suppression: corners, score, class, then points or factors of masks."""
    out = np.zeros((300, 6 + factors + 3 * points))
    out[:3, :6] = yolov10()["output0"][0, :3]
    if points:
        out[:3, 6:] = np.concatenate((POINTS, np.full((3, points, 1), 0.5)), axis=2).reshape(3, -1)
    return {"output0": out[None]}


def detections(boxes: np.ndarray, names: Sequence[str], *, batch: bool, rows: int = 100) -> Outputs:
    """Boxes, scores and classes as three outputs, and their number."""
    columns = np.zeros((rows, 4)), np.zeros(rows), np.zeros(rows)
    for column, values in zip(columns, (boxes, SCORES, KINDS), strict=True):
        column[:3] = values
    found = dict(zip(names, (column[None] if batch else column for column in columns), strict=False))
    return found | ({names[3]: np.array([3.0])} if len(names) > 3 else {})


def movenet() -> Outputs:
    """Six rows: y, x and confidence of each point, then y0, x0, y1, x1 and the score; all as fractions."""
    out = np.zeros((6, 5 * 3 + 5))
    points = np.concatenate(((POINTS / UNIT[:2])[..., ::-1], np.full((3, 5, 1), 0.5)), axis=2)
    out[:3] = np.concatenate(
        (points.reshape(3, -1), (BOXES / UNIT)[:, [1, 0, 3, 2]], SCORES[:, None]), axis=1
    )
    return {"output0": out[None]}


def movenet_of_one_person(points: int = 17) -> Outputs:
    out = np.zeros((1, 1, points, 3))
    out[0, 0, :5] = np.concatenate(((POINTS[0] / UNIT[:2])[:, ::-1], np.full((5, 1), SCORES[0])), axis=1)
    return {"output0": out}


_OF_TENSORFLOW = ("detection_boxes", "detection_scores", "detection_classes", "num_detections")
_OF_LITE = [f"TFLite_Detection_PostProcess{number}" for number in ("", ":2", ":1", ":3")]


def yolox_decoded() -> Outputs:
    points, steps = cells()
    out = yolox()["output"]
    out[0, :, :2] = out[0, :, :2] * steps[:, None] + points
    out[0, :, 2:4] = np.exp(out[0, :, 2:4]) * steps[:, None]
    return {"output": out}


def distributions(distances: np.ndarray) -> np.ndarray:
    """Eight logits whose softmax has the expectation `distances` (n, 4)."""
    low = np.floor(distances).astype(int)
    part = distances - low
    logits = np.full((*distances.shape, 8), -60.0)
    rows, sides = np.indices(distances.shape)
    logits[rows, sides, low] = np.log(np.maximum(1 - part, 1e-12))
    logits[rows, sides, np.minimum(low + 1, 7)] = np.log(np.maximum(part, 1e-12))
    return logits.reshape(len(distances), 32)


def nanodet(strides: tuple[int, ...], offset: float) -> Outputs:
    points, steps = cells(strides, offset)
    at = nearest(points, steps, 32)
    sides = np.concatenate((points[at] - BOXES[:, :2], BOXES[:, 2:] - points[at]), axis=1) / steps[at, None]
    boxes = np.zeros((len(points), 32))
    boxes[at] = distributions(sides)
    return {"output": np.concatenate((one_hot(len(points), at, CLASSES, SCORES), boxes), axis=1)[None]}


def split_nanodet() -> Outputs:
    whole = nanodet((8, 16, 32), 0.5)["output"]
    ends = np.cumsum([(HEIGHT // s) * (WIDTH // s) for s in (8, 16, 32)])[:2]
    levels = np.split(whole, ends, axis=1)
    scores = {f"cls_{s}": level[:, :, :CLASSES] for s, level in zip((8, 16, 32), levels, strict=True)}
    return scores | {f"dis_{s}": level[:, :, CLASSES:] for s, level in zip((8, 16, 32), levels, strict=True)}


def yunet() -> Outputs:
    points, steps = cells()
    at = nearest(points, steps)
    boxes, marks = np.zeros((len(points), 4)), np.zeros((len(points), 10))
    boxes[at, :2] = (CENTRES - points[at]) / steps[at, None]
    boxes[at, 2:] = np.log(SIZES / steps[at, None])
    marks[at] = ((POINTS - points[at][:, None]) / steps[at, None, None]).reshape(3, 10)
    single = one_hot(len(points), at, 1, SCORES)
    ends = np.cumsum([(HEIGHT // s) * (WIDTH // s) for s in (8, 16, 32)])[:2]
    outputs = {}
    for name, values in (("cls", single), ("obj", single), ("bbox", boxes), ("kps", marks)):
        for stride, level in zip((8, 16, 32), np.split(values, ends), strict=True):
            outputs[f"{name}_{stride}"] = level[None]
    return outputs


def priors() -> np.ndarray:
    """RetinaFace's priors: centre and size, in pixels."""
    found: list[tuple[float, ...]] = []
    for stride, sides in ((8, (16, 32)), (16, (64, 128)), (32, (256, 512))):
        for row in range(-(-HEIGHT // stride)):
            for column in range(-(-WIDTH // stride)):
                centre = ((column + 0.5) * stride, (row + 0.5) * stride)
                found.extend((*centre, side, side) for side in sides)
    return np.array(found)


def retinaface() -> Outputs:
    prior = priors()
    at = (np.abs(prior[:, None, :2] - CENTRES).sum(axis=2) + 1e3 * (prior[:, None, 2] != 64)).argmin(axis=0)
    boxes, marks = np.zeros((len(prior), 4)), np.zeros((len(prior), 10))
    boxes[at, :2] = (CENTRES - prior[at, :2]) / prior[at, 2:] / 0.1
    boxes[at, 2:] = np.log(SIZES / prior[at, 2:]) / 0.2
    marks[at] = ((POINTS - prior[at, None, :2]) / prior[at, None, 2:] / 0.1).reshape(3, 10)
    faces = one_hot(len(prior), at, 1, SCORES)
    return {
        "loc": boxes[None], "conf": np.concatenate((1 - faces, faces), axis=1)[None], "landms": marks[None]
    }  # fmt: skip


def ssd() -> Outputs:
    boxes = np.zeros((1500, 4))
    at = np.array([1, 700, 1400])
    boxes[at] = BOXES / UNIT
    scores = np.concatenate((np.ones((1500, 1)), one_hot(1500, at, CLASSES, SCORES)), axis=1)
    return {"scores": scores[None], "boxes": boxes[None]}


def ultraface() -> Outputs:
    outputs = ssd()
    faces = outputs["scores"].max(axis=2, where=np.arange(CLASSES + 1) > 0, initial=0)
    return {"scores": np.stack((1 - faces, faces), axis=2), "boxes": outputs["boxes"]}


def detr() -> Outputs:
    at = np.array([7, 40, 99])
    boxes = np.zeros((100, 4))
    boxes[at] = np.concatenate((CENTRES, SIZES), axis=1) / UNIT
    logits = np.full((100, CLASSES + 1), -30.0)
    logits[:, -1] = 5
    logits[at, KINDS], logits[at, -1] = np.log(SCORES), np.log(1 - SCORES)
    return {"logits": logits[None], "pred_boxes": boxes[None]}


def rtdetr() -> Outputs:
    at = np.array([7, 40, 299])
    boxes = np.zeros((300, 4))
    boxes[at] = np.concatenate((CENTRES, SIZES), axis=1) / UNIT
    return {"boxes": boxes[None], "logits": one_hot(300, at, CLASSES, logit(SCORES), -9.0)[None]}


def rtdetr_of_ultralytics() -> Outputs:
    raw = rtdetr()
    return {"output0": np.concatenate((raw["boxes"], 1 / (1 + np.exp(-raw["logits"]))), axis=2)}


# Preset, outputs, number of classes (0: any), and which preset is proposed for them.
FAMILIES: dict[str, tuple[str, Outputs, int, str | None]] = {
    "YOLOX": ("yolox", yolox(), CLASSES, "yolox"),
    "YOLOv5": ("yolov5", yolov5(), CLASSES, "yolov5"),
    "YOLOv5, segments": ("yolov5-seg", segmented(yolov5, False), CLASSES, "yolov5-seg"),
    "YOLOv8": ("yolov8", yolov8(), CLASSES, "yolov8"),
    "YOLOv8, transposed": (
        "yolov8", {"output0": yolov8()["output0"].transpose(0, 2, 1)}, CLASSES, None,
    ),
    "YOLO11, segments": ("yolo11-seg", segmented(yolov8, True), CLASSES, "yolov8-seg"),
    "YOLOv8, segments, channels last": (
        "yolov8-seg", with_channels_last(segmented(yolov8, True)), CLASSES, "yolov8-seg",
    ),
    "YOLOv8, pose": ("yolov8-pose", yolov8(points=5), 1, None),
    "YOLOv10": ("yolov10", yolov10(), 0, "yolov10"),
    "YOLO26, segments": ("yolo26-seg", segmented(end_to_end, False), 0, "yolo26-seg"),
    "YOLO26, pose": ("yolo26-pose", end_to_end(points=5), 0, None),
    "YOLOX, decoded": ("yolox-decoded", yolox_decoded(), CLASSES, None),
    "TensorFlow's own suppression": (
        "tf-detections", detections((BOXES / UNIT)[:, [1, 0, 3, 2]], _OF_TENSORFLOW, batch=True), 0,
        "tf-detections",
    ),
    "TensorFlow Lite's own suppression": (
        "tf-detections", detections((BOXES / UNIT)[:, [1, 0, 3, 2]], _OF_LITE, batch=True, rows=10), 0,
        "tf-detections",
    ),
    "torchvision's own suppression": (
        "detections", detections(BOXES, ("boxes", "scores", "labels"), batch=False), 0, "detections",
    ),
    "D-FINE's own choice": (
        "detections", detections(BOXES, ("boxes", "scores", "labels"), batch=True, rows=300), 0, "detections",
    ),
    "MoveNet, several persons": ("movenet", movenet(), 1, None),
    "NanoDet": ("nanodet", nanodet((8, 16, 32), 0.5), CLASSES, None),
    "NanoDet, six outputs": ("nanodet", split_nanodet(), CLASSES, "nanodet"),
    "NanoDet-Plus": ("nanodet", nanodet((8, 16, 32, 64), 0.0), CLASSES, "nanodet"),
    "YuNet": ("yunet", yunet(), 1, "yunet"),
    "RetinaFace": ("retinaface", retinaface(), 1, "retinaface"),
    "SSD": ("ssd", ssd(), CLASSES, "ssd"),
    "UltraFace": ("ultraface", ultraface(), 1, None),
    "DETR": ("detr", detr(), CLASSES, "detr"),
    "RT-DETR": ("rtdetr", rtdetr(), CLASSES, "rtdetr"),
    "RT-DETR of Ultralytics": ("rtdetr", rtdetr_of_ultralytics(), CLASSES, "rtdetr"),
}  # fmt: skip
# A letterbox at twice the size, 8 pixels from the left: sent = (input - offset) / scale.
PLACEMENT = Placement(152, 128, 2.0, 2.0, 8.0, 0.0, WIDTH, HEIGHT)


def signature(outputs: Mapping[str, np.ndarray]) -> tuple[list[TensorSpec], list[TensorSpec]]:
    image = TensorSpec("images", "FP32", (1, 3, HEIGHT, WIDTH))
    return [image], [TensorSpec(name, "FP32", value.shape) for name, value in outputs.items()]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_known_objects_come_out_in_pixels_of_the_image(family: str, dtype: Any) -> None:
    preset, exact, classes, _ = FAMILIES[family]
    inputs, specs = signature(exact)
    step = step_of(preset, Signature.of(inputs, specs))
    outputs = {name: value.astype(dtype) for name, value in exact.items()}
    result: Any = Postprocessor(Postprocess((step,)), specs)(outputs, PLACEMENT)
    coarse = dtype == np.float16
    expected = ((BOXES - [8, 0, 8, 0]) / 2).clip(0, [152, 128, 152, 128])
    np.testing.assert_allclose(result["boxes"], expected, atol=0.5 if coarse else 1e-3)
    np.testing.assert_allclose(result["scores"], SCORES, atol=2e-3 if coarse else 1e-5)
    first = 1 if preset in ("ssd", "retinaface", "ultraface") else 0
    posed = ("yunet", "retinaface", "yolov8-pose", "yolo26-pose", "movenet")
    np.testing.assert_array_equal(result["classes"], (KINDS % classes if classes else KINDS) + first)
    if "keypoints" in result:
        np.testing.assert_allclose(
            result["keypoints"][..., :2], (POINTS - [8, 0]) / 2, atol=0.5 if coarse else 1e-3
        )
    assert ("keypoints" in result) == (preset in posed)
    assert ("masks" in result) == preset.endswith("-seg")


@pytest.mark.parametrize(("family", "count"), [("RT-DETR", 4), ("RT-DETR of Ultralytics", 3)])
def test_a_row_of_two_classes_is_counted_as_its_authors_do(family: str, count: int) -> None:
    """`post_process_object_detection` of Transformers takes both, `RTDETRPredictor` the better one."""
    preset, exact, _, _ = FAMILIES[family]
    inputs, specs = signature(exact)
    outputs = {name: value.astype(np.float32) for name, value in exact.items()}
    if family == "RT-DETR":
        outputs["logits"][0, 7, (KINDS[0] + 1) % CLASSES] = logit(np.array(0.51))
    else:
        outputs["output0"][0, 7, 4 + (KINDS[0] + 1) % CLASSES] = 0.51
    step = step_of(preset, Signature.of(inputs, specs))
    result: Any = Postprocessor(Postprocess((step,)), specs)(outputs, PLACEMENT)
    assert len(result["boxes"]) == count


def test_a_person_of_movenet_has_the_box_of_the_points_that_are_seen() -> None:
    outputs = movenet_of_one_person()
    inputs, specs = signature(outputs)
    step = step_of("movenet", Signature.of(inputs, specs))
    result: Any = Postprocessor(Postprocess((step,)), specs)(outputs, PLACEMENT)
    seen = (POINTS[0] - [8, 0]) / 2
    np.testing.assert_allclose(result["keypoints"][0, :5, :2], seen, atol=1e-3)
    np.testing.assert_allclose(result["boxes"], [[*seen.min(axis=0), *seen.max(axis=0)]], atol=1e-3)
    np.testing.assert_allclose(result["scores"], [0.9], atol=1e-6)
    assert (result["classes"].tolist(), result["keypoints"].shape) == ([0], (1, 17, 3))


@pytest.mark.parametrize(("classes", "size"), [(1, 2), (4, 3), (3, 2)])
@pytest.mark.parametrize("is_final", [False, True])
def test_points_and_classes_of_a_pose_are_those_that_the_file_says(
    classes: int, size: int, *, is_final: bool
) -> None:
    points = np.concatenate((POINTS, np.full((3, 5, 1), 0.5)), axis=2)[:, :, :size].reshape(3, -1)
    if is_final:
        preset, made = "yolo26-pose", np.zeros((300, 6 + points.shape[1]))
        made[:3] = np.concatenate((BOXES, SCORES[:, None], KINDS[:, None] % classes, points), axis=1)
    else:
        preset, made = "yolov8-pose", np.zeros((4 + classes + points.shape[1], len(cells()[0])))
        made[:4, [5, 500, 1001]] = np.concatenate((CENTRES, SIZES), axis=1).T
        made[4 + KINDS % classes, [5, 500, 1001]] = SCORES
        made[4 + classes :, [5, 500, 1001]] = points.T
    inputs, specs = signature({"y": made[None]})
    step = step_of(preset, Signature.of(inputs, specs, Hints("pose", classes=classes, points=(5, size))))
    result: Any = Postprocessor(Postprocess((step,)), specs)({"y": made[None].astype(np.float32)}, PLACEMENT)
    assert result["classes"].tolist() == (KINDS % classes).tolist()
    np.testing.assert_allclose(result["scores"], SCORES, atol=1e-5)
    expected = points.reshape(3, 5, size)
    expected[:, :, :2] = (expected[:, :, :2] - [8, 0]) / 2
    np.testing.assert_allclose(result["keypoints"], expected, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_survive_the_manifest(family: str) -> None:
    preset, outputs, _, _ = FAMILIES[family]
    declared = Postprocess((step_of(preset, Signature.of(*signature(outputs))),))
    raw = canonical_json.encode(canonical_json.to_json(declared))
    assert canonical_json.from_json(Postprocess, canonical_json.parse(raw, "-"), "-") == declared


@pytest.mark.parametrize("preset", [name for name in OUTPUT_PRESETS if name != "embedding"])
def test_a_preset_that_does_not_fit_says_what_it_expects(preset: str) -> None:
    specs = [TensorSpec("y", "FP32", (1, 10))]
    with pytest.raises(ModelError, match=rf"postprocess {preset}: expected .*\[1, .*, got y\[1, 10\]"):
        step_of(preset, Signature.of([TensorSpec("x", "FP32", (1, 3, 64, 64))], specs))


@pytest.mark.parametrize("family", ["YuNet", "RetinaFace", "YOLOv8, pose", "MoveNet, several persons"])
def test_nothing_found_is_an_answer_with_no_key_points(family: str) -> None:
    preset, exact, _, _ = FAMILIES[family]
    inputs, specs = signature(exact)
    step = step_of(preset, Signature.of(inputs, specs))
    outputs = {name: np.zeros(value.shape, np.float32) for name, value in exact.items()}
    result: Any = Postprocessor(Postprocess((step,)), specs)(outputs, PLACEMENT)
    assert result["boxes"].shape == (0, 4)
    assert result["keypoints"].shape[0] == 0
    assert result["keypoints"].shape[1] == 5
