"""Queues of models: what a finished request leaves behind, and who gets which processors."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time

import pytest

from agent.service.requests.answers import ReplyTo
from agent.service.requests.requests import InferRequest
from agent.service.work import Outcome
from tests.agent.service.conftest import Client, StartService
from tests.conftest import BrokerProcess


def request(model: str) -> InferRequest:
    now_s = time.monotonic()
    reply = ReplyTo("edge/v1/replies/me/a", b"1", 1, now_s + 60)
    return InferRequest(model, reply, None, "application/octet-stream", (), None, now_s, False, None)


async def test_payload_of_a_finished_request_is_given_back_at_once(
    mosquitto: BrokerProcess, start_service: StartService
) -> None:
    async with start_service(mosquitto.port, models=["echo"]) as rig:
        model = rig.service.models.get("echo")
        assert model is not None
        answered: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        gc.disable()
        try:
            payload = bytes(100_000)
            nobody = sys.getrefcount(payload)
            model.submit(request("echo"), payload, answered.set_result)
            assert sys.getrefcount(payload) > nobody
            outcome = await asyncio.wait_for(answered, 10)
            assert outcome.answer is not None
            assert sys.getrefcount(payload) == nobody
        finally:
            gc.enable()


async def processors(client: Client, model: str) -> set[int]:
    answer = await client.ask(b"cpus", model=model)
    return set(json.loads(answer.payload.partition(b":")[2]))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is nothing to share out")
async def test_processors_are_shared_out_anew_when_a_model_comes_or_goes(
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


async def test_processors_are_everybodys_where_that_is_configured(
    mosquitto: BrokerProcess, start_service: StartService
) -> None:
    async with start_service(mosquitto.port, models=["one", "other"], worker_share_cores=False) as rig:
        client = await rig.client()
        assert await processors(client, "one") == await processors(client, "other") == os.sched_getaffinity(0)
