"""One connection, against real brokers."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from agent.errors import BrokerError
from agent.mqtt.message import Will
from agent.mqtt.properties import Properties
from agent.mqtt.settings import BrokerSettings, TlsSettings
from tests.agent.mqtt.peer import FILTER, TOPIC, Peer, connected, socket_of
from tests.agent.provision.authority import Authority
from tests.conftest import BrokerProcess
from tests.patience import PATIENCE_S


async def test_message_and_properties_go_there_and_back(mosquitto: BrokerProcess) -> None:
    async with connected(mosquitto.port) as peer:
        assert peer.version == 5
        await peer.subscribe(FILTER)
        sent = Properties(
            content_type="image/png",
            response_topic="a/b",
            correlation_data=b"\0\1",
            expiry_s=60,
            utf8=True,
            user=(("tensor", "x;FP32;1"), ("tensor", "y;FP32;1")),
        )
        assert not (await peer.publish(TOPIC, b"payload", properties=sent)).failed
        message = await peer.next()
        assert (message.topic, message.payload, message.qos) == (TOPIC, b"payload", 1)
        assert message.properties == sent


async def test_broker_without_mqtt_5_is_spoken_to_in_3_1_1(amqtt_broker: BrokerProcess) -> None:
    # A client that waits for an answer to 5 waits so long.
    limit_s = 10 * PATIENCE_S
    peer = Peer(BrokerSettings("127.0.0.1", amqtt_broker.port, connect_timeout_s=limit_s))
    async with asyncio.timeout(PATIENCE_S):
        await peer.connect()
        assert peer.version == 4
        await peer.subscribe(FILTER)
        assert not (await peer.publish(TOPIC, b"payload", properties=Properties(content_type="x"))).failed
        assert (await peer.next()).payload == b"payload"
        await peer.close()


async def test_round_trips_at_qos_1_do_not_wait_for_delayed_acknowledgements(
    mosquitto: BrokerProcess,
) -> None:
    async with connected(mosquitto.port) as peer, connected(mosquitto.port, "echo") as echo:
        await peer.subscribe(FILTER)
        await echo.subscribe("edge/v1/echo")

        async def answer() -> None:
            while True:
                message = await echo.next(60)
                await echo.publish(TOPIC, message.payload)
                echo.ack(message)

        answering = asyncio.create_task(answer())
        took_s = []
        for _ in range(200):
            started = time.perf_counter()
            peer.publish("edge/v1/echo", b"x" * 200)
            peer.ack(await peer.next())
            took_s.append(time.perf_counter() - started)
        answering.cancel()
        # A delayed acknowledgement takes 40 ms each time. A round trip without one takes less than 1 ms,
        # and longer only while other programs have the processor.
        assert sorted(took_s)[20] < 0.02


async def test_subscriptions_and_unsent_messages_survive_a_restart_of_the_broker(
    broker: BrokerProcess,
) -> None:
    async with connected(broker.port) as peer:
        await peer.subscribe(FILTER)
        broker.stop(signal.SIGKILL)
        await peer.loss()
        sent = peer.publish(TOPIC, b"while it was away")
        assert not sent.done()
        broker.start()
        assert not (await asyncio.wait_for(sent, PATIENCE_S)).failed
        assert (await peer.next()).payload == b"while it was away"
        assert peer.connects == 2


async def test_unacknowledged_message_comes_again_and_its_old_acknowledgement_is_ignored(
    mosquitto: BrokerProcess,
) -> None:
    async with (
        connected(mosquitto.port, persistent=True) as peer,
        connected(mosquitto.port, "other") as other,
    ):
        await peer.subscribe(FILTER)
        await other.publish(TOPIC, b"one")
        first = await peer.next()
        mosquitto.restart()  # with its persistence, as Debian configures it
        again = await peer.next(10)
        assert (again.payload, again.dup) == (b"one", True)
        peer.ack(first)  # of a connection that is gone
        await other.publish(TOPIC, b"two")
        assert (await peer.next()).payload == b"two"
        peer.ack(again)
        assert again.receipt != first.receipt


async def test_messages_of_a_persistent_session_wait_for_the_client(mosquitto: BrokerProcess) -> None:
    async with connected(mosquitto.port, persistent=True) as peer:
        await peer.subscribe(FILTER)
    async with connected(mosquitto.port, "other") as other:
        await other.publish(TOPIC, b"kept")
    present: list[bool] = []
    async with connected(mosquitto.port, persistent=True, on_up=present.append) as peer:
        assert (await peer.next()).payload == b"kept"
    assert present == [True]


async def test_will_is_left_by_a_client_that_vanishes_and_not_by_one_that_says_goodbye(
    mosquitto: BrokerProcess,
) -> None:
    async with connected(mosquitto.port, "watcher") as watcher:
        await watcher.subscribe(FILTER)
        will = Will(TOPIC, b"gone", retain=False)
        async with connected(mosquitto.port, "polite", will=will):
            pass
        rude = Peer(BrokerSettings("127.0.0.1", mosquitto.port), "rude", will=will)
        await rude.connect()
        socket_of(rude).shutdown(socket.SHUT_RDWR)
        assert (await watcher.next()).payload == b"gone"
        assert watcher.inbox.empty()
        await rude.close()


async def test_port_without_a_broker_is_an_error_with_a_hint() -> None:
    peer = Peer(BrokerSettings("127.0.0.1", 1))
    with pytest.raises(
        BrokerError, match=r"cannot reach the broker at mqtt://127\.0\.0\.1:1: Connection refused"
    ) as caught:
        await peer.connect()
    assert caught.value.hint
    await peer.close()


async def test_two_clients_of_one_name_evict_each_other(mosquitto: BrokerProcess) -> None:
    # In 3.1.1, a broker ends the older connection without a DISCONNECT. In 5, it may say why, and then a
    # minute passes: test_connection_in_memory.py tests this in virtual time, and test_backoff.py the delays.
    async with (
        connected(mosquitto.port, "twin", protocol="3.1.1") as first,
        connected(mosquitto.port, "twin", protocol="3.1.1") as second,
    ):
        await first.loss()
        await second.loss()
        await first.loss()


@pytest.fixture
def tls_broker(tmp_path: Path) -> Iterator[tuple[BrokerProcess, Path]]:
    authority = Authority(tmp_path)
    authority.client("client")
    process = BrokerProcess(
        "mosquitto",
        tmp_path,
        extra=f"cafile {authority.ca}\n{authority.server('127.0.0.1')}require_certificate true\n",
    )
    process.start()
    yield process, tmp_path
    process.stop()


async def test_mutual_tls(tls_broker: tuple[BrokerProcess, Path]) -> None:
    process, folder = tls_broker
    tls = TlsSettings(folder / "ca.pem", folder / "client.pem", folder / "client.key")
    peer = Peer(BrokerSettings("127.0.0.1", process.port, tls))
    await peer.connect()
    await peer.subscribe(FILTER)
    payload = bytes(range(256)) * 4000  # many TLS records
    peer.publish(TOPIC, payload)
    assert (await peer.next()).payload == payload
    await peer.close()


async def test_tls_broker_of_another_name_is_refused(tls_broker: tuple[BrokerProcess, Path]) -> None:
    process, folder = tls_broker
    tls = TlsSettings(folder / "ca.pem", folder / "client.pem", folder / "client.key")
    peer = Peer(BrokerSettings("localhost", process.port, tls))
    with pytest.raises(BrokerError, match=r"Hostname mismatch|certificate"):
        await peer.connect()
    await peer.close()


async def test_tls_broker_of_an_unknown_authority_is_refused(tls_broker: tuple[BrokerProcess, Path]) -> None:
    process, _folder = tls_broker
    peer = Peer(BrokerSettings("127.0.0.1", process.port, TlsSettings()))
    with pytest.raises(BrokerError, match="certificate"):
        await peer.connect()
    await peer.close()


Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def scripted(script: Script) -> AsyncIterator[int]:
    """A TCP server that does what a test says."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await script(reader, writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield int(server.sockets[0].getsockname()[1])


async def test_connection_cut_in_mid_packet_is_made_again_and_the_message_arrives(
    mosquitto: BrokerProcess,
) -> None:
    cuts = iter([40_000, 90_000, 1 << 30])

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        budget = next(cuts, 1 << 30)
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", mosquitto.port)

        async def back() -> None:
            while data := await there_reader.read(4096):
                writer.write(data)

        returning = asyncio.create_task(back())
        while budget > 0 and (data := await reader.read(min(4096, budget))):
            budget -= len(data)
            there_writer.write(data)
            await there_writer.drain()
        returning.cancel()
        there_writer.close()

    async with scripted(proxy) as port, connected(mosquitto.port) as receiver:
        await receiver.subscribe(FILTER)
        async with connected(port, "cut") as peer:
            verdict = await asyncio.wait_for(peer.publish(TOPIC, bytes(200_000)), PATIENCE_S)
            assert not verdict.failed
            assert peer.connects == 3
        assert len((await receiver.next()).payload) == 200_000
        assert receiver.inbox.empty()
