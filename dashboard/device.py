"""One agent as the dashboard knows it: its documents, and what a page shows of them.

Promises: what it keeps of an untrusted agent is bounded, and so is what it returns. An agent of another
version is shown with the fields that it has.
Leaves to others: the connection, and which page looks at what.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from agent.bundle.quantisation import Quantisation, Quantised
from agent.bundle.tensor_spec import TensorSpec
from agent.wire import topics
from agent.wire.desired import MAX_MODELS
from agent.wire.info import Capabilities, Info
from agent.wire.job import JobState, Status
from agent.wire.model_state import ModelPhase, ModelState
from agent.wire.presence import UNKNOWN, AgentState, Presence
from agent.wire.reported import Rejection, ReportedModel, ServiceState
from builder.fleet.hints import deployment_hint
from dashboard.sample import Sample
from dashboard.series import Series
from dashboard.shown import number, shown

# Of the documents of one agent that are kept: one with 64 models and 64 jobs has 200 kB.
MAX_DOCUMENT_BYTES: Final = 512 << 10
# How many topics whose documents had no room are remembered.
MAX_CUT: Final = 256
# An agent remembers its last 64 jobs.
MAX_JOBS: Final = 64
# What happened to one agent lately.
_MAX_EVENTS: Final = 40
# A Raspberry Pi slows down at 80 degrees, or at 85, by model and configuration.
HOT_C: Final = 80.0
_LISTED_MODELS: Final = 6
_SHOWN_TENSORS: Final = 16
_SHOWN_JOBS: Final = 20
BAD: Final = (ServiceState.DEGRADED, ServiceState.ROLLED_BACK, ServiceState.FAILED)
FAILED_JOBS: Final = (Status.FAILED, Status.TIMED_OUT, Status.REJECTED)


# What stands for documents that have not arrived.
_NO_INFO: Final = Info("", "")
_NO_STATE: Final = ModelState.from_bytes(b"{}")
_NO_REPORT: Final = ReportedModel(
    name="", digest="", version="", state="", origin="", job="", previous=None, security_counter=None
)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to an agent.

    `number`: grows with each event of this dashboard.
    `time_s`: seconds since the epoch, by this machine's clock; for what happened before the dashboard
        started, by the device's.
    `kind`: `good`, `bad` or `note`.
    `text`, `hint`: what happened, and what to do about it or an empty text.
    """

    number: int
    time_s: float
    agent: str
    kind: str
    text: str
    hint: str = ""


