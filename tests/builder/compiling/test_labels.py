"""Labels: one for each class, and none without a use."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.bundle.processing import Ctc, Normalise, Postprocess
from agent.bundle.tensor_spec import TensorSpec
from builder.compiling.declarations import postprocess
from builder.compiling.declared import declare
from builder.compiling.labels import COCO_LABELS, label_lines, read_named_labels
from builder.compiling.options import Options
from builder.compiling.outline import Outline
from builder.errors import ModelError

LOGITS = TensorSpec("logits", "FP32", (1, 3))
DECLARED = postprocess("softmax,top2", [LOGITS])


def test_there_must_be_one_label_per_class(tmp_path: Path) -> None:
    file = tmp_path / "labels.txt"
    file.write_text("cat\r\ndog\nZürich \n\n")
    assert read_named_labels(file, [LOGITS], DECLARED) == "cat\ndog\nZürich\n".encode()
    file.write_text("cat\ndog\n")
    with pytest.raises(ModelError, match="expected 3 labels for logits, got 2"):
        read_named_labels(file, [LOGITS], DECLARED)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xff\xfe"])
def test_a_bad_labels_file_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "labels.txt"
    file.write_bytes(content)
    with pytest.raises(ModelError):
        read_named_labels(file, [LOGITS], DECLARED)


def test_the_model_s_own_labels_count_unless_the_user_gives_others() -> None:
    own = ("cat", "dog", "bird")
    assert label_lines(None, own, [LOGITS], DECLARED) == b"cat\ndog\nbird\n"
    assert label_lines(None, own, [LOGITS], None) == b"cat\ndog\nbird\n"
    assert label_lines(None, own, [LOGITS], Postprocess((Normalise("logits"),))) is None
    assert label_lines(None, own[:2], [LOGITS], DECLARED) is None
    assert label_lines(("a", "b", "c"), own, [LOGITS], DECLARED) == b"a\nb\nc\n"
    assert label_lines(None, (), [LOGITS], None) is None


def test_labels_without_a_use_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "labels.txt"
    file.write_text("cat\ndog\nbird\n")
    for declared in (None, Postprocess((Normalise("logits"),))):
        with pytest.raises(ModelError, match="expected a postprocess that names classes"):
            read_named_labels(file, [LOGITS], declared)


def test_five_labels_for_eighty_classes_are_refused(tmp_path: Path) -> None:
    image = TensorSpec("images", "FP32", (1, 3, 416, 416))
    output = TensorSpec("output", "FP32", (1, 3549, 85))
    declared = postprocess("yolox", [output], [image])
    file = tmp_path / "labels.txt"
    file.write_text("a\nb\nc\nd\ne\n")
    with pytest.raises(ModelError, match="expected 80 labels for output, got 5"):
        read_named_labels(file, [output], declared)
    found = read_named_labels("coco", [output], declared)
    assert found is not None
    assert found.decode().splitlines() == list(COCO_LABELS)


def test_labels_for_one_class_are_counted_by_the_output_of_its_scores() -> None:
    """YuNet's last outputs are key points, which have no classes."""
    rows = (1600, 400, 100)
    outputs = [
        TensorSpec(f"{kind}_{stride}", "FP32", (1, count, values))
        for kind, values in (("cls", 1), ("obj", 1), ("bbox", 4), ("kps", 10))
        for stride, count in zip((8, 16, 32), rows, strict=True)
    ]
    image = TensorSpec("input", "FP32", (1, 3, 320, 320))
    declared = postprocess("yunet", outputs, [image])
    with pytest.raises(ModelError, match="coco: expected 1 label for cls_8, got 80") as caught:
        read_named_labels("coco", outputs, declared)
    assert "leave out --labels" in (caught.value.hint or "")


def test_the_background_may_be_left_out_of_the_file(tmp_path: Path) -> None:
    outputs = [TensorSpec("scores", "FP32", (1, 10, 3)), TensorSpec("boxes", "FP32", (1, 10, 4))]
    file = tmp_path / "labels.txt"
    file.write_text("cat\ndog\n")
    for preset in ("faces", "ssd"):
        assert read_named_labels(file, outputs, postprocess(preset, outputs)) == b"background\ncat\ndog\n"


def test_a_text_needs_its_characters_and_a_space_is_one_of_them(tmp_path: Path) -> None:
    steps = TensorSpec("y", "FP32", (1, 7, 4))
    declared = Postprocess((Ctc("y"),))
    with pytest.raises(ModelError, match="expected 3 or 4 labels for y, got 0"):
        read_named_labels(None, [steps], declared)
    file = tmp_path / "characters.txt"
    file.write_text("a\nb\n \n")
    assert read_named_labels(file, [steps], declared) == b"a\nb\n \n"
    # PaddleOCR's models read a space behind the characters of their file.
    file.write_text("a\nb\n")
    assert read_named_labels(file, [steps], declared) == b"a\nb\n \n"
    # It does so even if the file ends in a space, as its English one does.
    file.write_text("a\n \n")
    assert read_named_labels(file, [steps], declared) == b"a\n \n \n"
    file.write_text("a\n")
    with pytest.raises(ModelError, match="expected 3 or 4 labels for y, got 1"):
        read_named_labels(file, [steps], declared)


