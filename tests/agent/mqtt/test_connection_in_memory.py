"""One connection, in virtual time, against brokers in memory that misbehave."""

from __future__ import annotations

import asyncio
import gc

import pytest

from agent.errors import BrokerError, ConfigError
from agent.mqtt import sending
from agent.mqtt.backoff import LATER_S
from agent.mqtt.engine import Engine
from agent.mqtt.message import Message, Will
from agent.mqtt.properties import EMPTY, Properties
from agent.mqtt.reason_codes import (
    CLOSED,
    EXPIRED,
    NOT_CONNECTED,
    POISON,
    QUEUE_FULL,
    RENEWED,
    TOO_LARGE,
    Reason,
    reason,
)
from agent.mqtt.settings import BrokerSettings
from agent.mqtt.transport import BrokerSocket
from agent.mqtt.upkeep import LOOK_FOR_5_S
from tests.agent.mqtt import memory_broker
from tests.agent.mqtt.memory_broker import (
    CONNECT,
    DISCONNECT,
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBREC,
    SUBSCRIBE,
    UNSUBSCRIBE,
    Client,
    MemoryBroker,
    Packet,
)
from tests.agent.mqtt.peer import FILTER, SETTINGS, TOPIC, Peer, in_memory, now_s
from tests.virtual_time import START_S, in_virtual_time, settle


@in_virtual_time
async def test_message_of_an_earlier_connection_is_not_acknowledged_over_a_later_one() -> None:
    broker = MemoryBroker()
    async with in_memory(broker) as peer:
        broker.clients[0].send(memory_broker.publish("a", b"first", packet_id=7))
        first = await peer.next()
        broker.clients[0].hang_up()
        await peer.loss()
        await peer.wait_connected()
        broker.clients[1].send(memory_broker.publish("a", b"second", packet_id=8))
        second = await peer.next()
        peer.ack(first)
        peer.ack(second)
        await settle()
        assert [packet.packet_id for packet in broker.clients[1].of_kind(PUBACK)] == [8]


@in_virtual_time
async def test_publish_without_a_connection_says_so_at_qos_0_and_waits_at_qos_1() -> None:
    reachable = False
    broker = MemoryBroker()

    async def open_socket(settings: BrokerSettings) -> BrokerSocket:
        if not reachable:
            raise ConnectionRefusedError
        return await broker.open_socket(settings)

    peer = Peer(SETTINGS, open_socket=open_socket)
    peer.start()
    assert await peer.publish(TOPIC, b"", qos=0) is NOT_CONNECTED
    waiting = peer.publish(TOPIC, b"", qos=1)
    await asyncio.sleep(3600)
    assert not waiting.done()
    reachable = True
    assert await waiting == reason(0)
    await peer.close()
    assert await peer.publish(TOPIC, b"", qos=1) is CLOSED


