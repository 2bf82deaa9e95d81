"""What is said about the answer that declared steps make of a sample."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from PIL import Image

from agent.bundle.audio import Keywords
from agent.bundle.params import dump_params
from agent.bundle.processing import ClassMap, Ctc, Normalise, Postprocess, Softmax, Step, TopK
from agent.bundle.quantisation import Quantisation, Quantised
from agent.bundle.tensor_spec import TensorSpec
from builder.bundles.package import Package
from builder.compiler import compile
from builder.compiling.declarations import postprocess
from builder.compiling.first_look import confirmed, look, proposed
from builder.compiling.options import Options
from builder.compiling.recognition import recognise
from builder.errors import ModelError
from builder.importer.ultralytics_metadata import Exported
from tests.bundles import FILES, make_manifest

IMAGE = TensorSpec("images", "FP32", (1, 3, 64, 64))
ROWS = TensorSpec("output", "FP32", (1, 7, 84))  # x, y, width, height and three classes
RNG = np.random.default_rng(4)


def rows(unit: float) -> np.ndarray[Any, Any]:
    """Return candidates in the middle of a picture whose side is `unit`."""
    made = np.zeros((1, 7, 84), np.float32)
    made[0, :2] = unit * RNG.uniform(0.3, 0.7, (2, 84))
    made[0, 2:4] = unit * RNG.uniform(0.1, 0.5, (2, 84))
    made[0, 4:] = RNG.uniform(0, 0.9, (3, 84))
    return made


def seen(text: str, values: np.ndarray[Any, Any]) -> list[str]:
    declared = postprocess(text, [ROWS], [IMAGE])
    return look(declared, [ROWS], {"output": values}, (64, 64), {}, text)


@pytest.mark.parametrize(("text", "unit"), [("yolov8", 64), ("yolov8,normalised=true", 1)])
def test_boxes_in_the_declared_units_are_taken(text: str, unit: float) -> None:
    assert seen(text, rows(unit)) == []


@pytest.mark.parametrize(
    ("text", "unit", "expected", "option"),
    [
        ("yolov8", 1, "expected boxes as pixels .* as fractions of the picture do", "normalised=true"),
        ("yolov5", 1, "as fractions of the picture do", "normalised=true"),
    ],
)
def test_fractions_taken_for_pixels_are_refused_with_both_readings(
    text: str, unit: float, expected: str, option: str
) -> None:
    if text == "yolov5":
        spec = TensorSpec("output", "FP32", (1, 252, 8))
        values = np.concatenate((rows(unit)[:, :4], np.ones((1, 1, 84)), rows(unit)[:, 4:]), axis=1)
        values = np.repeat(values, 3, axis=2).transpose(0, 2, 1).astype(np.float32)
    else:
        spec, values = ROWS, rows(unit)
    declared = postprocess(text, [spec], [IMAGE])
    with pytest.raises(ModelError, match=expected) as caught:
        look(declared, [spec], {"output": values}, (64, 64), {}, text)
    assert caught.value.hint is not None and option in caught.value.hint


def test_boxes_of_a_segmenter_are_looked_at() -> None:
    image, maps = TensorSpec("images", "FP32", (1, 3, 128, 128)), TensorSpec("p", "FP32", (1, 32, 32, 32))
    spec = TensorSpec("output", "FP32", (1, 4 + 2 + 32, 256 + 64 + 16))
    text = "yolov8-seg,prototype_order=channels_first"
    values = {"output": np.zeros(spec.shape, np.float32), "p": np.zeros(maps.shape, np.float32)}
    [line] = look(postprocess(text, [spec, maps], [image]), [spec, maps], values, (128, 128), {}, text)
    assert "no score of the sample is above 0" in line


def test_pixels_taken_for_fractions_are_refused() -> None:
    declared = postprocess("yolov8,normalised=true", [ROWS], [IMAGE])
    with pytest.raises(ModelError, match=r"expected boxes as fractions of the picture .* as pixels do"):
        look(declared, [ROWS], {"output": rows(64)}, (64, 64), {})


def test_who_says_the_unit_himself_is_not_refused(tmp_path: Path) -> None:
    assert seen("yolov8,normalised=false", rows(1)) == []
    (tmp_path / "own.toml").write_text("[[steps]]\npreset = 'yolov8'\nnormalised = false\n")
    assert seen(str(tmp_path / "own.toml"), rows(1)) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda made: made[:, 4:].fill(0.25), "all scores of the sample are 0.25"),
        (lambda made: made[:, 4:].__imul__(100), "scores of the sample reach"),
        (lambda made: made[:, 4:].fill(0), "no score of the sample is above 0"),
        (lambda made: made[:, 2:4].fill(0), "have no area"),
        (lambda made: made[:, :2].__iadd__(500), "lie outside of the picture"),
    ],
)
def test_a_degenerate_answer_is_told(change: Any, words: str) -> None:
    made = rows(64)
    change(made)
    [line] = seen("yolov8", made)
    assert words in line


def test_offsets_that_are_taken_for_corners_are_told() -> None:
    """TensorFlow's detectors before their suppression; clipped corners have no sides, but none below 0."""
    boxes, scores = TensorSpec("boxes", "FP32", (1, 200, 4)), TensorSpec("scores", "FP32", (1, 200, 21))
    declared = postprocess("ssd", [boxes, scores], [IMAGE])
    state = np.random.default_rng(0)
    values = {"scores": state.random((1, 200, 21), np.float32)}
    offsets = values | {"boxes": state.normal(0, 0.5, (1, 200, 4)).astype(np.float32)}
    [line] = look(declared, [boxes, scores], offsets, (64, 64), {})
    assert "many boxes of the sample end before they begin" in line
    corners = np.sort(offsets["boxes"].reshape(200, 2, 2), axis=1).clip(0, 1).reshape(1, 200, 4)
    assert look(declared, [boxes, scores], values | {"boxes": corners}, (64, 64), {}) == []


