"""The client library while its broker sends more than it can read."""

from __future__ import annotations

import asyncio

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
        model = client.model("kitchen", "digits")
        asking: list[asyncio.Task[object]] = []

        async def ask_again_and_again() -> None:
            # The first request may be sent before the flood begins.
            while True:
                asking.append(asyncio.create_task(model(image=PNG)))
                await asyncio.sleep(0.05)

        asking.append(asyncio.create_task(ask_again_and_again()))
        await going_on.wait()
        for each in asking:
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
    assert going_on.most_in_a_turn() <= MOST_IN_A_TURN
    assert going_on.topics["edge/v1/kitchen/models/digits/infer"] >= 1
