"""Ask a model on a device about many items, with several requests under way."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from agent.errors import EdgeError
from builder.errors import BuildError

if TYPE_CHECKING:
    from edgebundle.answer import Answer

Item = TypeVar("Item")


async def ask_each(
    items: Iterable[Item],
    ask: Callable[[Item], Coroutine[Any, Any, Answer]],
    take: Callable[[Item, Answer], None],
    refuse: Callable[[Item, Exception], None],
) -> None:
    """Ask about each item; one that has no answer is refused, and the others go on.

    Parameters
    ----------
    items
        The items, taken only as fast as answers arrive.
    ask
        Asks about one of them.
    take
        Takes its answer, in a thread: it may draw, or write a file.
    refuse
        Takes the error instead.

    Raises
    ------
    ClientError
        If the broker is lost, no such model runs, or nothing answers any more.
    """
    from edgebundle.defaults import IN_FLIGHT
    from edgebundle.errors import NoAnswerError, RefusedError, UnknownModelError, UsageError

    running: deque[tuple[Item, asyncio.Task[Answer]]] = deque()
    silent = 0  # items, one after the other, that got no answer

    async def finish() -> None:
        nonlocal silent
        item, task = running.popleft()
        try:
            answer = await task
            silent = 0
            await asyncio.to_thread(take, item, answer)
        except UnknownModelError:
            raise
        except NoAnswerError as error:
            silent += 1
            if silent >= IN_FLIGHT:
                raise
            refuse(item, error)
        except (RefusedError, UsageError, BuildError, EdgeError, OSError) as error:
            silent = 0
            refuse(item, error)

    try:
        for item in items:
            running.append((item, asyncio.ensure_future(ask(item))))
            if len(running) >= IN_FLIGHT:
                await finish()
        while running:
            await finish()
    finally:
        for _, task in running:
            task.cancel()
        await asyncio.gather(*(task for _, task in running), return_exceptions=True)