@in_virtual_time
async def test_messages_that_wait_for_a_broker_are_bounded() -> None:
    peer = Peer(SETTINGS, open_socket=MemoryBroker().open_socket)
    half = bytes(sending.MAX_WAITING_BYTES // 2)
    waiting = [peer.publish(TOPIC, half), peer.publish(TOPIC, half)]
    assert await peer.publish(TOPIC, b"x") is QUEUE_FULL
    assert not any(future.done() for future in waiting)
    await peer.close()
    assert await asyncio.gather(*waiting) == [CLOSED, CLOSED]


@in_virtual_time
async def test_messages_that_wait_for_a_broker_are_few_objects() -> None:
    """The garbage collector stops the event loop for as long as it visits them."""
    peer = Peer(SETTINGS, open_socket=MemoryBroker().open_socket)
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(100):
        peer.send(TOPIC, b"", lambda _verdict: None)
    each = (len(gc.get_objects()) - before) / 100
    assert each < 5.5, "the message, and who is told what became of it"
    await peer.close()


@in_virtual_time
async def test_answers_at_qos_0_for_a_broker_that_does_not_read_are_bounded() -> None:
    broker = MemoryBroker()
    async with in_memory(broker) as peer:
        broker.clients[0].room = 0
        large = bytes(20 << 20)
        verdicts = [await peer.publish(TOPIC, large, qos=0)]  # nothing else waits
        verdicts += [await peer.publish(TOPIC, b"x", qos=0)]
        assert verdicts == [reason(0), QUEUE_FULL]
        broker.clients[0].room = None
        assert broker.clients[0].socket.on_writable is not None
        broker.clients[0].socket.on_writable()
        assert await peer.publish(TOPIC, b"x", qos=0) == reason(0)


@in_virtual_time
async def test_each_answer_at_qos_0_counts_for_a_broker_that_does_not_read() -> None:
    broker = MemoryBroker()
    async with in_memory(broker) as peer:
        broker.clients[0].room = 0
        verdicts = [await peer.publish(TOPIC, bytes(1 << 20), qos=0) for _ in range(20)]
        assert verdicts.count(reason(0)) < 9
        assert verdicts[-1] is QUEUE_FULL


@in_virtual_time
async def test_expired_message_is_not_sent() -> None:
    broker = MemoryBroker()
    peer = Peer(SETTINGS, open_socket=broker.open_socket)
    expired = peer.publish(TOPIC, b"late", properties=Properties(expiry_s=1))
    fresh = peer.publish(TOPIC, b"fresh", properties=Properties(expiry_s=60))
    await asyncio.sleep(1.1)
    await peer.connect()
    assert await expired is EXPIRED
    assert await fresh == reason(0)
    assert [packet.body[-5:] for packet in broker.clients[0].of_kind(PUBLISH)] == [b"fresh"]
    await peer.close()


@in_virtual_time
async def test_no_more_is_in_flight_than_the_servers_receive_maximum() -> None:
    in_flight: list[int] = []
    most = 0

    def answer(client: Client, packet: Packet) -> None:
        nonlocal most
        if packet.kind == CONNECT:
            client.send(b"\x20\x06\x00\x00\x03\x21\x00\x03")  # CONNACK with Receive Maximum 3
        elif packet.kind == PUBLISH:
            in_flight.append(packet.packet_id)
            most = max(most, len(in_flight))
            asyncio.get_running_loop().call_later(1.0, acknowledge, client)

    def acknowledge(client: Client) -> None:
        client.send(memory_broker.puback(in_flight.pop(0)))

    async with in_memory(MemoryBroker(answer)) as peer:
        verdicts = await asyncio.gather(*(peer.publish(TOPIC, b"%d" % number) for number in range(10)))
        assert not any(verdict.failed for verdict in verdicts)
    assert most == 3


@in_virtual_time
async def test_message_refused_for_good_is_reported_and_one_refused_for_now_is_sent_again() -> None:
    quota = iter([0x97, 0x97, 0x00])

    def answer(client: Client, packet: Packet) -> None:
        if packet.kind == PUBLISH:
            code = next(quota) if packet.body.endswith(b"quota") else 0x87
            client.send(memory_broker.puback(packet.packet_id, code))
        else:
            memory_broker.polite(client, packet)

    async with in_memory(MemoryBroker(answer)) as peer:
        assert await peer.publish(TOPIC, b"quota") == reason(0)
        assert now_s() - START_S == pytest.approx(2 * sending.RESEND_DELAY_S, abs=0.01)
        assert await peer.publish(TOPIC, b"never") == reason(0x87)


@in_virtual_time
async def test_nothing_is_published_before_the_subscriptions_are_granted() -> None:
    asked: list[int] = []

    def answer(client: Client, packet: Packet) -> None:
        if packet.kind == SUBSCRIBE:
            asked.append(packet.packet_id)
        else:
            memory_broker.polite(client, packet)

    broker = MemoryBroker(answer)
    peer = Peer(SETTINGS, open_socket=broker.open_socket)
    peer.want(FILTER)
    sent = peer.publish(TOPIC, b"x")
    await peer.connect()
    await settle()
    settled = peer.settled
    assert not settled
    assert broker.clients[0].kinds() == [CONNECT, SUBSCRIBE]
    broker.clients[0].send(memory_broker.suback(asked[0], 1))
    assert await sent == reason(0)
    assert peer.settled
    await peer.close()


@in_virtual_time
async def test_refused_subscription_is_an_error_and_is_not_asked_for_again() -> None:
    def answer(client: Client, packet: Packet) -> None:
        if packet.kind == SUBSCRIBE:
            client.send(memory_broker.suback(packet.packet_id, 0x87))
        else:
            memory_broker.polite(client, packet)

    broker = MemoryBroker(answer)
    async with in_memory(broker) as peer:
        with pytest.raises(BrokerError, match="Not authorized") as caught:
            await peer.subscribe(FILTER)
        assert caught.value.reason_code == 0x87
        broker.clients[0].hang_up()
        await peer.loss()
        await peer.wait_connected()
        await settle()
        assert broker.clients[1].kinds() == [CONNECT]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"\x20\x03\x00\x87\x00", "Not authorized"),
        (b"\x20\x03\x00\x86\x00", "Bad user name or password"),
    ],
)
@in_virtual_time
async def test_refusal_to_connect_is_reported_in_the_specifications_words(answer: bytes, words: str) -> None:
    peer = Peer(SETTINGS, open_socket=MemoryBroker(lambda client, _packet: client.send(answer)).open_socket)
    with pytest.raises(BrokerError, match=words):
        await peer.connect()
    await peer.close()


