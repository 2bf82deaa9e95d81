"""Whether an agent is online, and the error when the broker does not know it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from agent.errors import BundleError
from agent.mqtt.message import Message
from agent.wire import topics
from agent.wire.presence import UNKNOWN, AgentState, Presence
from builder.errors import FleetError
from builder.fleet.client import Client
from edgebundle.broker import Broker
from edgebundle.directory import names_hint
from edgebundle.quiet import wait_until_quiet

# Retained messages arrive at once: if none has come after this long, the broker knows no agent of that name.
ABSENT_LIMIT_S: Final = 1.0
# The names that the broker knows are complete when none has arrived for this long.
_QUIET_S: Final = 0.2
_LIST_LIMIT_S: Final = 1.0


class PresenceWatch:
    """Follows the state document of one agent.

    `state`: `online`, `stopped`, `offline`, or `unknown` for a document without a state; empty before one
        arrives.
    `deaf`: whether the agent is online, but has no connection for requests.
    """

    def __init__(self, agent: str) -> None:
        self.state = ""
        self.deaf = False
        self._agent = agent
        self._arrived = asyncio.Event()

    @property
    def online(self) -> bool:
        """Whether the agent is online."""
        return self.state == AgentState.ONLINE

    @property
    def away(self) -> str:
        """`<agent> is <state>` if the agent is known not to be able to answer requests; empty otherwise."""
        return f"{self._agent} is {self.said}" if self.deaf or (self.state and not self.online) else ""

    @property
    def said(self) -> str:
        """The state in words for people; empty before a document arrives."""
        return f"{self.state}, but its connection for requests is not" if self.deaf else self.state

    def on_message(self, topic: topics.Topic, message: Message) -> None:
        """Take a message; only the agent's state is read."""
        if topic == topics.State(self._agent):
            try:
                presence = Presence.from_bytes(message.payload)
                self.state = presence.state
                self.deaf = self.online and presence.inference == AgentState.OFFLINE
            except BundleError:
                self.state, self.deaf = UNKNOWN, False
            self._arrived.set()

    def subscribe(self, client: Client) -> None:
        """Subscribe without waiting for the broker's confirmation."""
        client.want(topics.format_topic(topics.State(self._agent)), 0)

    async def wait(self, limit_s: float) -> bool:
        """Wait up to `limit_s` for a state document; return whether there is one."""
        if self.state:
            return True
        try:
            async with asyncio.timeout(limit_s):
                await self._arrived.wait()
        except TimeoutError:
            return False
        return True


async def unknown_agent(agent: str, broker: Broker) -> FleetError:
    """Return the error for an agent that the broker does not know, with the names that it does know."""
    names = await known_agents(broker)
    return FleetError(f"no agent called {agent} is known at the broker", hint=names_hint("agent", names))


async def known_agents(broker: Broker) -> list[str]:
    """Return the names of the agents that the broker knows, online or not, sorted."""
    names: set[str] = set()
    arrived = asyncio.Event()

    def on_message(topic: topics.Topic, message: Message) -> None:
        if isinstance(topic, topics.State) and message.payload:
            names.add(topic.device)
            arrived.set()

    async with Client(broker, on_message) as client:
        await client.subscribe(topics.states_filter(), 0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LIST_LIMIT_S):
                await wait_until_quiet(arrived, _QUIET_S)
    return sorted(names)
