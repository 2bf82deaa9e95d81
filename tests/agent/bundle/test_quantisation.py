from __future__ import annotations

import math
from typing import Any

import pytest

from agent.bundle.processing import ClassMap, Postprocess, TopK
from agent.bundle.quantisation import Quantisation, Quantised
from tests.bundles import make_manifest

SCALES = Quantised("scores", 0.5, 3)


@pytest.mark.parametrize(
    ("scale", "zero"), [(0.0, 0), (-1.0, 0), (math.nan, 0), (math.inf, 0), (1.0, 1 << 31)]
)
def test_a_scale_that_is_none_is_refused(scale: float, zero: int) -> None:
    with pytest.raises(ValueError, match="quantisation"):
        Quantised("x", scale, zero)


@pytest.mark.parametrize(
    ("quantisation", "words"),
    [
        (Quantisation((Quantised("other", 1.0, 0),)), "no such tensor"),
        (Quantisation((Quantised("image", 1.0, 0),)), "got FP32"),
        (Quantisation((), (SCALES, SCALES)), "an output is named twice"),
    ],
)
def test_scales_of_other_tensors_are_refused(quantisation: Quantisation, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        manifest(quantisation=quantisation)


def manifest(**changes: Any) -> Any:
    from agent.bundle.tensor_spec import TensorSpec

    return make_manifest(
        inputs=(TensorSpec("image", "FP32", (1, 3, 4, 4)),),
        outputs=(TensorSpec("scores", "INT8", (1, 10)), TensorSpec("map", "INT8", (1, 3, 4, 4))),
        **changes,
    )


def test_the_outputs_that_a_step_reads_are_made_real() -> None:
    quantisation = Quantisation((), (SCALES, Quantised("map", 0.1, 0)))
    steps = (TopK("scores", 2), ClassMap("map"))
    assert manifest(quantisation=quantisation).real_outputs == {}
    found = manifest(quantisation=quantisation, postprocess=Postprocess(steps))
    assert found.real_outputs == {"scores": SCALES}
    assert type(found).from_bytes(found.to_bytes()) == found
