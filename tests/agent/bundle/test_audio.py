"""Declarations of sound: what a device would have to hold in memory is bounded before it is allocated."""

from __future__ import annotations

from typing import Any

import pytest

from agent.bundle.audio import Audio, Features

SPEECH: dict[str, Any] = {
    "frame": 400, "step": 160, "fft": 512, "bands": 80, "low_hz": 0.0, "high_hz": 8000.0,
}  # fmt: skip


def declared(window: int, **changed: object) -> Audio:
    return Audio("x", 16_000, window, window, features=Features(**SPEECH | changed))


def test_half_a_minute_of_speech_is_declared() -> None:
    assert declared(480_000).frames == 2998


@pytest.mark.parametrize(
    ("window", "changed", "message"),
    [
        (1 << 22, {"step": 1}, "elements of a window's spectrum: expected 0 to 16777216"),
        (1 << 20, {"frame": 1 << 15, "fft": 1 << 15, "step": 100}, "elements of a window's spectrum"),
        (1 << 15, {"fft": 1 << 15, "bands": 1024}, "elements of the mel bands: expected 0 to 4194304"),
    ],
)
def test_features_that_need_too_much_memory_are_refused(
    window: int, changed: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        declared(window, **changed)
