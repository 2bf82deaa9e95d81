"""Models are recognised by the shapes of their outputs."""

from __future__ import annotations

import pytest

from agent.bundle.processing import Postprocess, Softmax
from agent.bundle.quantisation import Quantised
from agent.bundle.tensor_spec import TensorSpec
from builder.compiling.declarations import preprocess
from builder.compiling.hints import Hints
from builder.compiling.output_presets import step_of
from builder.compiling.recognition import check_hints, contradicts, hint_note, recognise
from builder.compiling.signature import Signature
from builder.errors import ModelError
from tests.builder.compiling.test_output_presets import FAMILIES, signature


@pytest.mark.parametrize("family", [name for name, row in FAMILIES.items() if row[3]])
def test_outputs_are_recognised_by_their_shapes(family: str) -> None:
    _, outputs, _, expected = FAMILIES[family]
    proposal = recognise(*signature(outputs))
    assert proposal is not None
    assert proposal.postprocess == expected
    preprocess(proposal.preprocess, signature(outputs)[0])


def test_a_proposal_says_how_sure_it_is() -> None:
    image = [TensorSpec("images", "FP32", (1, 3, 416, 416))]
    sure = recognise(image, [TensorSpec("output", "FP32", (1, 3549, 85))])
    assert str(sure) == (
        "the outputs look like YOLOX (3549 rows of 85 at 416x416): --postprocess yolox --preprocess yolox"
    )
    unsure = recognise(image, [TensorSpec("output", "FP32", (1, 3549, 12))])
    assert str(unsure).startswith("the outputs may be those of YOLOX")


@pytest.mark.parametrize(
    ("shape", "outputs", "expected"),
    [
        ((1, 3, 224, 224), [(1, 1000)], "softmax,top5"),
        ((1, 3, 640, 640), [(1, 56, 8400)], "yolov8-pose"),
        ((1, 640, 640, 3), [(1, 84, 8400)], "yolov8"),
        ((1, 3, 1280, 1280), [(1, 84, 33600)], "yolov8"),
        ((1, 3, 640, 640), [(1, 25200, 85)], "yolov5"),
        ((1, 3, 240, 320), [(1, 4420, 2), (1, 4420, 4)], "ultraface"),
        ((1, 3, 512, 512), [(1, 21, 512, 512)], "segmentation"),
        ((1, 3, 48, 48), [(1, 49, 85)], "yolox"),
        ((1, 3, 48, 48), [(1, 84, 49)], "yolov8"),
        ((1, 3, 48, 48), [(1, 147, 85)], "yolov5"),
        ((1, 3, 640, 640), [(1, 25200, 6)], "yolov5"),  # one class
        ((1, 3, 1280, 1280), [(1, 102000, 6)], "yolov5"),
        ((1, 3, 192, 192), [(1, 756, 6)], "yolox"),
        ((1, 3, 640, 640), [(1, 8400, 84)], "yolov8"),
        ((1, 3, 640, 640), [(1, 8400, 5)], "yolov8"),
        ((1, 3, 640, 640), [(1, 25200, 38), (1, 32, 160, 160)], "yolov5-seg"),
        ((1, 3, 640, 640), [(1, 300, 6)], "yolov10"),
        ((1, 3, 64, 64), [(1, 3, 64, 64)], None),
        ((1, 3, 64, 64), [(1, 7)], None),
        ((1, 128), [(1, 84, 8400)], None),
        ((1, 3, 640, 640), [(1, 300, 57)], "yolo26-pose"),
        ((1, 3, 640, 640), [(1, 300, 38), (1, 32, 160, 160)], "yolo26-seg"),
        ((1, 3, 48, 320), [(1, 40, 97)], "ctc"),
        ((1, 1, 32, 100), [(26, 1, 37)], "ctc"),
        ((1, 3, 512, 512), [(1, 80, 128, 128), (1, 2, 128, 128), (1, 2, 128, 128)], None),  # CenterNet
        ((1, 3, 512, 512), [(1, 21, 512, 512), (1, 21, 512, 512)], "segmentation"),
        ((1, 128, 128, 3), [(1, 896, 16), (1, 896, 1)], None),  # BlazeFace
        ((1, 192, 192, 3), [(1, 1, 17, 3)], "movenet"),
        ((1, 3, 256, 256), [(1, 6, 56)], "movenet"),
        ((1, 3, 256, 192), [(1, 17, 384), (1, 17, 512)], None),  # RTMPose
        ((1, 3, 112, 112), [(1, 512)], None),  # ArcFace
    ],
)
def test_published_shapes(
    shape: tuple[int, ...], outputs: list[tuple[int, ...]], expected: str | None
) -> None:
    specs = [TensorSpec(f"y{i}", "FP32", each) for i, each in enumerate(outputs)]
    proposal = recognise([TensorSpec("x", "FP32", shape)], specs)
    assert (proposal and proposal.postprocess) == expected


