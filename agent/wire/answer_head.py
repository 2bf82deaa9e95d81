"""The head of an answer's JSON, which the worker writes; without MQTT, which the worker does not load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

OK: Final = 200


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The members of an answer's JSON before `outputs`.

    Attributes
    ----------
    model_name, model_version
        Of the model that answered; its version is None in a refusal.
    id
        The requester's name for the request, or None.
    has_envelope
        The requester has no MQTT 5 properties: `status` and `message` are members too.
    """

    model_name: str
    model_version: str | None = None
    id: str | None = None
    has_envelope: bool = False

    def to_document(self, status: int = OK, message: str = "") -> dict[str, object]:
        """Return the members as a JSON object."""
        head: dict[str, object] = {"model_name": self.model_name}
        if self.model_version is not None:
            head["model_version"] = self.model_version
        if self.id is not None:
            head["id"] = self.id
        if self.has_envelope:
            head |= {"status": status, "message": message}
        return head
