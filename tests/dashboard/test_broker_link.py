"""The dashboard's connection while a device sends more than it can read."""

from __future__ import annotations

from agent.wire.metrics import format_metrics
from dashboard.broker_link import BrokerLink
from dashboard.fleet_state import FleetState
from edgebundle.broker import Broker
from tests.flooding_broker import publish
from tests.floods import MOST_IN_A_TURN, flooding


async def test_dashboard_goes_on_in_a_flood_of_metrics() -> None:
    metrics = format_metrics({f"edge_load{number}": 1.0 for number in range(50)})
    async with flooding("metrics", publish("edge/v1/kitchen/metrics", metrics)) as going_on:
        link = BrokerLink(Broker(f"mqtt://127.0.0.1:{going_on.port}"), FleetState(), lambda: None)
        await link.start()
        await going_on.wait()
        await link.close()
    assert going_on.most_in_a_turn() <= MOST_IN_A_TURN
