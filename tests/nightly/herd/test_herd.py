"""A small `make herd`: its verdict detects a rush, and a small fleet comes back to a real mosquitto."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.nightly.herd.restart import Result, restart_under
from tests.patience import PATIENCE_S

GOOD = Result(10, 30, 1.0, (100, 150), (0.1, 0.2, 0.3), 29.0, 1.0, 0.0)


@pytest.mark.parametrize(
    "bad",
    [
        replace(GOOD, opened_s=tuple(10 + number / 200 for number in range(160))),
        replace(GOOD, back_s=30.1),
        replace(GOOD, back_s=None),
    ],
)
def test_rush_and_late_fleet_are_detected(bad: Result) -> None:
    assert GOOD.passed()
    assert not bad.passed()


@pytest.mark.slow
async def test_fleet_comes_back_once_each_within_its_spread(tmp_path: Path) -> None:
    result = await restart_under(30, tmp_path, spread_s=2.0, away_s=0.5, has_groups=True)
    assert result.back_s is not None
    # It takes 3 s. On a busy machine a connection may need a second try, which waits longer.
    assert result.back_s < PATIENCE_S
    # One socket for each connection: no probes, and no agent connects twice.
    assert len(result.opened_s) == result.connections == 90
    # Without slots all of them are there in the first second.
    assert result.busiest < 90
