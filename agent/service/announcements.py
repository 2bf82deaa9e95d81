"""What the broker retains about the device: the info document, each model's state, Home Assistant's entities.

Promises: each is published when it changes, and again to a broker that may have forgotten it. A model that
does not run here leaves nothing retained.
Leaves to others: the agent's own state (`presence`), desired and reported models (`agent.deploy`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agent.config.settings import HomeAssistantSettings
from agent.deploy.interfaces import Control
from agent.deploy.store.store import Store
from agent.service.metrics.host import Host
from agent.service.models.models import Models
from agent.wire.info import Info
from agent.wire.model_state import ModelPhase, ModelState
from agent.wire.topics import Info as InfoTopic
from agent.wire.topics import ModelState as ModelStateTopic
from agent.wire.topics import format_topic

if TYPE_CHECKING:
    from agent.service.metrics.home_assistant import Announcer

# Records what was announced to Home Assistant, so that it can be withdrawn when that is switched off.
HOME_ASSISTANT_FILE: Final = "home_assistant.json"


class Announcements:
    """What is retained about one device.

    `about` is its info document, without the sandbox. `home_assistant` is None if there is nothing to
    announce or to withdraw.
    """

    def __init__(
        self,
        about: Info,
        store: Store,
        models: Models,
        host: Host,
        control: Control,
        home_assistant: Announcer | None,
        metrics_interval_s: float,
    ) -> None:
        self._about = about
        self._store = store
        self._models = models
        self._host = host
        self._control = control
        self._home_assistant = home_assistant
        self._metrics_interval_s = metrics_interval_s
        self._info = b""
        self._states: dict[str, bytes] = {}

    def on_connected(self) -> None:
        """Publish info and entities again, and each model's state at the next `model_changed`."""
        self._info = b""
        self._publish_info()
        self._states.clear()
        if self._home_assistant is not None:
            self._home_assistant.forget()
            self._announce_entities(self._home_assistant)

    def model_changed(self, name: str) -> bool:
        """Publish what has changed with a model; return whether its state has."""
        self._publish_info()
        state = self._state(name)
        payload = b"" if state is None else state.to_bytes()
        if self._states.get(name) == payload:
            return False
        self._states[name] = payload
        self._control.publish(format_topic(ModelStateTopic(self._about.device, name)), payload, retain=True)
        if self._home_assistant is not None and self._control.connected:
            self._announce_entities(self._home_assistant)
        return True

    def _state(self, name: str) -> ModelState | None:
        """Return what is retained about a model, or None if it does not run here."""
        status = self._models.status(name)
        return self._loading_state(name) if status is None else status.document()

    def _loading_state(self, name: str) -> ModelState | None:
        """Return the state of a model that is not loaded yet, or None if it is not expected.

        Its tensors are known only when its bundle is verified.
        """
        active = self._store.active().get(name)
        awaited = self._models.awaited.get(name)
        if active is None or awaited is None:
            return None
        return ModelState(
            name=name,
            version=active.version,
            inputs=(),
            outputs=(),
            ready=False,
            state=ModelPhase.FAILED if awaited.message else ModelPhase.STARTING,
            message=awaited.message or "it is not loaded yet",
            security_counter=self._store.committed_counter(name),
            digest=active.digest,
            key_id="",
            image_input=None,
            postprocess=(),
        )

    def _publish_info(self) -> None:
        """Publish the info document if it has changed: workers report their sandbox when they are ready."""
        info = replace(self._about, sandbox=self._models.sandbox()).to_bytes()
        if self._info != info:
            self._info = info
            self._control.publish(format_topic(InfoTopic(self._about.device)), info, retain=True)

    def _announce_entities(self, home_assistant: Announcer) -> None:
        from agent.service.metrics.home_assistant import Device

        gauges = self._host.gauges()
        hardware = self._about.hardware
        home_assistant.announce(
            Device(
                name=self._about.device,
                version=self._about.agent,
                board=hardware.board or hardware.cpu or hardware.arch,
                models=self._models.names(),
                zones=[
                    labels[0][1] for (name, labels) in sorted(gauges) if name == "edge_temperature_celsius"
                ],
                throttled=any(name == "edge_throttled" for name, _ in gauges),
                interval_s=self._metrics_interval_s,
            )
        )


def home_assistant_announcer(
    settings: HomeAssistantSettings, control: Control, state_dir: Path | None
) -> Announcer | None:
    """Return what announces entities to Home Assistant; None if there is nothing to announce or to withdraw.

    What was announced is recorded in `state_dir`, which is None if the disk does not respond.
    """
    if state_dir is None:
        return None
    record = state_dir / HOME_ASSISTANT_FILE
    if not settings.enabled and not record.exists():
        return None
    from agent.service.metrics.home_assistant import Announcer

    return Announcer(control, record, settings.prefix if settings.enabled else None)
