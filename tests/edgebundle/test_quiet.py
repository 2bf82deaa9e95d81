"""When retained messages have all arrived."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest

from edgebundle.quiet import wait_until_quiet

LONG_S = 60.0


class _Arrivals(asyncio.Event):
    """So many messages, each at once; then none."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.left = count

    async def wait(self) -> Literal[True]:
        if self.left:
            self.left -= 1
            self.set()
        return await super().wait()


def test_the_wait_goes_on_while_messages_arrive() -> None:
    arrived = _Arrivals(5)
    asyncio.run(wait_until_quiet(arrived, 0.01))
    assert arrived.left == 0


def test_a_message_that_came_before_does_not_end_it() -> None:
    arrived = _Arrivals(0)
    arrived.set()
    asyncio.run(wait_until_quiet(arrived, 0.01))
    assert not arrived.is_set()


def test_a_limit_around_it_ends_it() -> None:
    async def main() -> None:
        async with asyncio.timeout(0.01):
            await wait_until_quiet(asyncio.Event(), LONG_S)

    with pytest.raises(TimeoutError):
        asyncio.run(main())
