"""Operators with odd extents take no more steps than smooth ones; with a broken tile they would."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.odd.steps import CASES, WORST, Variant, factors
from tests.needs import missing_to_count

# CI has all of them; elsewhere the test is skipped, and the reason names the missing ones.
MISSING = missing_to_count()


def narrowest(name: str, values: Sequence[int], default: int) -> int:
    """Decide as if nothing but 1 divided an odd extent: register tiles of one vector by one column."""
    del name, default
    return min(values)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="runs this Python on an emulated x86-64 core")
@pytest.mark.skipif(bool(MISSING) and "CI" not in os.environ, reason=MISSING)
def test_odd_extents_cost_no_more_than_smooth_ones_unless_the_tile_is_broken(tmp_path: Path) -> None:
    sound = [Variant(operator) for operator in CASES]
    broken = [Variant(operator, narrowest) for operator in CASES if operator.kind in ("conv1x1", "matmul")]
    found = factors([*sound, *broken], tmp_path)
    named = {str(operator): factor for operator, factor in zip(CASES, found, strict=False)}
    assert {name: factor for name, factor in named.items() if factor > WORST} == {}
    assert min(found[len(sound) :]) > 1.5 * WORST
