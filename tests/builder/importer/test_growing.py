"""Caches that grow get a capacity, and the model says the same as with caches of any length."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from builder.errors import ShapeError
from builder.importer.bounded_shapes import parse_bounded_shapes
from builder.importer.growing import load_growing
from builder.importer.onnx_import import ImportedModel
from tests.streaming_models import decoded, decoder

CAPACITY = 6
SHAPES = f"past.key:[1,0..{CAPACITY},8]"
STATES = ("past.*:present.*",)


def load(
    folder: Path,
    model: onnx.ModelProto,
    shapes: str = SHAPES,
    *,
    states: tuple[str, ...] = STATES,
    fill: bool = True,
) -> tuple[ImportedModel, tuple[str, ...]]:
    path = folder / "decoder.onnx"
    onnx.save(model, str(path))
    return load_growing(
        path, parse_bounded_shapes(shapes), states, {"mask": 1} if fill else {}, progress=lambda _: None
    )


def test_each_step_is_that_of_caches_of_any_length(tmp_path: Path) -> None:
    model, states = load(tmp_path, decoder())
    assert states == (
        "past.key:present.key",
        "past.value:present.value",
        f"edgebundle/cache/{CAPACITY}:edgebundle/cache/{CAPACITY}/next",
    )
    assert [(spec.name, spec.shape) for spec in model.inputs] == [
        ("ids", (1, 1)),
        ("past.key", (1, CAPACITY, 8)),
        ("past.value", (1, CAPACITY, 8)),
        (f"edgebundle/cache/{CAPACITY}", (1,)),
    ]
    assert not model.lengths
    session = ort.InferenceSession(model.onnx.SerializeToString())
    names = [spec.name for spec in model.outputs]
    pairs = [state.split(":") for state in states]
    kept = {spec.name: np.zeros(spec.shape, spec.dtype) for spec in model.inputs[1:]}
    ids = [3, 1, 4, 1, 5, 9]
    for step, (token, wanted) in enumerate(zip(ids, decoded(decoder(), ids), strict=True)):
        made = dict(zip(names, session.run(None, {"ids": np.array([[token]]), **kept}), strict=True))
        np.testing.assert_allclose(made["logits"], wanted, rtol=1e-5, atol=1e-5)
        kept = {before: made[after] for before, after in pairs}
        assert kept[f"edgebundle/cache/{CAPACITY}"] == [step + 1]
        # Behind the end, caches are zero: what is there never counts.
        assert not kept["past.key"][:, step + 1 :].any()
        for name in ("past.key", "past.value"):
            kept[name][:, step + 1 :] = np.nan


def test_the_length_counts_beyond_the_capacity(tmp_path: Path) -> None:
    """So that a device can refuse the step."""
    model, _ = load(tmp_path, decoder())
    session = ort.InferenceSession(model.onnx.SerializeToString())
    full = {spec.name: np.ones(spec.shape, spec.dtype) for spec in model.inputs}
    full[f"edgebundle/cache/{CAPACITY}"] *= CAPACITY
    made = dict(zip([spec.name for spec in model.outputs], session.run(None, full), strict=True))
    assert made[f"edgebundle/cache/{CAPACITY}/next"] == [CAPACITY + 1]


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ("past.key:[1,1..6,8]", "expected bounds from 0 beside a state, got 1..6"),
        ("past.key:[1,0..6,8] past.value:[1,0..7,8]", r"one largest length of all caches, got \[6, 7\]"),
        ("ids:[1,1]", r"one largest length of all caches, got \[\]"),
        ("past.key:[0..6,0..6,8]", "'past.key': expected one axis that grows"),
        ("past:[1,0..6,8]", "expected ids, mask, past.key, past.value, got 'past'"),
        ("past.key:[1,0..6]", "expected 3 dimensions, got 'past.key' with 2"),
    ],
)
def test_shapes_that_do_not_fit(tmp_path: Path, shapes: str, words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        load(tmp_path, decoder(), shapes)


def test_a_state_that_does_not_grow(tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match="a state whose input has bounds from 0, got none"):
        load(tmp_path, decoder(), states=("ids:logits",))


def test_an_input_that_grows_needs_a_value(tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match="'mask' grows with the caches") as caught:
        load(tmp_path, decoder(), fill=False)
    assert caught.value.hint == "for an attention mask, --input-values mask=1"