IMAGE = [TensorSpec("x", "FP32", (1, 3, 640, 640))]


@pytest.mark.parametrize(
    ("shape", "hints", "expected"),
    [
        ((1, 20, 8400), Hints(task="obb"), None),
        ((1, 300, 7), Hints(task="obb"), None),
        ((1, 68, 8400), Hints(task="pose"), "yolov8-pose"),
        ((1, 300, 69), Hints(task="pose"), "yolo26-pose"),
        # 80 classes before the points; points without a confidence, whose 24 values would be 8 with it.
        ((1, 135, 8400), Hints(task="pose", classes=80, points=(17, 3)), "yolov8-pose"),
        ((1, 29, 8400), Hints(task="pose", classes=1, points=(12, 2)), "yolov8-pose,keypoint_values=2"),
        ((1, 300, 30), Hints(task="pose", classes=1, points=(12, 2)), "yolo26-pose,keypoint_values=2"),
        ((1, 300, 24), Hints(task="pose", classes=3, points=(9, 2)), "yolo26-pose,keypoint_values=2"),
        ((1, 30, 8400), Hints(task="pose", classes=1, points=(12, 2)), None),
        ((1, 84, 8400), Hints(task="detect", classes=3), None),
        ((1, 84, 2000), Hints(task="detect", classes=80), "yolov8"),  # YOLOv3-tiny, of strides 16 and 32
        ((1, 84, 80), Hints(task="detect", classes=80), "yolov8"),
        ((1, 84, 2000), Hints(), None),
        ((1, 8400, 85), Hints(operators=frozenset({"Conv", "Sigmoid"})), "yolox"),
        ((1, 8400, 85), Hints(operators=frozenset({"Conv", "Exp"})), "yolox-decoded"),
        ((1, 1000), Hints(makers={"y": "Softmax"}), "top5"),
        ((1, 3), Hints(makers={"y": "Softmax"}), "top3"),
        ((1, 3), Hints(makers={"y": "Gemm"}), None),
        ((1, 1000), Hints(makers={"y": "Gemm"}), "softmax,top5"),
    ],
)
def test_the_file_decides_where_shapes_do_not(
    shape: tuple[int, ...], hints: Hints, expected: str | None
) -> None:
    proposal = recognise(IMAGE, [TensorSpec("y", "FP32", shape)], hints)
    assert (proposal and proposal.postprocess) == expected
    if proposal is not None and proposal.preprocess:
        preprocess(proposal.preprocess, IMAGE)


def test_offsets_from_anchors_are_not_taken_for_decoded_boxes() -> None:
    outputs = [TensorSpec("boxes", "FP32", (1, 8732, 4)), TensorSpec("scores", "FP32", (1, 8732, 91))]
    decoded = recognise(IMAGE, outputs, Hints(makers={"boxes": "Concat", "scores": "Softmax"}))
    assert decoded is not None
    assert decoded.postprocess == "ssd"
    assert recognise(IMAGE, outputs, Hints(makers={"boxes": "Concat", "scores": "Concat"})) is None


@pytest.mark.parametrize(
    ("rows", "classes", "expected"),
    [
        (100, 2, ("detr", "detr", False)),  # one class, and no object
        (100, 92, ("detr", "detr", True)),
        (300, 80, ("rtdetr", "unit", True)),
        (
            300,
            91,
            ("rtdetr", "detr", False),
        ),  # Deformable and Conditional DETR
    ],
)
def test_logits_of_transformers_are_no_scores_of_ssd(
    rows: int, classes: int, expected: tuple[str, str, bool]
) -> None:
    outputs = [
        TensorSpec("logits", "FP32", (1, rows, classes)),
        TensorSpec("pred_boxes", "FP32", (1, rows, 4)),
    ]
    found = recognise(IMAGE, outputs)
    assert found is not None
    assert (found.postprocess, found.preprocess, found.sure) == expected


