"""An agent's metrics, as it publishes them: sample names in Prometheus' notation, with their values.

Promises: only printable names and finite numbers are returned. docs/mqtt.md says what they mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from agent.errors import BundleError
from agent.mqtt.message import Message
from agent.wire import topics
from agent.wire.metrics import parse_metrics
from builder.errors import FleetError
from builder.fleet.client import Client
from builder.fleet.hints import AGENT_NAME, OLD_REPORT
from builder.fleet.presence import ABSENT_LIMIT_S, PresenceWatch, unknown_agent
from edgebundle.broker import Broker

# By default an agent publishes every ten seconds; this allows for one that is late.
WAIT_S: Final = 25.0


@dataclass(frozen=True, slots=True)
class MetricsSample:
    """What an agent published at one moment.

    `values`: sample name with its labels -> value.
    """

    agent: str
    values: Mapping[str, float]


def metrics(agent: str, broker: Broker, *, wait_s: float = WAIT_S) -> MetricsSample:
    """Wait for the next metrics of an agent.

    Parameters
    ----------
    agent
        The device's name.
    wait_s
        How long to wait; the agent publishes every `metrics.interval_s` of its configuration.

    Raises
    ------
    FleetError
        If none arrived in time, or they cannot be read.
    BrokerError
        If the broker cannot be reached, or refuses.
    """
    return asyncio.run(metrics_async(agent, broker, wait_s=wait_s))


async def metrics_async(agent: str, broker: Broker, *, wait_s: float = WAIT_S) -> MetricsSample:
    """Do what `metrics` does, in a running event loop."""
    if not topics.is_device_name(agent):
        raise FleetError(f"expected the name of an agent, got {agent!r:.80}", hint=AGENT_NAME)
    payload: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    presence = PresenceWatch(agent)

    def on_message(topic: topics.Topic, message: Message) -> None:
        presence.on_message(topic, message)
        if topic == topics.Metrics(agent) and not payload.done():
            payload.set_result(bytes(message.payload))

    async with Client(broker, on_message) as client:
        await client.subscribe(topics.format_topic(topics.Metrics(agent)), 0)
        presence.subscribe(client)
        known = await presence.wait(min(wait_s, ABSENT_LIMIT_S)) or payload.done()
        if known:
            try:
                async with asyncio.timeout(wait_s):
                    raw = await payload
            except TimeoutError as error:
                raise FleetError(
                    f"no metrics from {agent} within {wait_s:g} s: it is {presence.state}",
                    hint="wait longer than metrics.interval_s in the agent's configuration",
                ) from error
    if not known:
        raise await unknown_agent(agent, broker)
    try:
        return MetricsSample(agent, parse_metrics(raw))
    except BundleError as error:
        raise FleetError(f"the metrics of {agent} cannot be read: {error}", hint=OLD_REPORT) from error
