"""Starts the agent, a client or the dashboard, and measures the turns of its event loop.

`watched.py FILE agent|dashboard|client ARGUMENTS`: `FILE` has the numbers of `Pauses`, which another process
reads and sets to zero. A pause is the time from when the selector has returned until it is asked again: what
was due meanwhile waited for so long. Its own share is without the time in which the thread was ready and the
machine ran others.

`client` takes a broker's URL, and asks the model `twice` of the device `kitchen` ten times a second until it
gets SIGTERM.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import selectors
import signal
import struct
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_NUMBERS: Final = struct.Struct("<8d")


@dataclass(frozen=True, slots=True)
class Pauses:
    """The turns of an event loop.

    Attributes
    ----------
    turns
        How many.
    longest_s, longest_own_s
        The longest pause by the clock, and of its own share.
    above_50_ms, own_above_50_ms, above_500_ms
        How many pauses were longer, and how many own shares.
    asked, slowest_s
        Requests of the client that were answered, and the longest time from request to answer.
    """

    turns: float
    longest_s: float
    longest_own_s: float
    above_50_ms: float
    own_above_50_ms: float
    above_500_ms: float
    asked: float
    slowest_s: float


class PausesFile:
    """The numbers that the two processes share; made by who reads them."""

    def __init__(self, path: Path, *, make: bool = False) -> None:
        if make:
            path.write_bytes(bytes(_NUMBERS.size))
        with path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), _NUMBERS.size)

    def read(self) -> Pauses:
        """Return the numbers."""
        return Pauses(*_NUMBERS.unpack_from(self._shared))

    def write(self, numbers: list[float] | None = None) -> None:
        """Replace the numbers, by default with zeros."""
        _NUMBERS.pack_into(self._shared, 0, *(numbers or [0.0] * 8))

    def count(self, pause_s: float, own_s: float) -> None:
        """Count one turn."""
        old = _NUMBERS.unpack_from(self._shared)
        late = (old[3] + (pause_s > 0.05), old[4] + (own_s > 0.05), old[5] + (pause_s > 0.5))
        self.write([old[0] + 1, max(old[1], pause_s), max(old[2], own_s), *late, *old[6:]])

    def count_answer(self, latency_s: float) -> None:
        """Count one answer to the client."""
        old = list(_NUMBERS.unpack_from(self._shared))
        self.write([*old[:6], old[6] + 1, max(old[7], latency_s)])


class WatchedSelector(selectors.DefaultSelector):
    """A selector that counts the pauses between its uses."""

    def __init__(self, file: PausesFile) -> None:
        super().__init__()
        self._file = file
        self._since_s: float | None = None
        self._waited_s = 0.0
        self._statistics: int | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Count the pause that ends, and select."""
        if self._since_s is not None:
            pause_s = time.monotonic() - self._since_s
            self._file.count(pause_s, pause_s - (self._ready_s() - self._waited_s))
        found = super().select(timeout)
        self._since_s, self._waited_s = time.monotonic(), self._ready_s()
        return found

    def _ready_s(self) -> float:
        """Return how long this thread has been ready without a processor; proc(5), schedstat."""
        if self._statistics is None:
            self._statistics = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        return int(os.pread(self._statistics, 100, 0).split()[1]) / 1e9


async def _ask(url: str, file: PausesFile) -> None:
    from edgebundle import AsyncClient

    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    async with AsyncClient(url) as client:
        model = client.model("kitchen", "twice")
        while not ended.is_set():
            began_s = time.monotonic()
            await model([1.0, 2.0, 3.0, 4.0])
            file.count_answer(time.monotonic() - began_s)
            await asyncio.sleep(0.1)


def main() -> int:
    """Start what is named."""
    path, what, *arguments = sys.argv[1:]
    file = PausesFile(Path(path))

    class Watched(asyncio.DefaultEventLoopPolicy):
        def new_event_loop(self) -> asyncio.AbstractEventLoop:
            return asyncio.SelectorEventLoop(WatchedSelector(file))

    asyncio.set_event_loop_policy(Watched())
    if what == "client":
        asyncio.run(_ask(arguments[0], file))
        return 0
    if what == "dashboard":
        from builder.cli import main as dashboard

        return dashboard(["dashboard", *arguments])
    from agent.cli import main as agent

    return agent(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
