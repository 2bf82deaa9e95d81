"""Whether an agent is there at all, and what to say when it is not."""

from __future__ import annotations

import asyncio
from typing import Final

from agent.mqtt.message import Message
from agent.wire import topics
from builder.errors import FleetError
from builder.fleet.broker import Broker
from builder.fleet.client import Client
from builder.fleet.desired import parse_object

# What is retained comes at once: after so long, nothing is known of an agent of that name.
ABSENT_LIMIT_S: Final = 3.0
# What a broker keeps comes at once; names are listed when none has come for so long.
_QUIET_S: Final = 0.2
_LIST_LIMIT_S: Final = 1.0
_LISTED: Final = 8


class Presence:
    """What one agent has left at the broker about itself.

    Attributes
    ----------
    state
        `online`, `stopped` or `offline`; empty while nothing is known.
    """

    def __init__(self, agent: str) -> None:
        self.state = ""
        self._agent = agent
        self._came = asyncio.Event()

    def on_message(self, topic: topics.Topic, message: Message) -> None:
        """Take a message; others than the agent's state are ignored."""
        if topic == topics.State(self._agent):
            self.state = str(parse_object(message.payload).get("state", "unknown"))
            self._came.set()

    def want(self, client: Client) -> None:
        """Subscribe, without waiting for the broker's word."""
        client.want(topics.format_topic(topics.State(self._agent)), 0)

    async def wait(self, limit_s: float) -> bool:
        """Return whether anything is known of the agent, as soon as it is or after `limit_s`."""
        if self.state:
            return True
        try:
            await asyncio.wait_for(self._came.wait(), limit_s)
        except TimeoutError:
            return False
        return True

    @property
    def away(self) -> str:
        """Say that it is not online, if it is known not to be."""
        return f"{self._agent} is {self.state}" if self.state not in {"", "online"} else ""


async def absent(agent: str, broker: Broker) -> FleetError:
    """Return the error for an agent that the broker knows nothing of, with the names that it does know."""
    names: set[str] = set()
    came = asyncio.Event()

    def on_message(topic: topics.Topic, message: Message) -> None:
        if isinstance(topic, topics.State) and message.payload:
            names.add(topic.device)
            came.set()

    async with Client(broker, on_message) as client:
        await client.subscribe(topics.states_filter(), 0)
        try:
            async with asyncio.timeout(_LIST_LIMIT_S):
                while True:
                    came.clear()
                    await asyncio.wait_for(came.wait(), _QUIET_S)
        except TimeoutError:
            pass
    return FleetError(f"no agent called {agent} is known at the broker", hint=_hint(sorted(names)))


def _hint(names: list[str]) -> str:
    if not names:
        return "no agent has said anything there: does edge-agent run, with this broker in its configuration?"
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"known there: {', '.join(names[:_LISTED])}{more}"
