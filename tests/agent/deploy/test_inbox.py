"""The folder of bundles that a user of the device installs: what is left in it is deleted in the end."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from agent.deploy.inbox import LIFETIME_S, SEEN_S, Inbox


class Clock:
    """Seconds that pass only when a test says so."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def left(tmp_path: Path) -> list[Path]:
    """A result that was not fetched, and a copy that was not finished."""
    paths = [tmp_path / f"{'a' * 64}.result", tmp_path / f".{'b' * 64}.bundle.0123abcd.tmp"]
    for path in paths:
        path.write_bytes(b"left")
    return paths


def age(paths: list[Path], age_s: float) -> None:
    for path in paths:
        os.utime(path, (time.time() - age_s,) * 2)


def test_what_is_left_is_deleted_after_a_day(tmp_path: Path, left: list[Path]) -> None:
    clock = Clock()
    inbox = Inbox(tmp_path, clock)
    age(left, LIFETIME_S - 60)
    for _ in range(2):
        inbox.dropped()
        clock.now_s += SEEN_S + 1
    assert all(path.exists() for path in left), "not before it is a day old"
    age(left, LIFETIME_S + 60)
    inbox.dropped()
    clock.now_s += SEEN_S + 1
    inbox.dropped()
    assert not any(path.exists() for path in left)


def test_a_clock_that_jumps_deletes_nothing_that_is_new(tmp_path: Path, left: list[Path]) -> None:
    """A device without a battery began in 1970, and has just learned the time."""
    clock = Clock()
    inbox = Inbox(tmp_path, clock)
    inbox.dropped()
    clock.now_s += 1
    age(left, 50 * 365 * 24 * 3600)
    inbox.dropped()
    clock.now_s += 1
    inbox.dropped()
    assert all(path.exists() for path in left)
