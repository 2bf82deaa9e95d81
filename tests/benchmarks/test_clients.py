"""The client costs little more than the connection below it, over a broker as Debian configures it."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from benchmarks.clients import ASYNC, BARE, SYNC, measure


@pytest.mark.slow
def test_answer_costs_what_the_device_costs(tmp_path: Path) -> None:
    """By the lower quartile of turns: a round trip that waits for a delayed acknowledgement takes 44 ms."""
    trips = measure(tmp_path, 60, 0.005, foreign=False)
    names = (BARE, SYNC, ASYNC)
    bare, threaded, plain = (
        statistics.quantiles([trip.seconds for trip in trips[name]], n=4)[0] for name in names
    )
    assert 0.005 < bare < 0.04
    assert plain <= 1.2 * bare
    assert threaded <= 1.2 * bare
    # What this client adds is its own processor time, however busy the machine is.
    spent = {name: statistics.median(trip.cpu_s for trip in trips[name]) for name in names}
    assert spent[ASYNC] - spent[BARE] < 0.0004
    assert spent[SYNC] - spent[BARE] < 0.0006
