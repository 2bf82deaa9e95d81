"""Metrics of an agent, as it publishes them: one flat JSON object, each key a sample's Prometheus name.

Promises: what is returned are names and numbers, whatever came. Leaves their meaning to docs/mqtt.md.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from agent.mqtt.message import Message
from agent.wire import topics
from builder.errors import FleetError
from builder.fleet.broker import Broker
from builder.fleet.client import Client
from builder.fleet.presence import ABSENT_LIMIT_S, Presence, absent

# An agent that publishes every ten seconds, as it does by default, and is late once.
WAIT_S: Final = 25.0


@dataclass(frozen=True, slots=True)
class MetricsSample:
    """What an agent published at one moment: sample name, with its labels, -> value."""

    agent: str
    values: Mapping[str, float]


def metrics(agent: str, broker: Broker, *, wait_s: float = WAIT_S) -> MetricsSample:
    """Wait for what an agent next publishes about itself.

    Parameters
    ----------
    agent
        The device's name.
    wait_s
        How long to wait; it publishes every `metrics.interval_s` of its configuration.

    Raises
    ------
    FleetError
        If nothing came in time, or something else than metrics.
    BrokerError
        If the broker cannot be reached, or refuses.
    """
    return asyncio.run(metrics_async(agent, broker, wait_s=wait_s))


async def metrics_async(agent: str, broker: Broker, *, wait_s: float = WAIT_S) -> MetricsSample:
    """Do what `metrics` does, in a running event loop."""
    if not topics.is_device_name(agent):
        raise FleetError(f"{agent!r:.80} cannot be the name of an agent")
    payload: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    presence = Presence(agent)

    def on_message(topic: topics.Topic, message: Message) -> None:
        presence.on_message(topic, message)
        if topic == topics.Metrics(agent) and not payload.done():
            payload.set_result(bytes(message.payload))

    async with Client(broker, on_message) as client:
        await client.subscribe(topics.format_topic(topics.Metrics(agent)), 0)
        presence.want(client)
        known = await presence.wait(min(wait_s, ABSENT_LIMIT_S)) or payload.done()
        if known:
            try:
                raw = await asyncio.wait_for(payload, wait_s)
            except TimeoutError as error:
                raise FleetError(
                    f"no metrics from {agent} within {wait_s:g} s: it is {presence.state}",
                    hint="metrics.interval_s of its configuration says how often it publishes",
                ) from error
    if not known:
        raise await absent(agent, broker)
    return MetricsSample(agent, _parse(raw, agent))


def _parse(raw: bytes, agent: str) -> dict[str, float]:
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise FleetError(f"the metrics of {agent} are not JSON: {error}") from error
    if not isinstance(document, dict) or not all(type(value) in (int, float) for value in document.values()):
        raise FleetError(f"the metrics of {agent} are not an object of numbers")
    if not all(name.isprintable() for name in document):  # they end up on a terminal
        raise FleetError(f"the metrics of {agent} have names that cannot be printed")
    return document
