"""The client costs little more than the connection below it, over a broker as Debian configures it."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from benchmarks.clients import ASYNC, BARE, SYNC, count_calls, measure


@pytest.mark.slow
def test_answer_costs_what_the_device_costs(tmp_path: Path) -> None:
    """By the lower quartile of turns: a round trip that waits for a delayed acknowledgement takes 44 ms."""
    trips = measure(tmp_path, 40, 0.02, foreign=False)
    names = (BARE, SYNC, ASYNC)
    bare, threaded, plain = (
        statistics.quantiles([trip.seconds for trip in trips[name]], n=4)[0] for name in names
    )
    assert 0.02 < bare < 0.055
    assert plain <= 1.2 * bare
    assert threaded <= 1.2 * bare


def test_client_adds_few_calls_to_those_of_the_connection(tmp_path: Path) -> None:
    """Counted, so neither other programs nor a slow machine matter: 490, and 130 more in either client."""
    calls = count_calls(tmp_path)
    assert 300 < calls[BARE] < 800
    assert calls[ASYNC] - calls[BARE] < 200
    assert calls[SYNC] - calls[BARE] < 200
