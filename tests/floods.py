"""A flood for tests: `flooding_broker` in a process of its own, and what its client does meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence

from agent.mqtt.turns import PACKETS_IN_A_TURN
from tests import flooding_broker
from tests.patience import PATIENCE_S

# More than the buffers of both sockets hold, and for longer than what may be shed first suffices.
BLOCKS = 300
FLOOD_S = 2.0
# A turn that goes on, and one because the selector said so, fit into one turn of the event loop.
MOST_IN_A_TURN = 2 * PACKETS_IN_A_TURN


class Flood:
    """A flood that is going on, or is over.

    Attributes
    ----------
    port
        The broker's port.
    packets
        How many packets it has sent, once all were.
    topics
        What the client published while the flood went on, by topic.
    listening
        Reads what the broker says until all was sent.
    turns
        How many turns the event loop had since the client was first flooded.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.packets = 0
        self.listening: asyncio.Task[None]
        self.topics: Counter[str] = Counter()
        self.turns = 0

    def most_in_a_turn(self, dropped: int = 0) -> float:
        """Return how many packets the client decoded in a turn of its event loop, on average."""
        return (self.packets - dropped) / max(1, self.turns)

    async def wait(self) -> None:
        """Count the turns of the event loop until the flood is over."""
        async with asyncio.timeout(PATIENCE_S):
            while not self.listening.done():
                self.turns += 1
                await asyncio.sleep(0)
        self.listening.result()


@contextlib.asynccontextmanager
async def flooding(part: str, flood: bytes, honest: Sequence[bytes] = ()) -> AsyncIterator[Flood]:
    """Start a broker that floods a client which subscribes to a filter with `part` in it.

    Parameters
    ----------
    part
        A part of the filter.
    flood
        The packet that it sends again and again.
    honest
        The packets at QoS 1 that it sends between these, in turn.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(flooding_broker.SCRIPT),
        part,
        flood.hex(),
        ",".join(packet.hex() for packet in honest),
        str(BLOCKS),
        str(FLOOD_S),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    going_on = Flood(int(await process.stdout.readline()))

    async def listen() -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            number, _, topic = line.decode().strip().partition(" ")
            if not topic:
                going_on.packets = int(number) * (flooding_broker.BLOCK_BYTES // len(flood))
                return
            if int(number):
                going_on.topics[topic] += 1

    going_on.listening = asyncio.create_task(listen())
    try:
        yield going_on
    finally:
        going_on.listening.cancel()
        process.kill()
        await process.wait()
