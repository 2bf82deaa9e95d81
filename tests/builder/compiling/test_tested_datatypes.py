"""The table in docs/your-detector.md: in which datatypes each preset's outputs were tested.

What is proposed is in the table, and where the table says no, `compile` does not propose the preset.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.bundle.detection import ABSOLUTE, Objects
from agent.bundle.processing import Postprocess, Step
from agent.bundle.quantisation import Quantised
from agent.bundle.tensor_spec import TensorSpec
from agent.runtime.postprocess import Postprocessor
from builder.compiling import recognition
from builder.compiling.hints import Hints
from builder.compiling.output_presets import step_of
from builder.compiling.recognition import recognise
from builder.compiling.signature import Signature
from tests.builder.compiling.test_output_presets import (
    BOXES,
    FAMILIES,
    HEIGHT,
    PLACEMENT,
    SCORES,
    WIDTH,
    Outputs,
    signature,
)

PAGE = Path(__file__).parents[3] / "docs/your-detector.md"
INTEGERS = ("int8", "uint8")
# In pixels of the picture, whose largest side is 152, in 1/256 of it; and in scores.
MOST_PIXELS, MOST_SCORE = 0.6, 0.02
YES, FRACTIONS, NO = "yes", "as fractions", "no"


def quantised(outputs: Outputs, dtype: str) -> tuple[dict[str, np.ndarray], dict[str, Quantised]]:
    """Return outputs as integers of the whole range but two, so that zero points are odd numbers."""
    limits = np.iinfo(dtype)
    integers, scales = {}, {}
    for name, values in outputs.items():
        low, high = min(values.min(), 0.0), max(values.max(), 0.0)
        scale = float(np.float32((high - low or 1.0) / 253))
        zero = int(np.rint(limits.min + 1 - low / scale))
        integers[name] = np.clip(np.rint(values / scale) + zero, limits.min, limits.max).astype(dtype)
        scales[name] = Quantised(name, scale, zero)
    return integers, scales


def fractions(step: Objects, outputs: Outputs) -> tuple[Objects, Outputs]:
    """Return the same objects in fractions of the model's input."""
    made = {name: values.copy() for name, values in outputs.items()}
    for parts, size in ((step.boxes, 4), (step.keypoints, step.keypoint_values)):
        for part in parts:
            values = made[part.output]
            rows = values[0].T if step.transposed else values.reshape(-1, values.shape[-1])
            for place in range(part.count):
                if size == 4 or place % size < 2:
                    rows[:, part.first + place] /= (WIDTH, HEIGHT)[place % size % 2]
    return replace(step, normalised=True), made


def is_right(step: Step, outputs: Outputs, dtype: str) -> bool:
    """Return whether the known objects come out."""
    scales: Mapping[str, Quantised] = {}
    if dtype in INTEGERS:
        given, scales = quantised(outputs, dtype)
    else:
        given = {name: values.astype(dtype) for name, values in outputs.items()}
    specs = [TensorSpec.from_dtype(name, str(value.dtype), value.shape) for name, value in given.items()]
    found: Any = Postprocessor(Postprocess((step,)), specs, (), scales)(given, PLACEMENT)
    if len(found["boxes"]) != len(BOXES):
        return False
    expected = ((BOXES - [8, 0, 8, 0]) / 2).clip(0, [152, 128, 152, 128])
    near = np.abs(found["boxes"] - expected).max() < MOST_PIXELS
    return bool(near and np.abs(found["scores"] - SCORES).max() < MOST_SCORE)


def verdict(family: str) -> str:
    """Return what the table has to say about a family's outputs as integers."""
    preset, outputs, _, _ = FAMILIES[family]
    step = step_of(preset, Signature.of(*signature(outputs)))
    if all(is_right(step, outputs, dtype) for dtype in INTEGERS):
        return YES
    if isinstance(step, Objects) and step.coding in ABSOLUTE and not step.normalised:
        step, outputs = fractions(step, outputs)
        if all(is_right(step, outputs, dtype) for dtype in INTEGERS):
            return FRACTIONS
    return NO


def table() -> dict[str, tuple[str, str]]:
    """Preset -> what the page says about floats and about integers."""
    lines = PAGE.read_text().partition("## What was tested")[2].partition("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    return {name: (row[1], row[2]) for row in rows for name in re.findall(r"`([^`]+)`", row[0])}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_says_what_was_tested(family: str) -> None:
    preset, outputs, _, _ = FAMILIES[family]
    step = step_of(preset, Signature.of(*signature(outputs)))
    floats, integers = table()[preset]
    assert all(is_right(step, outputs, dtype) for dtype in ("float32", "float16")) == (floats == YES)
    if family in ("NanoDet", "NanoDet-Plus"):  # one output, whose scores share a scale with distances
        assert verdict(family) == NO
    else:
        assert integers == verdict(family)


@pytest.mark.parametrize("dtype", ["float32", "float16", *INTEGERS])
@pytest.mark.parametrize("preset", ["segmentation", "embedding", "ctc"])
def test_maps_vectors_and_texts_are_the_same_in_every_datatype(preset: str, dtype: str) -> None:
    shape = {"segmentation": (1, 4, 8, 8), "embedding": (1, 32), "ctc": (1, 12, 5)}[preset]
    exact = {"y": np.random.default_rng(5).permutation(np.linspace(-1, 1, np.prod(shape))).reshape(shape)}
    step = step_of(preset, Signature.of([TensorSpec("x", "FP32", (1, 3, 8, 8))], signature(exact)[1]))
    given, scales = ({"y": exact["y"].astype(dtype)}, {}) if dtype[0] == "f" else quantised(exact, dtype)
    specs = [TensorSpec.from_dtype("y", dtype, shape)]
    characters = tuple(b"abcd") if preset == "ctc" else ()
    labels = tuple(bytes([each]) for each in characters)
    found: Any = Postprocessor(Postprocess((step,)), specs, labels, scales)(given)
    wanted: Any = Postprocessor(Postprocess((step,)), signature(exact)[1], labels)(
        {"y": exact["y"].astype(np.float32)}
    )
    name = {"segmentation": "class_map", "embedding": "y", "ctc": "text"}[preset]
    if preset == "embedding":
        np.testing.assert_allclose(found[name], wanted[name], atol=2e-3)
    else:
        assert np.array_equal(found[name], wanted[name])
    assert table()[preset] == (YES, YES)


def test_what_is_proposed_is_in_the_table() -> None:
    tree = ast.parse(Path(recognition.__file__).read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) == 5]
    proposed = {
        call.args[3].value
        for call in calls
        if isinstance(call.func, ast.Name)
        and call.func.id == "Proposal"
        and isinstance(call.args[3], ast.Constant)
    }
    assert len(proposed) > 15
    assert {str(name) for name in proposed if not str(name).startswith(("softmax", "top"))} <= set(table())


@pytest.mark.parametrize("family", [name for name, row in FAMILIES.items() if row[3]])
def test_what_was_not_tested_is_not_proposed(family: str) -> None:
    preset, outputs, _, expected = FAMILIES[family]
    inputs, specs = signature(outputs)
    _, scales = quantised(outputs, "uint8")
    specs = [replace(spec, datatype="UINT8") for spec in specs]
    hints = Hints(steps={name: each.scale for name, each in scales.items()})
    proposal = recognise(inputs, specs, hints)
    step = step_of(preset, Signature.of(inputs, specs))
    if is_right(step, outputs, "uint8"):
        assert proposal is not None and proposal.postprocess == expected
    else:
        assert proposal is None
