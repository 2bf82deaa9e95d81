"""A version on trial: what brings its predecessor back, and what ends the trial."""

from __future__ import annotations

import json

import pytest

from agent.deploy.trial import (
    LONGEST_S,
    MAX_STARTS,
    MIN_ANSWERS,
    TRIAL_ANSWERS,
    TRIAL_S,
    Score,
    Trial,
    fault,
    over,
)

GOOD = Score(answers=1000, errors=1, p95_s=0.05)
TRIAL = Trial(baseline=GOOD)


def judged(trial: Trial, score: Score, out_of_service: str | None = None) -> str | None:
    return fault(trial, out_of_service=out_of_service, score=score)


def test_version_that_does_as_well_as_its_predecessor_goes_on() -> None:
    assert judged(TRIAL, GOOD) is None
    assert judged(TRIAL, Score()) is None


def test_version_that_is_out_of_service_is_rolled_back() -> None:
    assert judged(TRIAL, GOOD, "3 workers died within 60 s") == "3 workers died within 60 s"


def test_version_that_ends_the_agent_again_and_again_is_rolled_back() -> None:
    trial = TRIAL
    for _ in range(MAX_STARTS - 1):
        trial = trial.started()
    assert judged(trial, Score()) is None
    assert "ended 4 times" in str(judged(trial.started(), Score()))
    assert judged(trial.steady().started(), Score()) is None


@pytest.mark.parametrize(
    ("answers", "errors", "back"),
    [(99, 40, False), (100, 5, False), (100, 6, True), (1000, 50, False), (1000, 60, True)],
)
def test_version_that_fails_more_requests_is_rolled_back(answers: int, errors: int, back: bool) -> None:
    why = judged(TRIAL, Score(answers, errors, 0.05))
    assert (why is not None) == back
    if back:
        assert why == f"{errors} of {answers} requests failed, 1 of 1000 with the version before"


def test_version_that_fails_nearly_always_is_rolled_back_sooner() -> None:
    assert judged(TRIAL, Score(9, 9)) is None
    assert judged(TRIAL, Score(20, 10)) is None
    assert judged(TRIAL, Score(19, 10)) == "10 of 19 requests failed"


def test_share_of_failures_is_compared_with_the_predecessors() -> None:
    bad_already = Trial(baseline=Score(answers=1000, errors=100, p95_s=0.05))
    assert judged(bad_already, Score(1000, 140, 0.05)) is None
    assert judged(bad_already, Score(1000, 160, 0.05)) is not None


@pytest.mark.parametrize(
    ("before", "after", "back"),
    [
        (Score(1000, 0, 0.05), Score(100, 0, 0.21), True),
        (Score(1000, 0, 0.05), Score(100, 0, 0.19), False),
        (Score(1000, 0, 0.05), Score(99, 0, 0.21), False),
        (Score(99, 0, 0.05), Score(100, 0, 0.21), False),
        (Score(1000, 0, 0.001), Score(1000, 0, 0.02), False),
        (Score(1000, 0, 0.001), Score(1000, 0, 0.022), True),
    ],
)
def test_version_that_is_much_slower_is_rolled_back(before: Score, after: Score, back: bool) -> None:
    assert (judged(Trial(baseline=before), after) is not None) == back


def test_version_that_was_deployed_again_is_judged_only_by_crashes() -> None:
    again = Trial(baseline=None)
    assert judged(again, Score(1000, 1000, 60.0)) is None
    assert judged(again, Score(), "3 workers died within 60 s") is not None


def test_trial_ends_after_ten_minutes_and_a_thousand_answers_or_after_a_day() -> None:
    assert not over(TRIAL_S - 1, Score(10 * TRIAL_ANSWERS))
    assert not over(LONGEST_S - 1, Score(TRIAL_ANSWERS - 1))
    assert over(TRIAL_S, Score(TRIAL_ANSWERS))
    assert over(LONGEST_S, Score(0))
    assert MIN_ANSWERS < TRIAL_ANSWERS


@pytest.mark.parametrize("trial", [Trial(), Trial(2, GOOD, 7), Trial(1, Score(), None)])
def test_what_is_written_is_read_again(trial: Trial) -> None:
    assert Trial.from_document(json.loads(json.dumps(trial.to_document()))) == trial
