"""Lengths that are only known at run time, in models whose inputs change in size, too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from agent.runtime.lengths import cut
from builder.errors import ShapeError
from builder.importer import import_onnx
from builder.importer.bounded.widening import capacities, widened
from builder.running.local_run import Runner
from tests import changing_models

# The best boxes among any number of them: at most 3 of a class, and at most 4 in all.
DETECTOR = """<ir_version: 8, opset_import: ["" : 17]> g (float[1,n,4] boxes, float[1,2,n] scores)
=> (int64[m,3] chosen, float[k] best) {
    three = Constant<value_ints = [3]>() overlap = Constant<value_floats = [0.5]>()
    least = Constant<value_floats = [0.1]>() flat = Constant<value_ints = [-1]>()
    chosen = NonMaxSuppression(boxes, scores, three, overlap, least)
    above = Greater(scores, least) all = Reshape(scores, flat) marks = Reshape(above, flat)
    some = Compress(all, marks) size = Shape(some) four = Constant<value_ints = [4]>()
    count = Min(size, four) best, where = TopK(some, count)
}"""
SIZES = (2, 6, 12)


def model() -> onnx.ModelProto:
    return onnx.parser.parse_model(DETECTOR)


def at(size: int) -> dict[str, tuple[int, ...]]:
    return {"boxes": (1, size, 4), "scores": (1, 2, size)}


def feeds(size: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    corners = rng.random((1, size, 2))
    boxes = np.concatenate([corners, corners + rng.random((1, size, 2))], axis=2)
    return {
        "boxes": boxes.astype(np.float32),
        "scores": (rng.random((1, 2, size)) ** 3).astype(np.float32),
    }


def reference(inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    found: list[np.ndarray] = ort.InferenceSession(model().SerializeToString()).run(None, inputs)
    return found


def test_widened_outputs_say_the_same() -> None:
    wanted = capacities(import_onnx(model(), input_shapes=at(SIZES[-1])))
    small = import_onnx(model(), input_shapes=at(2))
    wide = widened(small, wanted)
    assert [spec.shape for spec in small.outputs[:2]] == [(4, 3), (4,)]
    assert [spec.shape for spec in wide.outputs[:2]] == [(6, 3), (4,)]
    assert wide.lengths == small.lengths
    session = ort.InferenceSession(wide.onnx.SerializeToString())
    inputs = feeds(2, 0)
    names = [spec.name for spec in wide.outputs]
    values = dict(zip(names, session.run(None, inputs), strict=True))
    for got, expected in zip(cut(values, values, wide.lengths).values(), reference(inputs), strict=True):
        assert np.array_equal(np.asarray(got), expected)


def test_a_length_at_some_sizes_only_is_refused() -> None:
    small = import_onnx(model(), input_shapes=at(2))
    with pytest.raises(ShapeError, match="'best': its length is only known at run time at some sizes"):
        widened(small, {length: 1 for length in small.lengths if length.output != "best"})


@pytest.mark.slow
def test_a_bundle_of_buckets_answers_as_the_exact_size(tmp_path: Path) -> None:
    bounds = f"boxes:[1,n={SIZES[0]}..{SIZES[-1]},4] scores:[1,2,n]"
    package = changing_models.compiled(model(), tmp_path, bounds, buckets={"": SIZES[1:]})
    assert package.manifest.buckets is not None
    assert not package.manifest.buckets.outputs
    assert {length.output for length in package.manifest.lengths or ()} == {"chosen", "best"}
    runner = Runner(package)
    lengths = set()
    for size in range(SIZES[0], SIZES[-1] + 1):
        for seed in range(3):
            inputs = feeds(size, seed)
            expected = reference(inputs)
            lengths.add(len(expected[0]))
            for got, wanted in zip(runner(inputs).outputs.values(), expected, strict=True):
                assert np.array_equal(got, wanted), (size, seed)
    assert len(lengths) > 3
