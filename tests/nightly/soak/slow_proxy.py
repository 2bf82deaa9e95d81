"""A proxy between a device and its broker that can be made slow."""

from __future__ import annotations

import asyncio
import contextlib


class SlowProxy:
    """A TCP proxy on the loopback interface.

    Parameters
    ----------
    upstream
        The broker's port.

    Attributes
    ----------
    port
        Where it listens.
    delay_s
        How long it holds everything back.
    """

    def __init__(self, upstream: int) -> None:
        self.port = 0
        self.delay_s = 0.0
        self._upstream = upstream
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop, and end every connection."""
        assert self._server is not None
        self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._upstream)
        except OSError:
            writer.transport.abort()
            return
        for source, sink in ((reader, up_writer), (up_reader, writer)):
            task = asyncio.create_task(self._forward(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError):
                while chunk := await reader.read(1 << 16):
                    if self.delay_s:
                        await asyncio.sleep(self.delay_s)
                    writer.write(chunk)
                    await writer.drain()
        finally:
            writer.transport.abort()
