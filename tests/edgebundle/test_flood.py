"""The client library while its broker sends more than it can read."""

from __future__ import annotations

import asyncio
import contextlib

from edgebundle import AsyncClient
from tests.edgebundle.rig import PNG
from tests.flooding_broker import publish
from tests.floods import MOST_IN_A_TURN, flooding


async def test_client_library_goes_on_in_a_flood() -> None:
    flood = publish("edge/v1/replies/someone/x/y", bytes(1000))
    async with (
        flooding("replies/", flood) as going_on,
        AsyncClient(f"mqtt://127.0.0.1:{going_on.port}") as client,
    ):
        asking = asyncio.create_task(client.model("kitchen", "digits")(image=PNG))
        await going_on.wait()
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
    assert going_on.most_in_a_turn <= MOST_IN_A_TURN
    assert going_on.topics["edge/v1/kitchen/models/digits/infer"] >= 1