@in_virtual_time
async def test_broker_that_says_nothing_is_given_up_in_time() -> None:
    peer = Peer(SETTINGS, open_socket=MemoryBroker(lambda _client, _packet: None).open_socket)
    with pytest.raises(BrokerError, match="no answer in time"):
        await peer.connect(timeout_s=1.0)
    assert now_s() - START_S == pytest.approx(1.0)
    await peer.close()


@in_virtual_time
async def test_broken_packet_ends_the_connection_and_the_next_one_works() -> None:
    broker = MemoryBroker()
    async with in_memory(broker) as peer:
        broker.clients[0].send(b"\x30\x05\x00\x09abc")  # a topic longer than its packet
        await peer.loss()
        await peer.wait_connected()
        broker.clients[1].send(memory_broker.publish("a", b"abc"))
        assert (await peer.next()).payload == b"abc"


@in_virtual_time
async def test_client_whose_name_was_taken_over_does_not_come_straight_back() -> None:
    broker = MemoryBroker()
    async with in_memory(broker) as peer:
        broker.clients[0].send(b"\xe0\x02\x8e\x00")  # DISCONNECT, session taken over
        assert await peer.loss() == reason(0x8E)
        await peer.wait_connected()
        assert broker.opened_s[1] - broker.opened_s[0] >= LATER_S


@in_virtual_time
async def test_messages_that_wait_for_a_broker_obey_the_limits_of_the_one_that_comes() -> None:
    def answer(client: Client, packet: Packet) -> None:
        if packet.kind == CONNECT and len(broker.clients) > 1:
            client.send(b"\x20\x0b\x01\x00\x08\x27\x00\x00\x00\x40\x21\x00\x01")  # 64 bytes, one at a time
        elif packet.kind != PUBLISH or len(broker.clients) > 1:
            memory_broker.polite(client, packet)

    broker = MemoryBroker(answer)
    async with in_memory(broker, persistent=True) as peer:
        in_flight = [peer.publish(TOPIC, payload) for payload in (b"a", bytes(100), b"b")]
        await settle()
        broker.clients[0].hang_up()
        await peer.loss()
        waiting = [peer.publish(TOPIC, payload) for payload in (bytes(100), b"c")]
        verdicts = await asyncio.gather(*in_flight, *waiting)
        assert verdicts == [reason(0), TOO_LARGE, reason(0), TOO_LARGE, reason(0)]
        assert [packet.body[-1:] for packet in broker.clients[1].of_kind(PUBLISH)] == [b"a", b"b", b"c"]
        assert await peer.publish(TOPIC, bytes(100), qos=0) is TOO_LARGE
        assert peer.unsendable == 3
        assert not peer.fits(TOPIC, bytes(100), qos=1, properties=EMPTY)
        assert peer.fits(TOPIC, bytes(30), qos=1, properties=EMPTY)
        assert len(broker.clients) == 2


