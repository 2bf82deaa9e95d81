"""Queues of models: what a finished request leaves behind, and who gets which processors."""

from __future__ import annotations

import asyncio
import gc
import sys
import time

from agent.service.answers import ReplyTo
from agent.service.requests import InferRequest
from agent.service.work import Outcome
from tests.agent.service.conftest import StartService
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
