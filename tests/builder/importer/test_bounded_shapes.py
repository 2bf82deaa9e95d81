from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from builder.errors import ShapeError
from builder.importer.bounded_shapes import (
    Bounds,
    declared_dims,
    has_bounds,
    parse_bounded_shapes,
    resolve_bounds,
)
from tests import changing_models


def test_bounds_with_and_without_a_name() -> None:
    assert parse_bounded_shapes("ids:[1,s=1..512] mask:[1,s], x:[1..8, 3]") == {
        "ids": (1, Bounds("s", 1, 512)),
        "mask": (1, "s"),
        "x": (Bounds("", 1, 8), 3),
    }
    assert has_bounds("a:[1,1..2]")
    assert not has_bounds("a:[1,2]")
    assert not has_bounds(None)


@pytest.mark.parametrize(
    "dim",
    [
        "4..1",
        "..4",
        "1..",
        "-1..4",
        "1...4",
        "s=",
        "s=4",
        "=1..2",
        "1..99999999999",
        "a b",
        "1..2..3",
    ],
)
def test_bounds_without_sense(dim: str) -> None:
    with pytest.raises(ShapeError, match=r"input 'x', got|two for 'x'"):
        parse_bounded_shapes(f"x:[1,{dim}]")


def test_a_dimension_takes_the_name_that_it_has_in_the_model(tmp_path: Path) -> None:
    onnx.save(changing_models.attention(), str(tmp_path / "m.onnx"))
    declared = declared_dims(tmp_path / "m.onnx")
    shapes = resolve_bounds(parse_bounded_shapes("ids:[1,1..9]"), declared)
    assert shapes.dimensions == (Bounds("sequence", 1, 9),)
    assert shapes.at((5,)) == {"ids": (1, 5)}
    assert resolve_bounds(parse_bounded_shapes("ids:[1,1..9]"), {}).dimensions[0].name == "ids_1"
    assert declared_dims(tmp_path / "none.onnx") == declared_dims("model.tflite") == {}


def test_names_must_have_one_range() -> None:
    for text, message in (
        ("ids:[1,s]", "bounds for 's', got none"),
        ("a:[s=1..2] b:[s=1..3]", r"one range, got 1\.\.2 and 1\.\.3"),
        ("a:[p=1..2,q=1..2,r=1..2,s=1..2,t=1..2]", "at most 4 dimensions"),
    ):
        with pytest.raises(ShapeError, match=message):
            resolve_bounds(parse_bounded_shapes(text), {})
