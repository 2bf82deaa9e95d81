"""When a device served, when its broker was there, and the longest time that it served nothing.

A time counts as dark from the last answer of any model to the next one, without the parts in which the
broker was away: a device cannot serve without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Final

# The promise.
MAX_DARK_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to the device: seconds since the start, its kind, and how long it lasted."""

    began_s: float
    kind: str
    lasted_s: float


@dataclass(frozen=True, slots=True)
class Dark:
    """A time without answers: when it began and ended, and its length without the broker's absence."""

    began_s: float
    ended_s: float
    dark_s: float


@dataclass
class Timeline:
    """One device's year.

    Attributes
    ----------
    seconds
        Its length so far.
    events
        What happened, in the order in which it ended.
    darks
        Times without answers of more than a second.
    absences
        When the broker was away: begin and end.
    answers
        Model -> number of answers with the right values.
    statuses
        Other answers, and requests without one, by status; 0 stands for none.
    """

    seconds: float = 0.0
    events: list[Event] = field(default_factory=list)
    darks: list[Dark] = field(default_factory=list)
    absences: list[tuple[float, float]] = field(default_factory=list)
    answers: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    _answered_s: float = 0.0
    _ticked_s: float = 0.0
    _dark_s: float = 0.0
    _away_since_s: float | None = None

    @property
    def longest_dark_s(self) -> float:
        """The longest dark time, also one that goes on."""
        return max([dark.dark_s for dark in self.darks] + [self._dark_s])

    def tick(self, now_s: float, *, broker: bool) -> None:
        """Count the time since the last call; `broker` says whether the broker was there."""
        if broker:
            self._dark_s += now_s - self._ticked_s
        if not broker and self._away_since_s is None:
            self._away_since_s = self._ticked_s
        elif broker and self._away_since_s is not None:
            self.absences.append((self._away_since_s, now_s))
            self._away_since_s = None
        self._ticked_s = self.seconds = now_s

    def answered(self, now_s: float, model: str) -> None:
        """Take note of an answer."""
        self.answers[model] += 1
        if self._dark_s > 1.0:
            self.darks.append(Dark(self._answered_s, now_s, self._dark_s))
        self._answered_s, self._dark_s = now_s, 0.0

    def darkest(self) -> Mapping[str, float]:
        """Return kind -> the longest dark time that began during such an event, or within 5 s after it."""
        found: dict[str, float] = {}
        for event in self.events:
            end_s = event.began_s + event.lasted_s + 5.0
            lengths = [dark.dark_s for dark in self.darks if event.began_s - 1.0 <= dark.began_s <= end_s]
            found[event.kind] = max([found.get(event.kind, 0.0), *lengths])
        return found

    def to_json(self) -> dict[str, object]:
        """Return the report's JSON document."""
        return {
            "seconds": round(self.seconds, 1),
            "longest_dark_s": round(self.longest_dark_s, 1),
            "answers": dict(self.answers),
            "statuses": dict(self.statuses),
            "events": [asdict(event) for event in self.events],
            "darks": [asdict(dark) for dark in self.darks],
            "absences": self.absences,
        }
