"""How many sessions a model has and how many ended early, over all processes that served its bundle."""

from __future__ import annotations

from agent.worker.frames import Answer


class SessionCounts:
    """Counts of one model's sessions, from its workers' answers; `count` is that of the last answer."""

    def __init__(self) -> None:
        self.count = 0
        self._evicted = 0
        self._before = 0

    @property
    def evicted(self) -> int:
        """Sessions that ended because there were too many, they were unused, or their process ended."""
        return self._before + self._evicted

    def note(self, answer: Answer) -> None:
        """Take what an answer says."""
        self.count, self._evicted = answer.sessions, max(self._evicted, answer.evicted)

    def process_ended(self) -> None:
        """Count the sessions that ended with their process."""
        self._before, self._evicted, self.count = self.evicted + self.count, 0, 0
