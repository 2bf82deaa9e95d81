"""Outputs are cut to the lengths that were computed beside them."""

from __future__ import annotations

import numpy as np
import pytest

from agent.bundle.detection import Objects, Part
from agent.bundle.output_length import OutputLength
from agent.bundle.processing import Softmax
from agent.runtime.lengths import cut, cut_objects
from agent.runtime.postprocess import Value

LENGTHS = (OutputLength("pairs", 1, "n"), OutputLength("pairs", 0, "m"), OutputLength("flat", 0, "n"))


def outputs(n: int, m: int = 2) -> dict[str, np.ndarray]:
    return {
        "pairs": np.arange(12).reshape(3, 4),
        "flat": np.arange(4.0),
        "whole": np.ones(5),
        "n": np.array([n]),
        "m": np.array([m]),
    }


@pytest.mark.parametrize(("n", "kept"), [(0, 0), (3, 3), (4, 4), (9, 4), (-1, 0)])
def test_a_length_from_the_graph_is_kept_within_its_capacity(n: int, kept: int) -> None:
    values = outputs(n)
    answer = {name: np.asarray(value) for name, value in cut(values, values, LENGTHS).items()}
    assert list(answer) == ["pairs", "flat", "whole"]
    assert np.array_equal(answer["pairs"], values["pairs"][:2, :kept])
    assert np.array_equal(answer["flat"], values["flat"][:kept])
    assert answer["pairs"].flags.c_contiguous


def test_what_a_postprocess_made_stays_whole() -> None:
    made: dict[str, Value] = {"scores": np.ones(2), "flat": (b"cat", b"dog", b"cow")}
    assert cut(made, outputs(1), LENGTHS) == made


def test_a_detector_gets_no_row_of_the_padding() -> None:
    step = Objects(boxes=(Part("pairs", 0, 4),), coding="corners", scores=(Part("flat", 0, 1),))
    values = outputs(3)
    shorter = cut_objects(values, LENGTHS, [Softmax("whole"), step])
    assert list(shorter) == list(values)
    assert np.array_equal(shorter["pairs"], values["pairs"][:2, :3])
    assert np.array_equal(shorter["flat"], values["flat"][:3])
    assert shorter["whole"] is values["whole"]
    assert cut_objects(values, LENGTHS, [Softmax("flat")]) is values
