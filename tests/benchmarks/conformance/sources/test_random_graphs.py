"""A sample of random graphs, as `make conformance` runs a thousand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.conformance.case import Case, read, write
from benchmarks.conformance.sources import random_graphs
from benchmarks.conformance.trial import try_case
from benchmarks.conformance.verdict import REFUSED, RIGHT


def made(seed: int, folder: Path) -> Case:
    folder.mkdir(exist_ok=True)
    write(folder / "case", random_graphs.make(seed, folder))
    return read(folder / "case")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1006))
def test_a_random_graph_is_right_or_refused(seed: int, tmp_path: Path) -> None:
    case = made(seed, tmp_path)
    verdict = try_case(case)
    assert verdict.kind in (RIGHT, REFUSED), (case.operator, verdict)
    assert "our own comparison" not in verdict.reason, (case.operator, verdict)


def test_a_seed_makes_its_graph_again(tmp_path: Path) -> None:
    one, other = (made(7, tmp_path / name) for name in "ab")
    assert one.model.read_bytes() == other.model.read_bytes()
    assert one.operator == other.operator
    assert len(one.operator.split()) > 1
    for array, again in zip(one.outputs, other.outputs, strict=True):
        np.testing.assert_array_equal(array, again)


def test_graphs_have_many_operators(tmp_path: Path) -> None:
    seen = {
        operator for seed in range(40) for operator in random_graphs.make(seed, tmp_path).operator.split()
    }
    assert len(seen) > 40
    assert {"Conv", "Transpose", "MatMul", "Slice"} <= seen
