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

# More than the buffers of both sockets hold.
BLOCKS = 300
# A turn that goes on, and one because the selector said so, fit into one turn of the event loop.
MOST_IN_A_TURN = 2 * PACKETS_IN_A_TURN


class Flood:
    """A flood that is going on, or is over.

    Attributes
    ----------
    port
        The broker's port.
    packets
        How many packets it sends.
    topics
        What the client published while the flood went on, by topic.
    over
        Whether all was sent.
    turns
        How many turns the event loop had since the client was first flooded.
    """

    def __init__(self, port: int, packets: int) -> None:
        self.port = port
        self.packets = packets
        self.topics: Counter[str] = Counter()
        self.over = False
        self.turns = 0

    @property
    def most_in_a_turn(self) -> float:
        """How many packets the client read in a turn of its event loop, on average."""
        return self.packets / max(1, self.turns)

    async def wait(self) -> None:
        """Count the turns of the event loop until the flood is over."""
        async with asyncio.timeout(PATIENCE_S):
            while not self.over:
                self.turns += 1
                await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def flooding(
    part: str, flood: bytes, honest: Sequence[bytes] = (), blocks: int = BLOCKS
) -> AsyncIterator[Flood]:
    """Start a broker that floods a client which subscribes to a filter with `part` in it.

    Parameters
    ----------
    part
        A part of the filter.
    flood
        The packet that it sends again and again.
    honest
        The packets at QoS 1 that it sends between these, in turn.
    blocks
        How many blocks of 64 KiB it sends.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(flooding_broker.SCRIPT),
        part,
        flood.hex(),
        ",".join(packet.hex() for packet in honest),
        str(blocks),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    going_on = Flood(
        int(await process.stdout.readline()), blocks * (flooding_broker.BLOCK_BYTES // len(flood))
    )

    async def listen() -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            if line.strip() == b"over":
                going_on.over = True
                return
            number, _, topic = line.decode().strip().partition(" ")
            if int(number):
                going_on.topics[topic] += 1

    listening = asyncio.create_task(listen())
    try:
        yield going_on
    finally:
        listening.cancel()
        process.kill()
        await process.wait()
