"""The number of a start grows, whatever the disk does."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from agent.service.session_seq import SessionSeq
from tests.patience import until

LIMIT_S = 10.0


async def test_number_grows_with_each_start(tmp_path: Path) -> None:
    assert [await SessionSeq(tmp_path).take(LIMIT_S) for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 100, b"9" * 40])
async def test_damaged_number_does_not_stop_the_agent_and_still_grows(tmp_path: Path, content: bytes) -> None:
    for _ in range(5):
        await SessionSeq(tmp_path).take(LIMIT_S)
    (tmp_path / "session_seq").write_bytes(content)
    seq = SessionSeq(tmp_path)
    after = await seq.take(LIMIT_S)
    assert seq.stored
    assert after > 5
    assert await SessionSeq(tmp_path).take(LIMIT_S) == after + 1


async def test_number_from_the_clock_is_stored_when_the_disk_can_be_written_again(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    state_dir.write_bytes(b"in the way")
    seq = SessionSeq(state_dir)
    number = await seq.take(LIMIT_S)
    assert not seq.stored
    assert abs(number - time.time()) < LIMIT_S
    state_dir.unlink()
    state_dir.mkdir()
    seq.store_later()
    await until(lambda: seq.stored)
    assert await SessionSeq(state_dir).take(LIMIT_S) == number + 1


async def test_disk_that_does_not_respond_leaves_the_number_to_the_clock(tmp_path: Path) -> None:
    seq = SessionSeq(tmp_path)
    assert abs(await seq.take(0.0) - time.time()) < LIMIT_S
    assert not seq.stored
