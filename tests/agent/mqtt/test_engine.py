"""One session over memory instead of sockets: what is sent, what comes back, and who is called."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.mqtt.engine import MQTT_3_1_1, MQTT_5, Connack, Engine
from agent.mqtt.limits import BrokerLimits
from agent.mqtt.message import Message, Receipt, Will, encode_publish
from agent.mqtt.properties import Properties, encode
from agent.mqtt.reason_codes import NOT_CONNECTED, TOO_LARGE, reason
from tests.agent.mqtt import memory_broker
from tests.agent.mqtt.engine_rig import SETTINGS, Rig
from tests.agent.mqtt.memory_broker import (
    ACCEPTED,
    CONNECT,
    DISCONNECT,
    PINGREQ,
    PUBACK,
    PUBLISH,
    SUBSCRIBE,
    Client,
    MemoryBroker,
    Packet,
)
from tests.virtual_time import in_virtual_time, settle


def silent(_client: Client, _packet: Packet) -> None:
    """Answer nothing."""


def answering(connack: bytes) -> MemoryBroker:
    def answer(client: Client, packet: Packet) -> None:
        if packet.kind == CONNECT:
            client.send(connack)

    return MemoryBroker(answer)


@in_virtual_time
async def test_accepted_connection_knows_the_brokers_limits() -> None:
    rig = Rig(answering(b"\x20\x06\x01\x00\x03\x21\x00\x05"))
    limits = BrokerLimits(receive_maximum=5)
    assert await rig.connect() == Connack(reason(0), session_present=True, limits=limits)
    assert rig.engine.connected
    assert rig.engine.limits == limits


@in_virtual_time
async def test_connect_carries_our_limits_and_the_will() -> None:
    rig = Rig(will=Will("gone", b"farewell"), persistent=True)
    await rig.connect()
    connect = rig.client.packets[0]
    assert connect.version == MQTT_5
    assert b"\x21\x00\x11" in connect.body  # Receive Maximum 17
    assert b"\x27\x00\x10\x00\x00" in connect.body  # Maximum Packet Size 1 MiB
    assert b"\x11\x00\x00\x02\x58" in connect.body  # Session Expiry 600 s
    assert b"\x00\x04gone\x00\x08farewell" in connect.body


@in_virtual_time
async def test_bare_connect_has_neither_name_nor_properties() -> None:
    engine = Engine("", MQTT_5, bare=True)
    broker = MemoryBroker()
    await engine.connect(await broker.open_socket(SETTINGS), 0, SETTINGS)
    assert broker.clients[0].packets[0].body == b"\x00\x04MQTT\x05\x02\x00\x1e\x00\x00\x00"


@in_virtual_time
async def test_refused_connection_is_closed() -> None:
    rig = Rig(answering(b"\x20\x03\x00\x87\x00"))
    assert (await rig.connect()).reason == reason(0x87)
    assert not rig.engine.connected
    assert rig.client.closed
    assert not rig.lost  # it was never up


@in_virtual_time
async def test_broker_that_hangs_up_gives_no_reason() -> None:
    broker = MemoryBroker(lambda client, _packet: client.hang_up())
    assert (await Rig(broker).connect()).reason is None


@in_virtual_time
async def test_cancelled_connect_closes_the_socket() -> None:
    rig = Rig(MemoryBroker(silent))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(5):
            await rig.connect()
    assert rig.client.closed


@in_virtual_time
async def test_acknowledgements_carry_identifier_and_verdict() -> None:
    rig = Rig()
    await rig.connect()
    assert (rig.publish(packet_id=7), rig.publish(packet_id=8)) == (None, None)
    await settle()
    assert rig.acknowledged == [(7, reason(0)), (8, reason(0))]


@in_virtual_time
async def test_received_message_is_numbered_with_its_connection_and_acknowledged_on_demand() -> None:
    rig = Rig()
    await rig.connect(epoch=3)
    rig.client.send(memory_broker.publish("a", b"hello", packet_id=7))
    await settle()
    (message,) = rig.messages
    assert message.receipt is not None
    assert (message.payload, message.receipt.packet_id, message.receipt.epoch) == (b"hello", 7, 3)
    assert not rig.client.of_kind(PUBACK)
    rig.engine.ack(replace(message.receipt, epoch=2))  # of an earlier connection
    assert not rig.client.of_kind(PUBACK)
    rig.engine.ack(message.receipt)
    assert [packet.packet_id for packet in rig.client.of_kind(PUBACK)] == [7]


@pytest.mark.parametrize("persistent", [False, True])
@in_virtual_time
async def test_who_waits_goes_on_before_the_acknowledgement_if_nothing_comes_twice(persistent: bool) -> None:
    waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    written: list[int] = []

    def take(message: Message) -> None:
        assert message.receipt is not None
        rig.engine.ack(message.receipt)
        waiting.set_result(None)

    rig = Rig(on_message=take, persistent=persistent)
    await rig.connect()
    waiting.add_done_callback(lambda _: written.append(len(rig.client.of_kind(PUBACK))))
    rig.client.send(memory_broker.publish("a", b"hello", packet_id=7))
    await settle()
    assert written == [int(persistent)]
    assert [packet.packet_id for packet in rig.client.of_kind(PUBACK)] == [7]


@pytest.mark.slow
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
@in_virtual_time
async def test_packets_arrive_however_the_stream_is_cut(sizes: list[int]) -> None:
    rig = Rig()
    await rig.connect()
    payloads = [bytes((65 + index,)) * index for index in range(8)]
    stream = b"".join(
        memory_broker.publish("a", payload, index + 1) for index, payload in enumerate(payloads)
    )
    while stream:
        for size in sizes:
            piece, stream = stream[:size], stream[size:]
            rig.client.send(piece)
            await settle()
    assert [message.payload for message in rig.messages] == payloads


@given(st.lists(st.integers(0, 60), max_size=40))
@in_virtual_time
async def test_packets_leave_whole_however_little_room_the_socket_has(rooms: list[int]) -> None:
    rig = Rig(answering(ACCEPTED))
    await rig.connect()
    client = rig.client
    client.room = 0
    payloads = [bytes((65 + index,)) * 7 for index in range(9)]
    for payload in payloads:
        rig.publish(payload)
    for room in (*rooms, 10_000):
        client.room = room
        assert client.socket.on_writable is not None or len(client.of_kind(PUBLISH)) == 9
        if client.socket.on_writable is not None:
            client.socket.on_writable()
    sent = client.of_kind(PUBLISH)
    assert [packet.body[-7:] for packet in sent] == payloads
    assert client.socket.on_writable is None


@in_virtual_time
async def test_small_packets_are_written_together_and_a_large_one_by_itself() -> None:
    rig = Rig(answering(ACCEPTED))
    await rig.connect()
    client = rig.client
    client.room = 0
    for size in (10, 20, 100_000, 30):
        rig.publish(bytes(size))
    client.room = None
    client.writes.clear()
    assert client.socket.on_writable is not None
    client.socket.on_writable()
    header = 10  # flags and length, topic, identifier, no properties
    assert client.writes == [10 + 20 + 2 * header, 100_000 + header + 2, 30 + header]


@pytest.mark.parametrize("version", [MQTT_5, MQTT_3_1_1])
@in_virtual_time
async def test_packet_that_is_too_long_is_not_kept_and_the_next_one_is_received(version: int) -> None:
    accepted = ACCEPTED if version == MQTT_5 else memory_broker.ACCEPTED_3_1_1
    rig = Rig(answering(accepted), version=version)
    await rig.connect()
    packed = encode(Properties(response_topic="r")) if version == MQTT_5 else None
    size = 3 * SETTINGS.max_packet_bytes
    head = encode_publish("a", size, packet_id=7, retain=False, packed=packed)
    rig.client.send(head)
    for _ in range(30):
        rig.client.send(bytes(size // 30))
        await settle()
        part = rig.client.socket._part
        assert part is None or len(part.kept) <= 128 << 10
    rig.client.send(bytes(size % 30))
    rig.client.send(encode_publish("b", 1, packet_id=8, retain=False, packed=packed and b"\0") + b"x")
    await settle()
    long, short = rig.messages
    assert (long.topic, long.payload, long.properties.response_topic) == ("a", b"", packed and "r")
    assert long.receipt is not None
    assert long.receipt.packet_id == 7
    assert long.refusal is not None
    assert "expected a shorter packet, got one of 31" in long.refusal
    assert (short.topic, short.payload, short.refusal) == ("b", b"x", None)


@pytest.mark.parametrize(
    "poison",
    [
        b"\x30\x05\x00\x09abc",  # a topic longer than its packet
        b"\x36\x08\x00\x01a\x00\x01\x00ab",  # QoS 3, which does not exist
        b"\x30\x06\x00\x01a\x02\x23\x00",  # a topic alias that was never granted
        b"\xf0\x00",  # AUTH without a beginning
        b"\x40\x01\x00",  # PUBACK without an identifier
        b"\x90\x84\x20\x00\x01\x00" + bytes(4097),  # SUBACK with a code for each of 4097 filters
        b"\xff\xff\xff\xff\xff\xff",  # a length of five bytes
    ],
)
@in_virtual_time
async def test_broken_packet_ends_the_connection(poison: bytes) -> None:
    rig = Rig()
    await rig.connect()
    rig.client.send(poison)
    await settle()
    assert rig.lost == [None]
    assert rig.client.closed
    assert not rig.messages


@in_virtual_time
async def test_loss_carries_the_brokers_reason() -> None:
    rig = Rig()
    await rig.connect()
    rig.client.send(b"\xe0\x02\x8e\x00")
    await settle()
    assert rig.lost == [reason(0x8E)]


@in_virtual_time
async def test_disconnect_says_goodbye_and_is_not_a_loss() -> None:
    rig = Rig()
    await rig.connect()
    rig.engine.disconnect()
    await settle()
    assert rig.client.kinds()[-1] == DISCONNECT
    assert rig.client.closed
    assert not rig.lost


@in_virtual_time
async def test_drop_says_nothing() -> None:
    rig = Rig()
    await rig.connect()
    rig.engine.drop()
    assert rig.client.kinds() == [CONNECT]
    assert rig.client.closed
    assert rig.publish() is NOT_CONNECTED


@in_virtual_time
async def test_packet_larger_than_the_broker_accepts_is_not_sent() -> None:
    rig = Rig(answering(b"\x20\x08\x00\x00\x05\x27\x00\x00\x00\x20"))  # Maximum Packet Size 32
    await rig.connect()
    head = 10  # flags and length, topic, identifier, no properties
    assert rig.publish(bytes(32 - head)) is None
    assert rig.publish(bytes(33 - head)) is TOO_LARGE
    assert rig.publish(bytes(33 - head), packet_id=None) == reason(0)  # without an identifier it is shorter
    assert rig.publish(b"", properties=Properties(content_type="x" * 32)) is TOO_LARGE
    assert [len(packet.body) for packet in rig.client.of_kind(PUBLISH)] == [30, 29]
    assert rig.engine.connected


@in_virtual_time
async def test_qos_is_lowered_and_retain_is_taken_off_for_a_broker_without_them() -> None:
    rig = Rig(answering(b"\x20\x07\x00\x00\x04\x24\x00\x25\x00"))
    await rig.connect()
    assert rig.engine.limits == BrokerLimits(max_qos=0, retain=False)
    assert rig.publish(retain=True) == reason(0)  # it is never acknowledged
    (packet,) = rig.client.of_kind(PUBLISH)
    assert (packet.flags, packet.body) == (0x30, b"\x00\x03a/b\x00x")


@in_virtual_time
async def test_limits_on_subscriptions_are_read() -> None:
    rig = Rig(answering(b"\x20\x07\x00\x00\x04\x28\x00\x2a\x00"))
    limits = (await rig.connect()).limits
    assert limits == BrokerLimits(wildcards=False, shared=False)
    assert [limits.allows(text) for text in ("a/b", "a/+", "a/#", "$share/g/a")] == [
        True,
        False,
        False,
        False,
    ]
    assert BrokerLimits(shared=False).allows("a/+")
    assert BrokerLimits(wildcards=False).allows("$share/g/a")
    assert len(limits.missing()) == 2
    assert not BrokerLimits().missing()


@in_virtual_time
async def test_subscribe_reports_each_filters_verdict() -> None:
    def answer(client: Client, packet: Packet) -> None:
        if packet.kind == SUBSCRIBE:
            client.send(memory_broker.suback(packet.packet_id, 0x01, 0x87))
        else:
            memory_broker.polite(client, packet)

    rig = Rig(MemoryBroker(answer))
    await rig.connect()
    packet_id = rig.engine.subscribe([("a/#", 1), ("b", 0)])
    await settle()
    assert rig.client.of_kind(SUBSCRIBE)[0].filters == [("a/#", 1), ("b", 0)]
    assert rig.granted == [(packet_id, [reason(0x01), reason(0x87)])]


@in_virtual_time
async def test_version_3_1_1_sends_no_properties() -> None:
    rig = Rig(answering(memory_broker.ACCEPTED_3_1_1), version=MQTT_3_1_1)
    assert (await rig.connect()).reason == reason(0)
    rig.publish(packet_id=None, properties=Properties(content_type="text/plain"))
    assert rig.client.of_kind(PUBLISH)[0].body == b"\x00\x03a/bx"


@pytest.mark.parametrize(
    ("connack", "ping_after_s"),
    [
        (ACCEPTED, SETTINGS.keepalive_s),
        (b"\x20\x06\x00\x00\x03\x13\x00\x05", 5),
        (b"\x20\x06\x00\x00\x03\x13\xff\xff", SETTINGS.keepalive_s),
        (b"\x20\x06\x00\x00\x03\x13\x00\x00", SETTINGS.keepalive_s),
    ],
    ids=["no Server Keep Alive", "shorter", "longer", "none"],
)
@in_virtual_time
async def test_silent_broker_gets_a_ping_and_is_dropped_without_an_answer(
    connack: bytes, ping_after_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr("paho.mqtt.client.time_func", lambda: now_s)
    monkeypatch.setattr("agent.mqtt.paho_client.time.monotonic", lambda: now_s)

    rig = Rig(answering(connack))
    await rig.connect()
    now_s += ping_after_s - 1
    rig.engine.keep_alive()
    assert not rig.client.of_kind(PINGREQ)
    now_s += 1
    rig.engine.keep_alive()
    assert len(rig.client.of_kind(PINGREQ)) == 1
    now_s += ping_after_s
    rig.engine.keep_alive()
    assert rig.lost == [None]
    assert rig.client.closed


@in_virtual_time
async def test_broker_that_exceeds_the_receive_maximum_is_left() -> None:
    rig = Rig()
    await rig.connect()
    for packet_id in range(1, 18):
        rig.client.send(memory_broker.publish("a/b", b"x", packet_id))
    await settle()
    assert rig.lost == []
    rig.engine.ack(Receipt(1, epoch=1))
    rig.client.send(memory_broker.publish("a/b", b"x", 1))
    await settle()
    assert rig.lost == []
    rig.client.send(memory_broker.publish("a/b", b"x", 18))
    await settle()
    (disconnect,) = rig.client.of_kind(DISCONNECT)
    assert disconnect.body[:1] == b"\x93"
    assert rig.lost == [reason(0x93)]
    assert rig.client.closed


@pytest.mark.parametrize(("size", "is_left"), [(10, False), (100, True)])
@in_virtual_time
async def test_a_broker_that_sends_all_it_has_queued_is_left_only_if_that_is_much(
    size: int, is_left: bool
) -> None:
    rig = Rig()
    await rig.connect(settings=replace(SETTINGS, excess_messages=100, excess_bytes=5_000))
    rig.client.send(b"".join(memory_broker.publish("a/b", b"x" * size, number) for number in range(1, 110)))
    await settle()
    assert rig.lost == ([reason(0x93)] if is_left else [])


@in_virtual_time
async def test_broker_that_exceeds_the_receive_maximum_and_does_not_read_is_left_too() -> None:
    rig = Rig()
    await rig.connect()
    rig.client.room = 0
    rig.client.send(b"".join(memory_broker.publish("a/b", b"x", packet_id) for packet_id in range(1, 100)))
    await settle()
    assert rig.lost == [reason(0x93)]
    assert rig.client.closed
    assert len(rig.messages) <= SETTINGS.receive_maximum + 1