@in_virtual_time
async def test_message_that_ends_the_connection_without_a_word_is_given_up_and_others_are_not() -> None:
    def answer(client: Client, packet: Packet) -> None:
        if packet.kind == PUBLISH and packet.body.endswith(b"poison"):
            client.hang_up()
        else:
            memory_broker.polite(client, packet)

    broker = MemoryBroker(answer)
    async with in_memory(broker, persistent=True) as peer:
        sent = [peer.publish(TOPIC, payload) for payload in (b"before", b"poison", b"behind")]
        assert await asyncio.gather(*sent) == [reason(0), POISON, reason(0)]
        assert len(broker.clients) <= sending.MAX_LOSSES + 1
        assert await peer.publish(TOPIC, b"later") == reason(0)


@pytest.mark.parametrize(
    ("refusal", "flags"), [(0x9A, 0x0E), (0x9B, 0x26)], ids=["retain not supported", "QoS not supported"]
)
@in_virtual_time
async def test_will_that_the_broker_cannot_keep_is_lowered(refusal: int, flags: int) -> None:
    def answer(client: Client, packet: Packet) -> None:
        if packet.kind == CONNECT and len(broker.clients) == 1:
            client.send(bytes((0x20, 3, 0, refusal, 0)))
        else:
            memory_broker.polite(client, packet)

    broker = MemoryBroker(answer)
    peer = Peer(SETTINGS, open_socket=broker.open_socket, will=Will(TOPIC, b"gone"))
    started_s = now_s()
    peer.start()
    await peer.wait_connected()
    assert now_s() - started_s < 1
    # Will Retain 0x20, Will QoS 0x08, Will Flag 0x04, Clean Start 0x02.
    assert [client.packets[0].body[7] for client in broker.clients] == [0x2E, flags]
    await peer.close()


@in_virtual_time
async def test_subscription_that_the_broker_does_not_support_is_not_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def answer(client: Client, packet: Packet) -> None:
        if packet.kind == CONNECT:
            client.send(b"\x20\x05\x00\x00\x02\x2a\x00")  # no shared subscriptions
        else:
            memory_broker.polite(client, packet)

    broker = MemoryBroker(answer)
    async with in_memory(broker) as peer:
        await peer.subscribe("a/+")
        with pytest.raises(BrokerError, match="Shared subscriptions not supported"):
            await peer.subscribe("$share/g/a")
        peer.want("$share/g/b")
        assert [packet.filters for packet in broker.clients[0].of_kind(SUBSCRIBE)] == [[("a/+", 1)]]
        assert not peer.granted
        broker.clients[0].hang_up()
        await peer.loss()
        await peer.wait_connected()
    said = [
        record.getMessage() for record in caplog.records if "shared subscriptions:" in record.getMessage()
    ]
    assert len(said) == 1


@in_virtual_time
async def test_what_mqtt_cannot_represent_is_an_error_before_it_is_queued() -> None:
    peer = Peer(SETTINGS, open_socket=MemoryBroker().open_socket)
    for topic, properties in (
        ("a/+", EMPTY),
        ("", EMPTY),
        ("a\0", EMPTY),
        ("a", Properties(content_type="a\0b")),
        ("a", Properties(user=(("a", "\ud800"),))),
    ):
        with pytest.raises(ValueError, match=r"expected|surrogates"):
            peer.publish(topic, b"", properties=properties)
    assert peer.unacknowledged == 0


