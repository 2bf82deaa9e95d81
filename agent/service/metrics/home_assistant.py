"""The device and its models as optional entities of Home Assistant.

One retained document under Home Assistant's discovery prefix (device discovery, Home Assistant 2024.12 and
newer) names topics that the agent publishes anyway: its state, its metrics, and the state of each model.
Nothing else is published, and this module is not imported while announcing is switched off.

Promises: an entity is removed when its model is gone; all are removed when announcing is switched off, even
if the agent was restarted in between, because a file records what was announced. `discovery_document` is
pure, `Announcer` publishes it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agent.deploy.interfaces import Control
from agent.disk_thread import in_disk_thread
from agent.durable import write_durably
from agent.errors import StoreError
from agent.mqtt.reason_codes import Reason
from agent.service.metrics.metrics import sample_key
from agent.wire.topics import Metrics, ModelState, State, discovery_id, discovery_topic, format_topic

_log = logging.getLogger(__name__)

# The record of what was announced has a line for each entity.
_MAX_FILE_BYTES: Final = 256 << 10
# A value expires when this many intervals passed without a new one.
_MISSED_INTERVALS: Final = 5


@dataclass(frozen=True, slots=True)
class Device:
    """A device as Home Assistant sees it: its name in topics, the agent's version, and the board.

    `models` run, `zones` are measured; `throttled` says whether the firmware reports that it slows the device
    down. Metrics are published every `interval_s`.
    """

    name: str
    version: str
    board: str
    models: Sequence[str]
    zones: Sequence[str]
    throttled: bool
    interval_s: float


def discovery_document(device: Device) -> dict[str, Any]:
    """Return the document that is retained at the discovery topic."""
    name = discovery_id(device.name)
    parts: dict[str, dict[str, Any]] = {
        "state": {
            "platform": "binary_sensor",
            "name": "Agent",
            "device_class": "connectivity",
            "state_topic": format_topic(State(device.name)),
            "value_template": "{{ 'ON' if value_json.state == 'online' else 'OFF' }}",
        },
        "free_space": _measured(
            device, "Free space", "edge_state_free_bytes", unit="MB", scale=1e-6, device_class="data_size"
        ),
    }
    for zone in device.zones:
        key = sample_key("edge_temperature_celsius", (("zone", zone),))
        part = _measured(device, f"Temperature {zone}", key, unit="°C", device_class="temperature")
        parts[f"temperature_{discovery_id(zone)}"] = part
    if device.throttled:
        parts["under_voltage"] = {
            **_measured(device, "Power supply", sample_key("edge_throttled", (("cause", "under_voltage"),))),
            "platform": "binary_sensor",
            "device_class": "problem",
            "payload_on": "1",
            "payload_off": "0",
        }
        parts["under_voltage"].pop("state_class")
    for model in device.models:
        parts.update(_model_parts(device, model))
    for part_name, part in parts.items():
        part["unique_id"] = f"{name}_{part_name}"
        if part_name != "state":
            part["availability"] = [
                {
                    "topic": format_topic(State(device.name)),
                    "value_template": "{{ 'online' if value_json.state == 'online' else 'offline' }}",
                }
            ]
    return {
        "device": {
            "identifiers": [name],
            "name": device.name,
            "model": device.board,
            "sw_version": device.version,
        },
        "origin": {"name": "edge-agent", "sw_version": device.version},
        "components": parts,
    }


def _model_parts(device: Device, model: str) -> dict[str, dict[str, Any]]:
    name = discovery_id(model)
    state = format_topic(ModelState(device.name, model))
    parts: dict[str, dict[str, Any]] = {
        f"{name}_ready": {
            "platform": "binary_sensor",
            "name": f"{model} ready",
            "device_class": "running",
            "state_topic": state,
            "value_template": "{{ 'ON' if value_json.ready else 'OFF' }}",
            "json_attributes_topic": state,
        },
        f"{name}_answers": {
            **_measured(
                device,
                f"{model} answers",
                sample_key("edge_inference_requests_total", (("model", model), ("status", "200"))),
            ),
            "state_class": "total_increasing",
        },
    }
    for quantile, word in (("0.5", "latency"), ("0.99", "latency_p99")):
        labels = (("model", model), ("quantile", quantile))
        key = sample_key("edge_inference_latency_seconds", labels)
        title = f"{model} {word.replace('_', ' ')}"
        parts[f"{name}_{word}"] = _measured(
            device, title, key, unit="ms", scale=1000, device_class="duration"
        )
    return parts


def _measured(
    device: Device,
    title: str,
    key: str,
    *,
    unit: str | None = None,
    scale: float = 1,
    device_class: str | None = None,
) -> dict[str, Any]:
    # A value that was not measured is shown as "unknown", because the template returns None.
    quoted = key.replace("\\", "\\\\").replace("'", "\\'")
    shown = f"(v * {scale:g}) | round(2)" if scale != 1 else "v"
    part: dict[str, Any] = {
        "platform": "sensor",
        "name": title,
        "state_topic": format_topic(Metrics(device.name)),
        "value_template": f"{{% set v = value_json.get('{quoted}') %}}"
        f"{{{{ {shown} if v is not none else none }}}}",
        "state_class": "measurement",
        "expire_after": max(30, round(_MISSED_INTERVALS * device.interval_s)),
    }
    if unit is not None:
        part["unit_of_measurement"] = unit
    if device_class is not None:
        part["device_class"] = device_class
    return part


class Announcer:
    """Publishes the discovery document, and withdraws it; `record` is the file that says what was announced.

    `prefix` is Home Assistant's discovery prefix; None if announcing is switched off.
    """

    def __init__(self, control: Control, record: Path, prefix: str | None) -> None:
        self._control = control
        self._path = record
        self._prefix = prefix
        self._announced = _load(self._path)
        self._last = b""
        self._unsaved = False
        self._saving: asyncio.Task[None] | None = None

    def forget(self) -> None:
        """Publish again at the next call of `announce`: the broker may have lost the document."""
        self._last = b""

    def announce(self, device: Device) -> None:
        """Publish the document if it changed; withdraw it if announcing is switched off."""
        if self._prefix is None:
            self._withdraw(None)
            return
        topic = discovery_topic(self._prefix, device.name)
        document = discovery_document(device)
        payload = _encode(document)
        if payload == self._last:
            return
        self._last = payload
        self._withdraw(topic)
        parts = {name: part["platform"] for name, part in document["components"].items()}
        gone = {name: kind for name, kind in self._announced.get(topic, {}).items() if name not in parts}
        if gone:
            # An entity is removed by a document that has only its platform, sent once.
            removed = {name: {"platform": kind} for name, kind in gone.items()}
            document["components"] = {**document["components"], **removed}
            self._control.publish(topic, _encode(document), retain=True)
        if self._announced != {topic: parts}:
            self._note({topic: parts})
        self._control.publish(topic, payload, retain=True)

    def _withdraw(self, kept: str | None) -> None:
        """Withdraw what was announced on other topics than `kept`."""
        for topic in [topic for topic in self._announced if topic != kept]:

            def taken(sent: asyncio.Future[Reason], topic: str = topic) -> None:
                if not sent.cancelled() and not sent.result().failed:
                    self._note({other: parts for other, parts in self._announced.items() if other != topic})

            self._control.publish(topic, b"", retain=True).add_done_callback(taken)

    def _note(self, announced: dict[str, dict[str, str]]) -> None:
        self._announced = announced
        self._unsaved = True
        if self._saving is None or self._saving.done():
            self._saving = asyncio.get_running_loop().create_task(self._save())

    async def _save(self) -> None:
        while self._unsaved:
            self._unsaved = False
            try:
                await in_disk_thread(_write, self._path, self._announced)
            except (StoreError, OSError) as error:
                _log.warning("cannot record what was announced to Home Assistant: %s", error)


def _write(path: Path, announced: dict[str, dict[str, str]]) -> None:
    if announced:
        write_durably(path, json.dumps(announced, sort_keys=True).encode())
    else:
        path.unlink(missing_ok=True)


def _encode(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()


def _load(path: Path) -> dict[str, dict[str, str]]:
    try:
        with path.open("rb") as file:
            document = json.loads(file.read(_MAX_FILE_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        _log.warning("%s cannot be used: %s", path, error)
        return {}
    if not isinstance(document, dict):
        return {}
    return {
        topic: {str(name): str(kind) for name, kind in parts.items()}
        for topic, parts in document.items()
        if isinstance(parts, dict)
    }
