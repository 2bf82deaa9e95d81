"""What the dashboard takes from one metrics document of an agent.

Promises: unknown samples, other types and absurd numbers are left out, so an older or a newer agent is shown
with what it does say. docs/mqtt.md lists the samples.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from agent.wire.desired import MAX_MODELS
from dashboard.shown import number, shown

# More zones and buckets than any device has.
_MAX_ZONES: Final = 16
_MAX_BUCKETS: Final = 64
_KEY: Final = re.compile(r"(edge_[a-z0-9_]{1,80})(?:\{(.{0,400})\})?", re.DOTALL)
_LABEL: Final = re.compile(r'(\w{1,40})="((?:[^"\\]|\\.){0,200})"')
# Longer keys are not looked at, and so not remembered.
_MAX_KEY: Final = 500
# A fleet's keys are alike: reading one takes 3 us, looking it up a tenth of that.
_REMEMBERED_KEYS: Final = 4096
_BUCKET: Final = "edge_inference_duration_seconds_bucket"
_SHOWN: Final = frozenset(
    {
        "edge_agent_uptime_seconds",
        "edge_inference_latency_seconds",
        "edge_inference_requests_total",
        "edge_inference_throughput",
        "edge_load1",
        "edge_memory_available_bytes",
        "edge_state_free_bytes",
        "edge_temperature_celsius",
        "edge_throttled",
        "edge_throttled_since_boot",
        _BUCKET,
    }
)


@dataclass(frozen=True, slots=True)
class ModelSample:
    """One model's numbers.

    `throughput`: answers a second over the last minute, or None.
    `quantiles`: (quantile, seconds), ascending.
    `buckets`: the histogram of durations: (upper bound in seconds, infinity for the last; answers in this
        bucket).
    `statuses`: (status, answered requests), by status.
    """

    throughput: float | None
    quantiles: tuple[tuple[float, float], ...]
    buckets: tuple[tuple[float, float], ...]
    statuses: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One agent's numbers; None or nothing for what its document does not have.

    `temperature_c`: the hottest zone, in degrees Celsius.
    `zones`: (zone, degrees Celsius).
    `throttled`, `throttled_before`: causes for which the firmware slows the device down now, and since its
        boot.
    `uptime_s`: seconds since the agent's start.
    """

    temperature_c: float | None = None
    zones: tuple[tuple[str, float], ...] = ()
    throttled: tuple[str, ...] = ()
    throttled_before: tuple[str, ...] = ()
    uptime_s: float | None = None
    load: float | None = None
    memory_available_bytes: float | None = None
    state_free_bytes: float | None = None
    models: Mapping[str, ModelSample] = field(default_factory=dict)


@dataclass(slots=True)
class _Model:
    throughput: float | None = None
    quantiles: dict[float, float] = field(default_factory=dict)
    cumulative: dict[float, float] = field(default_factory=dict)
    statuses: dict[str, float] = field(default_factory=dict)

    def sample(self) -> ModelSample:
        below, buckets = 0.0, []
        for bound, count in sorted(self.cumulative.items())[:_MAX_BUCKETS]:
            buckets.append((bound, max(0.0, count - below)))
            below = max(below, count)
        return ModelSample(
            self.throughput,
            tuple(sorted(self.quantiles.items())[:8]),
            tuple(buckets),
            tuple(sorted(self.statuses.items())[:16]),
        )


def read_sample(values: Mapping[str, float]) -> Sample:
    """Read the values of one document: sample name with labels -> number."""
    plain: dict[str, float] = {}
    zones: dict[str, float] = {}
    throttled: list[str] = []
    before: list[str] = []
    models: dict[str, _Model] = {}
    for key, given in values.items():
        name, labels = _parts(key) if len(key) <= _MAX_KEY else ("", {})
        if not name or (value := number(given)) is None:
            continue
        if name == "edge_temperature_celsius" and len(zones) < _MAX_ZONES:
            zones[shown(labels.get("zone"), 60)] = value
        elif name == "edge_throttled" and value:
            throttled.append(shown(labels.get("cause"), 60))
        elif name == "edge_throttled_since_boot" and value:
            before.append(shown(labels.get("cause"), 60))
        elif "model" in labels:
            model = labels["model"]
            if model not in models and len(models) < MAX_MODELS:
                models[model] = _Model()
            if model in models:
                _add(models[model], name, labels, value)
        elif not labels:
            plain[name] = value
    return Sample(
        temperature_c=max(zones.values(), default=None),
        zones=tuple(zones.items()),
        throttled=tuple(throttled[:8]),
        throttled_before=tuple(before[:8]),
        uptime_s=plain.get("edge_agent_uptime_seconds"),
        load=plain.get("edge_load1"),
        memory_available_bytes=plain.get("edge_memory_available_bytes"),
        state_free_bytes=plain.get("edge_state_free_bytes"),
        models={name: model.sample() for name, model in models.items()},
    )


@lru_cache(maxsize=_REMEMBERED_KEYS)
def _parts(key: str) -> tuple[str, Mapping[str, str]]:
    """Return the name and the labels of a sample; an empty name for one that is not shown."""
    match = _KEY.fullmatch(key)
    if match is None or match[1] not in _SHOWN:
        return "", {}
    return match[1], MappingProxyType(dict(_LABEL.findall(match[2] or "")))


def _add(model: _Model, name: str, labels: Mapping[str, str], value: float) -> None:
    match name:
        case "edge_inference_throughput":
            model.throughput = value
        case "edge_inference_latency_seconds":
            quantile = _bound(labels.get("quantile"))
            if quantile is not None and math.isfinite(quantile):
                model.quantiles[quantile] = value
        case "edge_inference_requests_total":
            model.statuses[shown(labels.get("status"), 8)] = value
        case _ if name == _BUCKET:
            bound = _bound(labels.get("le"))
            if bound is not None:
                model.cumulative[bound] = value


def _bound(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return None if math.isnan(value) else value
