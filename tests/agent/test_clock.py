"""What time it is, and whether that is known."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from agent import clock


@pytest.mark.parametrize(
    ("set_by_timesyncd", "state", "expected"),
    [(True, 5, True), (True, -1, True), (False, 0, True), (False, 5, False), (False, -1, False)],
)
def test_clock_is_synchronised_if_timesyncd_or_the_kernel_says_so(
    set_by_timesyncd: bool, state: int, expected: bool, tmp_path: Path
) -> None:
    marker = tmp_path / "synchronized"
    if set_by_timesyncd:
        marker.touch()
    # -1: the agent's unit may not ask the kernel.
    assert clock.is_synchronised(marker=marker, state=state) == expected


def test_kernel_is_asked_without_timesyncd(tmp_path: Path) -> None:
    assert clock.is_synchronised(marker=tmp_path / "none") in (True, False)


def test_time_is_never_before_the_agents_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 12.0)
    assert clock.now_s() == clock.built_s() > 12.0
    monkeypatch.setattr(time, "time", lambda: 4e9)
    assert clock.now_s() == 4e9
