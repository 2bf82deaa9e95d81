"""Ask a model, here or on a device, about many items, with one or several questions under way."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol, TypeVar

from agent.errors import EdgeError
from builder.errors import BuildError

if TYPE_CHECKING:
    from edgebundle.answer import Answer

Item = TypeVar("Item")
_Item_contra = TypeVar("_Item_contra", contravariant=True)


class Asks(Protocol[_Item_contra]):
    """Asks a model about an item: a `Runner` here, an `AsyncModel` there."""

    async def __call__(self, item: _Item_contra, /) -> Answer:
        """Return the model's answer."""


class Items(Protocol[Item]):
    """The items, and what becomes of the answers."""

    def __iter__(self) -> Iterator[Item]:
        """Yield the items; they are taken only as fast as answers arrive."""

    def add(self, item: Item, answer: Answer) -> None:
        """Take the answer about an item; it may draw, or write a file."""

    def refuse(self, item: Item, error: Exception) -> None:
        """Take the error of an item instead."""


async def ask_each(items: Items[Item], ask: Asks[Item], in_flight: int = 1) -> None:
    """Ask about each item, in order; one that has no answer is refused, and the others go on.

    `in_flight`: how many questions are under way at a time.
    Raises `ClientError` if the broker is lost, no such model runs, or nothing answers any more.
    """
    from edgebundle.errors import NoAnswerError, RefusedError, UnknownModelError, UsageError

    running: deque[tuple[Item, asyncio.Future[Answer]]] = deque()
    silent = 0  # items, one after the other, that got no answer

    async def finish() -> None:
        nonlocal silent
        item, task = running.popleft()
        try:
            answer = await task
            silent = 0
            await asyncio.to_thread(items.add, item, answer)
        except (UnknownModelError, BrokenPipeError):
            raise
        except NoAnswerError as error:
            silent += 1
            if silent >= in_flight:
                raise
            items.refuse(item, error)
        except (RefusedError, UsageError, BuildError, EdgeError, OSError) as error:
            silent = 0
            items.refuse(item, error)

    try:
        for item in items:
            running.append((item, asyncio.ensure_future(ask(item))))
            if len(running) >= in_flight:
                await finish()
        while running:
            await finish()
    finally:
        for _, task in running:
            task.cancel()
        await asyncio.gather(*(task for _, task in running), return_exceptions=True)
