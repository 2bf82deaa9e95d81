"""Between clients and a broker: passes bytes on, and, told to, cuts connections in the middle of a packet."""

from __future__ import annotations

import asyncio
import contextlib
import random


class _Pair:
    def __init__(self, client: asyncio.StreamWriter, broker: asyncio.StreamWriter) -> None:
        self.ends = (client, broker)
        self.doomed = False
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

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """End every connection, and listen no more."""
        assert self._server is not None
        self._server.close()
        for pair in tuple(self._pairs):
            pair.abort()

    async def cut(self) -> None:
        """Cut every connection within what it carries next; return when the first one is cut."""
        while not self._pairs:
            await asyncio.sleep(0.01)
        pairs = tuple(self._pairs)
        for pair in pairs:
            pair.doomed = True
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
        try:
            await asyncio.gather(self._pass(pair, reader, upstream[1]), self._pass(pair, upstream[0], writer))
        finally:
            self._pairs.discard(pair)
            pair.abort()

    async def _pass(self, pair: _Pair, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(1 << 16):
                if pair.doomed:
                    # A packet has two bytes at least: never all of the last one.
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
