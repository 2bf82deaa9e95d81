"""The life cycle of a supervised worker as data: its states, what may happen in each, and what follows.

Promises: `TRANSITIONS` is the only place that says which state follows which, and an event that a state does
not list raises. Only `STOPPED` is the end. The rules for a restart are here too: how long to wait before each
attempt, and which deaths take a bundle out of service. A death while a request was computed never does: a
client could otherwise take a model away from all others. Such requests are quarantined instead
(`agent.service.requests.quarantine`). Nothing here knows a process or reads a clock.
`tests/agent/service/models/test_life_cycle.py` walks the table.
Leaves to others: doing what a state requires (`supervisor`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import Enum, auto
from types import MappingProxyType
from typing import Final

from agent.wire.model_state import ModelPhase

# Seconds before each attempt to start another worker; the last one repeats. The first is short, so that a
# worker is back within two seconds; the others keep a worker that always dies from becoming a loop of forks.
_RESTART_DELAYS_S: Final = (0.05, 0.25, 1.0)
# A bundle that is out of service is tried again after this long, then after twice as long, and so on. Memory
# or processes may be short for seconds, or until a person acts.
RETRY_FIRST_S: Final = 5.0
# A start costs a second or two of a processor: with this pause it is not noticed.
RETRY_LONGEST_S: Final = 600.0
# Models that failed together, such as all of a device that ran out of memory, do not start together again.
_RETRY_SPREAD: Final = 0.2


class State(Enum):
    """What a supervised worker is doing.

    Attributes
    ----------
    STARTING
        The first process loads the bundle and answers its recorded samples.
    READY
        It answers requests.
    RESTARTING
        The process ended by itself; another one is being started.
    FAILED
        It died too often or could not be started again. Requests are refused until the next attempt succeeds.
    RETRYING
        After a pause, another process is being started. Requests are still refused.
    STOPPING
        It answers what it was sent, and is then ended.
    STOPPED
        There is no process, and there will not be one.
    """

    STARTING = auto()
    READY = auto()
    RESTARTING = auto()
    FAILED = auto()
    RETRYING = auto()
    STOPPING = auto()
    STOPPED = auto()


class Event(Enum):
    """What happens to a supervised worker.

    Attributes
    ----------
    LOADED
        A process loaded the bundle and its samples came out as recorded.
    NOT_LOADED
        A process could not be started, or did not load the bundle.
    DIED
        A process that was ready ended by itself, or was ended for computing too long.
    DIED_TOO_OFTEN
        The same, and it was one death too many within the crash window.
    GAVE_UP
        The last attempt to restart it failed.
    RETRY
        The pause of a failed worker is over.
    STOP
        The supervisor was asked to stop.
    DRAINED
        It answered everything it was sent, or the time for that is over.
    """

    LOADED = auto()
    NOT_LOADED = auto()
    DIED = auto()
    DIED_TOO_OFTEN = auto()
    GAVE_UP = auto()
    RETRY = auto()
    STOP = auto()
    DRAINED = auto()


class Cause(Enum):
    """Why a process that was ready died.

    Attributes
    ----------
    REQUEST
        It was computing a request, or answered one with what an agent does not accept.
    ITSELF
        It had nothing to compute.
    """

    REQUEST = auto()
    ITSELF = auto()


_S, _E = State, Event
TRANSITIONS: Final[Mapping[State, Mapping[Event, State]]] = MappingProxyType(
    {
        _S.STARTING: MappingProxyType(
            {_E.LOADED: _S.READY, _E.NOT_LOADED: _S.STOPPED, _E.STOP: _S.STOPPED},
        ),
        _S.READY: MappingProxyType(
            {_E.DIED: _S.RESTARTING, _E.DIED_TOO_OFTEN: _S.FAILED, _E.STOP: _S.STOPPING},
        ),
        _S.RESTARTING: MappingProxyType(
            {
                _E.LOADED: _S.READY,
                _E.NOT_LOADED: _S.RESTARTING,
                _E.GAVE_UP: _S.FAILED,
                _E.STOP: _S.STOPPED,
            },
        ),
        _S.FAILED: MappingProxyType({_E.RETRY: _S.RETRYING, _E.STOP: _S.STOPPED}),
        _S.RETRYING: MappingProxyType(
            {_E.LOADED: _S.READY, _E.NOT_LOADED: _S.FAILED, _E.STOP: _S.STOPPED},
        ),
        _S.STOPPING: MappingProxyType(
            {_E.DRAINED: _S.STOPPED, _E.DIED: _S.STOPPED, _E.DIED_TOO_OFTEN: _S.STOPPED},
        ),
        _S.STOPPED: MappingProxyType({}),
    }
)
# What a model's state document says. `stopping` is never published: the model is gone by then.
PHASES: Final[Mapping[State, ModelPhase]] = MappingProxyType(
    {
        _S.STARTING: ModelPhase.STARTING,
        _S.READY: ModelPhase.READY,
        _S.RESTARTING: ModelPhase.RESTARTING,
        _S.FAILED: ModelPhase.FAILED,
        _S.RETRYING: ModelPhase.FAILED,
        _S.STOPPING: ModelPhase.STOPPED,
        _S.STOPPED: ModelPhase.STOPPED,
    }
)
# States in which the process computes what it was sent.
COMPUTING: Final = frozenset({State.READY, State.STOPPING})
# States in which requests are refused at once.
OUT_OF_SERVICE: Final = frozenset({State.FAILED, State.RETRYING, State.STOPPED})


def next_state(state: State, event: Event) -> State:
    """Return the state that follows; an event that cannot happen in that state raises ValueError."""
    following = TRANSITIONS[state].get(event)
    if following is None:
        expected = ", ".join(possible.name for possible in TRANSITIONS[state]) or "no event"
        raise ValueError(f"expected {expected} in the state {state.name}, got {event.name}")
    return following


def restart_delay_s(attempt: int) -> float:
    """Return the seconds to wait before an attempt to start another worker, counted from 0."""
    return _RESTART_DELAYS_S[min(attempt, len(_RESTART_DELAYS_S) - 1)]


def retry_delay_s(attempt: int, chance: float) -> float:
    """Return the seconds to wait before a bundle that is out of service is tried again.

    Attempts count from 0, and from 0 again after it was in service for `RETRY_LONGEST_S`. `chance` is a
    random number from 0 to 1, which spreads attempts that would fall together.
    """
    doubled_s = min(RETRY_FIRST_S * 2.0 ** min(attempt, 16), RETRY_LONGEST_S)
    return doubled_s * (1 - _RETRY_SPREAD * chance)


class CrashWindow:
    """The latest deaths of a worker, of which `limit` of its own within `window_s` are too many.

    `by_itself` and `by_requests` count all deaths so far, by their cause.
    """

    def __init__(self, limit: int, window_s: float) -> None:
        self._window_s = window_s
        self._by_itself_s: deque[float] = deque(maxlen=limit)
        # Further deaths do not slow the next restart any more.
        self._by_requests_s: deque[float] = deque(maxlen=len(_RESTART_DELAYS_S))
        self.by_itself = 0
        self.by_requests = 0

    @property
    def total(self) -> int:
        """All deaths so far."""
        return self.by_itself + self.by_requests

    def died(self, now_s: float, cause: Cause) -> Event:
        """Count a death at `now_s`, a reading of a monotonic clock, and return which event it is."""
        if cause is Cause.REQUEST:
            self.by_requests += 1
            self._by_requests_s.append(now_s)
            return Event.DIED
        self.by_itself += 1
        self._by_itself_s.append(now_s)
        full = len(self._by_itself_s) == self._by_itself_s.maxlen
        return Event.DIED_TOO_OFTEN if full and now_s - self._by_itself_s[0] <= self._window_s else Event.DIED

    def restart_delay_s(self, attempt: int, now_s: float) -> float:
        """Return the seconds to wait before an attempt to start another worker, counted from 0.

        Requests that kill one worker after the other slow their restarts down, within the limits of
        `restart_delay_s`, so that the processor is not spent on loading the model.
        """
        recent = sum(now_s - died_s <= self._window_s for died_s in self._by_requests_s)
        return restart_delay_s(attempt + max(0, recent - 1))
