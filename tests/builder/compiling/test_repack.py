"""Repacking: another declaration for the same kernels, weights and samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from agent.bundle.detection import Objects, Part
from agent.bundle.params import dump_params
from agent.bundle.quantisation import Quantisation, Quantised
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import MixAndMatchError
from builder.bundles.package import Package
from builder.compiling.identity import Identity
from builder.compiling.repack import repack
from builder.errors import ModelError
from tests.bundles import FILES, make_manifest

IMAGE = TensorSpec("images", "FP32", (1, 3, 64, 64))
ZEROS = np.zeros((1, 84, 7), np.float32)  # 64 + 16 + 4 cells, 2 classes


def package(values: npt.NDArray[Any] = ZEROS, labels: bytes = b"", **changes: object) -> Package:
    """A bundle whose sample has these values as its output."""
    rows = TensorSpec.from_dtype("output", str(values.dtype), values.shape)
    outputs = dump_params([(replace(rows, name="0/output"), np.ascontiguousarray(values).data)])
    members = {**FILES, "samples/inputs.params": b"in", "samples/outputs.params": outputs}
    members |= {"labels.txt": labels} if labels else {}
    return Package(make_manifest(members, inputs=(IMAGE,), outputs=(rows,), **changes), members)


def test_declarations_and_labels_change_and_the_rest_stays() -> None:
    old = package()
    new = repack(
        old,
        identity=Identity("other", "2.0.0", 7),
        preprocess="yolox",
        postprocess="yolox",
        labels=["a", "b"],
    )
    manifest = new.manifest
    assert (manifest.name, manifest.version, manifest.security_counter) == ("other", "2.0.0", 7)
    assert manifest.preprocess is not None
    assert (manifest.preprocess.pad, manifest.preprocess.position) == (114, "top_left")
    assert new.members == {**old.members, "labels.txt": b"a\nb\n"}
    assert new.signature is None
    assert set(manifest.files) == set(new.members)
    unchanged = {"name", "version", "security_counter", "preprocess", "postprocess", "files"}
    for field in set(manifest.__slots__) - unchanged:
        assert getattr(manifest, field) == getattr(old.manifest, field), field


def test_labels_are_kept_while_they_fit_and_none_removes() -> None:
    labelled = repack(package(), postprocess="yolox", labels=["a", "b"])
    assert repack(labelled, postprocess="yolox,score_threshold=0.5").members == labelled.members
    with pytest.raises(
        ModelError, match="the bundle's labels: expected a postprocess that names classes"
    ) as caught:
        repack(labelled, postprocess="none")
    assert caught.value.hint == "add --labels FILE, or --labels none"
    bare = repack(labelled, postprocess="none", labels="none", preprocess="none")
    assert (bare.manifest.postprocess, bare.manifest.preprocess) == (None, None)
    assert "labels.txt" not in bare.members


def test_poses_are_read_with_the_bundle_s_classes_and_the_options_of_a_proposal() -> None:
    made = package(np.zeros((1, 4 + 2 + 2 * 5, 84), np.float32), b"cat\ndog\n")
    new = repack(made, postprocess="yolov8-pose,keypoint_values=2")
    assert new.manifest.postprocess is not None
    [step] = new.manifest.postprocess.steps
    assert isinstance(step, Objects)
    assert (step.scores[0].count, step.keypoints[0], step.keypoint_values) == (2, Part("output", 6, 10), 2)


def test_nothing_given_keeps_all_but_counter_and_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1234")
    old = replace(package(), signature=b"signature")
    new = repack(old)
    assert new.manifest == replace(old.manifest, security_counter=1234)
    assert new.signature is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"postprocess": "yolov5"}, "postprocess yolov5: expected"),
        ({"postprocess": "yolox", "labels": ["a"]}, "labels: expected 2 labels for output, got 1"),
        ({"labels": ["a", "b"]}, "labels: expected a postprocess that names classes, got none"),
        ({"identity": Identity("Not a name")}, "name: expected"),
        ({"preprocess": "imagnet"}, "unknown preset 'imagnet'"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        repack(package(), **changes)  # type: ignore[arg-type]


def test_a_bundle_whose_files_were_changed_is_refused() -> None:
    old = package()
    changed = replace(old, members={**old.members, "mod.so": b"other"})
    with pytest.raises(MixAndMatchError):
        repack(changed)


def test_boxes_in_other_units_than_the_sample_s_are_refused() -> None:
    fractions = np.random.default_rng(0).random((1, 6, 84)).astype(np.float32)
    with pytest.raises(ModelError, match="expected boxes as pixels of an input of 64 x 64") as caught:
        repack(package(fractions), postprocess="yolov8")
    assert "normalised=true" in (caught.value.hint or "")
    told: list[str] = []
    for declared in ("yolov8,normalised=true", "yolov8,normalised=false"):
        repack(package(fractions), postprocess=declared, progress=told.append)
    repack(package(np.array([64, 64, 9, 9, 1, 1], np.float32)[:, None] * fractions), postprocess="yolov8")


@pytest.mark.parametrize("datatype", ["float32", "uint8", "int8"])
def test_a_softmax_of_scores_is_told(datatype: str) -> None:
    scores = np.array([[0.9, 0.1, 0.0]])
    zero = -128 if datatype == "int8" else 0
    values = scores if datatype == "float32" else np.rint(scores * 255) + zero
    scales = None if datatype == "float32" else Quantisation((), (Quantised("output", 1 / 256, zero),))
    made = package(values.astype(datatype), quantisation=scales)
    told: list[str] = []
    repack(made, postprocess="top3", progress=told.append)
    assert not told
    repack(made, postprocess="softmax,top3", progress=told.append)
    [line] = told
    assert "leave out softmax" in line


def test_logits_without_a_softmax_are_told() -> None:
    told: list[str] = []
    logits = package(np.array([[7.0, -3.0, 0.5]], np.float32))
    repack(logits, postprocess="softmax,top3", progress=told.append)
    assert not told
    repack(logits, postprocess="top3", progress=told.append)
    assert "add softmax" in told[0]
