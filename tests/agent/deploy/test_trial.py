"""A version on trial: what brings its predecessor back, and what ends the trial."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from agent.deploy.trial import (
    AWAIT_S,
    LONGEST_S,
    MAX_STARTS,
    MIN_ANSWERS,
    TRIAL_ANSWERS,
    TRIAL_S,
    Score,
    Tally,
    Times,
    Trial,
    fault,
    over,
    slowness,
    slowness_is_explained,
)

GOOD = Score(clients={"a": Tally(1000, 1)}, times={"/1/a": Times(1000, 0.05)})
TRIAL = Trial(baseline=GOOD)


def tallies(**clients: tuple[int, int]) -> Score:
    return Score(clients={key: Tally(*tally) for key, tally in clients.items()})


def judged(
    trial: Trial, score: Score, out_of_service: str | None = None, served_s: float = AWAIT_S
) -> str | None:
    return fault(trial, out_of_service=out_of_service, score=score, served_s=served_s)


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
    ("before", "after", "back"),
    [
        # Its only steady client: sooner if it fails nearly always.
        ({"a": (1000, 1)}, {"a": (9, 9)}, False),
        ({"a": (1000, 1)}, {"a": (20, 10)}, False),
        ({"a": (1000, 1)}, {"a": (19, 10)}, True),
        ({"a": (1000, 1)}, {"a": (99, 40)}, False),
        ({"a": (1000, 1)}, {"a": (100, 5)}, False),
        ({"a": (1000, 1)}, {"a": (100, 6)}, True),
        # Its own record counts.
        ({"a": (1000, 100)}, {"a": (1000, 140)}, False),
        ({"a": (1000, 100)}, {"a": (1000, 160)}, True),
        ({"a": (100, 90)}, {"a": (100, 89)}, False),
        # A monitor hides nothing.
        ({"a": (1000, 1)}, {"a": (200, 200), "monitor": (1, 0)}, True),
        ({"a": (1000, 1), "monitor": (1, 0)}, {"a": (200, 200), "monitor": (1, 0)}, True),
        ({"a": (1000, 1), "monitor": (20, 0)}, {"a": (200, 200), "monitor": (1, 0)}, True),
        ({"a": (1000, 1), "monitor": (20, 0)}, {"a": (200, 200), "monitor": (9, 9)}, True),
        ({"a": (1000, 1), "monitor": (20, 0)}, {"a": (200, 200), "monitor": (9, 0)}, False),
        # Who has no record, or fails for itself only, ends no trial.
        ({"a": (1000, 1)}, {"a": (5, 0), "new": (500, 500)}, False),
        ({"a": (1000, 1)}, {"new": (500, 500)}, False),
        ({"a": (1000, 1), "b": (1000, 1)}, {"a": (500, 500), "b": (20, 0)}, False),
        ({"a": (1000, 1), "b": (10, 1)}, {"a": (30, 0), "b": (500, 500)}, False),
        # Clients are counted, not requests.
        ({"a": (50, 0), "b": (50, 0), "c": (9000, 0)}, {"a": (10, 10), "b": (9, 9), "c": (9000, 0)}, True),
        # Without any record, as after a restart, all count in the end.
        ({}, {"a": (10, 10)}, True),
        ({}, {"a": (10, 10), "b": (10, 10)}, True),
        ({}, {"a": (500, 500), "b": (10, 0)}, False),
        ({"a": (9, 0)}, {"b": (10, 10)}, True),
    ],
)
def test_version_is_rolled_back_if_most_clients_with_a_record_fail(
    before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]], back: bool
) -> None:
    why = judged(Trial(baseline=tallies(**before)), tallies(**after))
    assert (why is not None) == back
    if why is not None:
        assert "clients failed" in why


@pytest.mark.parametrize(
    ("before", "after", "back"),
    [
        # Its only steady client need not wait, nor need most of them.
        ({"a": (1000, 1)}, {"a": (10, 10)}, True),
        ({"a": (1000, 1), "b": (20, 0), "c": (20, 0)}, {"a": (10, 10), "b": (10, 10)}, True),
        ({"a": (1000, 1), "monitor": (9, 0)}, {"a": (10, 10)}, True),
        # Without any record.
        ({}, {"a": (500, 500)}, False),
        # The first to ask is not the only one.
        ({"a": (1000, 1), "b": (20, 0)}, {"b": (500, 500)}, False),
        ({"a": (1000, 1), "b": (20, 0)}, {"a": (2, 0), "b": (500, 500)}, False),
        ({"a": (1000, 1), "b": (20, 0), "c": (20, 0)}, {"b": (500, 500)}, False),
    ],
)
def test_client_that_is_the_first_to_ask_does_not_end_a_trial(
    before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]], back: bool
) -> None:
    trial = Trial(baseline=tallies(**before))
    assert (judged(trial, tallies(**after), served_s=AWAIT_S - 1) is not None) == back
    assert judged(trial, tallies(**after), served_s=AWAIT_S) is not None  # the others may never ask again


@pytest.mark.parametrize(
    ("before", "after", "back"),
    [
        ({"/1": (1000, 0.05)}, {"/1": (100, 0.21)}, True),
        ({"/1": (1000, 0.05)}, {"/1": (100, 0.19)}, False),
        ({"/1": (1000, 0.05)}, {"/1": (99, 0.21)}, False),
        ({"/1": (99, 0.05)}, {"/1": (100, 0.21)}, False),
        ({"/1": (1000, 0.001)}, {"/1": (1000, 0.02)}, False),
        ({"/1": (1000, 0.001)}, {"/1": (1000, 0.022)}, True),
        # Another size, or fewer threads.
        ({"8/4": (1000, 0.001)}, {"8/4": (100, 0.001), "512/4": (1000, 0.1)}, False),
        ({"8/4": (1000, 0.001)}, {"8/1": (1000, 0.1)}, False),
        ({"8/4": (1000, 0.001), "512/4": (200, 0.1)}, {"8/4": (100, 0.1), "512/4": (1000, 0.1)}, True),
    ],
)
def test_version_that_is_much_slower_at_the_same_work_is_rolled_back(
    before: dict[str, tuple[int, float]], after: dict[str, tuple[int, float]], back: bool
) -> None:
    first, second = (
        Score({"a": Tally(1000, 0)}, {f"{k}/a": Times(*v) for k, v in each.items()})
        for each in (before, after)
    )
    assert (judged(Trial(baseline=first), second) is not None) == back


@pytest.mark.parametrize(
    ("clients", "slow_for", "back"),
    [
        ({"a": 1000}, "a", True),
        ({"a": 1000, "b": 1000}, "ab", True),
        ({"a": 1000, "b": 1000, "c": 1000}, "ab", True),
        # Values that take long, from one client of two, also if the other asked seldom.
        ({"a": 1000, "b": 1000}, "b", False),
        ({"a": 10, "b": 1000}, "b", False),
        # From one without a record.
        ({"a": 1000, "b": 9}, "b", False),
    ],
)
def test_version_that_is_slow_for_one_client_of_several_goes_on(
    clients: dict[str, int], slow_for: str, back: bool
) -> None:
    tallies_of = {key: Tally(count, 0) for key, count in clients.items()}
    before = Score(tallies_of, {f"8/1/{key}": Times(count, 0.001) for key, count in clients.items()})
    after = Score(
        dict.fromkeys(clients, Tally(200, 0)),
        {f"8/1/{key}": Times(200, 0.1 if key in slow_for else 0.001) for key in clients},
    )
    assert (judged(Trial(baseline=before), after) is not None) == back


@pytest.mark.parametrize("circumstances", [{"hot": True}, {"others": ("other 1.0.0",)}])
def test_slowness_with_another_explanation_rolls_nothing_back(circumstances: dict[str, Any]) -> None:
    slow = Score({"a": Tally(1000, 0)}, {"/1/a": Times(1000, 1.0)})
    assert judged(TRIAL, slow) is not None
    slow = replace(slow, **circumstances)
    assert judged(TRIAL, slow) is None
    assert slowness_is_explained(GOOD, slow)
    assert slowness(GOOD, slow) is not None


def test_version_that_was_deployed_again_is_judged_only_by_crashes() -> None:
    again = Trial(baseline=None)
    assert judged(again, tallies(a=(1000, 1000))) is None
    assert judged(again, Score(), "3 workers died within 60 s") is not None


def test_trial_ends_after_ten_minutes_and_a_thousand_answers_or_after_a_day() -> None:
    assert not over(TRIAL_S - 1, tallies(a=(10 * TRIAL_ANSWERS, 0)))
    assert not over(LONGEST_S - 1, tallies(a=(TRIAL_ANSWERS - 1, 0)))
    assert over(TRIAL_S, tallies(a=(TRIAL_ANSWERS, 0)))
    assert over(LONGEST_S, Score())
    assert MIN_ANSWERS < TRIAL_ANSWERS


@pytest.mark.parametrize("trial", [Trial(), Trial(2, GOOD, 7), Trial(1, Score(), None)])
def test_what_is_written_is_read_again(trial: Trial) -> None:
    assert Trial.from_document(json.loads(json.dumps(trial.to_document()))) == trial


def test_baseline_of_an_earlier_agent_is_read_as_none_at_all() -> None:
    earlier = {"starts": 1, "counter": 7, "baseline": {"answers": 10, "errors": 0, "p95_s": 0.1}}
    assert Trial.from_document(earlier) == Trial(1, Score(), 7)


def test_one_client_beside_steady_ones_neither_forces_nor_hides_a_rollback() -> None:
    chance = random.Random(0)
    for _ in range(2000):
        honest = [f"h{number}" for number in range(chance.choice((2, 3, 5)))]
        asked, seen = chance.choice((0, 9, 10, 10_000)), chance.choice((0, 2, 3, 10, 99, 100, 100_000))
        served_s = chance.choice((0.0, AWAIT_S - 1, AWAIT_S, LONGEST_S))
        known = {name: Tally(chance.choice((10, 1000))) for name in honest}
        known["liar"] = Tally(asked, chance.choice((0, asked // 2, asked)))
        at_first = {f"/1/{name}": Times(1000, 0.01) for name in [*honest, "liar"]}
        trial = Trial(baseline=Score(known, at_first))
        good = {name: Tally(chance.choice((3, 5000))) for name in honest}
        good["liar"] = Tally(seen, chance.choice((0, seen // 2, seen)))
        assert judged(trial, Score(good, {**at_first, "/1/liar": Times(10_000, 9.9)}), None, served_s) is None
        failing = {name: Tally(10, 10) for name in honest} | {"liar": Tally(seen)}
        assert judged(trial, Score(failing, at_first), None, served_s) is not None
