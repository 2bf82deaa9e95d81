"""The client costs little more than the connection below it, over a broker as Debian configures it."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from benchmarks.clients import ASYNC, BARE, SYNC, measure


@pytest.mark.slow
def test_answer_costs_what_the_device_costs(tmp_path: Path) -> None:
    """A round trip that waits for a delayed acknowledgement takes 40 ms more; a busy machine adds a few."""
    trips = measure(tmp_path, 60, 0.005, foreign=False)
    names = (BARE, SYNC, ASYNC)
    bare, threaded, plain = (
        statistics.quantiles([trip.seconds for trip in trips[name]], n=4)[0] for name in names
    )
    assert bare > 0.005
    assert plain < bare + 0.025
    assert threaded < bare + 0.025
    # What this client adds is processor time: 0.2 ms on an idle machine.
    spent = {name: statistics.median(trip.cpu_s for trip in trips[name]) for name in names}
    assert spent[ASYNC] - spent[BARE] < 0.004
    assert spent[SYNC] - spent[BARE] < 0.006
