"""Recordings, states and labels are proposed by names, and only where nothing else fits."""

from __future__ import annotations

import pytest

from agent.bundle.tensor_spec import TensorSpec
from builder.compiling.declarations import postprocess
from builder.compiling.name_recognition import label_hint, recognise_sound, recognise_states
from builder.compiling.recognition import recognise
from builder.compiling.states import states


@pytest.mark.parametrize(
    ("inputs", "outputs", "expected"),
    [
        (("input", "state", "sr"), ("output", "stateN"), "silero"),
        (("input", "sr", "h", "c"), ("output", "hn", "cn"), "silero-v4"),
        (("input", "state"), ("output", "stateN"), None),
        (("input", "state", "sr", "mask"), ("output", "stateN"), None),
        (("input", "state", "sr"), ("output",), None),
        (("input",), ("output",), None),
    ],
)
def test_sound(inputs: tuple[str, ...], outputs: tuple[str, ...], expected: str | None) -> None:
    assert recognise_sound(inputs, outputs) == expected


def spec(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, "FP32", shape or (1, 8))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("h", "hn"), ("state", "stateN"), ("state", "state_out"), ("state_in", "state_out"), ("h0", "h_n"),
        ("cache", "new_cache"), ("stateIn", "stateOut"), ("prev_h", "next_h"), ("h_old", "h_new"),
    ],
)  # fmt: skip
def test_states(before: str, after: str) -> None:
    inputs, outputs = [spec("x", 1, 4), spec(before)], [spec("y", 1, 2), spec(after)]
    found = recognise_states(inputs, outputs)
    assert found == f"{before}:{after}"
    assert states([found], inputs, outputs) is not None


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        ((spec("x"),), (spec("x_out"),)),
        ((spec("x"), spec("h")), (spec("y"), spec("hn", 1, 9))),
        ((spec("x"), spec("h")), (spec("y"), spec("g"))),
        ((spec("x"), spec("h")), (spec("y"), spec("h_out"), spec("h_new"))),
        ((spec("x"), spec("h"), spec("h_in")), (spec("y"), spec("h_out"))),
    ],
)
def test_what_is_no_state(inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> None:
    assert recognise_states(inputs, outputs) is None


def test_labels_of_coco() -> None:
    image = (spec("images", 1, 3, 640, 640),)
    for outputs, words in (
        ((spec("o", 1, 84, 8400),), "80 classes without names: if they are those of COCO, add --labels coco"),
        (
            (spec("o", 1, 24, 8400),),
            "20 classes without names: --labels FILE names them in answers, one a line",
        ),
    ):
        assert label_hint(postprocess("yolov8", outputs, image), image, outputs) == words
    faces = (spec("o", 1, 5, 8400),)
    assert label_hint(postprocess("yolov8", faces, image), image, faces) is None
    assert label_hint(None, image, image) is None


def test_labels_of_imagenet_and_of_rows() -> None:
    outputs = (spec("logits", 1, 1000),)
    after = postprocess("softmax,top5", outputs)
    hint = label_hint(after, (spec("x", 1, 3, 224, 224),), outputs)
    assert hint is not None
    assert hint.startswith("1000 classes without names: --labels FILE")
    assert "ImageNet" in hint
    assert label_hint(after, (spec("x", 1, 20),), outputs) is None


def test_a_classifier_of_rows() -> None:
    label, scores = TensorSpec("label", "INT64", (1,)), TensorSpec("probabilities", "FP32", (1, 3))
    proposal = recognise([spec("X", 1, 20)], [label, scores])
    assert str(proposal) == (
        "the outputs may be those of a classifier of rows (a label and 3 probabilities): --postprocess top1"
    )
    assert postprocess("top1", (label, scores)).outputs == {"probabilities"}
    assert recognise([spec("X", 1, 20)], [scores]) is None
    assert recognise([spec("X", 1, 20)], [label, TensorSpec("p", "FP32", (3,))]) is None
