"""Which processors each model has while models come and go."""

from __future__ import annotations

import json
import os

import pytest

from tests.agent.service.conftest import Client, StartService
from tests.conftest import BrokerProcess


async def processors(client: Client, model: str) -> set[int]:
    answer = await client.ask(b"cpus", model=model)
    return set(json.loads(answer.payload.partition(b":")[2]))


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is nothing to share out")
async def test_processors_are_divided_again_when_a_model_comes_or_goes(
    mosquitto: BrokerProcess, start_service: StartService
) -> None:
    whole = os.sched_getaffinity(0)
    async with start_service(mosquitto.port, models=["one"]) as rig:
        client = await rig.client()
        assert await processors(client, "one") == whole
        await rig.service.models.activate(rig.signer.bundle("other"))
        one, other = await processors(client, "one"), await processors(client, "other")
        assert one | other == whole
        assert not one & other
        await client.ask(b"crash", model="one")
        assert await processors(client, "one") == one  # its successor has them too
        await rig.service.models.deactivate("one")
        assert await processors(client, "other") == whole


async def test_every_model_has_all_processors_if_configured(
    mosquitto: BrokerProcess, start_service: StartService
) -> None:
    async with start_service(mosquitto.port, models=["one", "other"], worker_share_cores=False) as rig:
        client = await rig.client()
        assert await processors(client, "one") == await processors(client, "other") == os.sched_getaffinity(0)
