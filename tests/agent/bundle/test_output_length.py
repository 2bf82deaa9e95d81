"""Lengths of outputs in a manifest."""

from __future__ import annotations

import pytest

from agent.bundle.output_length import OutputLength, answered, check_lengths, shortest
from agent.bundle.tensor_spec import TensorSpec

OUTPUTS = (
    TensorSpec("boxes", "FP32", (1, 300, 4)),
    TensorSpec("mean", "FP32", (4,)),
    TensorSpec("n", "INT64", (1,)),
    TensorSpec("half", "INT32", (1,)),
)
BOXES = OutputLength("boxes", 1, "n")


def test_lengths_that_fit() -> None:
    check_lengths((BOXES, OutputLength("mean", 0, "n")), OUTPUTS, frozenset({"boxes"}))
    assert [spec.name for spec in answered(OUTPUTS, (BOXES,))] == ["boxes", "mean", "half"]
    assert answered(OUTPUTS, ()) == OUTPUTS


def test_a_computed_length_may_be_nothing() -> None:
    kept = answered(OUTPUTS, (BOXES,))
    assert shortest(kept, (BOXES, OutputLength("mean", 0, "n"))) == ((1, 0, 4), (0,), (1,))


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((), "expected at least one"),
        ((BOXES, BOXES), "each axis once"),
        ((OutputLength("scores", 0, "n"),), "'scores', which does not exist"),
        ((OutputLength("boxes", 0, "count"),), "'count', which does not exist"),
        ((OutputLength("mean", 1, "n"),), "has no axis 1"),
        ((OutputLength("boxes", 1, "half"),), r"expected a length as INT64\[1\]"),
        ((OutputLength("n", 0, "n"),), "is a length itself"),
    ],
)
def test_lengths_that_do_not_fit(lengths: tuple[OutputLength, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_lengths(lengths, OUTPUTS, frozenset())


def test_a_postprocess_cannot_read_a_length() -> None:
    with pytest.raises(ValueError, match="which is a length"):
        check_lengths((BOXES,), OUTPUTS, frozenset({"n"}))


def test_an_axis_is_not_negative() -> None:
    with pytest.raises(ValueError, match="expected 0 to 15"):
        OutputLength("boxes", -1, "n")
