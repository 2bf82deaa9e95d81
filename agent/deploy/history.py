"""What the broker knows of the jobs: the changes of each, and all of them again if it has lost them.

A broker keeps the retained documents of jobs, but a broker that lost its state does not, and a session says
nothing about it: mosquitto writes sessions and retained messages every half hour, so it may know the session
and have lost a newer document. Therefore the agent reads one document back at each connect, the one that it
published last. If the broker still has that, it has the earlier ones too.

Promises: a broker that lost the documents gets every job again, at most `PATIENCE_S` after the connect; any
other broker gets none, so a fleet that reconnects does not publish its whole past. A recorded job is durable
before it is published.
Leaves to others: the file of jobs (`jobs`), messages that were never delivered (`outbox`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from agent.deploy.interfaces import Control
from agent.deploy.jobs import Job, Journal
from agent.wire import topics

# A retained message follows its subscription at once; a broker to which a whole fleet returns takes longer.
PATIENCE_S: Final = 5.0


class History:
    """The documents of all jobs."""

    def __init__(self, device: str, control: Control, journal: Journal) -> None:
        self._device = device
        self._control = control
        self._journal = journal
        self._last: Job | None = None
        self._awaited: tuple[topics.Job, bytes] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def record(self, job: Job) -> None:
        """Store the state of a job durably, and then publish it."""
        forgotten = self._journal.put(job)
        await self._journal.save()
        self._forget(forgotten)
        self.publish(job)

    def queue(self, job: Job) -> None:
        """Publish a job that is new or dropped; the journal is saved before anything is done for it."""
        self._forget(self._journal.put(job))
        self.publish(job)

    def publish(self, job: Job) -> None:
        """Publish one job: it has changed, or its request was delivered again."""
        self._last = job
        self._control.publish(topics.format_topic(self._topic(job)), job.state().to_bytes(), retain=True)

    def on_connected(self) -> None:
        """Ask the broker for the newest document."""
        self._stop_waiting()
        newest = self._last or next(reversed(tuple(self._journal)), None)
        if newest is None:
            return
        topic = self._topic(newest)
        self._awaited = (topic, newest.state().to_bytes())
        self._timer = asyncio.get_running_loop().call_later(PATIENCE_S, self._publish_all)
        self._control.want(topics.format_topic(topic))

    def on_retained(self, topic: topics.Job, payload: bytes) -> None:
        """Stop waiting if this is the awaited document: the broker still has it."""
        if self._awaited == (topic, payload):
            self._stop_waiting()

    def close(self) -> None:
        """Stop waiting for the broker."""
        self._stop_waiting()

    def _forget(self, jobs: Iterable[str]) -> None:
        for job in jobs:
            self._control.publish(topics.format_topic(topics.Job(self._device, job)), b"", retain=True)

    def _publish_all(self) -> None:
        self._stop_waiting()
        for job in self._journal:
            self.publish(job)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._awaited is not None:
            self._control.unsubscribe(topics.format_topic(self._awaited[0]))
            self._awaited = None

    def _topic(self, job: Job) -> topics.Job:
        return topics.Job(self._device, job.request.job)
