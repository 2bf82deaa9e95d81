"""On MQTT 3.1.1, asking now and then whether the broker speaks MQTT 5 by now.

A broker that refused 5 may only have been starting, or was replaced since. It is asked on another connection,
which disturbs no session. If it says that it speaks 5 and then does not, it is asked half as often.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

# How often to ask.
LOOK_FOR_5_S: Final = 300.0
_LOOK_FOR_5_AT_MOST_S: Final = 6 * 3600.0


class Upgrade:
    """Decides when to ask, asks, and says when to connect again.

    Parameters
    ----------
    speaks_5
        Asks the broker.
    wanted
        Whether the connection is up on 3.1.1 and nothing is being sent on it.
    renew
        Called when the broker speaks MQTT 5 and the connection is still `wanted` in it.
    """

    def __init__(
        self, speaks_5: Callable[[], Awaitable[bool]], wanted: Callable[[], bool], renew: Callable[[], None]
    ) -> None:
        self._speaks_5 = speaks_5
        self._wanted = wanted
        self._renew = renew
        self._interval_s = LOOK_FOR_5_S
        self._next_s = 0.0
        self._asking: asyncio.Task[None] | None = None

    def connected(self, *, in_5: bool) -> None:
        """Begin to count the time, after a connect."""
        if in_5:
            self._interval_s = LOOK_FOR_5_S
        self._plan()

    def tick(self) -> None:
        """Ask in the background if it is time; called about once a second."""
        if self._asking is None and _now_s() >= self._next_s and self._wanted():
            self._plan()
            self._asking = asyncio.get_running_loop().create_task(self._ask())

    def close(self) -> None:
        """Stop asking."""
        if self._asking is not None:
            self._asking.cancel()

    def _plan(self) -> None:
        self._next_s = _now_s() + self._interval_s

    async def _ask(self) -> None:
        try:
            if await self._speaks_5() and self._wanted():
                self._interval_s = min(2 * self._interval_s, _LOOK_FOR_5_AT_MOST_S)
                self._renew()
        finally:
            self._asking = None


def _now_s() -> float:
    return asyncio.get_running_loop().time()
