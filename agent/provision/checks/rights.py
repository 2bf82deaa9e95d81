"""The rights of this device at the broker, and how long a message takes there and back.

Promises to try each kind of topic that the agent writes and reads, under names that no model and no job
has, and with empty messages that are not kept: a running agent of this name and its clients see nothing
that matters. Leaves connecting to `reach`.

Only MQTT 5 reports that a publication was refused; a broker of 3.1.1 silently drops the message. Therefore
one message must come back, on the topic where requests arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from agent.errors import BrokerError, EndlessDataError, FormatError
from agent.mqtt.connection import Connection
from agent.mqtt.engine import MQTT_5
from agent.mqtt.message import Message
from agent.mqtt.properties import Properties
from agent.mqtt.reason_codes import reason
from agent.mqtt.settings import BrokerSettings
from agent.provision.checks.reach import reach
from agent.provision.finding import Finding, fail, ok, warn
from agent.wire.presence import AgentState, Presence
from agent.wire.topics import (
    BlockWant,
    Desired,
    Infer,
    Job,
    ModelState,
    Reply,
    State,
    format_topic,
    group_filters,
    infer_filters,
)

# Valid names that no model, job or bundle has.
_PROBE: Final = "edge-agent-check"
_ECHO: Final = "edge-agent-check-echo"
_NO_DIGEST: Final = "0" * 64
# Time for an answer from a broker that has just accepted us.
_ANSWER_S: Final = 5.0
_SHORT_LIVED: Final = Properties(expiry_s=5)
_ROUND_TRIPS: Final = 9
# Linux delays acknowledgements by 40 ms (TCP_DELACK_MIN); a slow network by itself rarely adds half of that.
_DELAY_S: Final = 0.020
_SLOW_S: Final = 0.250

_ACCESS_HINT: Final = "allow the device its topics: docs/mosquitto/edge.acl has an access list"


async def check_broker(
    settings: BrokerSettings, device: str, groups: Sequence[str], *, serving: bool = False
) -> list[Finding]:
    """Connect as the device, and try everything that it will do there.

    If an agent is `serving` on this machine, this name may be online. Raises UnreachableError, which says
    why, if there is no connection, and ConfigError if a password or certificate cannot be used.
    """
    probe = _Probe(device)
    started_s = time.monotonic()
    connection = probe.connection = await reach(settings, f"{device}-check", probe.on_message)
    took_ms = (time.monotonic() - started_s) * 1000
    try:
        version = "5" if connection.version == MQTT_5 else "3.1.1"
        tls = "TLS" if settings.tls is not None else "no TLS"
        findings = [ok("broker", f"{settings.url} accepted us in {took_ms:.0f} ms: MQTT {version}, {tls}")]
        findings += await _subscriptions(connection, device, groups)
        findings += await _publications(connection, device, groups)
        findings += await _requests(connection, probe)
        findings += probe.presence(serving=serving)
        if probe.heard:
            findings.append(await _delay(connection, settings, probe))
    finally:
        await connection.close()
    return findings


class _Probe:
    """The messages that the check's connection has received."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.topic = format_topic(Infer(device, _PROBE))
        self.heard = False
        self.connection: Connection | None = None
        self.echo: Connection | None = None
        self._state = b""
        self._arrived = asyncio.Event()

    def on_message(self, message: Message) -> None:
        if self.connection is not None:
            self.connection.ack(message)
        if message.topic == self.topic:
            self.heard = True
            self._arrived.set()
            if self.echo is not None:
                self.echo.publish(format_topic(Infer(self.device, _ECHO)), b"", properties=_SHORT_LIVED)
        elif message.topic == format_topic(State(self.device)):
            self._state = message.payload

    async def ask(self, connection: Connection) -> bool:
        """Send one request to ourselves and wait for it; return False if we may not send it.

        Raises TimeoutError if the broker accepted it and it did not arrive.
        """
        async with asyncio.timeout(_ANSWER_S):
            if (await connection.publish(self.topic, b"", properties=_SHORT_LIVED)).failed:
                return False
            await self._arrived.wait()
        return True

    def presence(self, *, serving: bool) -> list[Finding]:
        """Return a warning if a device of this name is already online."""
        with contextlib.suppress(FormatError, EndlessDataError):
            if Presence.from_bytes(self._state).state == AgentState.ONLINE and not serving:
                return [
                    warn(
                        "device",
                        f"a device named {self.device} is already online at this broker",
                        "give this one another --device: two devices with one name evict each other",
                    )
                ]
        return []


