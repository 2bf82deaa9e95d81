"""One request to a model, on a connection of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgebundle import Answer, Broker, Client, Request


def ask(
    agent: str, model: str, what: Path | Request | Mapping[str, Any], broker: Broker, *, deadline_s: float
) -> Answer:
    with Client(broker) as client:
        called = client.model(agent, model)
        if isinstance(what, Path):
            return called(image=what, deadline_s=deadline_s)
        return called(what, deadline_s=deadline_s)
