"""The agent while the broker does not take its answers: it computes no more, and goes on afterwards."""

from __future__ import annotations

import asyncio
from collections import Counter

from agent.service.inference import _MAX_BACKLOG_BYTES
from tests.agent.service.conftest import StartService, status_of
from tests.conftest import BrokerProcess
from tests.flooding_broker import CONNECT, PINGREQ, PUBLISH, SUBSCRIBE, numbered, publish, reply_to
from tests.patience import until

PAYLOAD_BYTES = 1 << 20
REQUESTS = 20
# What a worker had when it was held.
SENT_AHEAD = 2


class Withholding:
    """A broker of MQTT 5 that acknowledges answers only when it is told to."""

    def __init__(self) -> None:
        self.answers = 0
        self.go_on = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.read(1):
            size = shift = 0
            while True:
                (byte,) = await reader.readexactly(1)
                size |= (byte & 0x7F) << shift
                shift += 7
                if byte < 0x80:
                    break
            await self.take(head[0], await reader.readexactly(size), writer)

    async def take(self, first: int, body: bytes, writer: asyncio.StreamWriter) -> None:
        kind = first & 0xF0
        if kind == CONNECT:
            writer.write(b"\x20\x03\0\0\0")
        elif kind == PINGREQ:
            writer.write(b"\xd0\0")
        elif kind == SUBSCRIBE:
            count = body.count(b"edge/v1")
            writer.write(bytes((0x90, 3 + count)) + body[:2] + b"\0" + b"\1" * count)
            if b"kitchen/models/+/infer/+" in body:
                self.ask(writer)
        elif kind == PUBLISH:
            end = 2 + int.from_bytes(body[:2], "big")
            is_answer = b"replies" in body[:end]
            self.answers += is_answer
            if first & 6:
                if is_answer and not self.go_on.is_set():
                    asyncio.get_running_loop().create_task(
                        self.acknowledge_later(body[end : end + 2], writer)
                    )
                else:
                    writer.write(b"\x40\x02" + body[end : end + 2])

    async def acknowledge_later(self, identifier: bytes, writer: asyncio.StreamWriter) -> None:
        await self.go_on.wait()
        writer.write(b"\x40\x02" + identifier)

    def ask(self, writer: asyncio.StreamWriter) -> None:
        for number in range(1, REQUESTS + 1):
            request = publish(
                "edge/v1/kitchen/models/echo/infer/honest",
                bytes(PAYLOAD_BYTES),
                reply_to("edge/v1/replies/honest/x", b"%d" % number),
                qos=1,
            )
            writer.write(numbered(request, number))


async def test_answers_that_the_broker_does_not_acknowledge_are_not_computed_until_it_does(
    start_service: StartService,
) -> None:
    broker = Withholding()
    server = await asyncio.start_server(broker.serve, "127.0.0.1", 0)
    async with server, start_service(server.sockets[0].getsockname()[1], models=["echo"], wait=False) as rig:
        service = rig.service

        def computed() -> Counter[str]:
            return Counter(
                {name: int(value) for name, value in service.samples().items() if "requests_total" in name}
            )

        await until(lambda: service._inference._holding)
        model = service.models.get("echo")
        assert model is not None
        await until(lambda: not model.busy)
        most = _MAX_BACKLOG_BYTES // PAYLOAD_BYTES + 1 + SENT_AHEAD
        assert 0 < sum(computed().values()) <= most
        broker.go_on.set()
        await until(lambda: broker.answers == REQUESTS)
        assert sum(computed().values()) == REQUESTS
        assert all("200" in name for name in computed())


async def test_control_messages_that_wait_are_few_and_small(
    mosquitto: BrokerProcess, start_service: StartService
) -> None:
    async with start_service(mosquitto.port) as rig:
        settings = rig.service.connections.control.settings
        assert settings.receive_maximum * settings.max_packet_bytes <= 16 << 20


async def test_a_broker_that_sends_all_it_has_queued_is_not_left(
    mosquitto: BrokerProcess, start_service: StartService
) -> None:
    """Mosquitto 2.0.11 does once one message is acknowledged; the others wait behind a slow one."""
    async with start_service(mosquitto.port, models=["echo"], broker_receive_maximum=3) as rig:
        client = await rig.client()
        sent = [client.send(b"quick"), *(client.send(b"sleep:0.3") for _ in range(2))]
        sent += [client.send(b"quick") for _ in range(30)]
        for correlation in sent:
            assert status_of(await client.answer(correlation)) in (200, 503)
        assert [connection.connects for connection in rig.service.connections] == [1, 1]
