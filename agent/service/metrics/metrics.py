"""The agent's counters, histograms and samples, under Prometheus names.

One list of samples is the source of both forms: a flat JSON object over MQTT, whose keys are those of
Prometheus' text format (`edge_inference_requests_total{model="digits",status="200"}`), and the Prometheus
page. Label values come from a bounded set (models that run here, statuses, reasons), so that requests for
models that do not exist take no memory.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from agent.worker.frames import Answer

# Seconds: from a tiny model on a fast core to the default compute limit.
BUCKETS_S: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0),
)
QUANTILES: Final = (0.5, 0.9, 0.99)
# Quantiles are computed over this many latest answers.
RECENT: Final = 1024
# Throughput is averaged over this many seconds.
THROUGHPUT_S: Final = 60
UNKNOWN_MODEL: Final = ""

Labels = tuple[tuple[str, str], ...]
# (name, labels) -> value.
Gauges = dict[tuple[str, Labels], float]


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a metric in `metric_table.METRICS`, in the unit that the name says.

    `name` is the metric's, or has a suffix for a part of a histogram.
    """

    metric: str
    name: str
    labels: Labels
    value: float

    @property
    def key(self) -> str:
        """Name and labels in Prometheus' text format."""
        return sample_key(self.name, self.labels)


@dataclass(slots=True)
class Histogram:
    """Observations in seconds, by bucket; the buckets become cumulative in `samples`."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    total_s: float = 0.0

    def observe(self, seconds: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.total_s += seconds

    def samples(self, name: str, labels: Labels) -> Iterator[Sample]:
        """Yield buckets, sum and count."""
        running = 0
        for bound, count in zip((*BUCKETS_S, float("inf")), self.counts, strict=True):
            running += count
            yield Sample(name, f"{name}_bucket", (*labels, ("le", _number(bound))), running)
        yield Sample(name, f"{name}_sum", labels, round(self.total_s, 6))
        yield Sample(name, f"{name}_count", labels, running)


class Throughput:
    """Events a second over the last minute, from a ring with one count for each second."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts = [0] * THROUGHPUT_S
        self._second = int(clock())
        self._since_s = clock()

    def count(self) -> None:
        """Count one event."""
        self._turn()
        self._counts[self._second % THROUGHPUT_S] += 1

    def per_second(self) -> float:
        """Return the mean over the last minute, or since the start if that is shorter."""
        self._turn()
        seen_s = min(float(THROUGHPUT_S), max(1.0, self._clock() - self._since_s))
        return round(sum(self._counts) / seen_s, 3)

    def _turn(self) -> None:
        now = int(self._clock())
        for second in range(max(self._second + 1, now - THROUGHPUT_S + 1), now + 1):
            self._counts[second % THROUGHPUT_S] = 0
        self._second = now


@dataclass(slots=True)
class _ModelDurations:
    queue: Histogram = field(default_factory=Histogram)
    decode: Histogram = field(default_factory=Histogram)
    compute: Histogram = field(default_factory=Histogram)
    encode: Histogram = field(default_factory=Histogram)
    total: Histogram = field(default_factory=Histogram)
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    throughput: Throughput = field(default_factory=Throughput)

    def samples(self, labels: Labels) -> Iterator[Sample]:
        yield from self.queue.samples("edge_inference_queue_seconds", labels)
        yield from self.decode.samples("edge_inference_decode_seconds", labels)
        yield from self.compute.samples("edge_inference_compute_seconds", labels)
        yield from self.encode.samples("edge_inference_encode_seconds", labels)
        yield from self.total.samples("edge_inference_duration_seconds", labels)
        recent = sorted(self.recent_s)
        latency = "edge_inference_latency_seconds"
        for quantile in QUANTILES:
            at = min(len(recent) - 1, int(quantile * len(recent)))
            value = round(recent[at], 6)
            yield Sample(latency, latency, (*labels, ("quantile", _number(quantile))), value)
        throughput = "edge_inference_throughput"
        yield Sample(throughput, throughput, labels, self.throughput.per_second())


class Metrics:
    """The agent's counters and durations."""

    def __init__(self) -> None:
        self._counters: dict[tuple[str, Labels], float] = {}
        self._durations: dict[str, _ModelDurations] = {}

    def count(self, name: str, amount: float = 1, /, **labels: str) -> None:
        """Add to a counter; its name ends in `_total`."""
        key = (name, tuple(labels.items()))
        self._counters[key] = self._counters.get(key, 0) + amount

    def request(self, model: str, status: int) -> None:
        """Count an answered request; `model` must run here or be `UNKNOWN_MODEL`."""
        self.count("edge_inference_requests_total", model=model, status=str(status))

    def durations(self, model: str, answer: Answer, total_s: float) -> None:
        """Record the durations of one computed answer: the worker's, and `total_s` from arrival to answer."""
        entry = self._durations.get(model)
        if entry is None:
            entry = self._durations[model] = _ModelDurations()
        entry.queue.observe(answer.queue_us / 1e6)
        entry.decode.observe(answer.decode_us / 1e6)
        entry.compute.observe(answer.compute_us / 1e6)
        entry.encode.observe(answer.encode_us / 1e6)
        entry.total.observe(total_s)
        entry.recent_s.append(total_s)
        entry.throughput.count()

    def forget(self, model: str) -> None:
        """Drop the durations of a model that no longer runs."""
        self._durations.pop(model, None)

    def samples(self, gauges: Mapping[tuple[str, Labels], float]) -> list[Sample]:
        """Return all samples, including these gauges."""
        out = [
            Sample(name, name, labels, value)
            for (name, labels), value in sorted({**self._counters, **gauges}.items())
        ]
        for model, entry in sorted(self._durations.items()):
            out += entry.samples((("model", model),))
        return out


def to_document(samples: Iterable[Sample]) -> dict[str, float]:
    """Return samples as the JSON object that is published."""
    return {sample.key: sample.value for sample in samples}


def sample_key(name: str, labels: Labels) -> str:
    """Return name and labels in Prometheus' text format."""
    if not labels:
        return name
    return name + "{" + ",".join(f'{key}="{_escape(value)}"' for key, value in labels) + "}"


def _escape(value: str) -> str:
    # Prometheus' text format: backslash, quote and line feed.
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return "+Inf" if value == float("inf") else f"{value:g}"