@dataclass(slots=True)
class Device:
    """One agent; `None` for documents that have not arrived or cannot be read."""

    name: str
    presence: Presence | None = None
    info: Info | None = None
    models: dict[str, ModelState] = field(default_factory=dict)
    reported: dict[str, ReportedModel] = field(default_factory=dict)
    rejection: Rejection | None = None
    jobs: dict[str, JobState] = field(default_factory=dict)
    sample: Sample | None = None
    sampled_s: float | None = None
    series: dict[str, Series] = field(default_factory=dict)
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=_MAX_EVENTS))
    # Whether the broker has repeated the state since the last connect; what it said before may be old.
    is_confirmed: bool = True
    # The bytes of the documents that are kept, and the topics whose documents had no room.
    sizes: dict[topics.Topic, int] = field(default_factory=dict)
    cut: set[topics.Topic] = field(default_factory=set)

    def has_room(self, topic: topics.Topic, nbytes: int) -> bool:
        """Return whether a document can replace the one before; `cut` remembers the topic if not."""
        others = sum(size for other, size in self.sizes.items() if other != topic)
        if others + nbytes <= MAX_DOCUMENT_BYTES:
            self.cut.discard(topic)
            return True
        if len(self.cut) < MAX_CUT:
            self.cut.add(topic)
        return False

    @property
    def state(self) -> str:
        """`online`, `stopped`, `offline`, or `unknown`."""
        if self.presence is None or not self.is_confirmed:
            return UNKNOWN
        return shown(self.presence.state, 20)

    @property
    def is_online(self) -> bool:
        """Whether it is online."""
        return self.state == AgentState.ONLINE

    def names(self) -> list[str]:
        """Return the names of its models."""
        return sorted({*self.models, *self.reported})[:MAX_MODELS]

    def row(self) -> dict[str, Any]:
        """Return its row in the list; what changes every second is in `live`."""
        names = self.names()
        return {
            "name": self.name,
            "state": self.state,
            "version": self._version(),
            "machine": self._machine(),
            "models": [self._summary(name) for name in names[:_LISTED_MODELS]],
            "more": max(0, len(names) - _LISTED_MODELS),
            "alerts": list(self.alerts())[:8],
            "busy": self._busy(),
        }

    def live(self) -> list[float | None]:
        """Return the hottest temperature in degrees, and the answers a second of all models."""
        if self.sample is None or not self.is_online:
            return [None, None]
        rates = [model.throughput for model in self.sample.models.values() if model.throughput is not None]
        temperature = number(self.sample.temperature_c)
        return [
            None if temperature is None else round(temperature, 1),
            round(sum(rates), 2) if rates else None,
        ]

    def alerts(self) -> Iterator[str]:
        """Yield what needs attention, each in a few words."""
        presence = self.presence
        if presence is not None and presence.name_conflict:
            yield "two agents have this name"
        if self.state not in (AgentState.ONLINE, AgentState.STOPPED):
            yield self.state
        if presence is not None and self.is_online:
            if AgentState.OFFLINE in (presence.inference, presence.groups):
                yield "requests cannot arrive"
            if presence.storage:
                yield f"storage: {shown(presence.storage, 60)}"
        for name in self.names():
            state, report = self._documents(name)
            if report.state in BAD:
                yield f"{shown(name, 64)}: {report.state.replace('_', ' ')}"
            elif not state.ready and state.state == ModelPhase.FAILED:
                yield f"{shown(name, 64)}: failed"
        if self.cut:
            yield "it publishes more than this page keeps"
        if self.rejection is not None:
            yield f"refused a request: {shown(self.rejection.code, 40)}"
        if self.sample is not None and self.is_online:
            if self.sample.throttled:
                causes = ", ".join(self.sample.throttled[:2])
                yield f"slowed down: {causes.replace('_', ' ')}"
            if (self.sample.temperature_c or 0.0) >= HOT_C:
                yield f"hot: {HOT_C:.0f} °C or more"

    def detail(self, model: str | None) -> dict[str, Any]:
        """Return all that its own page shows, with one model's numbers over time."""
        info, sample, rejection = self.info or _NO_INFO, self.sample or Sample(), self.rejection
        return {
            **self.row(),
            "alerts": list(self.alerts())[:40],
            "live": self.live(),
            "sampled": self.sampled_s,
            "uptime": number(sample.uptime_s),
            "zones": sample.zones,
            "throttled": sample.throttled,
            "throttledBefore": sample.throttled_before,
            "load": number(sample.load),
            "memoryFree": number(sample.memory_available_bytes),
            "diskFree": number(sample.state_free_bytes),
            "cores": number(info.hardware.cores),
            "memory": number(info.hardware.memory_bytes),
            "sandboxMissing": info.sandbox and [shown(part, 40) for part in info.sandbox.missing],
            "rejection": None
            if rejection is None
            else {
                "code": shown(rejection.code, 40),
                "message": shown(rejection.message),
                "hint": deployment_hint(rejection.code),
            },
            "allModels": [self._model(name) for name in self.names()],
            "jobs": [_job(job) for job in self._latest_jobs()],
            "events": [asdict(event) for event in reversed(self.events)],
            "chart": None if model is None else self._chart(model),
        }

    def _version(self) -> str:
        version = "" if self.presence is None else self.presence.version
        return shown(version or (self.info or _NO_INFO).agent, 60)

    def _machine(self) -> str:
        hardware = (self.info or _NO_INFO).hardware
        words = (shown(hardware.board or hardware.cpu or "", 120), shown(hardware.arch, 30))
        return ", ".join(word for word in words if word)

    def _busy(self) -> str:
        """Return the step of a deployment that is under way, or an empty text."""
        for job in reversed(self.jobs.values()):
            if job.status is Status.IN_PROGRESS:
                return (job.step or job.status).replace("_", " ").lower()
        return ""

    def _documents(self, name: str) -> tuple[ModelState, ReportedModel]:
        return self.models.get(name, _NO_STATE), self.reported.get(name, _NO_REPORT)

    def _summary(self, name: str) -> list[str]:
        state, report = self._documents(name)
        condition = state.state
        if report.state in BAD or name not in self.models:
            condition = report.state.replace("_", " ")
        elif state.ready:
            condition = "ready"
        return [
            shown(name, 64),
            shown(state.version or report.version, 40),
            shown(condition, 20) or "not ready",
        ]

    def _model(self, name: str) -> dict[str, Any]:
        state, report = self._documents(name)
        job = self.jobs.get(report.job)
        shown_name, version, condition = self._summary(name)
        return {
            "name": shown_name,
            "version": version,
            "condition": condition,
            "ready": state.ready,
            "reason": shown(state.message or report.message),
            "digest": shown(state.digest or report.digest, 80),
            "key": shown(state.key_id, 80),
            "previous": shown(report.previous, 80),
            "since": None if job is None or job.status is not Status.SUCCEEDED else _time(job.time_s),
            "image": None if state.image_input is None else shown(state.image_input, 100),
            "audio": None if state.audio_input is None else shown(state.audio_input, 100),
            "audioRate": number(state.audio_rate),
            "inputs": _specs(state.inputs, state.quantisation.inputs),
            "steps": [shown(step, 40) for step in state.postprocess],
        }

    def _chart(self, model: str) -> dict[str, Any]:
        sample = None if self.sample is None else self.sample.models.get(model)
        series = self.series.get(model)
        return {
            "model": shown(model, 64),
            "points": [] if series is None else list(series.points()),
            "buckets": []
            if sample is None
            else [[None if math.isinf(bound) else bound, count] for bound, count in sample.buckets],
            "quantiles": [] if sample is None else list(sample.quantiles),
            "statuses": [] if sample is None else list(sample.statuses),
        }

    def _latest_jobs(self) -> list[JobState]:
        return sorted(self.jobs.values(), key=lambda job: job.time_s, reverse=True)[:_SHOWN_JOBS]


