"""`compile` in Python does what `edgebundle compile` does, with one object of options."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from builder import Identity, Options, compile, load
from builder.cli import main
from builder.errors import ShapeError
from tests import changing_models
from tests.builder.quantising.test_precisions import WIDTH, layers

SHAPES = f"x:[4,{WIDTH}]"
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "int8": (
        {
            "input_shapes": {"x": (4, WIDTH)},
            "precision": "int8",
            "calibration": "data.npz",
            "max_drop": 100.0,
        },
        ["--input-shapes", SHAPES, "--calibration", "data.npz", "--precision", "int8", "--max-drop", "100"],
    ),
    "weights in buckets": (
        {"input_shapes": {"x": ("n=1..4", WIDTH)}, "precision": "weights-int8", "buckets": {"n": (2, 4)}},
        ["--input-shapes", f"x:[n=1..4,{WIDTH}]", "--precision", "weights-int8", "--buckets", "n=2,4"],
    ),
    "float16": (
        {"input_shapes": SHAPES, "precision": "fp16"},
        ["--input-shapes", SHAPES, "--precision", "fp16"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_options_and_flags_make_the_same_bundle(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    onnx.save(layers(), "layers.onnx")
    np.savez("data.npz", x=np.random.default_rng(0).standard_normal((32, WIDTH)).astype(np.float32))
    options, flags = CASES[case]
    package = compile("layers.onnx", "rpi5", Options(**options), identity=Identity(name="layers"))
    package.save("python.bundle")
    assert main(["compile", "layers.onnx", "--target", "rpi5", "-q", *flags]) == 0
    assert Path("python.bundle").read_bytes() == Path("layers.bundle").read_bytes()
    assert package.quantisation is not None
    assert package.quantisation.lines()


def test_bounds_need_a_path_because_the_model_is_imported_at_each_size(tmp_path: Path) -> None:
    onnx.save(changing_models.rows(), tmp_path / "rows.onnx")
    model = load(tmp_path / "rows.onnx", input_shapes={"x": (4, 3)})
    with pytest.raises(ShapeError, match="expected a path for shapes with bounds, got an imported model"):
        compile(model, options=Options(input_shapes={"x": ("1..4", 3)}))


def test_compile_has_at_most_eight_parameters() -> None:
    assert len(inspect.signature(compile).parameters) <= 8
