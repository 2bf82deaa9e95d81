"""Labels: one for each class, and none without a use."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.bundle.processing import Ctc, Normalise, Postprocess
from agent.bundle.tensor_spec import TensorSpec
from builder.compiling.declarations import postprocess
from builder.compiling.labels import COCO_LABELS, label_lines, read_named_labels
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
