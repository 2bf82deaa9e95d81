"""One open page: what it looks at, and the messages that tell it what changed.

Promises: a page that reads slowly, or sleeps overnight, costs the memory of one message. The next message is
made when the last has been written, and has everything that changed in the meantime.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any, Final

from agent.bundle.names import MODEL_NAME
from agent.wire.topics import is_device_name
from builder.errors import FleetError
from dashboard.actions import Action
from dashboard.fleet_state import FleetState
from dashboard.shown import as_json

RELOAD: Final = "reload the page"

# A window has some tens of rows.
_MAX_VISIBLE: Final = 200
# Without other news, a page is sent a sign of life this often.
HEARTBEAT_S: Final = 2.0
# How often the numbers of the agent that a page shows are sent.
_DETAIL_S: Final = 0.5
MAX_MESSAGE_BYTES: Final = 64 << 10


class PageSession:
    """What one page has been told.

    `send`: sends one message; done when it has been written.
    """

    def __init__(self, fleet: FleetState, send: Callable[[str], Awaitable[None]]) -> None:
        self.visible: set[str] = set()
        self._fleet = fleet
        self._send = send
        self._agent: str | None = None
        self._model: str | None = None
        self._revision = 0
        self._event = 0
        self._whole_sent = False
        self._last_sent_s = 0.0
        self._detail = ""
        self._detail_s = 0.0
        self._live = ""
        self._broker = ""
        self._actions: dict[str, Action] = {}
        self._busy = False

    @property
    def looks_at(self) -> set[str]:
        """Names of the agents whose numbers the page shows."""
        return self.visible if self._agent is None else {*self.visible, self._agent}

    def on_message(self, text: str) -> None:
        """Take a message of the page: what it looks at.

        Raises `FleetError` if it is not such a message.
        """
        try:
            message = json.loads(text)
            visible, agent, model = message["visible"], message["agent"], message["model"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise FleetError(
                "expected the names of the agents in view, got something else", hint=RELOAD
            ) from error
        if not isinstance(visible, list) or len(visible) > _MAX_VISIBLE:
            raise FleetError(f"expected a list of at most {_MAX_VISIBLE} names", hint=RELOAD)
        self.visible = {name for name in visible if isinstance(name, str) and is_device_name(name)}
        self._agent = agent if isinstance(agent, str) and is_device_name(agent) else None
        self._model = model if isinstance(model, str) and MODEL_NAME.fullmatch(model) else None
        self._detail_s, self._detail = 0.0, ""

    def on_action(self, action: Action) -> None:
        """Take a change of an action; only the latest of each is sent."""
        self._actions[action.id] = action

    async def tick(self, broker: dict[str, object], now_s: float) -> None:
        """Send what changed, unless the last message is still being written."""
        if self._busy:
            return
        text = self._message(broker, now_s)
        if text is None:
            return
        self._busy, self._last_sent_s = True, now_s
        try:
            await self._send(text)
        finally:
            self._busy = False

    def _message(self, broker: dict[str, object], now_s: float) -> str | None:
        parts: dict[str, Any] = {}
        rows, gone, is_whole = self._fleet.rows_since(self._revision)
        self._revision = self._fleet.revision
        if not self._whole_sent:
            is_whole = self._whole_sent = True
        elif not rows and not gone:
            is_whole = False
        if rows or gone or is_whole:
            parts["fleet"] = {"whole": is_whole, "gone": gone, "full": self._fleet.is_full}
        events = self._fleet.events_since(self._event)
        if events:
            parts["events"] = events
            self._event = events[-1]["number"]
        if self._actions:
            parts["actions"] = [asdict(action) for action in self._actions.values()]
            self._actions.clear()
        state = as_json(broker)
        if state != self._broker:
            self._broker, parts["broker"] = state, broker
        self._add_numbers(parts, now_s)
        if not parts and now_s - self._last_sent_s < HEARTBEAT_S:
            return None
        parts["now"] = time.time()
        text = as_json(parts)
        # The rows are JSON already.
        return f'{text[:-1]},"rows":[{",".join(rows)}]}}' if rows else text

    def _add_numbers(self, parts: dict[str, Any], now_s: float) -> None:
        devices = ((name, self._fleet.get(name)) for name in sorted(self.visible))
        live = {name: device.live() for name, device in devices if device is not None}
        text = as_json(live)
        if text != self._live:
            self._live, parts["live"] = text, live
        if self._agent is None or now_s - self._detail_s < _DETAIL_S:
            return
        device = self._fleet.get(self._agent)
        detail = {"name": self._agent, "absent": True} if device is None else device.detail(self._model)
        text = as_json(detail)
        self._detail_s = now_s
        if text != self._detail:
            self._detail, parts["detail"] = text, detail
