"""Counters and histograms of the agent, under Prometheus names, as one flat JSON object.

A sample's key is its name in Prometheus' text format, labels and all
(`edge_inference_requests_total{model="digits",status="200"}`), so that the numbers are the same wherever
they are read. Label values come from a bounded set: models that run here, statuses, reasons. Nobody can
make the agent grow by asking for models that do not exist.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from agent.worker.channel import Answer

# Seconds; from a tiny model on a fast core to what a compute limit allows.
BUCKETS_S: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0),
)
QUANTILES: Final = (0.5, 0.9, 0.99)
# Quantiles are of this many latest answers.
RECENT: Final = 1024
UNKNOWN_MODEL: Final = ""

_Labels = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class Histogram:
    """Observations in seconds, counted in cumulative buckets when they are written."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    total_s: float = 0.0

    def observe(self, seconds: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.total_s += seconds

    def write(self, name: str, labels: _Labels, out: dict[str, float]) -> None:
        """Add the samples."""
        running = 0
        for bound, count in zip((*BUCKETS_S, float("inf")), self.counts, strict=True):
            running += count
            out[_sample(f"{name}_bucket", (*labels, ("le", _number(bound))))] = running
        out[_sample(f"{name}_sum", labels)] = round(self.total_s, 6)
        out[_sample(f"{name}_count", labels)] = running


@dataclass(slots=True)
class _ModelDurations:
    queue: Histogram = field(default_factory=Histogram)
    decode: Histogram = field(default_factory=Histogram)
    compute: Histogram = field(default_factory=Histogram)
    encode: Histogram = field(default_factory=Histogram)
    total: Histogram = field(default_factory=Histogram)
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))


class Metrics:
    """What the agent counts."""

    def __init__(self) -> None:
        self._counters: dict[tuple[str, _Labels], float] = {}
        self._durations: dict[str, _ModelDurations] = {}

    def count(self, name: str, amount: float = 1, /, **labels: str) -> None:
        """Add to a counter; its name ends in `_total`."""
        key = (name, tuple(labels.items()))
        self._counters[key] = self._counters.get(key, 0) + amount

    def request(self, model: str, status: int) -> None:
        """Count an answered request; `model` is one that runs here or `UNKNOWN_MODEL`."""
        self.count("edge_inference_requests_total", model=model, status=str(status))

    def durations(self, model: str, answer: Answer, total_s: float) -> None:
        """Record what one computed answer took, by the worker's clock and by ours from end to end."""
        entry = self._durations.setdefault(model, _ModelDurations())
        entry.queue.observe(answer.queue_us / 1e6)
        entry.decode.observe(answer.decode_us / 1e6)
        entry.compute.observe(answer.compute_us / 1e6)
        entry.encode.observe(answer.encode_us / 1e6)
        entry.total.observe(total_s)
        entry.recent_s.append(total_s)

    def forget(self, model: str) -> None:
        """Drop the durations of a model that does not run any more."""
        self._durations.pop(model, None)

    def write(self, gauges: Mapping[tuple[str, _Labels], float]) -> dict[str, float]:
        """Return all samples, with those that are measured now."""
        out: dict[str, float] = {}
        for (name, labels), value in sorted({**self._counters, **gauges}.items()):
            out[_sample(name, labels)] = value
        for model, entry in sorted(self._durations.items()):
            labels = (("model", model),)
            entry.queue.write("edge_inference_queue_seconds", labels, out)
            entry.decode.write("edge_inference_decode_seconds", labels, out)
            entry.compute.write("edge_inference_compute_seconds", labels, out)
            entry.encode.write("edge_inference_encode_seconds", labels, out)
            entry.total.write("edge_inference_duration_seconds", labels, out)
            recent = sorted(entry.recent_s)
            for quantile in QUANTILES:
                at = min(len(recent) - 1, int(quantile * len(recent)))
                key = _sample("edge_inference_latency_seconds", (*labels, ("quantile", _number(quantile))))
                out[key] = round(recent[at], 6)
        return out


def _sample(name: str, labels: _Labels) -> str:
    if not labels:
        return name
    return name + "{" + ",".join(f'{key}="{_escape(value)}"' for key, value in labels) + "}"


def _escape(value: str) -> str:
    # Prometheus' text format: backslash, quote and line feed.
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return "+Inf" if value == float("inf") else f"{value:g}"