def test_near_scores_are_not_equal_and_no_more_is_told_than_was_seen() -> None:
    """Of many cells, the best hundred have nearly the same score; that says nothing about the others."""
    spec = replace(ROWS, shape=(1, 7, 2100))
    image = replace(IMAGE, shape=(1, 3, 320, 320))
    declared = postprocess("yolov8", [spec], [image])
    values = np.zeros((1, 7, 2100), np.float32)
    values[0, :4] = [[100], [120], [40], [30]]
    values[0, 4] = np.linspace(0.6, 0.59, 2100)
    assert look(declared, [spec], {"output": values}, (320, 320), {}) == []
    values[0, 4, :300] = 0.6
    [line] = look(declared, [spec], {"output": values}, (320, 320), {})
    assert "the 100 best scores of the sample are 0.6" in line


def test_an_angle_among_the_scores_is_told() -> None:
    values = rows(64)
    values[0, -1, 0] = -0.7
    [line] = seen("yolov8", values)
    assert "scores of output reach down to -0.7" in line


def test_scores_that_are_no_probabilities_are_told() -> None:
    spec = TensorSpec("y", "FP32", (1, 4))
    values = {"y": np.array([[-3.0, 12.5, 0, 1]], np.float32)}
    [line] = look(Postprocess((TopK("y", 2),)), [spec], values, None, {})
    assert "from -3 to 12.5 in the sample" in line and "softmax" in line
    assert look(Postprocess((Softmax("y"), TopK("y", 2))), [spec], values, None, {}) == []
    integers = {"y": np.array([[-128, 127, 0, 1]], np.int8)}
    spec = TensorSpec("y", "INT8", (1, 4))
    scale = {"y": Quantised("y", 1 / 256, -128)}
    assert look(Postprocess((TopK("y", 2),)), [spec], integers, None, scale) == []


MASK, LINE = (1, 1, 4, 4), (1, 4, 4)


@pytest.mark.parametrize(
    ("step", "shape", "low", "high", "words"),
    [
        (ClassMap("y", threshold=0.5), MASK, 0, 1, ""),
        (ClassMap("y", threshold=0.5), MASK, -5, 5, "from -5 to 5 in the sample, .* add threshold=0 if"),
        (ClassMap("y", threshold=0.0), MASK, -5, 5, ""),
        (ClassMap("y"), (1, 4, 2, 2), -5, 5, ""),
        (ClassMap("y"), (1, 4, 2, 2), 0.2, 0.2, "all values of y are 0.2 in the sample"),
        (Ctc("y"), LINE, 0, 1, ""),
        (Ctc("y"), LINE, -9, 4, "from -9 to 4 in the sample, .* add activation=softmax if"),
        (Ctc("y", activation="softmax"), LINE, -9, 4, ""),
        (Keywords("y"), (1, 16), 0, 1, ""),
        (Keywords("y"), (1, 16), -9, 4, "from -9 to 4 in the sample, .* add activation=softmax if"),
        (Keywords("y", activation="softmax"), (1, 16), -9, 4, ""),
        (Normalise("y"), (1, 16), 0, 0, "all values of y are 0 in the sample"),
        (Softmax("y"), (1, 16), 3, 3, "all values of y are 3 in the sample"),
        (TopK("y", 2), (1, 16), 0, np.nan, "some values of y are NaN or infinite in the sample"),
    ],
)
def test_masks_texts_and_vectors_are_looked_at(
    step: Step, shape: tuple[int, ...], low: float, high: float, words: str
) -> None:
    values = {"y": np.linspace(low, high, 16, dtype=np.float32).reshape(shape)}
    lines = look(Postprocess((step,)), [TensorSpec("y", "FP32", shape)], values, None, {})
    assert len(lines) == bool(words), lines
    assert not words or re.search(words, lines[0])
    if isinstance(step, Ctc | Keywords) and words:
        both = Postprocess((Softmax("y"), step))
        assert look(both, [TensorSpec("y", "FP32", shape)], values, None, {}) == []