async def _subscriptions(connection: Connection, device: str, groups: Sequence[str]) -> list[Finding]:
    wanted = [format_topic(State(device)), format_topic(Desired(device)), *infer_filters(device)]
    wanted += [topic_filter for group in groups for topic_filter in group_filters(group, _PROBE)]
    for topic_filter in wanted:
        try:
            async with asyncio.timeout(_ANSWER_S):
                await connection.subscribe(topic_filter)
        except BrokerError as error:
            why = reason(error.reason_code)
            return [fail("rights", f"{device} may not read {topic_filter}: {why}", _ACCESS_HINT)]
        except TimeoutError:
            return [
                fail("rights", f"the broker did not answer a subscription to {topic_filter}", _ACCESS_HINT)
            ]
    return [ok("rights", f"{device} may read {', '.join(wanted)}")]


async def _publications(connection: Connection, device: str, groups: Sequence[str]) -> list[Finding]:
    # An empty retained message removes the retained message of its topic, and these topics have none.
    topics = [
        (format_topic(ModelState(device, _PROBE)), True),
        (format_topic(Job(device, _PROBE)), True),
        (format_topic(BlockWant(device, _NO_DIGEST)), False),
        # Answers, below the name that the request was sent to.
        *((format_topic(Reply(f"{device}-check", f"{name}/{_PROBE}")), False) for name in (device, *groups)),
    ]
    for topic, retain in topics:
        sent = connection.publish(topic, b"", retain=retain, properties=_SHORT_LIVED)
        done, _ = await asyncio.wait({sent}, timeout=_ANSWER_S)
        if not done:
            return [fail("rights", f"the broker did not acknowledge a message on {topic}", _ACCESS_HINT)]
        if sent.result().failed:
            return [fail("rights", f"{device} may not write {topic}: {sent.result()}", _ACCESS_HINT)]
    caveat = "" if connection.version == MQTT_5 else " (as far as MQTT 3.1.1 reports it)"
    return [ok("rights", f"{device} may write its states, jobs and answers{caveat}")]


async def _requests(connection: Connection, probe: _Probe) -> list[Finding]:
    try:
        allowed = await probe.ask(connection)
    except TimeoutError:
        return [
            fail(
                "rights",
                f"the broker accepted a request for {probe.device}, but it did not reach the device",
                _ACCESS_HINT,
            )
        ]
    if not allowed:
        return [ok("rights", "only other clients may send requests, so none was tried")]
    return [ok("rights", "a request for this device reaches it")]


async def _delay(echo: Connection, settings: BrokerSettings, probe: _Probe) -> Finding:
    """Measure a QoS 1 round trip, first as the agent does it, then with delayed acknowledgements.

    `echo` answers a second connection, because the delay needs two: Nagle's algorithm holds an answer back
    until the acknowledgement of the question has itself been acknowledged.
    """
    probe.echo = echo
    ours_s = await _median_round_trip(settings, probe.device)
    others_s = await _median_round_trip(replace(settings, quick_ack=False), probe.device)
    took = f"a round trip at QoS 1 takes {ours_s * 1000:.1f} ms"
    if others_s - ours_s > _DELAY_S:
        return warn(
            "delay",
            f"{took}; other client libraries take {others_s * 1000:.0f} ms: the broker delays small messages",
            "mosquitto: set_tcp_nodelay true (only other clients wait for Nagle's algorithm)",
        )
    if ours_s > _SLOW_S:
        return warn("delay", took, "check the network (ping) and the broker's load")
    return ok("delay", took)


async def _median_round_trip(settings: BrokerSettings, device: str) -> float:
    arrived = asyncio.Event()
    asking: list[Connection] = []

    def on_message(message: Message) -> None:
        asking[0].ack(message)
        arrived.set()

    connection = await reach(settings, f"{device}-check-delay", on_message)
    asking.append(connection)
    took: list[float] = []
    try:
        await connection.subscribe(format_topic(Infer(device, _ECHO)))
        for _ in range(_ROUND_TRIPS):
            arrived.clear()
            started_s = time.monotonic()
            connection.publish(format_topic(Infer(device, _PROBE)), b"", properties=_SHORT_LIVED)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ANSWER_S):
                    await arrived.wait()
            took.append(time.monotonic() - started_s)
    finally:
        await connection.close()
    return statistics.median(took)
