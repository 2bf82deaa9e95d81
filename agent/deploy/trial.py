"""The trial of a version after the switch to it: how long it takes, and what ends it early.

A version that passed its recorded samples can still fail on real requests. So for some time after the switch
its predecessor can come back:

=======================  ===========================================================================
the version              what follows
=======================  ===========================================================================
is out of service        its predecessor comes back: its worker died by itself too often, or does not start
ends the agent often     its predecessor comes back: `MAX_STARTS` starts of the agent in a trial, none of
                         which lasted `STEADY_S` or ended with a clean stop
fails                    its predecessor comes back, if it fails for most clients that count (see below): more
                         than every second request of a client failed or ended the worker, of one client at
                         least `MIN_FAILED`; or more than `MAX_ERROR_SHARE` of a client's `MIN_ANSWERS`,
                         beyond its share with the predecessor
is much slower           its predecessor comes back, if it is slower for most clients that count: in the same
                         bucket and with as many threads, both have `MIN_ANSWERS` answers for the client, and
                         the 95th percentile of the computing time is over `MAX_SLOWDOWN` times the
                         predecessor's, and more than `MIN_SLOWDOWN_S` above it; if other models run than
                         before, or the device is hot, that is only logged
serves well              the trial ends after `TRIAL_S` in service and `TRIAL_ANSWERS` answers, at the latest
                         after `LONGEST_S` in service
=======================  ===========================================================================

A client counts if it has `MIN_SEEN` answers of the version, and had `MIN_KNOWN` good ones of the predecessor,
in any run of the agent; if none had, all count, but not before `AWAIT_S`. One that had, and has asked
less, is held to be content until then: to be the first to ask ends no trial. So a client
without a record can neither end a trial nor hide that the version fails for those that have one, however
often it asks.

A version that was deployed again after it was rolled back is judged only by the first two rules: a person has
decided that it may fail or be slow. Time is time in service in one run of the agent, so the clock of the
device does not matter.

Promises: no I/O and no clock. Leaves to others: measuring, and bringing the predecessor back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, NamedTuple

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
# Good answers of the predecessor that make a client's failures count.
MIN_KNOWN: Final = 10
# A client that asked once or twice says nothing.
MIN_SEEN: Final = 3
# So long a client of the predecessor has to ask the version before it is judged without it.
AWAIT_S: Final = 300.0
_HALF: Final = 0.5
# The reason to bring back the predecessor of a version that ends the agent begins with this.
AGENT_ENDED: Final = "the agent ended"
MAX_ERROR_SHARE: Final = 0.05
# A larger model is slower, and that was known when it was deployed; four times is more often a mistake.
MAX_SLOWDOWN: Final = 4.0
# Below this, the difference may be the machine's other load.
MIN_SLOWDOWN_S: Final = 0.02


class Tally(NamedTuple):
    """What a version did for one client.

    Attributes
    ----------
    answers, errors
        Requests that were computed, and how many of them failed or ended the worker.
    """

    answers: int = 0
    errors: int = 0

    @property
    def good(self) -> int:
        """Requests that were answered."""
        return self.answers - self.errors

    @property
    def error_share(self) -> float:
        """The share of requests that failed."""
        return self.errors / self.answers if self.answers else 0.0

    def fails(self, before: Tally) -> bool:
        """Return whether the version fails for this client, which had `before` with the predecessor."""
        if self.error_share > max(_HALF, before.error_share):
            return True
        return self.answers >= MIN_ANSWERS and self.error_share > MAX_ERROR_SHARE + before.error_share


class Times(NamedTuple):
    """How long one kind of request took.

    Attributes
    ----------
    answers
        How many there were.
    p95_s
        The 95th percentile of the graph's computing time in seconds.
    """

    answers: int
    p95_s: float


@dataclass(frozen=True, slots=True)
class Score:
    """How a version has done.

    Attributes
    ----------
    clients
        For each client, by a digest of its name.
    times
        For each bucket, number of threads and client, as `kind_of` names them.
    others
        The other models that run beside it.
    hot
        Whether the device has been too hot for full speed.
    """

    clients: Mapping[str, Tally] = field(default_factory=dict)
    times: Mapping[str, Times] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    hot: bool = False

    @property
    def answers(self) -> int:
        """Requests that were computed."""
        return sum(tally.answers for tally in self.clients.values())

    def after(self, earlier: Score) -> Score:
        """Return this score with an earlier one of the same bundle; of times, those of more answers."""
        clients = dict(earlier.clients)
        for key, tally in self.clients.items():
            before = clients.get(key, Tally())
            clients[key] = Tally(tally.answers + before.answers, tally.errors + before.errors)
        times = dict(self.times)
        for kind, known in earlier.times.items():
            times[kind] = max(times.get(kind, known), known)
        return replace(self, clients=clients, times=times)

    @classmethod
    def from_document(cls, value: Mapping[str, Any]) -> Score:
        """Read its fields; of an earlier agent's score, nothing is left.

        Raises
        ------
        KeyError, TypeError, ValueError
            If `value` is something else.
        """
        if "clients" not in value:
            return cls()
        return cls(
            clients={str(key): Tally(int(n), int(bad)) for key, (n, bad) in value["clients"].items()},
            times={str(kind): Times(int(n), float(p95_s)) for kind, (n, p95_s) in value["times"].items()},
            others=tuple(map(str, value["others"])),
            hot=bool(value["hot"]),
        )


@dataclass(frozen=True, slots=True)
class Trial:
    """A version on trial, as it is kept on disk.

    `starts` counts those of the agent since the version last proved steady. `baseline` is the predecessor's
    score at the switch; None if only crashes count. `counter` is the security counter that was committed
    before the switch, which the predecessor still meets.
    """

    starts: int = 0
    baseline: Score | None = None
    counter: int | None = None

    def started(self) -> Trial:
        """Return the trial after another start of the agent."""
        return replace(self, starts=self.starts + 1)

    def steady(self) -> Trial:
        """Return the trial with its starts reset: the agent ran long enough, or was stopped cleanly."""
        return replace(self, starts=0)

    def to_document(self) -> dict[str, object]:
        """Return the trial as a JSON object."""
        return asdict(self)

    @classmethod
    def from_document(cls, value: Mapping[str, Any]) -> Trial:
        """Read what `to_document` returned; something else raises KeyError, TypeError or ValueError."""
        baseline = value["baseline"]
        return cls(
            starts=int(value["starts"]),
            counter=None if value["counter"] is None else int(value["counter"]),
            baseline=None if baseline is None else Score.from_document(baseline),
        )


def fault(trial: Trial, *, out_of_service: str | None, score: Score, served_s: float = 0.0) -> str | None:
    """Return why the predecessor must come back; None if the version may go on.

    `out_of_service` says why it is. `score` and `served_s`, in service, count since the version was loaded.
    """
    if out_of_service is not None:
        return out_of_service
    if trial.starts >= MAX_STARTS:
        return f"{AGENT_ENDED} {trial.starts} times soon after it had loaded this version"
    before = trial.baseline
    if before is None:
        return None
    if (why := _failure(before, score, served_s)) is not None:
        return why
    return None if slowness_is_explained(before, score) else slowness(before, score, served_s)


def kind_of(work: str, client: str) -> str:
    """Return the name of a client's work of one kind."""
    return f"{work}/{client}"


