"""The offering side: which blocks a want document gets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.deploy.fetch.blocks import BlockPull, Write
from agent.wire.blocks import MAX_BLOCK_BYTES, MAX_COUNT, Want
from builder.fleet.offer import Offer

FILE = bytes(range(256)) * 10


@pytest.fixture
def offer(tmp_path: Path) -> Offer:
    path = tmp_path / "a.bundle"
    path.write_bytes(FILE)
    return Offer(path)


def want(**changes: object) -> bytes:
    return json.dumps({"offset": 0, "count": 2, "block_bytes": 100, "seq": 1} | changes).encode()


def test_pull_and_offer_transfer_the_file(offer: Offer) -> None:
    pull = BlockPull(size=len(FILE), have=7, now=0, block_bytes=100, window_blocks=8)
    disk = bytearray(FILE[:7])
    pending: list[Want | Write] = list(pull.start(0))
    while not pull.complete:
        decision = pending.pop(0)
        if isinstance(decision, Write):
            disk += decision.data
        else:
            for offset, data in offer.blocks(decision.to_bytes()):
                pending.extend(pull.block(offset, data, 0))
    for decision in pending:
        assert isinstance(decision, Write)
        disk += decision.data
    assert disk == FILE
    assert offer.sent == len(FILE) - 7


def test_the_last_block_is_as_long_as_the_file(offer: Offer) -> None:
    blocks = list(offer.blocks(want(offset=len(FILE) - 150, count=5)))
    assert blocks == [(2410, FILE[2410:2510]), (2510, FILE[2510:])]


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"",
        b"{",
        b"[]",
        b"[" * 1000,
        b"x" * 2000,
        want(offset=-1),
        want(offset=len(FILE)),
        want(offset=1.5),
        want(offset=True),
        want(count=0),
        want(count=MAX_COUNT + 1),
        want(block_bytes=0),
        want(block_bytes=MAX_BLOCK_BYTES + 1),
        want(seq="1"),
        want(more=1),
        json.dumps({"offset": 0}).encode(),
    ],
)
def test_malformed_want_gets_no_blocks(offer: Offer, request_bytes: bytes) -> None:
    assert list(offer.blocks(request_bytes)) == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_any_bytes_get_only_blocks_of_the_file(offer: Offer, request_bytes: bytes) -> None:
    for offset, data in offer.blocks(request_bytes):
        assert FILE[offset : offset + len(data)] == data
