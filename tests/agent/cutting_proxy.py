"""A proxy between clients and a broker: it forwards bytes and, on demand, cuts connections in mid-packet."""

from __future__ import annotations

import asyncio
import contextlib
import random


class _Pair:
    """A client's connection and the one to the broker that belongs to it."""

    def __init__(self, client: asyncio.StreamWriter, broker: asyncio.StreamWriter) -> None:
        self.ends = (client, broker)
        self.cut_next = False
        self.cut = asyncio.Event()

    def abort(self) -> None:
        for end in self.ends:
            end.transport.abort()
        self.cut.set()


class CuttingProxy:
    """A TCP proxy on the loopback interface.

    Parameters
    ----------
    upstream
        The broker's port.
    """

    def __init__(self, upstream: int) -> None:
        self.port = 0
        self.cuts = 0
        self._upstream = upstream
        self._server: asyncio.Server | None = None
        self._pairs: set[_Pair] = set()
        self._connected = asyncio.Event()

    async def start(self) -> None:
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening, and end every connection."""
        assert self._server is not None
        self._server.close()
        for pair in tuple(self._pairs):
            pair.abort()

    async def cut(self) -> None:
        """Cut every connection in the middle of the bytes it carries next; return when one is cut."""
        await self._connected.wait()
        pairs = tuple(self._pairs)
        for pair in pairs:
            pair.cut_next = True
        waiting = [asyncio.create_task(pair.cut.wait()) for pair in pairs]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream = await asyncio.open_connection("127.0.0.1", self._upstream)
        except OSError:
            writer.transport.abort()
            return
        pair = _Pair(writer, upstream[1])
        self._pairs.add(pair)
        self._connected.set()
        try:
            await asyncio.gather(
                self._forward(pair, reader, upstream[1]), self._forward(pair, upstream[0], writer)
            )
        finally:
            self._pairs.discard(pair)
            if not self._pairs:
                self._connected.clear()
            pair.abort()

    async def _forward(self, pair: _Pair, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(1 << 16):
                if pair.cut_next:
                    # Every packet has at least two bytes, so the last one is never complete.
                    writer.write(chunk[: random.randrange(len(chunk))])
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.1):
                            await writer.drain()
                    self.cuts += 1
                    pair.abort()
                    return
                writer.write(chunk)
                await writer.drain()
        pair.abort()