def package_of(values: np.ndarray, spec: TensorSpec, quantisation: Quantisation | None = None) -> Package:
    """Return a package whose recorded sample has an output of these values."""
    members = {
        **FILES,
        "samples/inputs.params": b"in",
        "samples/outputs.params": dump_params([(replace(spec, name="0/output"), values.data)]),
    }
    return Package(
        make_manifest(members, inputs=(IMAGE,), outputs=(spec,), quantisation=quantisation), members
    )


@pytest.mark.parametrize(("unit", "expected"), [(64, "yolov8"), (1, "yolov8,normalised=true")])
@pytest.mark.parametrize("is_quantised", [False, True])
def test_a_proposal_has_the_units_of_the_sample(unit: float, expected: str, *, is_quantised: bool) -> None:
    values, spec, quantisation = rows(unit), ROWS, None
    if is_quantised:
        scale = unit / 200
        spec = replace(ROWS, datatype="INT8")
        values = np.rint(values / scale - 100).clip(-128, 127).astype(np.int8)
        quantisation = Quantisation((), (Quantised("output", scale, -100),))
    proposal = recognise([IMAGE], [spec])
    assert proposal is not None
    found = confirmed(proposal, package_of(values, spec, quantisation))
    if is_quantised and unit > 1:  # nothing is left of scores that share a scale with pixels
        assert found is None
    else:
        assert found is not None and (found.postprocess, found.doubt) == (expected, "")


@pytest.mark.parametrize("step", [0.0, 0.5], ids=["real numbers", "integers inside of the model"])
def test_scores_that_were_integers_with_pixels_are_not_proposed(step: float) -> None:
    values = rows(64)
    if step:
        values = np.rint(values / step).astype(np.float32) * np.float32(step)
    proposal = recognise([IMAGE], [ROWS])
    assert proposal is not None
    assert (confirmed(proposal, package_of(values, ROWS)) is None) == bool(step)
    told = "\n".join(seen("yolov8", values))
    assert ("scores of output are numbers in steps of 0.5" in told) == bool(step)


def test_points_behind_a_score_are_told_from_scores_by_the_sample() -> None:
    spec = TensorSpec("output", "FP32", (1, 4 + 1 + 9, 84))  # a score and three points
    values = rows(64).repeat(2, 1)
    values[:, 2:4] = values[:, 4:6]
    values[:, 5:] = RNG.uniform(0, 64, (1, 9, 84))
    values[:, 4] = RNG.uniform(0, 0.9, 84)
    proposal = recognise([IMAGE], [spec])
    assert proposal is not None and (proposal.postprocess, proposal.sure) == ("yolov8", False)
    found = confirmed(proposal, package_of(values, spec))
    assert found is not None and (found.postprocess, found.doubt) == ("yolov8-pose", "")


def test_a_proposal_says_what_the_sample_has_against_it() -> None:
    values = rows(64)
    values[:, 4:] = 0  # lost in integers of boxes and scores inside of the model
    proposal = recognise([IMAGE], [ROWS])
    assert proposal is not None
    text = str(confirmed(proposal, package_of(values, ROWS)))
    assert text.startswith(f"{replace(proposal, sure=False)}; but no score of the sample is above 0")


