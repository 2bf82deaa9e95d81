"""The table of steps: every path through it ends."""

from __future__ import annotations

import pytest

from agent.deploy.transitions import TRANSITIONS, classify
from agent.errors import (
    CounterAheadError,
    EdgeError,
    EndlessDataError,
    FormatError,
    IncompatibleError,
    KeyRevokedError,
    MixAndMatchError,
    NoSpaceError,
    RollbackError,
    SelfTestError,
    SignatureError,
    SourceError,
    StoreError,
)
from agent.wire.job import Result, Status, Step


def test_steps_follow_the_order_of_trust() -> None:
    way: list[Step] = []
    step: Step | None = Step.DOWNLOADING
    while step is not None:
        way.append(step)
        step = TRANSITIONS[step].then
    assert way == [
        Step.DOWNLOADING,
        Step.VERIFYING,
        Step.INSTALLING,
        Step.TESTING,
        Step.ACTIVATING,
        Step.COMMITTING,
        Step.CLEANUP,
    ]


@pytest.mark.parametrize("step", Step)
def test_every_failure_ends_the_job(step: Step) -> None:
    seen: list[Step] = []
    at: Step | None = step
    while at is not None:
        assert at not in seen
        seen.append(at)
        at = TRANSITIONS[at].on_error


@pytest.mark.parametrize("step", Step)
def test_only_steps_after_the_switch_roll_back(step: Step) -> None:
    after_switch = step in (Step.ACTIVATING, Step.COMMITTING)
    assert (TRANSITIONS[step].on_error is Step.ROLLING_BACK) == after_switch


@pytest.mark.parametrize("step", Step)
def test_a_restart_never_skips_verification(step: Step) -> None:
    again = TRANSITIONS[step].after_restart
    assert again in (Step.DOWNLOADING, Step.ROLLING_BACK, Step.CLEANUP)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (SignatureError("x"), Status.REJECTED, "ERR_ARBITRARY_SOFTWARE"),
        (FormatError("x"), Status.REJECTED, "ERR_ARBITRARY_SOFTWARE"),
        (MixAndMatchError("x"), Status.REJECTED, "ERR_MIX_AND_MATCH"),
        (EndlessDataError("x"), Status.REJECTED, "ERR_ENDLESS_DATA"),
        (RollbackError("x"), Status.REJECTED, "ERR_ROLLBACK"),
        (CounterAheadError("x"), Status.REJECTED, "ERR_COUNTER_AHEAD"),
        (IncompatibleError("x"), Status.REJECTED, "ERR_INCOMPATIBLE"),
        (KeyRevokedError("x"), Status.REJECTED, "ERR_KEY_REVOKED"),
        (SelfTestError("x"), Status.FAILED, "ERR_SELF_TEST"),
        (NoSpaceError("x"), Status.FAILED, "ERR_NO_SPACE"),
        (StoreError("x"), Status.FAILED, "ERR_STORE"),
        (SourceError("x"), Status.FAILED, "ERR_SOURCE"),
        (TimeoutError("x"), Status.TIMED_OUT, "ERR_SOURCE"),
    ],
)
def test_refusal_is_final_and_failure_is_not(
    error: EdgeError | TimeoutError, status: Status, code: str
) -> None:
    failure = classify(Step.VERIFYING, error)
    assert (failure.status, failure.code) == (status, code)
    assert (failure.result is Result.REJECTED) == (status is Status.REJECTED)


def test_wrong_bytes_from_a_source_are_a_fault_of_the_transfer() -> None:
    for error in (MixAndMatchError("x"), EndlessDataError("x")):
        assert classify(Step.DOWNLOADING, error).status is Status.FAILED
