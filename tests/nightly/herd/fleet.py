"""The MQTT side of many agents in one process: real connections and documents, no models.

Promises: each agent has the agent's own connections, with their wills, sessions, subscriptions and slots, and
publishes what an agent publishes when it connects.
Leaves out: workers, deployments and metrics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

import agent
from agent.mqtt.connection import Connection
from agent.mqtt.message import Message
from agent.mqtt.reason_codes import Reason
from agent.mqtt.session import Owner
from agent.mqtt.settings import BrokerSettings
from agent.mqtt.transport import BrokerSocket, open_socket
from agent.service import groups
from agent.service.groups import Groups
from agent.service.presence import Presence, Session
from agent.wire.topics import Desired, Info, ModelState, Reported, State, format_topic, infer_filters

MODEL: Final = "digits"
GROUP: Final = "all"
# As large as those of a Raspberry Pi with one small model.
_INFO: Final = b'{"info":"' + b"x" * 1000 + b'"}'
_MODEL_STATE: Final = b'{"model":"' + b"x" * 700 + b'"}'
_REPORTED: Final = b'{"reported":"' + b"x" * 500 + b'"}'
# So many agents connect for the first time at once: a slow greeting would cause a second connection.
_STARTING: Final = 10


class SimulatedAgent:
    """The connections of one agent.

    Parameters
    ----------
    name
        The device's name.
    settings
        The broker.
    has_group
        Whether the device belongs to a group, and has a third connection.
    opened
        Called when a socket to the broker is open.
    """

    def __init__(
        self, name: str, settings: BrokerSettings, *, has_group: bool, opened: Callable[[], None]
    ) -> None:
        async def open_and_count(to: BrokerSettings) -> BrokerSocket:
            sock = await open_socket(to)
            opened()
            return sock

        self._name = name
        connect = partial(Connection, open_socket=open_and_count)
        owner = partial(Owner, on_subscribed=self._changed)
        session = Session(name, 1, agent.__version__)
        self._control = connect(
            settings,
            owner(on_message=self._on_control_message, on_up=self._on_control_up),
            client_id=f"{name}-control",
            will=session.will(),
        )
        self._requests = connect(
            settings,
            owner(on_message=_ignore, on_up=self._on_up, on_down=self._on_down),
            client_id=f"{name}-inference",
            persistent=True,
        )
        self.connections = [self._control, self._requests]
        self._groups: Groups | None = None
        if has_group:
            connection = connect(
                groups.settings_of(settings),
                owner(on_message=_ignore, on_up=self._on_up, on_down=self._on_down),
                client_id=f"{name}-groups",
            )
            self.connections.append(connection)
            self._groups = Groups((GROUP,), connection)
            self._groups.model_changed(MODEL, ready=True)
        self._presence = Presence(session, self._control)
        self._control.want(format_topic(State(name)))
        self._control.want(format_topic(Desired(name)))
        for topic_filter in infer_filters(name):
            self._requests.want(topic_filter)

    @property
    def back(self) -> bool:
        """Whether everything is connected, subscribed and published."""
        return all(connection.granted for connection in self.connections) and not self._control.unacknowledged

    def start(self) -> None:
        """Connect, and stay connected."""
        for connection in self.connections:
            connection.start()

    async def close(self) -> None:
        """Disconnect."""
        for connection in self.connections:
            await connection.close()

    def _on_control_message(self, message: Message) -> None:
        if message.topic == format_topic(State(self._name)):
            self._presence.on_state(message.payload)
        self._control.ack(message)

    def _on_control_up(self, _session_present: bool) -> None:
        self._presence.announce()
        for topic, document in (
            (Info(self._name), _INFO),
            (ModelState(self._name, MODEL), _MODEL_STATE),
            (Reported(self._name), _REPORTED),
        ):
            self._control.publish(format_topic(topic), document, retain=True)

    def _on_up(self, _session_present: bool) -> None:
        self._changed()

    def _on_down(self, _why: Reason) -> None:
        self._changed()

    def _changed(self) -> None:
        if self._groups is not None:
            self._groups.answers_changed(possible=self._requests.connected)
        self._presence.connections_changed(
            inference=self._requests.granted,
            groups=None if self._groups is None else self.connections[-1].granted,
        )


async def start_fleet(
    count: int, settings: BrokerSettings, *, has_groups: bool, opened: Callable[[], None]
) -> list[SimulatedAgent]:
    """Start that many agents and wait until all of them are connected."""
    agents = [
        SimulatedAgent(f"device-{number}", settings, has_group=has_groups, opened=opened)
        for number in range(count)
    ]
    for first in range(0, count, _STARTING):
        some = agents[first : first + _STARTING]
        for each in some:
            each.start()
        while not all(each.back for each in some):
            await asyncio.sleep(0.005)
    return agents


def settings_for(port: int, spread_s: float) -> BrokerSettings:
    """Return the settings of an agent whose configuration has nothing but the broker's address."""
    return replace(BrokerSettings("127.0.0.1", port), reconnect_spread_s=spread_s)


def _ignore(_message: Message) -> None:
    """Take a message; none is expected here."""