@in_virtual_time
async def test_broker_that_is_slow_to_start_is_spoken_to_in_5() -> None:
    ready_s = now_s() + 25.0

    def answer(client: Client, packet: Packet) -> None:
        if packet.kind != CONNECT or now_s() >= ready_s:
            memory_broker.polite(client, packet)

    broker = MemoryBroker(answer)
    peer = Peer(SETTINGS, open_socket=broker.open_socket)
    peer.start()
    await peer.wait_connected()
    assert peer.version == 5
    assert {packet.version for client in broker.clients for packet in client.of_kind(CONNECT)} == {5}
    await peer.close()


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
@in_virtual_time
async def test_broker_that_speaks_5_by_now_is_found_out_without_disturbing_anybody(busy: bool) -> None:
    upgraded = False

    def answer(client: Client, packet: Packet) -> None:
        if packet.kind == CONNECT and not upgraded:
            client.send(b"\x20\x02\x00\x01" if packet.version == 5 else memory_broker.ACCEPTED_3_1_1)
        elif packet.kind != PUBLISH:
            memory_broker.polite(client, packet)

    broker = MemoryBroker(answer)
    async with in_memory(broker, persistent=True) as peer:
        assert peer.version == 4
        await asyncio.sleep(10 * LOOK_FOR_5_S)
        assert peer.connects == 1
        assert len(broker.clients) < 2 + 2 * 10 + 1
        upgraded = True
        if busy:
            peer.publish(TOPIC, b"never acknowledged")
        await asyncio.sleep(LOOK_FOR_5_S + 2)
        assert (peer.version, peer.connects) == ((4, 1) if busy else (5, 2))


@in_virtual_time
async def test_broker_that_only_seems_to_speak_5_is_asked_less_and_less_often() -> None:
    def answer(client: Client, packet: Packet) -> None:
        if packet.kind == CONNECT and packet.version == 5 and len(packet.body) > 16:
            client.send(b"\x20\x02\x00\x01")
        elif packet.kind == CONNECT and packet.version == 4:
            client.send(memory_broker.ACCEPTED_3_1_1)
        else:
            memory_broker.polite(client, packet)

    broker = MemoryBroker(answer)
    async with in_memory(broker) as peer:
        await asyncio.sleep(40 * LOOK_FOR_5_S)
        assert peer.version == 4
        assert peer.connects <= 7


@in_virtual_time
async def test_renewed_connection_says_goodbye_and_loses_no_message() -> None:
    def answer(client: Client, packet: Packet) -> None:
        if packet.kind != PUBLISH or len(broker.clients) == 2:
            memory_broker.polite(client, packet)

    broker = MemoryBroker(answer)

    async with in_memory(broker) as peer:
        sent = peer.publish(TOPIC, b"x")
        peer.renew()
        assert await peer.loss() is RENEWED
        assert await sent == reason(0)
        assert broker.clients[0].kinds() == [CONNECT, PUBLISH, DISCONNECT]
        assert peer.connects == 2


