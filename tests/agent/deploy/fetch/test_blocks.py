"""The block protocol: bytes and times in, writes and requests out."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agent.deploy.fetch.blocks import BlockPull, Write
from agent.errors import EndlessDataError
from agent.wire.blocks import Want

Wire = list[tuple[int, bytes]]
Mangle = Callable[[Wire], Wire]

FILE = random.Random(7).randbytes(1000)


class Offer:
    """The offering side: answers want documents from a file."""

    def __init__(self, file: bytes) -> None:
        self.file = file
        self.sent = 0

    def answer(self, want: Want) -> list[tuple[int, bytes]]:
        blocks = []
        for index in range(want.count):
            offset = want.offset + index * want.block_bytes
            data = self.file[offset : offset + want.block_bytes]
            if data:
                blocks.append((offset, data))
        self.sent += sum(len(data) for _, data in blocks)
        return blocks


def pull_all(
    pull: BlockPull, offer: Offer, disk: bytearray, *, mangle: Mangle = lambda blocks: blocks
) -> float:
    """Run both sides until the file is complete; return the time it took."""
    now = 0.0
    wire: list[tuple[int, bytes]] = []
    pending = list(pull.start(now))
    while not pull.complete:
        for want in pending:
            wire.extend(offer.answer(want))
        pending = []
        wire = mangle(wire)
        if not wire:
            now = max(now, pull.ask_again_at)
            pending = list(pull.tick(now))
            assert pending, "silent, and nothing is requested"
            continue
        offset, data = wire.pop(0)
        now += 0.001
        for decision in pull.block(offset, data, now):
            if isinstance(decision, Write):
                assert decision.offset == len(disk)
                disk += decision.data
            else:
                pending.append(decision)
        assert now < 100_000, "it ends, even if most requests are lost twice and repeated after 30 s"
    return now


def test_file_arrives_complete_and_once() -> None:
    offer, disk = Offer(FILE), bytearray()
    pull_all(BlockPull(size=len(FILE), have=0, now=0, block_bytes=64, window_blocks=4), offer, disk)
    assert disk == FILE
    assert offer.sent == len(FILE)


def test_resumed_pull_requests_only_the_rest() -> None:
    offer, disk = Offer(FILE), bytearray(FILE[:321])
    pull_all(BlockPull(size=len(FILE), have=321, now=0, block_bytes=64, window_blocks=4), offer, disk)
    assert disk == FILE
    assert offer.sent == len(FILE) - 321


@given(
    seed=st.integers(0, 2**32),
    size=st.integers(0, 600),
    block=st.integers(1, 100),
    window=st.integers(1, 9),
    loss=st.floats(0, 0.6),
)
@example(seed=404, size=401, block=1, window=1, loss=0.5625)
def test_link_that_loses_copies_and_reorders_delivers_the_file(
    seed: int, size: int, block: int, window: int, loss: float
) -> None:
    rng = random.Random(seed)

    def mangle(wire: Wire) -> Wire:
        kept = [item for item in wire if rng.random() >= loss / max(len(wire), 1)]
        if kept and rng.random() < 0.2:
            kept.append(rng.choice(kept))
        if rng.random() < 0.3:
            rng.shuffle(kept)
        return kept

    file = rng.randbytes(size)
    have = rng.randint(0, size)
    disk = bytearray(file[:have])
    pull = BlockPull(size=size, have=have, now=0, block_bytes=block, window_blocks=window)
    pull_all(pull, Offer(file), disk, mangle=mangle)
    assert disk == file


@given(st.lists(st.tuples(st.integers(-50, 1200), st.binary(max_size=80)), max_size=60))
def test_blocks_of_a_stranger_never_grow_the_file_beyond_its_size(blocks: Wire) -> None:
    pull = BlockPull(size=1000, have=0, now=0, block_bytes=64, window_blocks=4)
    list(pull.start(0))
    written = 0
    for offset, data in blocks:
        try:
            for decision in pull.block(offset, data, 0.1):
                if isinstance(decision, Write):
                    assert decision.offset == written
                    written += len(decision.data)
        except EndlessDataError:
            assert len(data) > 40
    assert written == pull.written <= 1000


def test_block_longer_than_requested_is_endless_data() -> None:
    pull = BlockPull(size=1000, have=0, now=0, block_bytes=64, window_blocks=4)
    list(pull.start(0))
    with pytest.raises(EndlessDataError, match="expected a block of 64 bytes at 0, got 65"):
        list(pull.block(0, bytes(65), 0))


def test_each_silence_halves_the_window_and_doubles_the_interval() -> None:
    pull = BlockPull(
        size=10_000, have=0, now=0, block_bytes=10, window_blocks=8, silence_s=2, longest_silence_s=30
    )
    list(pull.start(0))
    for offset in range(0, 100, 10):
        list(pull.block(offset, bytes(10), 0))
    assert list(pull.tick(1.9)) == []
    counts, times, now = [], [], 0.0
    for _ in range(7):
        times.append(pull.ask_again_at - now)
        now = pull.ask_again_at
        (want,) = pull.tick(now)
        assert want.offset == 100
        counts.append(want.count)
    assert counts == [4, 2, 1, 1, 1, 1, 1]
    assert times == [2, 4, 8, 16, 30, 30, 30]


def test_slow_link_gets_no_second_request_for_blocks_under_way() -> None:
    pull = BlockPull(size=10_000, have=0, now=0, block_bytes=10, window_blocks=8, silence_s=2)
    list(pull.start(0))
    list(pull.block(0, bytes(10), 1.5))  # 1.5 s a block
    assert list(pull.tick(4.0)) == []
    assert pull.ask_again_at == pytest.approx(7.5)


def test_new_connection_requests_only_the_gaps() -> None:
    pull = BlockPull(size=1000, have=0, now=0, block_bytes=10, window_blocks=4)
    list(pull.start(0))
    for offset in (0, 10):
        list(pull.block(offset, bytes(10), 0))
    list(pull.block(30, bytes(10), 0))
    wants = list(pull.connected(0.5))
    assert [(want.offset, want.count) for want in wants] == [(20, 1), (40, 2)]


def test_at_most_one_window_is_requested() -> None:
    pull = BlockPull(size=10_000, have=0, now=0, block_bytes=10, window_blocks=4)
    asked_to, written = 0, 0
    pending: list[Want | Write] = list(pull.start(0))
    for step in range(100):
        for decision in pending:
            if isinstance(decision, Want):
                assert decision.offset == asked_to
                asked_to += decision.count * decision.block_bytes
        assert asked_to - written <= 40
        pending = list(pull.block(step * 10, bytes(10), 0))
        written += 10


def test_want_document_is_json() -> None:
    assert json.loads(Want(offset=512, count=3, block_bytes=256, seq=7).to_bytes()) == {
        "offset": 512,
        "count": 3,
        "block_bytes": 256,
        "seq": 7,
    }


def test_sizes_are_tried_in_turn_until_a_block_arrives() -> None:
    pull = BlockPull(size=10_000_000, have=0, now=0.0, block_bytes=65536, guesses=True)
    now, asked = 0.0, [next(pull.start(0.0)).block_bytes]
    for _ in range(4):
        now = pull.ask_again_at
        (want,) = pull.tick(now)
        asked.append(want.block_bytes)
    assert asked == [65536, 16384, 4096, 1024, 65536]
    list(pull.tick(now := pull.ask_again_at))
    list(pull.block(0, bytes(16384), now))
    for _ in range(3):
        now = pull.ask_again_at
        assert {want.block_bytes for want in pull.tick(now)} == {16384}, "this size is known to arrive"


def test_short_block_says_how_long_the_others_may_be() -> None:
    pull = BlockPull(size=100_000, have=0, now=0.0, block_bytes=65536)
    list(pull.start(0.0))
    (want,) = pull.block(0, bytes(60_000), 1.0)
    assert isinstance(want, Want)
    assert (want.offset, want.block_bytes) == (0, 60_000)
    assert list(pull.block(0, bytes(100), 2.0)) == [], "too short to be meant"
    pull.limit(70_000)
    (again,) = pull.connected(3.0)
    assert again.block_bytes == 60_000


@given(st.integers(512, 2000), st.lists(st.integers(512, 2000), max_size=3))
def test_file_is_whole_whatever_the_limits_of_the_way_become(first: int, limits: list[int]) -> None:
    file = random.Random(8).randbytes(20_000)
    pull = BlockPull(size=len(file), have=0, now=0.0, block_bytes=first)
    offer, disk, wants = Offer(file), bytearray(), list(pull.start(0.0))
    for limit in (*limits, 512):
        for _ in range(3):
            if not wants:
                wants = list(pull.connected(0.0))
            for start, data in [block for want in wants for block in offer.answer(want)]:
                for decision in pull.block(start, data[:limit], 0.0):
                    if isinstance(decision, Write):
                        assert decision.offset == len(disk)
                        disk += decision.data
            wants = []
    while not pull.complete:
        for want in list(pull.connected(0.0)):
            for start, data in offer.answer(want):
                for decision in pull.block(start, data, 0.0):
                    if isinstance(decision, Write):
                        disk += decision.data
    assert disk == file
