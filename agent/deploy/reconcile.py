"""What should run, and when the agent tries again to make it so.

What runs is compared with what should run after every event and once a second, as long as the agent runs:

====================  ======================  ============================================================
should run            runs                    what follows
====================  ======================  ============================================================
nothing               a desired model         it is stopped; its bundle stays on disk for a while
a bundle              the same bundle         nothing; if its worker fails, the worker is tried again
a bundle              another one, or none    the bundle is tried at once, and then after growing pauses
a refused bundle      another one, or none    tried again when the document, the keys or the agent change
a rolled back bundle  its predecessor         nothing until a document has another job for the model
a rolled back bundle  itself, or none         its predecessor is tried, after growing pauses
====================  ======================  ============================================================

The comparison does not depend on the job journal, which may be lost. The journal only says which refusals
need no further attempt, and to which job a new attempt belongs.

Promises: no I/O and no clock. Leaves to others: running the attempts (`deployment`, `installer`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from agent.deploy.jobs import Request
from agent.deploy.store.active import ActiveModel
from agent.wire.desired import Desired
from agent.wire.reported import Origin

# The first pause is short: a block was damaged, or a disk is full for a moment.
FIRST_PAUSE_S: Final = 5.0
# A person who has removed the cause waits no longer than this; an attempt costs a few writes to an SD card.
LONGEST_PAUSE_S: Final = 600.0
# Agents that failed together, such as those whose server was away, do not try again together.
_SPREAD: Final = 0.2


def wishes(
    desired: Desired | None, active: Mapping[str, ActiveModel], recovered: Iterable[Request] = ()
) -> dict[str, Request]:
    """Return what should run, by model.

    A model that a person installed here should run as recorded in `active`, and so should every other one
    while there is no desired document; `recovered` is what a person installed, if that record is lost.
    """
    wanted = {request.model: request for request in recovered}
    for model in active.values():
        if desired is None or model.origin is Origin.LOCAL:
            wanted[model.name] = Request(
                job=model.job,
                model=model.name,
                digest=model.digest,
                size=0,
                version=model.version,
                sources=(),
                origin=model.origin,
            )
    if desired is not None:
        wanted.update({entry.model: Request.from_desired(entry) for entry in desired.models})
    return wanted


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a model does not run as it should, and the wire code of the error, if there was one.

    `next_try_s` is in seconds since the epoch by the device's clock; None if that depends on something else.
    """

    message: str
    next_try_s: float | None
    code: str | None = None


class Attempts:
    """The failed attempts for each model, and when the next ones are due; `chance` draws from 0 to 1."""

    def __init__(self, chance: Callable[[], float] = random.random) -> None:
        self._chance = chance
        self._tries: dict[str, int] = {}
        self._due_s: dict[str, float] = {}
        self._problems: dict[str, Problem] = {}

    @property
    def problems(self) -> Mapping[str, Problem]:
        """Why the last attempt for each model failed."""
        return self._problems

    def due(self, name: str, now_s: float) -> bool:
        """Return whether a model may be tried at `now_s`, a reading of a monotonic clock."""
        return now_s >= self._due_s.get(name, now_s)

    def failed(self, name: str, now_s: float) -> float:
        """Count a failed attempt, and return the seconds until the next one."""
        tries = self._tries.get(name, 0)
        self._tries[name] = tries + 1
        pause_s = min(FIRST_PAUSE_S * 2.0 ** min(tries, 16), LONGEST_PAUSE_S) * (1 - _SPREAD * self._chance())
        self._due_s[name] = now_s + pause_s
        return pause_s

    def postpone(self, name: str, due_s: float) -> None:
        """Do not try a model before `due_s`."""
        self._due_s[name] = due_s

    def explain(self, name: str, problem: Problem) -> None:
        """Record why the last attempt failed."""
        self._problems[name] = problem

    def forget(self, name: str) -> None:
        """Forget the failed attempts: the model runs, or something has changed."""
        self._tries.pop(name, None)
        self._due_s.pop(name, None)
        self._problems.pop(name, None)

    def hurry(self, now_s: float) -> None:
        """Try all models again soon: what was missing may be there now."""
        for name, due_s in self._due_s.items():
            self._tries[name] = 0
            self._due_s[name] = min(due_s, now_s + FIRST_PAUSE_S * (1 - _SPREAD * self._chance()))