@pytest.mark.parametrize(
    "shapes",
    [
        [(1, 8400, 4), (1, 8400, 80)],  # YOLO-NAS: no background
        [(1, 19206, 4), (1, 19206, 90)],  # EfficientDet before its suppression: offsets from anchors
        [(1, n, v) for v in (80, 32) for n in (6400, 1600, 400, 100)],  # PicoDet
        [(1, 17, 160, 160)],  # key points as maps
        [(1, 256, 80, 80)],  # features
        [(1, 80, 160, 160), (1, 2, 160, 160), (1, 2, 160, 160)],  # CenterNet
        [(1, 255, 80, 80), (1, 255, 40, 40), (1, 255, 20, 20)],  # YOLOv3 before its grids
        [(1, 3, 80, 80, 85), (1, 3, 40, 40, 85), (1, 3, 20, 20, 85)],
    ],
)
def test_families_without_a_preset_are_not_proposed(shapes: list[tuple[int, ...]]) -> None:
    outputs = [TensorSpec(f"output_{place}", "FP32", shape) for place, shape in enumerate(shapes)]
    assert recognise(IMAGE, outputs) is None


def test_decoded_boxes_contradict_the_preset_of_raw_ones() -> None:
    outputs = [TensorSpec("y", "FP32", (1, 8400, 85))]
    hints = Hints(operators=frozenset({"Exp"}))
    proposal = recognise(IMAGE, outputs, hints)
    assert proposal is not None
    raw = Postprocess((step_of("yolox", Signature.of(IMAGE, outputs)),))
    assert contradicts(proposal, raw)


def test_boxes_with_an_angle_are_not_decoded_as_upright_ones() -> None:
    declared = Postprocess(
        (step_of("yolov8", Signature.of(IMAGE, [TensorSpec("y", "FP32", (1, 20, 8400))])),)
    )
    with pytest.raises(ModelError, match="boxes have an angle"):
        check_hints(Hints(task="obb"), declared)
    check_hints(Hints(task="obb"), None)
    check_hints(Hints(task="detect"), declared)
    assert "answers are its own outputs" in (hint_note(Hints(task="obb"), None) or "")


def test_a_sine_and_a_cosine_without_a_task_are_doubted() -> None:
    outputs = [TensorSpec("y", "FP32", (1, 20, 8400))]
    angles = Hints(operators=frozenset({"Conv", "Sin", "Cos"}))
    proposal = recognise(IMAGE, outputs, angles)
    assert proposal is not None and not proposal.sure and "boxes with an angle" in proposal.doubt
    declared = Postprocess((step_of("yolov8", Signature.of(IMAGE, outputs)),))
    assert "boxes with an angle" in (hint_note(angles, declared) or "")
    for other in (Hints(operators=frozenset({"Conv", "Sin"})), Hints("detect", operators=angles.operators)):
        found = recognise(IMAGE, outputs, other)
        assert found is not None and not found.doubt and hint_note(other, declared) is None


def test_a_preset_that_takes_points_for_scores_is_refused() -> None:
    outputs = [TensorSpec("y", "FP32", (1, 135, 8400))]
    hints = Hints(task="pose", classes=80, points=(17, 3))
    detector = Postprocess((step_of("yolov8", Signature.of(IMAGE, outputs, hints)),))
    with pytest.raises(
        ModelError, match=r"expected 80 classes, 17 points of 3 values.* got no key p"
    ) as caught:
        check_hints(hints, detector, is_preset=True)
    assert caught.value.hint is not None and "task, pose" in caught.value.hint
    check_hints(hints, detector)  # a file of declarations may read a part of the values
    poses = Postprocess((step_of("yolov8-pose", Signature.of(IMAGE, outputs, hints)),))
    check_hints(hints, poses, is_preset=True)
    with pytest.raises(ModelError, match="expected 20 classes, as the file says, got scores of 131 classes"):
        check_hints(Hints(task="detect", classes=20), detector, is_preset=True)
    without_names = Postprocess(
        (step_of("yolov8-pose", Signature.of(IMAGE, [TensorSpec("y", "FP32", (1, 56, 8400))])),)
    )
    check_hints(Hints(task="pose"), without_names, is_preset=True)


def test_a_second_softmax_is_told() -> None:
    softmax = Postprocess((Softmax("y"),))
    assert "leave out softmax" in (hint_note(Hints(makers={"y": "Softmax"}), softmax) or "")
    assert hint_note(Hints(makers={"y": "Gemm"}), softmax) is None
    assert hint_note(Hints(makers={"y": "Softmax"}), None) is None


def test_fractions_that_the_file_tells_of_are_proposed_and_pixels_refused() -> None:
    hints = Hints(task="detect", normalised=True)
    outputs = [TensorSpec("y", "FP32", (1, 20, 8400))]
    proposal = recognise(IMAGE, outputs, hints)
    assert proposal is not None and proposal.postprocess == "yolov8,normalised=true"
    declared = Postprocess((step_of("yolov8", Signature.of(IMAGE, outputs)),))
    assert not contradicts(proposal, declared)
    with pytest.raises(ModelError, match="expected boxes as pixels of the input, got a file of Ultra"):
        check_hints(hints, declared, is_explicit=False)
    check_hints(hints, declared)
    check_hints(Hints(), declared, is_explicit=False)
    finished = recognise(IMAGE, [TensorSpec("y", "FP32", (1, 300, 85))], hints)
    assert finished is not None and finished.postprocess == "rtdetr"  # whose boxes are fractions anyway


