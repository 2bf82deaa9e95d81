"""Rules for outputs' sizes, found from a few sizes; models are replaced by their shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import cast

import pytest

from agent.bundle.tensor_spec import TensorSpec
from builder.compiling import sized_models
from builder.compiling.sized_models import MAX_KEPT_BYTES, SizedModels, input_axes, output_axes
from builder.errors import ShapeError
from builder.importer.bounded_shapes import parse_bounded_shapes, resolve_bounds
from builder.importer.onnx_import import ImportedModel


@pytest.fixture(autouse=True)
def sizes_of_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of `models` has no graph to measure."""
    monkeypatch.setattr(sized_models, "model_bytes", lambda model: model.ByteSize())


def models(
    output: Callable[[int], tuple[int, ...]], text: str, nbytes: int = 1
) -> tuple[SizedModels, list[int]]:
    """Return a model from `x` [1, n] to `y`, and the sizes that it is imported at."""
    asked: list[int] = []

    def load(shapes: Mapping[str, tuple[int, ...]]) -> ImportedModel:
        size = shapes["x"][1]
        asked.append(size)
        fake = SimpleNamespace(
            inputs=(TensorSpec("x", "FP32", (1, size)), TensorSpec("z", "FP32", (3,))),
            outputs=(TensorSpec("y", "FP32", output(size)),),
            onnx=SimpleNamespace(ByteSize=lambda: nbytes),
        )
        return cast(ImportedModel, fake)

    return SizedModels(load, resolve_bounds(parse_bounded_shapes(text), {})), asked


def test_axes_of_outputs_that_follow() -> None:
    sized, asked = models(lambda n: (1, (n - 5) // 4 + 1, 5), "x:[1,20..200]")
    (rule,) = output_axes(sized, [(64,)])
    assert (rule.tensor, rule.axis) == ("y", 1)
    assert all(rule(n) == (n - 5) // 4 + 1 for n in range(20, 201))
    assert len(asked) < 12


def test_sizes_that_no_rule_gives() -> None:
    sized, _ = models(lambda n: (1, n * n), "x:[1,2..9]")
    with pytest.raises(ShapeError, match="output 'y': axis 1 has sizes that no rule gives: 4 at x_1=2"):
        output_axes(sized, [(5,)])


def test_inputs_that_follow_and_what_they_are_padded_with() -> None:
    sized, asked = models(lambda n: (1, n), "x:[1,2..9]")
    (axis,) = input_axes(sized, {"x": ("edge", 0.0)})
    assert (axis.tensor, axis.axis, axis.pad) == ("x", 1, "edge")
    with pytest.raises(ShapeError, match="inputs whose shapes change, 'x', got 'z'"):
        input_axes(sized, {"z": ("edge", 0.0)})
    assert sorted(asked) == [2, 9]


def test_large_models_are_not_kept() -> None:
    sized, asked = models(lambda n: (1, n), "x:[1,2..9]", MAX_KEPT_BYTES)
    for size in (2, 9, 9, 2):
        sized.at((size,))
    assert asked == [2, 9, 2]
