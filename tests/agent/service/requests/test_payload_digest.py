"""The digests of large payloads: right, one after the other, and with turns of the event loop between."""

from __future__ import annotations

import asyncio
import hashlib

import pytest

from agent.service.requests.payload_digest import MAX_WAITING_BYTES, SLICE_BYTES, PayloadDigests
from tests.virtual_time import in_virtual_time


@pytest.mark.parametrize("nbytes", [0, 1, SLICE_BYTES - 1, SLICE_BYTES, SLICE_BYTES + 1, 3 * SLICE_BYTES])
@in_virtual_time
async def test_digest_is_that_of_the_whole_payload(nbytes: int) -> None:
    payload = bytes(nbytes)
    assert await PayloadDigests().of(payload) == hashlib.sha256(payload).digest()


@in_virtual_time
async def test_event_loop_turns_between_the_slices_of_all_payloads(monkeypatch: pytest.MonkeyPatch) -> None:
    slices = turns = 0

    class Counted:
        def update(self, part: memoryview) -> None:
            nonlocal slices
            assert len(part) <= SLICE_BYTES
            slices += 1

        def digest(self) -> bytes:
            return b""

    monkeypatch.setattr(hashlib, "sha256", Counted)
    digests = PayloadDigests()
    tasks = [asyncio.ensure_future(digests.of(bytes(4 * SLICE_BYTES))) for _ in range(3)]
    while not all(task.done() for task in tasks):
        before = slices
        await asyncio.sleep(0)
        turns += 1
        assert slices - before <= 1
    assert slices == 12
    assert turns >= 12


@in_virtual_time
async def test_payloads_that_wait_are_bounded() -> None:
    digests = PayloadDigests()
    assert digests.has_room(2 * MAX_WAITING_BYTES)
    waiting = asyncio.ensure_future(digests.of(bytes(2 * SLICE_BYTES)))
    await asyncio.sleep(0)
    assert digests.has_room(MAX_WAITING_BYTES - 2 * SLICE_BYTES)
    assert not digests.has_room(MAX_WAITING_BYTES)
    await waiting
    assert digests.has_room(MAX_WAITING_BYTES)
