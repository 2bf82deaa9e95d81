"""Models are recognised by the shapes of their outputs."""

from __future__ import annotations

import pytest

from agent.bundle.tensor_spec import TensorSpec
from builder.compiling.declarations import preprocess
from builder.compiling.recognition import recognise
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
        ((1, 3, 64, 64), [(1, 3, 64, 64)], None),
        ((1, 3, 64, 64), [(1, 7)], None),
        ((1, 128), [(1, 84, 8400)], None),
    ],
)
def test_published_shapes(
    shape: tuple[int, ...], outputs: list[tuple[int, ...]], expected: str | None
) -> None:
    specs = [TensorSpec(f"y{i}", "FP32", each) for i, each in enumerate(outputs)]
    proposal = recognise([TensorSpec("x", "FP32", shape)], specs)
    assert (proposal and proposal.postprocess) == expected
