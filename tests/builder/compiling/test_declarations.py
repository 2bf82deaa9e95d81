"""Presets and TOML files that declare what happens before and after a model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agent.bundle.processing import Detect, Softmax, TopK
from agent.bundle.tensor_spec import TensorSpec
from builder.compiling.declarations import check_names, postprocess, preprocess
from builder.compiling.input_presets import INPUT_PRESETS
from builder.compiling.output_presets import OUTPUT_PRESETS
from builder.errors import BuildError, ModelError, ShapeError

PHOTO = TensorSpec("data", "FP32", (1, 3, 224, 224))
LAST = TensorSpec("image", "FP32", (1, 240, 320, 3))
GREY = TensorSpec("digit", "FP32", (1, 1, 28, 28))
TOKENS = TensorSpec("input_ids", "INT64", (1, 128))
LOGITS = TensorSpec("logits", "FP32", (1, 3))


def test_imagenet_is_the_tutorials_preprocessing() -> None:
    made = preprocess("imagenet", [PHOTO])
    assert (made.input, made.layout, made.colour, made.resize) == ("data", "NCHW", "RGB", (224, 224))
    assert made.scale == pytest.approx(1 / 255)
    assert made.mean == (0.485, 0.456, 0.406)
    assert made.std == (0.229, 0.224, 0.225)


@pytest.mark.parametrize("name", INPUT_PRESETS)
def test_every_preset_fits_a_photograph(name: str) -> None:
    assert preprocess(name, [PHOTO]).input == "data"


def test_the_layout_follows_from_the_input() -> None:
    made = preprocess("unit", [LAST])
    assert (made.layout, made.resize) == ("NHWC", (240, 320))


def test_one_channel_means_grey() -> None:
    assert preprocess("unit", [GREY]).colour == "GRAY"


def test_the_picture_goes_to_the_only_input_of_four_dimensions() -> None:
    assert preprocess("unit", [TOKENS, GREY]).input == "digit"


def test_a_file_declares_a_preprocess(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_text('colour = "BGR"\nscale = 1\nmean = [127]\nstd = [128]\nresize_mode = "letterbox"\n')
    made = preprocess(str(file), [PHOTO])
    assert (made.colour, made.mean, made.resize_mode) == ("BGR", (127.0,), "letterbox")


@pytest.mark.parametrize(
    ("text", "inputs", "kind", "says"),
    [
        ("imagnet", [PHOTO], ModelError, "unknown preset 'imagnet'"),
        ("imagenet", [GREY], ShapeError, r"expected colour GRAY for digit \(channels: 1\), got RGB"),
        ("imagenet", [TOKENS], ShapeError, "expected one input with 4 dimensions"),
        ("unit", [PHOTO, LAST], ShapeError, "expected one input with 4 dimensions"),
        ("missing.toml", [PHOTO], ModelError, "cannot be read"),
    ],
)
def test_a_preprocess_that_does_not_fit_gets_one_line(
    text: str, inputs: list[TensorSpec], kind: type[BuildError], says: str
) -> None:
    with pytest.raises(kind, match=says):
        preprocess(text, inputs)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("not toml at all", "expected TOML"),
        ('colour = "PINK"', "PINK"),
        ("std = [0]", "std: expected values other than 0"),
        ("resize = [10, 10]", r"expected \(224, 224\) pixels for data, got \(10, 10\)"),
        ("resise = [10, 10]", "resise"),
        ('mean = ["a"]', "could not convert"),
        ('input = "other"', "expected input 'other' with"),
        ("crop = [1]", "crop: expected a height and a width"),
        ("resize = 224", "resize"),
    ],
)
def test_a_bad_preprocess_file_gets_one_line(tmp_path: Path, content: str, says: str) -> None:
    file = tmp_path / "p.toml"
    file.write_text(content)
    with pytest.raises(BuildError, match=says) as caught:
        preprocess(str(file), [PHOTO])
    assert "\n" not in str(caught.value)


def test_softmax_and_top_five() -> None:
    assert postprocess("softmax,top3", [LOGITS]).steps == (Softmax("logits"), TopK("logits", 3))


def test_faces_finds_boxes_and_scores_by_their_shapes() -> None:
    outputs = [TensorSpec("scores", "FP32", (1, 10, 2)), TensorSpec("boxes", "FP32", (1, 10, 4))]
    (step,) = postprocess("faces", outputs).steps
    assert isinstance(step, Detect)
    assert (step.boxes, step.scores) == ("boxes", "scores")


@pytest.mark.parametrize("text", ["softmx", "top", "top0", "softmax,", "faces", "softmax top5"])
def test_a_bad_postprocess_gets_one_line(text: str) -> None:
    with pytest.raises(ModelError):
        postprocess(text, [LOGITS])


def test_softmax_of_two_outputs_asks_for_a_file() -> None:
    with pytest.raises(ModelError, match="expected one output") as caught:
        postprocess("softmax", [LOGITS, PHOTO])
    assert "TOML" in (caught.value.hint or "")


def test_a_postprocess_file(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    softmax = '[[steps]]\nkind = "softmax"\noutput = "logits"\n'
    file.write_text(softmax + '[[steps]]\nkind = "top_k"\noutput = "logits"\nk = 2\n')
    assert postprocess(str(file), [LOGITS]).steps == (Softmax("logits"), TopK("logits", 2))


@pytest.mark.parametrize(
    "content", ['[[steps]]\nkind = "sort"', '[[steps]]\nkind = "top_k"\nk = 2', "steps = 3", "k = 1", ""]
)
def test_a_bad_postprocess_file_gets_one_line(tmp_path: Path, content: str) -> None:
    file = tmp_path / "p.toml"
    file.write_text(content)
    with pytest.raises(ModelError):
        postprocess(str(file), [LOGITS])


PAGE = Path(__file__).resolve().parents[3] / "docs" / "your-detector.md"
IMAGE = TensorSpec("images", "FP32", (1, 3, 416, 416))
YOLOX = TensorSpec("output", "FP32", (1, 3549, 85))


def examples() -> list[str]:
    return re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_pages_examples_are_valid(tmp_path: Path) -> None:
    ssd = [TensorSpec("boxes", "FP32", (1, 1383, 4)), TensorSpec("scores", "FP32", (1, 1383, 21))]
    call = "StatefulPartitionedCall"
    finished = [
        TensorSpec(f"{call}:{n}", "FP32", (1, 25, *more)) for n, more in ((3, (4,)), (1, ()), (2, ()))
    ]
    unnamed, preset, anchors = examples()
    for text, outputs, expected in (
        (preset, [YOLOX], "yolox,score_threshold=0.5,class_agnostic=true"),
        (unnamed, finished, None),
        (anchors, ssd, None),
    ):
        (tmp_path / "p.toml").write_text(text)
        declared = postprocess(str(tmp_path / "p.toml"), outputs, [IMAGE])
        if expected is not None:
            assert declared == postprocess(expected, outputs, [IMAGE])


def test_every_preset_is_on_the_page() -> None:
    page = PAGE.read_text()
    families = {
        "yolov9",
        "yolo11",
        "yolo11-seg",
        "yolo11-pose",
        "faces",
    }  # other names of presets on the page
    assert [name for name in OUTPUT_PRESETS if name not in families and name not in page] == []
    named = set(re.findall(r"--postprocess ([a-z][\w-]*)", page)) | {"ssd", "yunet", "detr"}
    assert named <= set(OUTPUT_PRESETS)
    assert set(re.findall(r"--preprocess ([a-z][\w-]*)", page)) <= set(INPUT_PRESETS)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("yolox,max_detections=1.5", "an integer, got 1.5"),
        ("yolox,score_threshold=high", "score_threshold|not supported"),
        ("yolox,score_threshold=2", "score_threshold: expected 0 to 1, got 2"),
        ("yolox,class_agnostic=1", "a boolean, got 1"),
        ("yolox,threshold=0.5", "unknown option 'threshold'"),
        ("yolox,coding=polar", "coding: expected one of"),
        ("score_threshold=0.5", "expected a preset before the option"),
        ("yolox,boxes=[]", "number of boxes: expected 1 to 16, got 0"),
        ("yolox,boxes=[{output='other',first=0,count=4}]", "the model does not have"),
    ],
)
def test_a_bad_option_gets_one_line(text: str, says: str) -> None:
    with pytest.raises(ModelError, match=says) as caught:
        postprocess(text, [YOLOX], [IMAGE])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("yolox,pad=300", "pad: expected 0 to 255"),
        ("yolox,pad=0.5", "an integer, got 0.5"),
        ("yolox,position=left", "position: expected one of centre, top_left"),
        ("unit,pad=3", "expected resize_mode letterbox"),
        ("unit,resize_mode", "expected an option such as pad=0"),
        ("unit,reduce=3", "reduce"),
    ],
)
def test_a_bad_option_of_a_preprocess_gets_one_line(text: str, says: str) -> None:
    with pytest.raises(ModelError, match=says) as caught:
        preprocess(text, [IMAGE])
    assert "\n" not in str(caught.value)


def test_options_and_files_change_a_preset(tmp_path: Path) -> None:
    made = preprocess("yolox,pad=0,position=centre,reduce=false", [IMAGE])
    assert (made.pad, made.position, made.reduce, made.colour) == (0, "centre", None, "BGR")
    file = tmp_path / "p.toml"
    file.write_text('preset = "yolov8"\nresize_mode = "stretch"\n')
    made = preprocess(str(file), [IMAGE])
    assert (made.resize_mode, made.pad, made.position, made.reduce) == ("stretch", None, None, True)


def test_names_are_checked_without_a_model(tmp_path: Path) -> None:
    check_names("yolox", "softmax,top5")
    for before, after in (("yolo", None), (None, "yolo"), ("absent.toml", None), (None, "absent.toml")):
        with pytest.raises(ModelError):
            check_names(before, after)


def test_an_unknown_field_of_a_preprocess_is_named(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('fit = "cover"\n')
    with pytest.raises(ModelError, match="unknown field 'fit'") as caught:
        preprocess(str(tmp_path / "own.toml"), [TensorSpec("x", "FP32", (1, 3, 8, 8))])
    assert caught.value.hint is not None and "resize_mode" in caught.value.hint