@pytest.mark.parametrize(
    ("side", "expected"), [(1, "yolox"), (64, "yolox-decoded")], ids=["offsets", "pixels, as YOLOv6 has them"]
)
def test_of_what_fits_a_shape_the_sample_chooses(side: float, expected: str) -> None:
    spec = TensorSpec("output", "FP32", (1, 84, 7))
    values = np.random.default_rng(4).uniform(0.1, 0.9, spec.shape).astype(np.float32)
    values[..., :4] *= side
    values[..., 4] = 1
    proposal = recognise([IMAGE], [spec])
    assert proposal is not None and proposal.postprocess == "yolox"
    found = confirmed(proposal, package_of(values, spec))
    assert found is not None and (found.preset, found.doubt) == (expected, "")


@pytest.mark.parametrize(("is_whole", "expected"), [(True, "yolov10"), (False, "rtdetr")])
def test_numbers_of_classes_are_whole(expected: str, *, is_whole: bool) -> None:
    spec = TensorSpec("output", "FP32", (1, 300, 6))
    values = np.random.default_rng(4).uniform(0.1, 0.9, spec.shape).astype(np.float32)
    if is_whole:
        values[..., :2] *= 20
        values[..., 2:4] = values[..., :2] + 9
        values[..., 5] = 1
    proposal = recognise([IMAGE], [spec])
    assert proposal is not None and proposal.postprocess == "yolov10"
    found = confirmed(proposal, package_of(values, spec))
    assert found is not None and (found.preset, found.doubt) == (expected, "")


def test_a_proposal_is_tried_on_the_picture_if_there_is_one() -> None:
    proposal = recognise([IMAGE], [ROWS])
    assert proposal is not None
    tried = rows(1)
    tried[:, 4:] /= 10
    package = replace(package_of(rows(64), ROWS), tried={"output": tried})
    found = confirmed(proposal, package)
    assert found is not None and found.postprocess == "yolov8,normalised=true"
    assert found.doubt.startswith("no score of the picture is above 0.25; the best is 0.09")
    opposite = replace(proposal, postprocess="yolov8,normalised=false")
    found = confirmed(opposite, package)
    assert found is not None and found.postprocess == "yolov8,normalised=true"


def test_nothing_is_proposed_for_a_file_that_says_otherwise() -> None:
    """Boxes with an angle: one more value than the names; a loaded bundle has only these."""
    package = package_of(rows(64), ROWS)
    plain = proposed(package)
    assert plain is not None and plain.preset == "yolov8"
    assert proposed(replace(package, exported=Exported(task="obb"))) is None
    named = replace(package, members={**package.members, "labels.txt": b"a\nb\n"})
    assert proposed(named) is None


@pytest.mark.slow
def test_compile_tries_the_postprocess_on_the_picture_and_does_not_keep_it(tmp_path: Path) -> None:
    """The model's outputs are pixels, so that all scores of an even picture are equal."""
    nodes = [
        helper.make_node("Flatten", ["images"], ["flat"]),
        helper.make_node("Slice", ["flat", "first", "last", "axis"], ["part"]),
        helper.make_node("Reshape", ["part", "shape"], ["output"]),
    ]
    x, y = (helper.make_tensor_value_info(each.name, TensorProto.FLOAT, each.shape) for each in (IMAGE, ROWS))
    numbers = {"first": [0], "last": [7 * 84], "axis": [1], "shape": [1, 7, 84]}
    constants = [helper.make_tensor(n, TensorProto.INT64, [len(v)], v) for n, v in numbers.items()]
    graph = helper.make_graph(nodes, "g", [x], [y], constants)
    path, picture = tmp_path / "m.onnx", tmp_path / "grey.png"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    Image.new("RGB", (64, 64), (51, 51, 51)).save(picture)
    options = Options(preprocess="unit", postprocess="yolov8,normalised=true")
    made = []
    for each, words in ((None, ""), (picture, "all scores of the picture are 0.2: the")):
        lines: list[str] = []
        made.append(compile(path, options=replace(options, picture=each), progress=lines.append))
        told = "\n".join(lines)
        assert ("of the picture" in told) == bool(words) and words in told
    assert made[0].members == made[1].members


@pytest.mark.parametrize(("scale", "count"), [(0.3, 1), (1 / 64, 0)])
def test_scores_in_coarse_steps_are_told(scale: float, count: int) -> None:
    declared = postprocess("yolov8", [ROWS], [IMAGE])
    made = np.clip(np.rint(rows(64) / 0.5), 0, 255).astype(np.uint8)
    spec = replace(ROWS, datatype="UINT8")
    lines = look(
        declared, [spec], {"output": made}, (64, 64), {"output": Quantised("output", scale, 0)}, "normalised"
    )
    assert sum("in steps of 0.3" in line for line in lines) == count
