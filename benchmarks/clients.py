"""Round trips of MQTT clients over mosquitto as Debian configures it: `python -m benchmarks.clients`.

A responder in a process of its own answers each request after a fixed time, as a device with an idle model
would. The clients take turns, one request each, so that other work on the machine disturbs all of them alike.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import secrets
import socket
import statistics
import struct
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties as PahoProperties

from agent.mqtt.connection import Connection
from agent.mqtt.message import Message
from agent.mqtt.properties import Properties
from agent.mqtt.session import Owner
from agent.mqtt.settings import BrokerSettings
from agent.wire import topics
from agent.wire.answer import read_answer
from agent.wire.request import InferMessage
from edgebundle import AsyncClient, Client
from tests.conftest import BrokerProcess

DEVICE: Final = "echo"
MODEL: Final = "nothing"
TENSOR: Final = "x;FP32;1,4"
X: Final = np.arange(4, dtype=np.float32).reshape(1, 4)
TOPIC: Final = topics.format_topic(topics.Infer(DEVICE, MODEL))
BARE: Final = "the bare connection"
ASYNC: Final = "AsyncClient"
SYNC: Final = "Client"
START_LIMIT_S: Final = 20.0


def respond(port: int, device_s: float, ready: Any) -> None:  # noqa: ANN401 - an event of multiprocessing
    """Answer every request with its own payload after `device_s`, until the process is ended."""

    async def serve() -> None:
        loop = asyncio.get_running_loop()

        def answer(message: Message) -> None:
            properties = Properties(
                content_type="application/octet-stream",
                correlation_data=message.properties.correlation_data,
                user=(("__stat", "200"), ("tensor", TENSOR)),
            )
            topic = message.properties.response_topic
            assert topic is not None
            connection.publish(topic, message.payload, qos=message.qos, properties=properties)

        def received(message: Message) -> None:
            connection.ack(message)
            loop.call_later(device_s, answer, message)

        connection = Connection(
            BrokerSettings("127.0.0.1", port), Owner(received), client_id=f"{DEVICE}-inference"
        )
        await connection.connect()
        state = '{"name":"nothing","ready":true,"inputs":[{"name":"x","datatype":"FP32","shape":[1,4]}]}'
        place = topics.format_topic(topics.ModelState(DEVICE, MODEL))
        await connection.publish(place, state.encode(), retain=True)
        for topic_filter in topics.infer_filters(DEVICE):
            await connection.subscribe(topic_filter)
        ready.set()
        await asyncio.Event().wait()

    asyncio.run(serve())


class Bare:
    """The project's connection, with one request made and read as the client does, and nothing around it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._loop = asyncio.new_event_loop()
        self._waiting: dict[str, asyncio.Future[Message]] = {}
        self._connection: Connection | None = None

    def _received(self, message: Message) -> None:
        assert self._connection is not None
        self._connection.ack(message)
        self._waiting.pop(message.topic).set_result(message)

    async def _ask(self) -> None:
        if self._connection is None:
            settings = BrokerSettings("127.0.0.1", self._port)
            self._connection = Connection(settings, Owner(self._received), client_id=secrets.token_hex(8))
            await self._connection.connect()
            await self._connection.subscribe(topics.reply_filter("bare"))
        identifier = secrets.token_hex(8)
        reply_to = topics.format_topic(topics.Reply("bare", f"{DEVICE}/{identifier}"))
        request = InferMessage(
            reply_to=reply_to,
            body=X.tobytes(),
            content_type="application/octet-stream",
            tensors=(TENSOR,),
            correlation=identifier.encode(),
            deadline_s=30.0,
        )
        waiting = self._waiting[reply_to] = asyncio.get_running_loop().create_future()
        self._connection.publish(TOPIC, request.body, properties=request.properties())
        answer = read_answer(await waiting)
        assert answer.raw == X.tobytes()

    def __call__(self) -> None:
        """Ask once."""
        self._loop.run_until_complete(self._ask())

    def close(self) -> None:
        """End the connection."""
        if self._connection is not None:
            self._loop.run_until_complete(self._connection.close())
        self._loop.close()


