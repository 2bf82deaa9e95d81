"""Which requests are quarantined, for how long, and how many are remembered."""

from __future__ import annotations

import pytest

from agent.service.requests.quarantine import MAX_DEATHS, Content, Quarantine
from agent.worker.frames import Request


def content(payload: bytes) -> Content:
    return Content.of(Request(1), payload)


def deaths(quarantine: Quarantine, payload: bytes, now_s: float = 0.0) -> int:
    return quarantine.deaths(Request(2), payload, now_s)


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
    assert Content.of(other, b"x") != content(b"x")


def test_what_names_a_request_does_not_belong_to_the_content() -> None:
    assert Content.of(Request(7, id="another", received_s=9.0, deadline_s=10.0), b"x") == content(b"x")


def test_parts_of_the_content_do_not_run_into_each_other() -> None:
    assert Content.of(Request(1, tensors=("a", "b")), b"") != Content.of(Request(1, tensors=("ab",)), b"")
    assert Content.of(Request(1, content_type="a", accept="b"), b"") != Content.of(
        Request(1, content_type="ab", accept=""), b""
    )


def test_payload_is_hashed_only_if_its_size_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    quarantine = Quarantine()
    quarantine.died(content(b"four"), 0.0)
    monkeypatch.setattr(Content, "of", lambda *_: pytest.fail("hashed"))
    assert deaths(quarantine, b"other size") == 0
