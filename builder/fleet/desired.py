"""What an agent should run, as this side sees it: merged, published, and perhaps lost to somebody else.

Promises: bytes in, bytes and decisions out. What else is desired stays desired: a document that is written
here has everything that the one in force has, and says which one that was, so that the agent refuses it when
another tool was faster. The documents are described in docs/deployment.md.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Final

CONFLICT: Final = "ERR_CONFLICT"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why the agent did not take a document."""

    code: str
    message: str


class DesiredState:
    """One model's wish among the others.

    Parameters
    ----------
    model
        The model's name.
    entry
        What is wished for it: digest, size, version, job, sources.
    """

    def __init__(self, model: str, entry: dict[str, Any]) -> None:
        self._model = model
        self._entry = entry
        self._at_broker: dict[str, Any] = {}
        self._reported: dict[str, Any] = {}
        self._ours: dict[str, Any] = {}

    @property
    def reported(self) -> bool:
        """Whether the agent has said what it runs."""
        return bool(self._reported)

    @property
    def published(self) -> bytes | None:
        """The document that was written here last, while it is also the last at the broker."""
        if not self._ours or self._at_broker not in ({}, self._ours):
            return None
        return json.dumps(self._ours).encode()

    def on_desired(self, payload: bytes) -> None:
        """Take the document that is at the broker."""
        self._at_broker = parse_object(payload)

    def on_reported(self, payload: bytes) -> None:
        """Take what the agent reports."""
        self._reported = parse_object(payload)

    def write(self, *, online: bool) -> bytes:
        """Write a document that has everything the one in force has, and our wish.

        Parameters
        ----------
        online
            Whether the agent is there. One that is away sees the last of several documents alone, so it
            cannot compare what each was written from.
        """
        taken = self._taken()
        # What the agent took has the say; a later one at the broker is one that it has not seen yet.
        unseen = _version(self._at_broker) > _version(taken) and self._refused_version() != _version(
            self._at_broker
        )
        base = self._at_broker if unseen else taken
        self._ours = {
            "version": max(_version(taken), _version(self._at_broker)) + 1,
            "models": {**_members(base), self._model: self._entry},
        }
        if base and online:
            self._ours["base"] = _digest(base)
        self._reported.pop("error", None)  # of an earlier document
        return json.dumps(self._ours).encode()

    def refusal(self) -> Refusal | None:
        """Return why the agent did not take what was written here, if it said so."""
        error = self._error()
        if not self._ours or self._refused_version() != self._ours["version"]:
            return None
        return Refusal(str(error.get("code") or ""), str(error.get("message") or ""))

    def lost(self) -> bool:
        """Return whether a document without our wish is in force in the place of ours."""
        if not self._ours:
            return False
        refusal, taken = self.refusal(), self._taken()
        if refusal is not None:
            return refusal.code == CONFLICT
        return _version(taken) >= self._ours["version"] and _members(taken).get(self._model) != self._entry

    def _taken(self) -> dict[str, Any]:
        taken = self._reported.get("desired")
        return taken if isinstance(taken, dict) else {}

    def _error(self) -> dict[str, Any]:
        error = self._reported.get("error")
        return error if isinstance(error, dict) else {}

    def _refused_version(self) -> object:
        return self._error().get("version")


def parse_object(payload: bytes) -> dict[str, Any]:
    """Return a JSON object, empty if it is none: what is at a broker may be anything."""
    try:
        document = json.loads(payload)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _version(document: dict[str, Any]) -> int:
    version = document.get("version")
    return version if type(version) is int else 0


def _members(document: dict[str, Any]) -> dict[str, Any]:
    models = document.get("models")
    return models if isinstance(models, dict) else {}


def _digest(document: dict[str, Any]) -> str:
    """Return what identifies a document: the digest of its version and models, as canonical JSON."""
    members = {"version": _version(document), "models": _members(document)}
    raw = json.dumps(members, sort_keys=True, separators=(",", ":")).encode()
    return f"sha256:{hashlib.sha256(raw).hexdigest()}"