class Async:
    """`AsyncClient`."""

    def __init__(self, url: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._client = AsyncClient(url)
        self._model = self._client.model(DEVICE, MODEL)

    def __call__(self) -> None:
        """Ask once."""
        answer = self._loop.run_until_complete(self._model(X))
        assert answer["x"][0, 3] == 3

    def close(self) -> None:
        """End the connection."""
        self._loop.run_until_complete(self._client.close())
        self._loop.close()


class Sync:
    """`Client`."""

    def __init__(self, url: str) -> None:
        self._client = Client(url)
        self._model = self._client.model(DEVICE, MODEL)

    def __call__(self) -> None:
        """Ask once."""
        assert self._model(X)["x"][0, 3] == 3

    def close(self) -> None:
        """End the connection."""
        self._client.close()


class PlainPaho:
    """What a newcomer writes with paho."""

    def __init__(self, port: int, qos: int, *, no_delay: bool) -> None:
        self._qos = qos
        self._answered = threading.Event()
        self._payload = b""
        self._client = paho.Client(CallbackAPIVersion.VERSION2, protocol=MQTTProtocolVersion.MQTTv5)
        self._client.on_message = self._received
        self._client.connect("127.0.0.1", port)
        sock = self._client.socket()
        if no_delay and isinstance(sock, socket.socket):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reply_to = f"edge/v1/replies/paho/{DEVICE}/{secrets.token_hex(4)}"
        subscribed = threading.Event()
        self._client.on_subscribe = lambda *_: subscribed.set()
        self._client.loop_start()
        self._client.subscribe(self._reply_to, qos)
        subscribed.wait(START_LIMIT_S)

    def _received(self, _client: object, _data: object, message: paho.MQTTMessage) -> None:
        self._payload = bytes(message.payload)
        self._answered.set()

    def __call__(self) -> None:
        """Ask once."""
        properties = PahoProperties(PacketTypes.PUBLISH)
        properties.ResponseTopic = self._reply_to
        properties.CorrelationData = secrets.token_bytes(8)
        properties.ContentType = "application/octet-stream"
        properties.UserProperty = [("tensor", TENSOR)]
        self._answered.clear()
        self._client.publish(TOPIC, X.tobytes(), self._qos, properties=properties)
        assert self._answered.wait(START_LIMIT_S)
        assert struct.unpack("<4f", self._payload)[3] == 3

    def close(self) -> None:
        """End the connection."""
        self._client.disconnect()
        self._client.loop_stop()


@dataclass(frozen=True, slots=True)
class Trip:
    """One round trip.

    Attributes
    ----------
    seconds
        From the call to the answer.
    cpu_s
        Processor time of this process, all threads. Other work on the machine changes it little.
    """

    seconds: float
    cpu_s: float


@contextlib.contextmanager
def _connected(folder: Path, device_s: float, *, foreign: bool, extra: str) -> Iterator[dict[str, Any]]:
    """Yield clients by name, each of which has asked once and is connected to the same responder."""
    broker = BrokerProcess("mosquitto", folder, extra=extra)
    broker.start()
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    responder = context.Process(target=respond, args=(broker.port, device_s, ready), daemon=True)
    responder.start()
    try:
        if not ready.wait(START_LIMIT_S):
            raise RuntimeError(f"the responder was not ready within {START_LIMIT_S:g} s")
        clients: dict[str, Any] = {
            BARE: Bare(broker.port),
            ASYNC: Async(broker.url),
            SYNC: Sync(broker.url),
        }
        if foreign:
            clients |= {
                "plain paho, QoS 1": PlainPaho(broker.port, 1, no_delay=False),
                "paho, QoS 1, TCP_NODELAY": PlainPaho(broker.port, 1, no_delay=True),
                "plain paho, QoS 0": PlainPaho(broker.port, 0, no_delay=False),
            }
        for ask in clients.values():
            ask()
        yield clients
        for client in clients.values():
            client.close()
    finally:
        responder.kill()
        responder.join()
        broker.stop()


def measure(
    folder: Path, requests: int, device_s: float, *, foreign: bool = True, extra: str = ""
) -> dict[str, list[Trip]]:
    """Return each client's round trips.

    Parameters
    ----------
    folder
        For the broker.
    requests
        Of each client.
    device_s
        How long the responder waits before it answers.
    foreign
        Whether to measure plain paho, too.
    extra
        Lines of mosquitto's configuration.
    """
    with _connected(folder, device_s, foreign=foreign, extra=extra) as clients:
        trips: dict[str, list[Trip]] = {name: [] for name in clients}
        for _ in range(requests):
            for name, ask in clients.items():
                trips[name].append(_timed(ask))
        return trips


def count_calls(folder: Path, requests: int = 5) -> dict[str, int]:
    """Return how many functions, in Python and in C, each of our clients calls in a round trip.

    The median of `requests`, over all threads. It measures a client's work on any machine, however busy.

    Parameters
    ----------
    folder
        For the broker.
    requests
        Of each client.
    """
    calls = 0

    def profile(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    threading.setprofile(profile)  # for the thread that `Client` starts
    try:
        counts: dict[str, list[int]] = defaultdict(list)
        with _connected(folder, 0.0, foreign=False, extra="") as clients:
            for _ in range(requests):
                for name, ask in clients.items():
                    calls = 0
                    sys.setprofile(profile)
                    ask()
                    sys.setprofile(None)
                    counts[name].append(calls)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return {name: int(statistics.median(each)) for name, each in counts.items()}


def _timed(ask: Callable[[], None]) -> Trip:
    began_s, spent_s = time.perf_counter(), time.process_time()
    ask()
    return Trip(time.perf_counter() - began_s, time.process_time() - spent_s)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return 0 if the client is within 1.2 of the bare connection."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.clients",
        description="Compare round trips of MQTT clients over mosquitto as Debian configures it.",
        epilog="example:\n  python -m benchmarks.clients --device-ms 2",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--requests", type=int, default=100, help="of each client (default: %(default)s)")
    parser.add_argument(
        "--device-ms",
        type=float,
        default=10.0,
        help="the device's part of a round trip (default: %(default)g)",
    )
    options = parser.parse_args(arguments)
    worst = 0.0
    for title, extra in (("as Debian configures it", ""), ("set_tcp_nodelay true", "set_tcp_nodelay true\n")):
        with tempfile.TemporaryDirectory(prefix="bench-clients-") as name:
            trips = measure(Path(name), options.requests, options.device_ms / 1000, extra=extra)
        print(
            f"mosquitto, {title}: p50 in ms, as a multiple of the bare connection, and processor time in ms"
        )
        p50 = {client: statistics.median(trip.seconds for trip in every) for client, every in trips.items()}
        for client, seconds in p50.items():
            cpu_s = statistics.median(trip.cpu_s for trip in trips[client])
            print(f"  {client:28} {1000 * seconds:8.2f} {seconds / p50[BARE]:8.2f} {1000 * cpu_s:8.2f}")
        worst = max(worst, *(p50[client] / p50[BARE] for client in (ASYNC, SYNC)))
    return 0 if worst <= 1.2 else 1


if __name__ == "__main__":
    sys.exit(main())