def _numbers() -> tuple[list[TensorSpec], Postprocess]:
    """A detector that answers numbers of classes, and its postprocess."""
    outputs = [
        TensorSpec("TFLite_Detection_PostProcess", "FP32", (1, 10, 4)),
        TensorSpec("TFLite_Detection_PostProcess:1", "FP32", (1, 10)),
        TensorSpec("TFLite_Detection_PostProcess:2", "FP32", (1, 10)),
        TensorSpec("TFLite_Detection_PostProcess:3", "FP32", (1,)),
    ]
    picture = [TensorSpec("picture", "UINT8", (1, 300, 300, 3))]
    return outputs, postprocess("tf-detections", outputs, picture)


def test_names_of_coco_are_put_at_their_ninety_numbers() -> None:
    outputs, declared = _numbers()
    found = read_named_labels("coco", outputs, declared, {outputs[1].name: 90})
    assert found is not None
    lines = found.decode().splitlines()
    assert len(lines) == 90
    # COCO's own numbers, counted from 1; 12 is no class.
    names = {1: "person", 12: " ", 23: "bear", 24: "zebra", 90: "toothbrush"}
    assert {number: lines[number - 1] for number in names} == names


@pytest.mark.parametrize("first", ["???", "Unlabeled", "background", "__background__"])
def test_the_line_of_a_background_that_is_not_answered_is_left_out(first: str) -> None:
    outputs, declared = _numbers()
    found = read_named_labels([first, "cat", "dog"], outputs, declared, {outputs[1].name: 2})
    assert found == b"cat\ndog\n"


@pytest.mark.parametrize("labels", [["cat", "dog"], ["x", *["name"] * 90], ["name"] * 91, ["name"] * 80])
def test_labels_that_do_not_fit_numbers_of_classes_are_refused(labels: list[str]) -> None:
    outputs, declared = _numbers()
    with pytest.raises(ModelError, match=rf"expected 90 labels for \S+, got {len(labels)}"):
        read_named_labels(labels, outputs, declared, {outputs[1].name: 90})
    # Of a model that does not say how many there are, nothing is known.
    assert read_named_labels(labels, outputs, declared) is not None


def test_the_background_of_a_mask_of_one_channel_may_be_left_out() -> None:
    outputs = [TensorSpec("mask", "FP32", (1, 1, 64, 64))]
    declared = postprocess("segmentation", outputs, [TensorSpec("x", "FP32", (1, 3, 64, 64))])
    assert read_named_labels(["person"], outputs, declared) == b"background\nperson\n"
    with pytest.raises(ModelError, match="expected 2 labels for mask, got 3"):
        read_named_labels(["a", "b", "c"], outputs, declared)


def test_numbers_whose_first_class_nobody_says_are_refused(tmp_path: Path) -> None:
    outputs, declared = _numbers()
    known = {outputs[1].name: 80}
    file = tmp_path / "names.txt"
    file.write_text("cat\ndog\n")
    for source, first in (("coco", "person"), (file, "cat")):
        with pytest.raises(ModelError, match=f"which number of \\S+ the class '{first}' has") as caught:
            read_named_labels(source, outputs, declared)
        assert f"{source},first=1 (torchvision" in caught.value.hint
    assert read_named_labels(f"{file},first=0", outputs, declared) == b"cat\ndog\n"
    assert read_named_labels(f"{file},first=1", outputs, declared) == b"background\ncat\ndog\n"
    assert read_named_labels("coco", outputs, declared, known) == read_named_labels(
        "coco,first=0", outputs, declared
    )
    with pytest.raises(ModelError, match="expected first=0 or first=1, got first=2"):
        read_named_labels("coco,first=2", outputs, declared)
    file.write_text("__background__\ncat\n")
    assert read_named_labels(file, outputs, declared) == b"__background__\ncat\n"
    assert read_named_labels(["cat"], outputs, declared) == b"cat\n"  # an index is a number


def test_coco_s_own_numbers_can_be_asked_for() -> None:
    outputs, declared = _numbers()
    found = read_named_labels("coco,first=1", outputs, declared)
    assert found is not None
    lines = found.decode().splitlines()
    assert (len(lines), lines[0], lines[23], lines[90]) == (91, "background", "bear", "toothbrush")
    with pytest.raises(ModelError, match="expected 80 labels"):
        read_named_labels("coco,first=1", outputs, declared, {outputs[1].name: 80})
    ninety = read_named_labels("coco,first=1", outputs, declared, {outputs[1].name: 90})
    assert ninety == read_named_labels("coco", outputs, declared, {outputs[1].name: 90})


