"""Which MQTT version is tried when, against brokers in memory and in virtual time."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from agent.errors import ConfigError
from agent.mqtt.engine import MQTT_3_1_1, MQTT_5, Connack, Engine
from agent.mqtt.negotiation import PROBE_AFTER_S, Negotiation
from agent.mqtt.reason_codes import SILENCE, Reason, reason
from agent.mqtt.settings import BrokerSettings
from agent.mqtt.transport import BrokerSocket
from tests.agent.mqtt.memory_broker import (
    ACCEPTED,
    ACCEPTED_3_1_1,
    CONNECT,
    Client,
    MemoryBroker,
    Packet,
)
from tests.virtual_time import START_S, in_virtual_time, settle

SETTINGS = BrokerSettings("broker")
LIMIT_S = 10.0
REFUSES_5 = b"\x20\x03\x00\x84\x00"
# How a broker of 3.1.1 refuses 5 (MQTT 3.1.1, 3.2.2.3: unacceptable protocol version).
REFUSES_5_IN_3_1_1 = b"\x20\x02\x00\x01"

Answer = Callable[[Client, Packet], None]


class Rig:
    """A negotiation with a broker in memory."""

    def __init__(self, answer: Answer, settings: BrokerSettings = SETTINGS) -> None:
        def answer_connect(client: Client, packet: Packet) -> None:
            if packet.kind == CONNECT:
                answer(client, packet)

        self.broker = MemoryBroker(answer_connect)
        self.engines: list[Engine] = []
        self.accepted: list[Connack] = []
        self.negotiation = Negotiation(settings, self.engine_of, self.broker.open_socket)

    def engine_of(self, version: int) -> Engine:
        self.engines.append(Engine("me", version))
        return self.engines[-1]

    async def attempt(self) -> Reason:
        answer = await self.negotiation.attempt(LIMIT_S)
        if isinstance(answer, Reason):
            return answer
        self.accepted.append(answer)
        return reason(0)

    def asked(self) -> list[int]:
        """Return the version of each CONNECT, in order."""
        return [client.packets[0].version for client in self.broker.clients if client.packets]


def accept(client: Client, packet: Packet) -> None:
    client.send(ACCEPTED if packet.version == MQTT_5 else ACCEPTED_3_1_1)


def passed_s() -> float:
    """Return the seconds since the test began."""
    return asyncio.get_running_loop().time() - START_S


@in_virtual_time
async def test_broker_of_mqtt_5_is_asked_once() -> None:
    rig = Rig(accept)
    assert not (await rig.attempt()).failed
    assert rig.asked() == [MQTT_5]
    assert passed_s() < PROBE_AFTER_S


@pytest.mark.parametrize("refusal", [REFUSES_5, REFUSES_5_IN_3_1_1])
@in_virtual_time
async def test_broker_that_refuses_5_is_asked_in_3_1_1_and_first_in_5_the_next_time(refusal: bytes) -> None:
    def answer(client: Client, packet: Packet) -> None:
        client.send(refusal if packet.version == MQTT_5 else ACCEPTED_3_1_1)

    rig = Rig(answer)
    for attempt in (1, 2):
        assert not (await rig.attempt()).failed
        assert rig.asked() == [MQTT_5, MQTT_3_1_1] * attempt


@in_virtual_time
async def test_broker_that_hangs_up_twice_and_accepts_3_1_1_is_spoken_to_in_3_1_1() -> None:
    def answer(client: Client, packet: Packet) -> None:
        if packet.version == MQTT_5:
            client.hang_up()
        else:
            client.send(ACCEPTED_3_1_1)

    rig = Rig(answer)
    assert not (await rig.attempt()).failed
    assert rig.asked() == [MQTT_5, MQTT_5, MQTT_3_1_1]


@pytest.mark.parametrize("second", ["accepts", "is silent", "is away"])
@in_virtual_time
async def test_broker_that_hangs_up_once_is_asked_in_5_only(second: str) -> None:
    async def open_socket(settings: BrokerSettings) -> BrokerSocket:
        if second == "is away" and rig.broker.clients:
            raise ConnectionRefusedError
        return await rig.broker.open_socket(settings)

    def answer(client: Client, packet: Packet) -> None:
        if len(rig.broker.clients) == 1:
            client.hang_up()
        elif second == "accepts":
            accept(client, packet)

    rig = Rig(answer)
    negotiation = Negotiation(SETTINGS, rig.engine_of, open_socket)
    assert await negotiation.attempt(LIMIT_S) is SILENCE
    assert MQTT_3_1_1 not in rig.asked()
    assert passed_s() <= LIMIT_S


@pytest.mark.parametrize(
    ("connack", "speaks"),
    [
        (ACCEPTED, True),
        (b"\x20\x03\x00\x87\x00", True),  # not authorized, in MQTT 5
        (b"\x20\x02\x00\x05", False),  # the same in 3.1.1
        (ACCEPTED_3_1_1, False),
        (REFUSES_5, False),
        (REFUSES_5_IN_3_1_1, False),
        (None, False),
    ],
)
@in_virtual_time
async def test_shortest_connect_shows_whether_a_broker_speaks_5(connack: bytes | None, speaks: bool) -> None:
    rig = Rig(lambda client, _packet: client.hang_up() if connack is None else client.send(connack))
    assert await rig.negotiation.speaks_5(LIMIT_S) == speaks
    assert rig.asked() == [MQTT_5]
    assert not rig.engines  # the session was not touched


@in_virtual_time
async def test_broker_that_chokes_on_properties_is_detected_by_a_bare_connect() -> None:
    def answer(client: Client, packet: Packet) -> None:
        if packet.version == MQTT_3_1_1:
            client.send(ACCEPTED_3_1_1)
        elif len(packet.body) < 16:  # nothing but the version
            client.send(REFUSES_5_IN_3_1_1)

    rig = Rig(answer)
    assert not (await rig.attempt()).failed
    assert rig.asked() == [MQTT_5, MQTT_5, MQTT_3_1_1]
    assert passed_s() == pytest.approx(PROBE_AFTER_S)


@in_virtual_time
async def test_slow_broker_of_mqtt_5_is_waited_for() -> None:
    def answer(client: Client, _packet: Packet) -> None:
        asyncio.get_running_loop().call_later(2.0, client.send, ACCEPTED)

    rig = Rig(answer)
    assert not (await rig.attempt()).failed
    assert set(rig.asked()) == {MQTT_5}
    assert rig.accepted == [Connack(reason(0))]


@in_virtual_time
async def test_broker_that_is_slow_to_greet_a_fleet_gets_one_connection_from_each() -> None:
    def answer(client: Client, _packet: Packet) -> None:
        asyncio.get_running_loop().call_later(2.0, client.send, ACCEPTED)

    rig = Rig(answer, replace(SETTINGS, reconnect_spread_s=28.0))
    for _ in range(2):
        assert not (await rig.attempt()).failed
    assert len(rig.broker.clients) == 2


@in_virtual_time
async def test_broker_that_spoke_5_is_not_probed_when_it_is_slow() -> None:
    delays_s = iter((0.0, 9.0))

    def answer(client: Client, _packet: Packet) -> None:
        asyncio.get_running_loop().call_later(next(delays_s), client.send, ACCEPTED)

    rig = Rig(answer)
    for _ in range(2):
        assert not (await rig.attempt()).failed
    assert len(rig.broker.clients) == 2


@in_virtual_time
async def test_silent_broker_is_asked_in_5_only() -> None:
    rig = Rig(lambda _client, _packet: None)
    for attempt in (1, 2, 3):
        assert await rig.attempt() is SILENCE
        assert set(rig.asked()) == {MQTT_5}
        assert passed_s() == pytest.approx(attempt * LIMIT_S)
    await settle()
    assert all(client.closed for client in rig.broker.clients)


@in_virtual_time
async def test_broker_that_answers_only_whom_it_knows_is_not_held_up_by_the_probe() -> None:
    def answer(client: Client, packet: Packet) -> None:
        if len(packet.body) > 16:
            asyncio.get_running_loop().call_later(2.0, client.send, ACCEPTED)

    rig = Rig(answer)
    assert not (await rig.attempt()).failed
    assert passed_s() == pytest.approx(2.0)


@in_virtual_time
async def test_broker_that_spoke_5_before_is_not_asked_in_3_1_1_when_it_falls_silent() -> None:
    silent = False

    def answer(client: Client, packet: Packet) -> None:
        if silent:
            client.hang_up()
        else:
            accept(client, packet)

    rig = Rig(answer)
    await rig.attempt()
    silent = True
    assert await rig.attempt() is SILENCE
    assert rig.asked() == [MQTT_5, MQTT_5]


@in_virtual_time
async def test_refusal_of_our_name_is_final_in_every_version() -> None:
    rig = Rig(lambda client, _packet: client.send(b"\x20\x03\x00\x87\x00"))
    assert await rig.attempt() == reason(0x87)
    assert rig.asked() == [MQTT_5]


@pytest.mark.parametrize(("protocol", "version"), [("5", MQTT_5), ("3.1.1", MQTT_3_1_1)])
@in_virtual_time
async def test_configured_version_is_the_only_one_tried(protocol: str, version: int) -> None:
    rig = Rig(lambda client, _packet: client.hang_up(), replace(SETTINGS, protocol=protocol))
    assert await rig.attempt() is SILENCE
    assert rig.asked() == [version]


@in_virtual_time
async def test_each_connection_has_a_higher_number() -> None:
    rig = Rig(accept)
    epochs = []
    for _ in range(3):
        await rig.attempt()
        epochs.append(rig.negotiation.epoch)
    assert epochs == sorted(set(epochs))


@in_virtual_time
async def test_alert_after_the_handshake_is_raised() -> None:
    alert = ssl.SSLError(1, "[SSL: TLSV13_ALERT_CERTIFICATE_REQUIRED]")

    def answer(client: Client, _packet: Packet) -> None:
        client.socket.tls_error = alert
        client.hang_up()

    with pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"):
        await Rig(answer).attempt()


@in_virtual_time
async def test_unreachable_broker_is_an_error_of_the_system() -> None:
    async def refuse(_settings: BrokerSettings) -> BrokerSocket:
        raise ConnectionRefusedError

    rig = Rig(accept)
    negotiation = Negotiation(SETTINGS, rig.engine_of, refuse)
    with pytest.raises(ConnectionRefusedError):
        await negotiation.attempt(LIMIT_S)
    assert not rig.engines


@in_virtual_time
async def test_password_is_read_at_each_attempt_before_anything_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "password"

    rig = Rig(accept, replace(SETTINGS, username="me", password_file=path))
    with pytest.raises(ConfigError):
        await rig.attempt()
    assert not rig.broker.clients
    for password in ("first", "second"):
        path.write_text(password + "\n")
        await rig.attempt()
        assert password.encode() in rig.broker.clients[-1].packets[0].body
