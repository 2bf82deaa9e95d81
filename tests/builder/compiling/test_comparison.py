"""What is not looked at in a sample is said."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agent.bundle.processing import Postprocess
from agent.bundle.tensor_spec import TensorSpec
from builder.compiling.comparison import look_at_sample
from builder.compiling.output_presets import step_of
from builder.compiling.signature import Signature
from builder.importer.edge_scales import NO_SCALES

IMAGE = TensorSpec("image", "FP32", (1, 3, 64, 64))
ROWS = TensorSpec("output", "FP32", (1, 7, 84))
STEP = step_of("yolov8", Signature.of([IMAGE], [ROWS]))


def told(inputs: list[TensorSpec], lengths: tuple[Any, ...] = (), *, declares: bool = True) -> list[str]:
    """Return the lines about a detector with plausible boxes and scores."""
    made = np.zeros((1, 7, 84), np.float32)
    made[0, :4] = np.array([32, 32, 20, 20])[:, None]
    made[0, 4] = np.linspace(0.1, 0.9, 84)
    model: Any = SimpleNamespace(inputs=inputs, outputs=[ROWS], lengths=lengths, scales=NO_SCALES)
    lines: list[str] = []
    compared: Any = SimpleNamespace(samples=[made])
    look_at_sample(model, Postprocess((STEP,)) if declares else None, compared, "yolov8", lines.append)
    return lines


def test_a_plausible_sample_says_nothing() -> None:
    assert told([IMAGE]) == []


@pytest.mark.parametrize(
    ("inputs", "lengths", "words"),
    [
        ([IMAGE, replace(IMAGE, name="depth")], (), "no single input takes one"),
        ([IMAGE], ("count",), "was not tried on the sample"),
    ],
    ids=["two pictures", "lengths"],
)
def test_what_was_not_looked_at_is_told(inputs: list[TensorSpec], lengths: Any, words: str) -> None:
    [line] = told(inputs, lengths)
    assert words in line
    assert told(inputs, lengths, declares=False) == []