def test_rows_of_a_yolo_with_class_numbers_begin_at_0() -> None:
    image = TensorSpec("images", "FP32", (1, 3, 640, 640))
    rows = TensorSpec("output0", "FP32", (1, 300, 6))
    declared = postprocess("yolov10", [rows], [image])
    found = declare(Outline((image,), (rows,)), Options(postprocess="yolov10", labels="coco"))
    assert found.labels == read_named_labels("coco", [rows], declared)


@pytest.mark.parametrize(
    "content",
    [
        "\ufeffcat\ndog\nbird\n",
        "0: cat\r\n1: dog\r\n2: bird\r\n\r\n",
        "0,cat\n1,dog\n2,bird",
        "2  bird\n0  cat\n1  dog\n",
        "0 cat\n1 dog\n2 bird\n",
        "1: cat\n2: dog\n3: bird\n",
        "cat\u2028\ndog\nbird\n",
    ],
)
def test_marks_and_numbers_are_no_part_of_a_label(tmp_path: Path, content: str) -> None:
    file = tmp_path / "labels.txt"
    file.write_bytes(content.encode())
    assert read_named_labels(file, [LOGITS], DECLARED) == b"cat\ndog\nbird\n"


@pytest.mark.parametrize("content", ["1 euro\n2 euro\n5 euro\n", "0\n1\n2\n", "1 cent\n2 cents\n5 cents\n"])
def test_numbers_that_are_names_stay(tmp_path: Path, content: str) -> None:
    file = tmp_path / "labels.txt"
    file.write_text(content)
    assert read_named_labels(file, [LOGITS], DECLARED) == content.encode()


def test_numbers_of_lines_are_those_of_the_classes(tmp_path: Path) -> None:
    """As in the label files of Coral, from 0, and in COCO's own annotations, from 1; both leave out ten."""
    outputs, declared = _numbers()
    ninety = {outputs[1].name: 90}
    expected = read_named_labels("coco", outputs, declared, ninety)
    assert expected is not None
    names = expected.decode().splitlines()
    file = tmp_path / "labels.txt"
    for first in (0, 1):
        given = "".join(f"{number}  {name}\n" for number, name in enumerate(names, first) if name.strip())
        file.write_text(given)
        assert read_named_labels(file, outputs, declared, ninety) == expected
        # The file says them, so the user need not.
        unknown = read_named_labels(file, outputs, declared)
        assert unknown == (b"background\n" if first else b"") + expected
    file.write_text("0: cat\n2: bird\n")
    assert read_named_labels(file, [LOGITS], DECLARED) == b"cat\n \nbird\n"
    file.write_text("0: cat\n1: dog\n")
    with pytest.raises(ModelError, match="expected 3 labels for logits, got 2"):
        read_named_labels(file, [LOGITS], DECLARED)


def test_no_background_is_made_up_for_91_classes(tmp_path: Path) -> None:
    logits = TensorSpec("logits", "FP32", (1, 91))
    file = tmp_path / "labels.txt"
    file.write_text("".join(f"name {i}\n" for i in range(90)))
    with pytest.raises(ModelError, match="expected 91 labels for logits, got 90"):
        read_named_labels(file, [logits], postprocess("softmax,top5", [logits]))


def test_a_dictionary_has_characters_that_are_line_ends_elsewhere(tmp_path: Path) -> None:
    steps = TensorSpec("y", "FP32", (1, 7, 5))
    file = tmp_path / "characters.txt"
    content = "\u2028\n\x85\n\u3000\na\n".encode()
    file.write_bytes(content)
    assert read_named_labels(file, [steps], Postprocess((Ctc("y"),))) == content


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('["cat",\n"dog",\n"bird"]\n', "got JSON"),
        ('{\n"0": "cat", "1": "dog",\n"2": "bird"}', "got JSON"),
        ("item {\n  id: 1\n}\n", "got a label map of TensorFlow"),
    ],
)
def test_files_of_other_formats_are_refused(tmp_path: Path, content: str, words: str) -> None:
    """Each has as many lines as the model has classes."""
    file = tmp_path / "labels.json"
    file.write_text(content)
    with pytest.raises(ModelError, match=f"expected one label per line, {words}"):
        read_named_labels(file, [LOGITS], DECLARED)


def test_brackets_are_characters(tmp_path: Path) -> None:
    file = tmp_path / "characters.txt"
    steps = TensorSpec("y", "FP32", (1, 7, 4))
    for content in ("[\n1\n]\n", "{\n}\n]\n", "[" * 9 + "\n]\n{\n"):
        file.write_text(content)
        assert read_named_labels(file, [steps], Postprocess((Ctc("y"),))) == content.encode()


def test_how_to_convert_a_file_of_windows_is_said(tmp_path: Path) -> None:
    file = tmp_path / "labels.txt"
    file.write_bytes("cat\ndog\nbird\n".encode("utf-16"))
    with pytest.raises(ModelError, match="expected UTF-8") as caught:
        read_named_labels(file, [LOGITS], DECLARED)
    assert "iconv -f utf-16 -t utf-8" in caught.value.hint
