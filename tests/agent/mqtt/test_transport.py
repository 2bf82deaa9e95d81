"""The socket to the broker, without a broker."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest

from agent.mqtt import transport
from agent.mqtt.message import Message, Receipt, decode_publish, encode_publish
from agent.mqtt.settings import BrokerSettings
from agent.mqtt.transport import BrokerSocket, open_socket
from tests.patience import PATIENCE_S
from tests.virtual_time import in_virtual_time


async def test_look_up_without_a_thread_is_a_failed_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    # An error of another kind would end the agent.
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("cannot start a thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(OSError, match="cannot look up the-broker: cannot start"):
            await asyncio.wait_for(open_socket(BrokerSettings("the-broker")), PATIENCE_S)


@pytest.mark.parametrize("host", ["broker..local", ".local", 64 * "a"])
async def test_name_that_no_host_can_have_is_a_failed_attempt(host: str) -> None:
    with pytest.raises(OSError, match="expected the name of a host"):
        await open_socket(BrokerSettings(host))


@pytest.mark.parametrize("closes", [True, False])
async def test_broker_that_is_writing_reads_the_last_packet_of_a_client_that_leaves(
    closes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    linger_s = 600.0 if closes else 1.0
    monkeypatch.setattr(transport, "LINGER_S", linger_s)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = await open_socket(BrokerSettings("127.0.0.1", listener.getsockname()[1]))
        client.watch(lambda: None)
        broker, _ = listener.accept()
    with broker:
        broker.sendall(bytes(10_000))
        client.send(b"DISCONNECT")
        client.lingers = True
        began_s = time.monotonic()
        client.close()
        client.close()
        await asyncio.sleep(0)
        for _ in range(10):
            broker.sendall(bytes(10_000))
        assert broker.recv(100) == b"DISCONNECT"
        assert broker.recv(100) == b"", "the client has finished, and has not reset the connection"
        if closes:
            broker.close()
        await asyncio.wait_for(client.wait_closed(), PATIENCE_S)
        assert closes or time.monotonic() - began_s > linger_s / 2, "it waits for the broker"
        assert client.fileno() == -1


class RefusedSocket(socket.socket):
    """The broker has sent an alert and closed the connection, which the next packet to it finds out."""

    def __init__(self, error: OSError, alert: ssl.SSLError) -> None:
        super().__init__()
        self._error = error
        self._alert = alert

    def send(self, *_arguments: object) -> int:
        raise self._error

    def recv(self, *_arguments: object) -> bytes:
        raise self._alert


@pytest.mark.parametrize(
    "error",
    [
        ssl.SSLEOFError(ssl.SSL_ERROR_EOF, "EOF occurred in violation of protocol"),
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
        BrokenPipeError(errno.EPIPE, "Broken pipe"),
    ],
)
def test_alert_is_read_when_the_broker_has_closed_before_our_first_packet(error: OSError) -> None:
    alert = ssl.SSLError(ssl.SSL_ERROR_SSL, "alert certificate required")
    alert.reason = "TLSV13_ALERT_CERTIFICATE_REQUIRED"
    client = BrokerSocket(RefusedSocket(error, alert))
    with pytest.raises(type(error)) as caught:
        client.send(b"CONNECT")
    assert caught.value is error
    assert client.tls_error is alert
    client.close()


@in_virtual_time
async def test_an_address_that_does_not_answer_leaves_time_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    connect = loop.sock_connect
    silent = ("192.0.2.1", 1883)
    tried = []

    async def sock_connect(sock: socket.socket, address: tuple[str, int]) -> None:
        tried.append(address)
        if address == silent:
            await loop.create_future()
        await connect(sock, address)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        addresses = (silent, listener.getsockname())

        async def look_up(_host: str, _port: int) -> list[tuple[object, ...]]:
            return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", address) for address in addresses]

        monkeypatch.setattr(loop, "sock_connect", sock_connect)
        monkeypatch.setattr(transport, "_look_up", look_up)
        settings = BrokerSettings("broker", connect_timeout_s=30.0)
        client = await open_socket(settings)
        assert tried == list(addresses)
        client.close()


def test_large_payload_is_in_memory_once() -> None:
    """A device with little memory takes requests of 60 MiB."""
    payload = bytes(8 << 20)
    head = encode_publish(
        "edge/v1/kitchen/models/m/infer/cam", len(payload), packet_id=7, retain=False, packed=b"\0"
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with ThreadPoolExecutor(1) as sending, ours, theirs:
        ours.setblocking(False)
        sent = sending.submit(theirs.sendall, head + payload)
        broker = BrokerSocket(ours)
        tracemalloc.start()
        try:
            message, most = received(broker), tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        sent.result(PATIENCE_S)
    assert message.payload == payload
    assert message.receipt == Receipt(7, 1)
    assert most < 1.5 * len(payload)


def received(broker: BrokerSocket) -> Message:
    """Return the next message, which arrives in parts."""
    while True:
        try:
            packet = broker.take_packet()
        except BlockingIOError:
            broker.wake()
            continue
        assert packet is not None
        return decode_publish(packet.first, packet.body, version=5, epoch=1)
