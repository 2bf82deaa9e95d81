"""The page under a thousand agents, as `python -m benchmarks.dashboard` measures it for a minute."""

from __future__ import annotations

import pytest

from benchmarks.dashboard.fleet import Device
from benchmarks.dashboard.measure import MOST_BYTES, measure
from tests.conftest import BrokerProcess
from tests.needs import needed


@pytest.mark.slow
async def test_a_thousand_agents_do_not_make_the_page_stutter(mosquitto: BrokerProcess) -> None:
    browser = needed("chromium", "chromium-browser", "google-chrome")
    result = await measure(mosquitto.url, browser, agents=1000, seconds=4)
    # Other tests run beside this one: the times are wider than those of the benchmark.
    assert result.rows_s < 5
    assert result.longest_s < 1.5
    assert result.memory_bytes < MOST_BYTES
    # Rows that are not in view do not exist, or the frames would not come.
    assert result.frames > 30
    assert result.updates > 50


def test_devices_of_the_fleet_differ_and_have_what_a_page_shows() -> None:
    devices = [Device(number) for number in range(200)]
    assert len({device.name for device in devices}) == 200
    assert len(devices[0].documents(0.0)) == 5
    assert b"edge_inference_duration_seconds_bucket" in devices[0].metrics(0)