def shown_state(state: ModelState) -> ModelState:
    """Return what is shown of a model's state: a stranger's may have thousands of tensors."""
    return replace(
        state,
        inputs=state.inputs[:_SHOWN_TENSORS],
        outputs=(),
        smallest_inputs=(),
        smallest_outputs=(),
        columns=(),
        postprocess=state.postprocess[:_SHOWN_TENSORS],
        quantisation=Quantisation(state.quantisation.inputs[:_SHOWN_TENSORS], ()),
    )


def shown_info(info: Info) -> Info:
    """Return what is shown of an agent's info, without its long lists."""
    hardware = replace(info.hardware, features=())
    sandbox = None if info.sandbox is None else replace(info.sandbox, missing=info.sandbox.missing[:8])
    return replace(info, hardware=hardware, compatible=(), capabilities=Capabilities(), sandbox=sandbox)


def _job(job: JobState) -> dict[str, Any]:
    return {
        "model": shown(job.model, 64),
        "status": job.status,
        "step": job.step,
        "code": shown(job.code, 40),
        "message": shown(job.message),
        "hint": deployment_hint(job.code),
        "time": _time(job.time_s),
    }


def _specs(specs: Sequence[TensorSpec], quantised: Sequence[Quantised]) -> list[str]:
    steps = {each.name: f" in steps of {each.scale:.4g}" for each in quantised}
    return [
        shown(f"{s.name} {s.datatype} [{','.join(map(str, s.shape[:8]))}]{steps.get(s.name, '')}", 160)
        for s in specs
    ]


def _time(time_s: float) -> float | None:
    return number(time_s) or None