@in_virtual_time
async def test_close_that_is_cancelled() -> None:
    peer = Peer(SETTINGS, open_socket=MemoryBroker().open_socket)
    await peer.connect()
    closing = asyncio.create_task(peer.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await peer.close()


@pytest.mark.parametrize("readable", [True, False])
@in_virtual_time
async def test_certificate_that_cannot_be_read_while_looking_for_5(
    caplog: pytest.LogCaptureFixture, *, readable: bool
) -> None:
    def answer(client: Client, packet: Packet) -> None:
        if packet.kind == CONNECT:
            client.send(b"\x20\x02\x00\x01" if packet.version == 5 else memory_broker.ACCEPTED_3_1_1)

    broker, opened = MemoryBroker(answer), 0

    async def open_socket(settings: BrokerSettings) -> BrokerSocket:
        nonlocal opened
        opened += 1
        if opened > 2 and not readable:
            raise ConfigError("ca.pem: cannot be read (Permission denied)")
        return await broker.open_socket(settings)

    failed: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
    peer = Peer(SETTINGS, open_socket=open_socket)
    await peer.connect()
    await asyncio.sleep(2 * LOOK_FOR_5_S)
    assert (peer.version, peer.connects) == (4, 1)
    await peer.close()
    gc.collect()
    assert not failed
    warnings = [record.getMessage() for record in caplog.records if "ca.pem" in record.getMessage()]
    assert bool(warnings) is not readable
    assert all("MQTT 5" in line for line in warnings)


@pytest.mark.parametrize(
    ("acknowledged_after_s", "lost_after_s", "closed_after_s", "verdict"),
    [(2.0, None, 2.0, reason(0)), (None, 3.0, 3.0, CLOSED), (None, None, 5.0, CLOSED)],
    ids=["acknowledged", "connection lost", "time is up"],
)
@in_virtual_time
async def test_close_waits_for_acknowledgements_as_long_as_that_can_help(
    acknowledged_after_s: float | None, lost_after_s: float | None, closed_after_s: float, verdict: Reason
) -> None:
    def answer(client: Client, packet: Packet) -> None:
        loop = asyncio.get_running_loop()
        if packet.kind != PUBLISH:
            memory_broker.polite(client, packet)
        elif acknowledged_after_s is not None:
            loop.call_later(acknowledged_after_s, client.send, memory_broker.puback(packet.packet_id))
        elif lost_after_s is not None:
            loop.call_later(lost_after_s, client.hang_up)

    loop = asyncio.get_running_loop()
    peer = Peer(SETTINGS, open_socket=MemoryBroker(answer).open_socket)
    await peer.connect()
    started_s = loop.time()
    sent = peer.publish(TOPIC, b"x")
    await peer.close(drain_s=5.0)
    assert loop.time() - started_s == pytest.approx(closed_after_s, abs=0.01)
    assert await sent == verdict


@in_virtual_time
async def test_refused_subscription_is_settled_but_not_granted() -> None:
    refused = {"b"}

    def answer(client: Client, packet: Packet) -> None:
        if packet.kind == SUBSCRIBE:
            codes = [0x87 if name in refused else qos for name, qos in packet.filters]
            client.send(memory_broker.suback(packet.packet_id, *codes))
        else:
            memory_broker.polite(client, packet)

    heard: list[bool] = []
    broker = MemoryBroker(answer)
    peers: list[Peer] = []
    async with in_memory(broker, on_subscribed=lambda: heard.append(peers[0].granted)) as peer:
        peers.append(peer)
        assert peer.granted
        peer.want("a")
        await settle()
        peer.want("b")
        await settle()
        assert peer.settled
        assert heard == [True, False]
        refused.clear()
        peer.want("b")
        await settle()
        assert heard == [True, False, True]


@in_virtual_time
async def test_wait_until_subscribed_ends_with_the_unsuback() -> None:
    held: list[bytes] = []

    def answer(client: Client, packet: Packet) -> None:
        if packet.kind == UNSUBSCRIBE:
            held.append(memory_broker.unsuback(packet.packet_id))
        else:
            memory_broker.polite(client, packet)

    broker = MemoryBroker(answer)
    async with in_memory(broker) as peer:
        peer.want("a")
        await peer.wait_subscribed()
        peer.unsubscribe("a")
        waiting = asyncio.ensure_future(peer.wait_subscribed())
        await settle()
        assert not waiting.done()
        broker.clients[0].send(held[0])
        await asyncio.wait_for(waiting, 1)


@in_virtual_time
async def test_message_that_comes_with_the_connack_can_be_acknowledged() -> None:
    def answer(client: Client, packet: Packet) -> None:
        if packet.kind == CONNECT:  # the session's messages follow at once, in the same segment
            client.send(memory_broker.ACCEPTED + memory_broker.publish(TOPIC, b"kept", 7))
        else:
            memory_broker.polite(client, packet)

    broker = MemoryBroker(answer)

    class Hasty(Peer):
        """Acknowledges at once, as a request that is dropped is."""

        def _keep(self, message: Message) -> None:
            self.ack(message)

    peer = Hasty(SETTINGS, open_socket=broker.open_socket, persistent=True)
    await peer.connect()
    await settle()
    assert [packet.packet_id for packet in broker.clients[0].of_kind(PUBACK)] == [7]
    await peer.close()


@in_virtual_time
async def test_owner_that_fails_does_not_end_the_attempts_to_connect(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(_session_present: bool) -> None:
        if len(broker.clients) < 3:
            raise ValueError("a fault of the owner")

    broker = MemoryBroker()
    peer = Peer(SETTINGS, open_socket=broker.open_socket, on_up=fail)
    peer.start()
    await asyncio.sleep(60)
    assert peer.connected
    assert "a fault of the owner" in caplog.text
    assert [client.closed for client in broker.clients] == [True, True, False]
    broker.clients[-1].hang_up()
    await asyncio.sleep(60)
    assert peer.connected
    assert len(broker.clients) == 4
    await peer.close()


@in_virtual_time
async def test_connection_that_breaks_while_it_subscribes_holds_up_no_later_one() -> None:
    def answer(client: Client, packet: Packet) -> None:
        memory_broker.polite(client, packet)
        if packet.kind == CONNECT and len(broker.clients) == 1:
            client.socket.pipe.ended = True  # CONNACK is the last thing that arrives

    ups: list[bool] = []
    broker = MemoryBroker(answer)
    peer = Peer(SETTINGS, open_socket=broker.open_socket, on_up=ups.append)
    peer.want(FILTER)
    peer.start()
    sent = peer.publish(TOPIC, b"waits")
    await asyncio.sleep(60)
    assert len(broker.clients) == 2
    assert peer.settled
    assert sent.done()
    assert ups == [False]
    await asyncio.wait_for(peer.wait_subscribed(), 1)
    await peer.close()


@in_virtual_time
async def test_pings_go_on_after_an_internal_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def keep_alive(_engine: Engine) -> None:
        ticks.append(now_s())
        if len(ticks) == 1:
            raise ValueError("a fault in here")

    ticks: list[float] = []
    monkeypatch.setattr(Engine, "keep_alive", keep_alive)
    async with in_memory(MemoryBroker()):
        await asyncio.sleep(10)
    assert len(ticks) >= 9
    assert "a fault in here" in caplog.text


@in_virtual_time
async def test_message_at_qos_2_is_taken_and_its_exchange_completed() -> None:
    broker = MemoryBroker()
    async with in_memory(broker, persistent=True) as peer:
        client = broker.clients[0]
        message = memory_broker.publish(TOPIC, b"twice", 7)
        client.send(bytes((PUBLISH | 4,)) + message[1:])  # although we subscribe at QoS 1
        received = await peer.next()
        assert (received.payload, received.qos) == (b"twice", 2)
        assert not client.of_kind(PUBREC)  # not before the owner has it
        peer.ack(received)
        client.send(b"\x62\x02\x00\x07")  # PUBREL
        await settle()
        assert [packet.packet_id for packet in client.of_kind(PUBREC)] == [7]
        assert [packet.packet_id for packet in client.of_kind(PUBCOMP)] == [7]
        client.send(b"\x62\x03\x00\x09\x00")  # of an earlier process
        await settle()
        assert [packet.packet_id for packet in client.of_kind(PUBCOMP)] == [7, 9]
        assert not client.closed
        client.send(b"\x62\x01\x00")
        assert (await peer.loss()).failed
