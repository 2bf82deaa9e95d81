from __future__ import annotations

import pytest

from builder.boards.tracker_client import Tracker
from builder.errors import FleetError


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("lab:9190", "lab", 9190), ("lab", "lab", 9190), ("[::1]:99", "::1", 99), ("10.0.0.1:1", "10.0.0.1", 1)],
)
def test_tracker_addresses_are_read(text: str, host: str, port: int) -> None:
    assert Tracker.parse(text) == Tracker(host, port)


@pytest.mark.parametrize(
    "text", ["", ":9190", "lab:", "lab:0", "lab:99999", "a:b:c", "lab:9190/x", "http://lab:9190"]
)
def test_malformed_tracker_addresses_are_refused(text: str) -> None:
    with pytest.raises(FleetError, match="host:port"):
        Tracker.parse(text)
