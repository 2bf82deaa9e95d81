"""The trial of a version after the switch to it: how long it takes, and what ends it early.

A version that passed its recorded samples can still fail on real requests. So for some time after the switch
its predecessor can come back:

=======================  ===========================================================================
the version              what follows
=======================  ===========================================================================
is out of service        its predecessor comes back: its worker died by itself too often, or does not start
ends the agent often     its predecessor comes back: `MAX_STARTS` starts of the agent in a trial, none of
                         which lasted `STEADY_S` or ended with a clean stop
fails nearly always      its predecessor comes back: at least `MIN_FAILED` requests failed or ended the
                         worker, and they are more than half of all
fails more often         its predecessor comes back: at least `MIN_ANSWERS` answers, and more than
                         `MAX_ERROR_SHARE` of them failed, beyond the share of the predecessor
is much slower           its predecessor comes back: both have `MIN_ANSWERS` answers, and the 95th percentile
                         of the computing time is over `MAX_SLOWDOWN` times the predecessor's, and more than
                         `MIN_SLOWDOWN_S` above it
serves well              the trial ends after `TRIAL_S` in service and `TRIAL_ANSWERS` answers, at the latest
                         after `LONGEST_S` in service
=======================  ===========================================================================

A version that was deployed again after it was rolled back is judged only by the first two rules: a person has
decided that it may fail or be slow. Time is time in service in one run of the agent, so the clock of the
device does not matter.

Promises: no I/O and no clock. Leaves to others: measuring, and bringing the predecessor back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

TRIAL_S: Final = 600.0
TRIAL_ANSWERS: Final = 1000
# A model that is asked once an hour: after a day it has seen what it will see.
LONGEST_S: Final = 24 * 3600.0
# One power cut in a trial is an accident, four are a pattern.
MAX_STARTS: Final = 4
# A version that lets the agent live this long does not end it by being loaded.
STEADY_S: Final = 60.0
# Fewer answers say little: with a share of 5 %, two failures of 40 requests are no surprise.
MIN_ANSWERS: Final = 100
# A version that fails more than every second request need not be watched for that long.
MIN_FAILED: Final = 10
_HALF: Final = 0.5
# The reason to bring back the predecessor of a version that ends the agent begins with this.
AGENT_ENDED: Final = "the agent ended"
MAX_ERROR_SHARE: Final = 0.05
# A larger model is slower, and that was known when it was deployed; four times is more often a mistake.
MAX_SLOWDOWN: Final = 4.0
# Below this, the difference may be the machine's other load.
MIN_SLOWDOWN_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Score:
    """How a version has done.

    Attributes
    ----------
    answers, errors
        Requests that were computed, and how many of them failed or ended the worker; without those of the
        client that has the most failures, if there are others (`agent.service.models.track_record`).
    p95_s
        The 95th percentile of the graph's computing time in seconds; None before the first answer.
    """

    answers: int = 0
    errors: int = 0
    p95_s: float | None = None

    @property
    def error_share(self) -> float:
        """The share of requests that failed."""
        return self.errors / self.answers if self.answers else 0.0


@dataclass(frozen=True, slots=True)
class Trial:
    """A version on trial, as it is kept on disk.

    Attributes
    ----------
    starts
        How often the agent started in this trial since the version last proved steady.
    baseline
        The predecessor's score at the switch; None if only crashes count.
    counter
        The security counter that was committed before the switch, which the predecessor still meets; None if
        there was none.
    """

    starts: int = 0
    baseline: Score | None = None
    counter: int | None = None

    def started(self) -> Trial:
        """Return the trial after another start of the agent."""
        return replace(self, starts=self.starts + 1)

    def steady(self) -> Trial:
        """Return the trial after the version let the agent live, or the agent was stopped cleanly."""
        return replace(self, starts=0)

    def to_document(self) -> dict[str, object]:
        """Return the trial as a JSON object."""
        baseline = self.baseline
        return {
            "starts": self.starts,
            "counter": self.counter,
            "baseline": None
            if baseline is None
            else {"answers": baseline.answers, "errors": baseline.errors, "p95_s": baseline.p95_s},
        }

    @classmethod
    def from_document(cls, value: Mapping[str, Any]) -> Trial:
        """Read what `to_document` returned.

        Raises
        ------
        KeyError, TypeError, ValueError
            If `value` is something else.
        """
        baseline = value["baseline"]
        return cls(
            starts=int(value["starts"]),
            counter=None if value["counter"] is None else int(value["counter"]),
            baseline=None
            if baseline is None
            else Score(
                answers=int(baseline["answers"]),
                errors=int(baseline["errors"]),
                p95_s=None if baseline["p95_s"] is None else float(baseline["p95_s"]),
            ),
        )


def fault(trial: Trial, *, out_of_service: str | None, score: Score) -> str | None:
    """Return why the predecessor must come back; None if the version may go on.

    Parameters
    ----------
    trial
        The version's trial.
    out_of_service
        Why the version is out of service; None if it is not.
    score
        How the version has done since it was loaded.
    """
    if out_of_service is not None:
        return out_of_service
    if trial.starts >= MAX_STARTS:
        return f"{AGENT_ENDED} {trial.starts} times soon after it had loaded this version"
    before = trial.baseline
    if before is None:
        return None
    if score.errors >= MIN_FAILED and score.error_share > max(_HALF, before.error_share):
        return f"{score.errors} of {score.answers} requests failed"
    if score.answers < MIN_ANSWERS:
        return None
    if score.error_share > MAX_ERROR_SHARE + before.error_share:
        return (
            f"{score.errors} of {score.answers} requests failed, "
            f"{before.errors} of {before.answers} with the version before"
        )
    if score.p95_s is None or before.p95_s is None or before.answers < MIN_ANSWERS:
        return None
    if score.p95_s > MAX_SLOWDOWN * before.p95_s and score.p95_s - before.p95_s > MIN_SLOWDOWN_S:
        return (
            f"95 % of the requests took up to {1000 * score.p95_s:.0f} ms, "
            f"{1000 * before.p95_s:.0f} ms with the version before"
        )
    return None


def over(served_s: float, score: Score) -> bool:
    """Return whether a version without fault has passed its trial.

    Parameters
    ----------
    served_s
        How long it has been in service in this run of the agent, in seconds.
    score
        How it has done.
    """
    return served_s >= LONGEST_S or (served_s >= TRIAL_S and score.answers >= TRIAL_ANSWERS)
