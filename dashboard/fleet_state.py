"""The fleet as one broker's retained messages tell it, and what changed since a page looked last.

Promises: no I/O. Metrics are only noted when they arrive; `settle` reads the latest of each agent, so many of
them in a short time cost little, and they get no more than a share of the processor. At most `MAX_AGENTS`
agents are kept, and of each at most `MAX_DOCUMENT_BYTES` of documents. Every change has a number, so each
page gets what changed since its own last one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

from agent.errors import BundleError
from agent.wire import topics
from agent.wire.desired import MAX_MODELS
from agent.wire.info import Info
from agent.wire.job import JobState, Status
from agent.wire.metrics import parse_metrics
from agent.wire.model_state import ModelState
from agent.wire.presence import AgentState, Presence
from agent.wire.reported import Reported
from builder.fleet.hints import deployment_hint
from dashboard.device import (
    BAD,
    FAILED_JOBS,
    MAX_JOBS,
    Device,
    Event,
    shown_info,
    shown_state,
)
from dashboard.sample import read_sample
from dashboard.series import Series
from dashboard.shown import as_json, shown

# What a page lists without trouble; a broker with more is asked by group.
MAX_AGENTS: Final = 5000
# Removed agents that a page may not have heard of yet; a page that slept longer gets the whole list.
_MAX_GONE: Final = 2000
_MAX_EVENTS: Final = 300
# Of metrics that wait to be read; the oldest are dropped. A thousand agents with three models have 10 MB.
MAX_WAITING_BYTES: Final = 64 << 20
# No document: it counts as one that cannot be read.
_UNREADABLE: Final = b"?"
# How much of each `settle` may go into reading metrics: 16 ms twenty times a second are a third of one core,
# and nothing else has to wait for longer.
METRICS_BUDGET_S: Final = 0.016
# After a reconnect an agent repeats its state within 28 s (`broker.reconnect_spread_s`).
CONFIRM_WITHIN_S: Final = 35.0


class FleetState:
    """All agents of one broker.

    `clock`, `wall`, `spent`: return seconds: since any moment, since the epoch, and of processor time.
    `is_full`: whether there are more agents than `MAX_AGENTS`.
    `samples_read`: how many metrics documents were read; the latest of each agent, as far as there is time.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        spent: Callable[[], float] = time.thread_time,
    ) -> None:
        self.revision = 0
        self.is_full = False
        self.samples_read = 0
        self._clock, self._wall, self._spent = clock, wall, spent
        self._devices: dict[str, Device] = {}
        self._rows: dict[str, tuple[int, str]] = {}
        self._gone: deque[tuple[int, str]] = deque(maxlen=_MAX_GONE)
        self._changed: set[str] = set()
        self._metrics: dict[str, bytes] = {}
        self._waiting_bytes = 0
        self._events: deque[Event] = deque(maxlen=_MAX_EVENTS)
        self._event_number = 0
        self._unconfirmed: set[str] = set()
        self._confirm_by_s = 0.0

    def __len__(self) -> int:
        return len(self._devices)

    def get(self, name: str) -> Device | None:
        """Return an agent, or None."""
        return self._devices.get(name)

    def on_message(self, topic: topics.Topic, payload: bytes, *, is_retained: bool = False) -> None:
        """Take a message."""
        match topic:
            case topics.Metrics(name):
                self._on_metrics(name, payload)
            case topics.State(name) if not payload:  # removed from the broker
                self._remove(name)
            case topics.State() | topics.Info() | topics.Reported() | topics.ModelState() | topics.Job():
                if device := self._device(topic.device):
                    self._on_document(device, topic, payload, is_retained=is_retained)
                    self._changed.add(device.name)

    def _on_document(self, device: Device, topic: topics.Topic, payload: bytes, *, is_retained: bool) -> None:
        if not device.has_room(topic, len(payload)):
            payload = _UNREADABLE
        is_kept = True
        match topic:
            case topics.State():
                self._on_state(device, payload, is_retained=is_retained)
            case topics.Info():
                info = _read(Info.from_bytes, payload)
                device.info = None if info is None else shown_info(info)
            case topics.ModelState(_, model):
                self._on_model(device, model, payload)
                is_kept = model in device.models
            case topics.Reported():
                self._on_reported(device, payload, is_retained=is_retained)
            case topics.Job(_, job):
                self._on_job(device, job, payload, is_retained=is_retained)
                is_kept = job in device.jobs
        if is_kept:
            device.sizes[topic] = len(payload)
        else:
            device.sizes.pop(topic, None)

    def on_up(self) -> None:
        """Record a new connection: the agents' states must be confirmed by new messages."""
        self._unconfirmed = {name for name, device in self._devices.items() if device.presence is not None}
        self._confirm_by_s = self._clock() + CONFIRM_WITHIN_S

    def settle(self, first: set[str] | None = None) -> None:
        """Read what has arrived.

        `first`: agents whose metrics are read even if there is no time for all: those that a page shows.
        """
        self._read_metrics(first or set())
        self._expire()
        for name in self._changed:
            device = self._devices.get(name)
            if device is None:
                continue
            row = as_json(device.row())
            known = self._rows.get(name)
            if known is None or known[1] != row:
                self.revision += 1
                self._rows[name] = (self.revision, row)
        self._changed.clear()

    def rows_since(self, revision: int) -> tuple[list[str], list[str], bool]:
        """Return rows that changed after a revision, names that went, and whether it is the whole list."""
        is_whole = revision == 0 or (
            len(self._gone) == _MAX_GONE and self._gone[0][0] > revision  # some removals are forgotten
        )
        after = 0 if is_whole else revision
        rows = [row for number, row in self._rows.values() if number > after]
        gone = [] if is_whole else [name for number, name in self._gone if number > after]
        return rows, [name for name in gone if name not in self._rows], is_whole

    def events_since(self, number: int) -> list[dict[str, Any]]:
        """Return the events after one, the newest last."""
        return [asdict(event) for event in self._events if event.number > number]

    def _device(self, name: str) -> Device | None:
        device = self._devices.get(name)
        if device is None:
            if len(self._devices) >= MAX_AGENTS:
                self.is_full = True
                return None
            device = self._devices[name] = Device(name)
        return device

    def _on_metrics(self, name: str, payload: bytes) -> None:
        if name not in self._devices:
            return
        self._waiting_bytes += len(payload) - len(self._metrics.get(name, b""))
        self._metrics[name] = payload  # it keeps its place
        while self._waiting_bytes > MAX_WAITING_BYTES:
            oldest = next(iter(self._metrics))
            self._waiting_bytes -= len(self._metrics.pop(oldest))

    def _on_state(self, device: Device, payload: bytes, *, is_retained: bool) -> None:
        presence = _read(Presence.from_bytes, payload)
        before, device.presence, device.is_confirmed = device.presence, presence, True
        self._unconfirmed.discard(device.name)
        if presence is None or is_retained or (before is not None and before.state == presence.state):
            return
        kind = "good" if presence.state == AgentState.ONLINE else "note"
        kind = "bad" if presence.state == AgentState.OFFLINE else kind
        self._happened(device, kind, f"is {shown(presence.state, 20)}")

    def _on_model(self, device: Device, model: str, payload: bytes) -> None:
        state = _read(ModelState.from_bytes, payload)
        if state is None:
            device.models.pop(model, None)
            device.series.pop(model, None)
        elif model in device.models or len(device.models) < MAX_MODELS:
            device.models[model] = shown_state(state)

    def _on_reported(self, device: Device, payload: bytes, *, is_retained: bool) -> None:
        report = _read(Reported.from_bytes, payload)
        before = device.rejection
        device.reported = {} if report is None else {each.name: each for each in report.models[:MAX_MODELS]}
        device.rejection = None if report is None else report.error
        if device.rejection is not None and device.rejection != before:
            code = device.rejection.code
            text = f"refused a request: {shown(device.rejection.message)} ({shown(code, 40)})"
            self._happened(device, "bad", text, deployment_hint(code))
        if is_retained:
            return
        for model in device.reported.values():
            if model.message and model.state in BAD:
                text = f"{shown(model.name, 64)} is {model.state.replace('_', ' ')}: {shown(model.message)}"
                if not any(event.text == text for event in device.events):
                    self._happened(device, "bad", text)

    def _on_job(self, device: Device, name: str, payload: bytes, *, is_retained: bool) -> None:
        job = _read(JobState.from_bytes, payload)
        if job is None:
            device.jobs.pop(name, None)
            return
        before = device.jobs.pop(name, None)
        device.jobs[name] = job
        while len(device.jobs) > MAX_JOBS:
            oldest = min(device.jobs, key=lambda each: device.jobs[each].time_s)
            del device.jobs[oldest]
            device.sizes.pop(topics.Job(device.name, oldest), None)
        if not job.status.final or (before is not None and before.status is job.status):
            return
        what = f"{shown(job.model, 64)}: {job.status.lower().replace('_', ' ')}"
        if job.status in FAILED_JOBS:
            why = f"{what}: {shown(job.message)} ({shown(job.code, 40) or 'no code'})"
            self._happened(device, "bad", why, deployment_hint(job.code), job, is_old=is_retained)
        else:
            kind = "good" if job.status is Status.SUCCEEDED else "note"
            self._happened(device, kind, what, "", job, is_old=is_retained)

    def _happened(
        self,
        device: Device,
        kind: str,
        text: str,
        hint: str = "",
        job: JobState | None = None,
        *,
        is_old: bool = False,
    ) -> None:
        self._event_number += 1
        now_s = self._wall()
        # A device's clock may be in 1970 or in the future: then the time of arrival is as good.
        time_s = job.time_s if job is not None and is_old and 0 < job.time_s <= now_s else now_s
        event = Event(self._event_number, time_s, device.name, kind, text, hint)
        device.events.append(event)
        # An agent that comes and goes all the time must not hide what happens to the others.
        for same in [each for each in self._events if (each.agent, each.text) == (device.name, text)]:
            self._events.remove(same)
        self._events.append(event)

    def _remove(self, name: str) -> None:
        if self._devices.pop(name, None) is not None:
            self.revision += 1
            self._rows.pop(name, None)
            self._waiting_bytes -= len(self._metrics.pop(name, b""))
            self._gone.append((self.revision, name))

    def _read_metrics(self, first: set[str]) -> None:
        end_s = self._spent() + METRICS_BUDGET_S
        for name in self._in_order(first):
            payload = self._metrics.pop(name)
            self._waiting_bytes -= len(payload)
            device = self._devices.get(name)
            if device is None:
                continue
            try:
                device.sample = read_sample(parse_metrics(payload))
            except BundleError:
                continue  # another version's, or a mistake: the last numbers stay
            self.samples_read += 1
            device.sampled_s = now_s = self._wall()
            for model in device.series.keys() - device.models.keys() - device.reported.keys():
                del device.series[model]
            for model, numbers in device.sample.models.items():
                if model in device.models or model in device.reported:
                    device.series.setdefault(model, Series()).add(now_s, numbers)
            self._changed.add(name)
            if self._spent() > end_s:
                return

    def _in_order(self, first: set[str]) -> list[str]:
        """Return whose metrics wait: those that a page shows, then the others from the longest wait on."""
        return sorted(self._metrics, key=lambda name: name not in first)

    def _expire(self) -> None:
        """Mark agents as unknown if the broker did not send their state again after a reconnect."""
        if self._unconfirmed and self._clock() > self._confirm_by_s:
            for name in self._unconfirmed & self._devices.keys():
                self._devices[name].is_confirmed = False
                self._changed.add(name)
            self._unconfirmed.clear()


def _read(parse: Callable[[bytes], Any], payload: bytes) -> Any:  # noqa: ANN401 - whatever the parser returns
    """Return a document, or None if it cannot be read: it was removed, or is of another version."""
    try:
        return parse(payload)
    except (BundleError, ValueError):
        return None
