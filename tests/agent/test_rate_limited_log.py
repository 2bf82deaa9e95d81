"""One line of each kind in an interval."""

from __future__ import annotations

import logging

import pytest

from agent.rate_limited_log import RateLimitedLog


def test_lines_of_one_kind_are_dropped_until_the_interval_is_over(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 100.0
    log = RateLimitedLog(logging.getLogger("test"), 10.0, lambda: now_s)
    for number in range(3):
        log.error("fault %d", number)
    now_s = 109.9
    log.error("fault 3")
    now_s = 110.0
    log.error("fault 4")
    assert caplog.messages == ["fault 0", "fault 4"]


def test_kinds_do_not_hide_each_other() -> None:
    log = RateLimitedLog(logging.getLogger("test"), 10.0, lambda: 0.0)
    assert [log.due(kind) for kind in ("a", "b", "a", "b")] == [True, True, False, False]
