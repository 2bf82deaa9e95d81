"""The parts of an answer's time, as a user property."""

from __future__ import annotations

import pytest

from agent.wire.server_timing import MAX_CHARACTERS, ServerTiming


@pytest.mark.parametrize("us", [0, 1, 999, 1000, 123_456, 999_999])
def test_microseconds_are_read_as_they_are_written(us: int) -> None:
    timing = ServerTiming(us, 2 * us % 999_983, 0, 7)
    assert ServerTiming.parse(str(timing)) == timing
    assert len(str(timing)) <= MAX_CHARACTERS


def test_seconds_are_whole_milliseconds_and_a_clock_that_jumps_is_no_negative_time() -> None:
    assert str(ServerTiming(600_000_123, -5, 1, 0)) == (
        "queue;dur=600000, decode;dur=0, compute;dur=0.001, encode;dur=0"
    )


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "queue;dur=1",
        "queue;dur=1, decode;dur=1, compute;dur=1",
        "queue;dur=1, decode;dur=1, compute;dur=1, encode;dur=-1",
        "queue;dur=1, decode;dur=1, compute;dur=1, encode;dur=nan",
        "queue;dur=1, decode;dur=1, compute;dur=1, encode;dur=" + "1" * 300,
        "queue;dur=1, " * 20 + "decode;dur=1, compute;dur=1, encode;dur=1",
    ],
)
def test_everything_else_is_none(text: str | None) -> None:
    assert ServerTiming.parse(text) is None


def test_other_metrics_are_ignored() -> None:
    text = "cdn;dur=3, queue;dur=0.5, decode;dur=1, compute;dur=2, encode;dur=3"
    assert ServerTiming.parse(text) == ServerTiming(500, 1000, 2000, 3000)