@pytest.mark.parametrize(
    ("picture", "shape", "maker", "expected"),
    [
        ((1, 3, 48, 320), (1, 40, 97), "Softmax", ("ctc", "paddleocr")),
        ((1, 1, 64, 200), (1, 49, 97), "Gemm", ("ctc,activation=softmax", "easyocr")),
        ((1, 32, 100, 1), (1, 26, 37), "Add", ("ctc,activation=softmax", "easyocr")),
        ((1, 32, 320, 3), (80, 1, 97), "", ("ctc", "paddleocr")),
    ],
)
def test_a_line_of_text_keeps_its_proportions(
    picture: tuple[int, ...], shape: tuple[int, ...], maker: str, expected: tuple[str, str]
) -> None:
    inputs = [TensorSpec("x", "FP32", picture)]
    hints = Hints(makers={"y": maker} if maker else {})
    proposal = recognise(inputs, [TensorSpec("y", "FP32", shape)], hints)
    assert proposal is not None
    assert (proposal.postprocess, proposal.preprocess) == expected
    assert preprocess(proposal.preprocess, inputs).resize_mode == "line"


@pytest.mark.parametrize("classes", [2, 1000, 1001])
@pytest.mark.parametrize(
    ("datatype", "low", "high", "expected"),
    [
        ("UINT8", -1.0, 127 / 128, "raw"),
        ("UINT8", -1.0, 1.0, "raw"),
        ("INT8", -1.0, 1.0, "raw"),
        ("UINT8", 0.0, 1.0, "raw"),
        ("INT8", 0.0, 1.0, "raw"),
        ("INT8", 0.0, 255.0, "raw"),
        ("INT8", -128.0, 127.0, "raw"),
        ("INT8", 0.0, 0.8, "unit"),  # calibrated on dark pictures
        ("UINT8", -1.0, 0.7, "symmetric"),
        ("INT8", -2.12, 2.64, "imagenet"),
        ("UINT8", -2.0, 2.4, "imagenet"),
    ],
)
def test_a_quantised_input_says_which_numbers_it_holds(
    datatype: str, low: float, high: float, expected: str, classes: int
) -> None:
    scale = (high - low) / 255
    zero = (-128 if datatype == "INT8" else 0) - round(low / scale)
    picture = [TensorSpec("x", datatype, (1, 64, 64, 3))]
    hints = Hints(makers={"y": "Softmax"}, scales={"x": Quantised("x", scale, zero)})
    proposal = recognise(picture, [TensorSpec("y", datatype, (1, classes))], hints)
    assert proposal is not None
    usual = "imagenet-crop" if classes == 1000 else "imagenet"
    assert proposal.preprocess == expected.replace("imagenet", usual)


def test_bytes_without_a_scale_are_the_picture_s() -> None:
    proposal = recognise([TensorSpec("x", "INT8", (1, 64, 64, 3))], [TensorSpec("y", "FP32", (1, 1000))])
    assert proposal is not None and proposal.preprocess == "raw"


def test_a_detector_of_signed_bytes_gets_the_bytes() -> None:
    outputs = [TensorSpec(f"detection_{each}", "FP32", (1, 10)) for each in ("scores", "classes")]
    outputs.append(TensorSpec("detection_boxes", "FP32", (1, 10, 4)))
    hints = Hints(scales={"x": Quantised("x", 1 / 128, 0)})
    proposal = recognise([TensorSpec("x", "INT8", (1, 64, 64, 3))], outputs, hints)
    assert proposal is not None
    assert (proposal.postprocess, proposal.preprocess) == ("tf-detections", "raw")


@pytest.mark.parametrize("count", [3, 1000, 1001])
def test_nothing_is_proposed_against_what_the_file_says_of_its_pictures(count: int) -> None:
    hints = Hints(makers={"y": "Softmax"}, is_prepared=True)
    proposal = recognise(IMAGE, [TensorSpec("y", "FP32", (1, count))], hints)
    assert proposal is not None
    assert "--preprocess" not in str(proposal)


def test_tensorflow_s_classifiers_with_a_background_take_symmetric_numbers() -> None:
    proposal = recognise(IMAGE, [TensorSpec("y", "FP32", (1, 1001))])
    assert proposal is not None and proposal.preprocess == "symmetric"
