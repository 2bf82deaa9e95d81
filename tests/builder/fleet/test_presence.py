"""Waiting for the state of an agent."""

from __future__ import annotations

import asyncio

import pytest

from agent.mqtt.message import Message
from agent.wire import topics
from builder.fleet.presence import PresenceWatch
from tests.virtual_time import in_virtual_time


@in_virtual_time
async def test_a_wait_that_is_cancelled_when_the_document_arrives() -> None:
    for turns in range(4):
        watch = PresenceWatch("kitchen")
        waiting = asyncio.create_task(watch.wait(5))
        await asyncio.sleep(1)
        watch.on_message(topics.State("kitchen"), Message("", b""))
        for _ in range(turns):
            await asyncio.sleep(0)
        if waiting.cancel():
            with pytest.raises(asyncio.CancelledError):
                await waiting
    assert not await PresenceWatch("kitchen").wait(5)
