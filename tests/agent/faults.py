"""A requester that repeats each request until its deadline, while everything around it is restarted.

For `test_faults.py` (a few faults) and `make soak` (hundreds). The model returns different bytes at each run,
so that two answers to one request cannot look like one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from agent.mqtt.connection import Connection
from agent.mqtt.message import Message
from agent.mqtt.properties import Properties
from agent.mqtt.session import Owner
from agent.mqtt.settings import BrokerSettings
from agent.wire.topics import Infer, Reply, format_topic, reply_filter
from tests.agent.cutting_proxy import CuttingProxy
from tests.agent.service.conftest import status_of
from tests.agent.test_agent_process import Device, model_is_ready

MODEL = "unique"
AT_ONCE = 8
RESEND_S = 1.0
DEADLINE_S = 60
# Workers are killed from outside here, which must not take the model out of service. The agent is no fleet.
CONFIG = "[inference]\ncrash_limit = 1000\n[broker]\nreconnect_spread_s = 0\n"


@dataclass
class Load:
    """Numbered requests, each sent again until it is answered.

    Attributes
    ----------
    port
        Port of the broker, or of the proxy in front of it.
    requests
        How many requests to send.
    at_once
        How many of them may wait for an answer at a time.
    """

    port: int
    requests: int
    at_once: int = AT_ONCE
    done: int = 0
    sent: int = 0
    repeated: int = 0
    wrong: list[str] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._answers: dict[int, tuple[int, bytes]] = {}
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._numbers = itertools.count(1)
        self._request_topic = format_topic(Infer("kitchen", MODEL, "load"))
        self._reply_topic = format_topic(Reply("load", "answers"))
        settings = BrokerSettings("127.0.0.1", self.port)
        self._connection = Connection(settings, Owner(self._take), client_id="load")

    async def run(self) -> None:
        """Send requests until all are answered or have expired."""
        await self._connection.connect()
        await self._connection.subscribe(reply_filter("load"))
        try:
            await asyncio.gather(*(self._lane() for _ in range(self.at_once)))
            # A second answer to a request may still be on its way.
            await asyncio.sleep(RESEND_S)
        finally:
            await self._connection.close()

    async def _lane(self) -> None:
        for number in self._numbers:
            if number > self.requests:
                return
            await self._one(number)
            self.done += 1

    async def _one(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        payload = struct.pack("<4f", number, number + 0.5, -number, 0)
        until_s = time.monotonic() + DEADLINE_S
        while (left_s := until_s - time.monotonic()) > 0:
            self._waiting[number] = answered = loop.create_future()
            self._send(number, payload, left_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RESEND_S):
                    await answered
                break
        self._waiting.pop(number, None)
        if number not in self._answers:
            self.wrong.append(f"{number}: no answer")
            return
        status, got = self._answers[number]
        self.statuses[status] += 1
        if status not in (200, 500, 503):
            self.wrong.append(f"{number}: {status}")
        # The last value differs at each run.
        if status == 200 and got[:12] != struct.pack("<3f", 2 * number, 2 * number + 1, -2 * number):
            self.wrong.append(f"{number}: the answer to another request")

    def _send(self, number: int, payload: bytes, left_s: float) -> None:
        self.sent += 1
        self._connection.publish(
            self._request_topic,
            payload,
            properties=Properties(
                content_type="application/octet-stream",
                response_topic=self._reply_topic,
                correlation_data=b"%d" % number,
                expiry_s=max(1, round(left_s)),
            ),
        )

    def _take(self, message: Message) -> None:
        self._connection.ack(message)
        number = int(message.properties.correlation_data or b"0")
        got = (status_of(message), bytes(message.payload))
        first = self._answers.setdefault(number, got)
        if first is not got:
            self.repeated += 1
        if first != got:
            self.wrong.append(f"{number}: two answers, {first[0]} and {got[0]}")
        waiting = self._waiting.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)


@dataclass
class Trial:
    """A device under load to which a fault happens several times.

    Attributes
    ----------
    victim
        The device; its model is installed.
    load
        The requests.
    fault
        Causes the fault, and returns when it is over.
    times
        How often it happens, spread evenly over the requests.
    """

    victim: Device
    load: Load
    fault: Callable[[Device], Awaitable[None]]
    times: int
    happened: int = 0

    async def run(self, limit_s: float) -> None:
        """Cause the faults, and wait for every answer."""
        happening = asyncio.create_task(self._happen())
        try:
            await asyncio.wait_for(self.load.run(), limit_s)
        finally:
            happening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await happening

    async def _happen(self) -> None:
        for number in range(1, self.times + 1):
            due = number * self.load.requests / (self.times + 1)
            while self.load.done < due:
                await asyncio.sleep(0.005)
            await self.fault(self.victim)
            self.happened += 1


async def kill_worker(victim: Device) -> None:
    """Kill the model's process, and wait until there is another one."""
    before: list[int] = []
    while not before:
        await asyncio.sleep(0.01)
        before = victim.children()
    for pid in before:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    while not set(victim.children()) - set(before):
        await asyncio.sleep(0.01)


async def kill_agent(victim: Device) -> None:
    """Kill the agent and its workers, and start another agent."""
    workers = victim.children()
    await asyncio.to_thread(victim.end, signal.SIGKILL)
    for pid in workers:  # systemd would end what is left of a service
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    victim.start(config=CONFIG)
    await model_is_ready(victim.port, MODEL)


async def restart_broker(victim: Device) -> None:
    """Stop the broker in an orderly way, and start it again."""
    assert victim.broker is not None
    await asyncio.to_thread(victim.broker.restart)


async def kill_broker(victim: Device) -> None:
    """Kill the broker, as a power cut would, and start it again."""
    assert victim.broker is not None
    await asyncio.to_thread(victim.broker.stop, signal.SIGKILL)
    await asyncio.to_thread(victim.broker.start)


def cut_connections(proxy: CuttingProxy) -> Callable[[Device], Awaitable[None]]:
    """Return the fault that cuts connections in the middle of a packet."""

    async def cut(_victim: Device) -> None:
        await proxy.cut()

    return cut
