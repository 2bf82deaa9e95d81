"""Which requests are quarantined, for how long, and how many are remembered."""

from __future__ import annotations

import hashlib

import pytest

from agent.service.requests.quarantine import MAX_DEATHS, Content, Quarantine
from agent.worker.frames import Request

REQUEST = Request(1)


def content(payload: bytes, request: Request = REQUEST) -> Content:
    return Content.of(request, len(payload), hashlib.sha256(payload).digest())


def deaths(quarantine: Quarantine, payload: bytes, now_s: float = 0.0) -> int:
    return quarantine.deaths(content(payload), now_s)


def test_second_death_quarantines_a_request() -> None:
    quarantine = Quarantine()
    assert MAX_DEATHS == 2
    assert [quarantine.died(content(b"evil"), 0.0) for _ in range(3)] == [False, True, True]
    assert (deaths(quarantine, b"evil"), deaths(quarantine, b"good"), deaths(quarantine, b"")) == (3, 0, 0)


def test_suspect_is_forgotten_when_it_was_computed_without_harm() -> None:
    quarantine = Quarantine()
    quarantine.died(content(b"x"), 0.0)
    quarantine.acquit(content(b"x"))
    quarantine.acquit(content(b"never seen"))
    assert (deaths(quarantine, b"x"), len(quarantine)) == (0, 0)
    assert not quarantine.died(content(b"x"), 1.0)


def test_request_is_forgotten_after_its_age() -> None:
    quarantine = Quarantine(max_age_s=10.0)
    quarantine.died(content(b"x"), 0.0)
    quarantine.died(content(b"x"), 5.0)
    assert deaths(quarantine, b"x", 14.9) == 2
    assert deaths(quarantine, b"x", 15.0) == 0
    assert len(quarantine) == 0


def test_memory_is_bounded_and_the_oldest_death_is_forgotten_first() -> None:
    quarantine = Quarantine(max_entries=3)
    for number in range(3):
        quarantine.died(content(b"%d" % number), 0.0)
    quarantine.died(content(b"0"), 1.0)
    quarantine.died(content(b"new"), 2.0)
    assert len(quarantine) == 3
    assert [deaths(quarantine, payload, 2.0) for payload in (b"0", b"1", b"2", b"new")] == [2, 0, 1, 1]


@pytest.mark.parametrize(
    "other",
    [
        Request(1, content_type="application/octet-stream"),
        Request(1, tensors=("x;FP32;1",)),
        Request(1, accept="application/cbor"),
        Request(1, client_json=True),
        Request(1, content_type="\ud800"),
    ],
)
def test_what_describes_the_payload_belongs_to_the_content(other: Request) -> None:
    assert content(b"x", other) != content(b"x")


def test_what_names_a_request_does_not_belong_to_the_content() -> None:
    assert content(b"x", Request(7, id="another", received_s=9.0, deadline_s=10.0)) == content(b"x")


def test_parts_of_the_content_do_not_run_into_each_other() -> None:
    assert content(b"", Request(1, tensors=("a", "b"))) != content(b"", Request(1, tensors=("ab",)))
    one, other = Request(1, content_type="a", accept="b"), Request(1, content_type="ab", accept="")
    assert content(b"", one) != content(b"", other)


def test_sizes_are_those_that_are_remembered() -> None:
    quarantine = Quarantine(max_entries=2)
    for payload in (b"four", b"fo", b"five5"):
        quarantine.died(content(payload), 0.0)
    assert quarantine.sizes == {2, 5}
    quarantine.acquit(content(b"fo"))
    assert quarantine.sizes == {5}
