"""The connections of one agent: for control, for requests, and for the requests of its groups if it has any.

Promises: a flood of requests delays nothing on the control connection. Groups deal us requests only while we
can answer them. Presence is told which connections are up. At the end, every request that a broker has dealt
to us is answered: no other member of the group gets it.
Leaves to others: what arrives (`inference`, `control_messages`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from agent.config.settings import Config
from agent.mqtt.connection import Connection
from agent.mqtt.message import Will
from agent.mqtt.reason_codes import Reason
from agent.mqtt.session import Owner
from agent.service import groups
from agent.service.client_ids import ClientIds
from agent.service.groups import Groups
from agent.service.inference import Inference
from agent.service.presence import Presence
from agent.wire.topics import Block, State, format_topic, infer_filters, parse_topic

# For requests that were being answered when the connection for groups was asked to end.
_FAREWELL_S: Final = 2.0
# A broker that holds requests back until we acknowledge earlier ones sends the next ones within this.
_QUIET_S: Final = 0.1
# In a flood a request waits behind this much. It takes 8 MB a second at 30 ms to the broker.
_RECEIVE_BUFFER_BYTES: Final = 256 << 10
# A desired document waits until the one before it is stored, and has at most 256 KiB; a block has 64 KiB.
_CONTROL_RECEIVE_MAXIMUM: Final = 32
_CONTROL_PACKET_BYTES: Final = 512 << 10


class Connections:
    """The connections of one agent; `on_control` takes what arrives on the one for control.

    `groups` is None for an agent without groups. `presence` is told which are up, once it is set.
    """

    def __init__(
        self, config: Config, inference: Inference, client_ids: ClientIds, on_control: Owner
    ) -> None:
        self.presence: Presence | None = None
        self._device = config.device
        self._inference = inference
        self._stopping = False
        broker = replace(config.broker, receive_buffer_bytes=_RECEIVE_BUFFER_BYTES)
        taking = Owner(
            inference.on_message, on_up=self._on_up, on_subscribed=self._changed, shed=inference.sheds
        )
        self.requests = Connection(
            broker,
            replace(taking, on_down=self._on_requests_down),
            client_id=client_ids.of("inference"),
            name=f"{config.device}-inference",
            persistent=True,
        )
        inference.use(self.requests)
        self.groups: Connection | None = None
        self._groups: Groups | None = None
        if config.groups:
            self.groups = Connection(
                groups.settings_of(broker),
                replace(taking, on_message=inference.on_group_message, on_down=self._on_groups_down),
                client_id=client_ids.of("groups"),
                name=f"{config.device}-groups",
            )
            inference.use_for_groups(self.groups)
            self._groups = Groups(config.groups, self.groups)
        self.control = Connection(
            replace(
                config.broker,
                receive_maximum=min(config.broker.receive_maximum, _CONTROL_RECEIVE_MAXIMUM),
                max_packet_bytes=min(config.broker.max_packet_bytes, _CONTROL_PACKET_BYTES),
            ),
            replace(on_control, shed=_sheds_control),
            client_id=client_ids.of("control"),
            name=f"{config.device}-control",
        )

    def __iter__(self) -> Iterator[Connection]:
        yield from (self.control, self.requests)
        if self.groups is not None:
            yield self.groups

    @property
    def online(self) -> bool:
        """Whether all connections are up and subscribed, and every control message is acknowledged."""
        return all(connection.settled for connection in self) and not self.control.unacknowledged

    def start(self, presence: Presence, will: Will) -> None:
        """Connect, with the will on the control connection, and stay connected."""
        self.presence = presence
        self._changed()
        self.control.will = will
        self.control.want(format_topic(State(self._device)))
        for topic_filter in infer_filters(self._device):
            self.requests.want(topic_filter)
        self._inference.deliver_left_over()
        for connection in self:
            connection.start()

    def renew(self) -> None:
        """Connect again, with the certificates and the password as they are on disk now."""
        for connection in self:
            connection.renew()

    def model_changed(self, name: str, *, ready: bool) -> None:
        """Take a model's requests from groups while it is ready, and not otherwise."""
        if self._groups is not None:
            self._groups.model_changed(name, ready=ready)

    def leave(self) -> None:
        """Say that requests are taken no more, and ask groups for none."""
        self._stopping = True
        self._changed()

    async def close_requests(self, end_s: float) -> None:
        """Answer what was taken, until `end_s` by `time.monotonic`, and end the connections for requests."""
        if self.groups is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, end_s - time.monotonic())):
                    await self._answer_groups(self.groups)
            await self.groups.close()
        await self._inference.drain(max(0.0, end_s - time.monotonic()))
        await self.requests.close()

    async def _answer_groups(self, connection: Connection) -> None:
        """Wait until every request that the broker has dealt to us is answered: no other member gets it."""
        await connection.wait_subscribed()
        taken = -1
        while connection.connected and taken != self._inference.taken_for_groups:
            taken = self._inference.taken_for_groups
            await self._inference.drain(_FAREWELL_S)
            await asyncio.sleep(_QUIET_S)

    def _on_up(self, _session_present: bool) -> None:
        self._changed()

    def _on_requests_down(self, why: Reason) -> None:
        self._inference.on_down(why)
        self._changed()

    def _on_groups_down(self, why: Reason) -> None:
        self._inference.on_group_down(why)
        self._changed()

    def _changed(self) -> None:
        """Say which connections are up, and take part in groups only while answers can be sent."""
        serving = not self._stopping
        if self._groups is not None:
            self._groups.answers_changed(possible=serving and self.requests.connected)
        if self.presence is not None:
            self.presence.connections_changed(
                inference=serving and self.requests.granted,
                groups=None if self.groups is None else serving and self.groups.granted,
            )


def _sheds_control(topic: str, _flooded_s: float) -> bool:
    """Return whether to drop a control message at QoS 0 in a flood: only blocks are sent that way."""
    return not isinstance(parse_topic(topic), Block)
