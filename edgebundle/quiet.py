"""When the retained messages of a subscription have all arrived: a broker does not say so.

Promises: the wait ends only after a pause; each message begins the pause again.
Leaves to others: how long a pause says enough, and when to stop waiting for one (`asyncio.timeout`).
"""

from __future__ import annotations

import asyncio


async def wait_until_quiet(arrived: asyncio.Event, quiet_s: float) -> None:
    """Wait until no message has arrived for `quiet_s`.

    Parameters
    ----------
    arrived
        What is set with each message; it is cleared here.
    quiet_s
        The pause after which no more are expected.
    """
    while True:
        arrived.clear()
        try:
            async with asyncio.timeout(quiet_s):
                await arrived.wait()
        except TimeoutError:
            return
