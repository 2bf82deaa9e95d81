"""The JSON of an answer apart from its outputs; without MQTT, which the worker does not load.

A refusal has the same form, whether the agent refuses a request or the worker does.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from agent.errors import RequestError

OK: Final = 200
# With four bytes for each character it stays far below the 65535 bytes of an MQTT string.
MAX_STATUS_MESSAGE_CHARACTERS: Final = 500


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

    def refusal(self, error: RequestError) -> bytes:
        """Return the JSON of an answer that says why a request was not, or could not be, computed."""
        message = one_line(str(error))
        body = self.to_document(error.status, message) if self.has_envelope else {}
        body["error"] = message
        if error.hint is not None:
            body["hint"] = one_line(error.hint)
        return json.dumps(body).encode()


def one_line(text: str) -> str:
    """Return a message for a user property and a log: printable, in one line, at most 500 characters."""
    # Cut first: a message that quotes a request may be long.
    cut = text[:MAX_STATUS_MESSAGE_CHARACTERS]
    return cut if cut.isprintable() else "".join(each if each.isprintable() else "?" for each in cut)
