"""How a connection shares the event loop, over memory instead of sockets."""

from __future__ import annotations

import asyncio
import itertools
import math

import pytest

from agent.mqtt import turns
from agent.mqtt.message import Message
from tests.agent.mqtt import memory_broker
from tests.agent.mqtt.engine_rig import Rig
from tests.agent.mqtt.memory_broker import PUBACK, PUBLISH
from tests.virtual_time import in_virtual_time, settle


@in_virtual_time
async def test_a_turn_reads_so_many_packets_and_lets_the_rest_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "TURN_S", math.inf)
    rig = Rig()
    await rig.connect()
    rig.client.send(memory_broker.publish("a/b", b"x") * 1000)
    read = [0]
    while len(rig.messages) < 1000:
        await asyncio.sleep(0)
        read.append(len(rig.messages))
    assert max(b - a for a, b in itertools.pairwise(read)) == turns.PACKETS_IN_A_TURN


@in_virtual_time
async def test_a_turn_ends_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "TURN_S", 0.0)
    rig = Rig()
    await rig.connect()
    rig.client.send(memory_broker.publish("a/b", b"x") * 10)
    read = [0]
    while len(rig.messages) < 10:
        await asyncio.sleep(0)
        read.append(len(rig.messages))
    assert max(b - a for a, b in itertools.pairwise(read)) == 1


@in_virtual_time
async def test_answers_are_written_at_the_end_of_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "TURN_S", math.inf)

    def answer(message: Message) -> None:
        assert message.receipt is not None
        rig.engine.ack(message.receipt)

    rig = Rig(on_message=answer, persistent=True)
    await rig.connect()
    for packet_id in range(1, 101):
        rig.client.socket.pipe.incoming += memory_broker.publish("a/b", b"x", packet_id % 17 + 1)
    rig.client.send(b"")
    while not rig.client.of_kind(PUBACK):
        await asyncio.sleep(0)
    assert len(rig.client.of_kind(PUBACK)) == turns.PACKETS_IN_A_TURN
    await settle()
    assert len(rig.client.of_kind(PUBACK)) == 100


@in_virtual_time
async def test_messages_at_qos_0_are_dropped_undecoded_once_a_flood_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns, "TURN_S", math.inf)
    monkeypatch.setattr(turns, "SHED_AFTER_S", 1e-9)
    asked: list[str] = []

    def shed(topic: str, _flooded_s: float) -> bool:
        asked.append(topic)
        return True

    rig = Rig(shed=shed)
    await rig.connect()
    broken = memory_broker.publish("a/b", b"x")[:-2] + b"\x7fx"  # the properties run past its end
    turn = memory_broker.publish("a/b", b"x") * turns.PACKETS_IN_A_TURN
    rig.client.send(turn + broken * 500 + memory_broker.publish("a/c", b"kept", 1) + broken * 500)
    await settle()
    assert [message.topic for message in rig.messages] == ["a/b"] * turns.PACKETS_IN_A_TURN + ["a/c"]
    assert rig.engine.dropped == 1000
    assert set(asked) == {"a/b"}


@in_virtual_time
async def test_short_burst_at_qos_0_is_read_whole() -> None:
    rig = Rig(shed=lambda _topic, _s: True)
    await rig.connect()
    rig.client.send(memory_broker.publish("a/b", b"x") * 100)
    await settle()
    assert len(rig.messages) == 100


@in_virtual_time
async def test_broker_that_does_not_read_is_not_read() -> None:
    def answer(message: Message) -> None:
        rig.messages.append(message)
        rig.publish(bytes(50_000), None)

    rig = Rig(on_message=answer)
    await rig.connect()
    client = rig.client
    client.room = 0
    client.send(memory_broker.publish("a/b", b"x") * 500)
    await settle()
    assert len(rig.messages) <= turns.PAUSE_BYTES // 50_000 + turns.PACKETS_IN_A_TURN
    assert rig.engine.unsent_bytes < turns.PAUSE_BYTES + turns.PACKETS_IN_A_TURN * 51_000
    client.send(memory_broker.publish("a/b", b"x") * 500)
    await settle()
    assert len(rig.messages) <= turns.PAUSE_BYTES // 50_000 + turns.PACKETS_IN_A_TURN
    client.room = None
    for _ in range(100):
        if client.socket.on_writable is not None:
            client.socket.on_writable()
        await settle()
    assert len(rig.messages) == 1000
    assert len(client.of_kind(PUBLISH)) == 1000
    assert rig.engine.unsent_bytes == 0


@in_virtual_time
async def test_requests_to_acknowledge_without_end_are_not_read_either() -> None:
    rig = Rig()
    await rig.connect()
    rig.client.room = 0
    for _ in range(20):
        rig.client.send(b"\x62\x02\x00\x07" * 1000)  # PUBREL
        await settle()
    assert rig.engine.unsent_bytes < 2 * turns.PAUSE_BYTES


@in_virtual_time
async def test_large_message_at_qos_1_does_not_stop_reading() -> None:
    rig = Rig()
    await rig.connect()
    rig.client.room = 0
    rig.publish(bytes(3 * turns.PAUSE_BYTES), 1)
    rig.client.send(memory_broker.publish("a/b", b"x"))
    await settle()
    assert len(rig.messages) == 1


@in_virtual_time
async def test_written_bytes_are_a_sign_of_life_while_nothing_is_read() -> None:
    rig = Rig()
    await rig.connect()
    client = rig.client
    client.room = 0
    rig.publish(bytes(3 * turns.PAUSE_BYTES), None)
    paho = rig.engine._client
    heard_s = paho._last_bytes_received = paho._last_bytes_received - 1000.0
    client.room = 10_000
    assert client.socket.on_writable is not None
    client.socket.on_writable()
    assert paho._last_bytes_received > heard_s
    rig.engine.keep_alive()
    assert rig.lost == []