def client_of(kind: str) -> str:
    """Return the client in what `kind_of` returned."""
    return kind.rpartition("/")[2]


def _counting(before: Score, score: Score, served_s: float) -> tuple[dict[str, Tally], int]:
    """Return the clients that count, with what the version did for them, and how many others are content."""
    seen = {key: tally for key, tally in score.clients.items() if tally.answers >= MIN_SEEN}
    known = {key for key, tally in before.clients.items() if tally.good >= MIN_KNOWN}
    awaits = served_s < AWAIT_S
    if not known:
        return ({}, 0) if awaits else (seen, 0)
    seen = {key: tally for key, tally in seen.items() if key in known}
    return seen, len(known - seen.keys()) if awaits else 0


def _failure(before: Score, score: Score, served_s: float) -> str | None:
    """Return for how many requests the version fails, if it does for most clients that count."""
    none = Tally()
    seen, content = _counting(before, score, served_s)
    failing = [tally for key, tally in seen.items() if tally.fails(before.clients.get(key, none))]
    if 2 * len(failing) <= len(seen) + content or all(
        tally.errors < MIN_FAILED and tally.answers < MIN_ANSWERS for tally in failing
    ):
        return None
    return (
        f"{sum(tally.errors for tally in failing)} of {sum(tally.answers for tally in failing)} requests of "
        f"{len(failing)} of {len(seen)} clients failed"
    )


def slowness(before: Score, score: Score, served_s: float = AWAIT_S) -> str | None:
    """Return how much slower the version is for most clients that count; None if it is not."""
    seen, content = _counting(before, score, served_s)
    slow: dict[str, str] = {}
    for kind, times in score.times.items():
        known = before.times.get(kind)
        if known is None or min(known.answers, times.answers) < MIN_ANSWERS or client_of(kind) not in seen:
            continue
        if times.p95_s > MAX_SLOWDOWN * known.p95_s and times.p95_s - known.p95_s > MIN_SLOWDOWN_S:
            slow[client_of(kind)] = (
                f"95 % of the requests took up to {1000 * times.p95_s:.0f} ms, "
                f"{1000 * known.p95_s:.0f} ms with the version before"
            )
    return next(iter(slow.values())) if 2 * len(slow) > len(seen) + content else None


def slowness_is_explained(before: Score, score: Score) -> bool:
    """Return whether a version may be slower for a reason that is not its own."""
    return score.hot or score.others != before.others


def over(served_s: float, score: Score) -> bool:
    """Return whether a version without fault has passed its trial.

    `served_s` is how long it has been in service in this run of the agent.
    """
    return served_s >= LONGEST_S or (served_s >= TRIAL_S and score.answers >= TRIAL_ANSWERS)
