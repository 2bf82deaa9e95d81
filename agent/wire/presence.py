"""The state document: whether an agent is online, retained at `edge/v1/<device>/state`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from agent.wire import document


class AgentState(StrEnum):
    """What the state document says; the broker publishes `offline` as the agent's will.

    `online` means that the control connection is up. Requests have other connections, whose states are
    `online` or `offline` too.
    """

    ONLINE = "online"
    STOPPED = "stopped"
    OFFLINE = "offline"


# The state that a reader finds in a document without one.
UNKNOWN: Final = "unknown"


@dataclass(frozen=True, slots=True)
class Presence:
    """One state document.

    Attributes
    ----------
    state
        A member of `AgentState`; a later version of the agent may use other texts.
    session_seq
        The number of the agent's start, which grows each time; 0 if a document has none.
    version
        The agent's version.
    inference
        Whether requests to the device can arrive, and answers leave: `online` or `offline`; empty if that is
        not known, as in a will.
    groups
        The same for the requests of its groups; empty if the device has none.
    storage
        Why the state directory cannot be written, such as `full` or `read-only`; nothing is stored or
        installed then. Empty while it can be written.
    name_conflict
        Whether another agent is online under the same name.
    instance
        A random text for each start: two agents of one name may be equal in all else.
    """

    state: str
    session_seq: int
    version: str
    inference: str = ""
    groups: str = ""
    storage: str = ""
    name_conflict: bool = False
    instance: str = ""

    def to_bytes(self) -> bytes:
        """Write the document."""
        fields: dict[str, object] = {
            "state": self.state,
            "session_seq": self.session_seq,
            "version": self.version,
        }
        if self.inference:
            fields["inference"] = self.inference
        if self.groups:
            fields["groups"] = self.groups
        if self.storage:
            fields["storage"] = self.storage
        if self.name_conflict:
            fields["name_conflict"] = True
        if self.instance:
            fields["instance"] = self.instance
        return document.encode(fields)

    @classmethod
    def from_bytes(cls, raw: bytes) -> Presence:
        """Read the document tolerantly.

        Raises
        ------
        EndlessDataError, FormatError
            If it is not a JSON object, or too long.
        """
        fields = document.parse_object(raw, "the state document")
        return cls(
            state=document.text(fields.get("state")) or UNKNOWN,
            session_seq=document.integer(fields.get("session_seq")) or 0,
            version=document.text(fields.get("version")),
            inference=document.text(fields.get("inference")),
            groups=document.text(fields.get("groups")),
            storage=document.text(fields.get("storage")),
            name_conflict=fields.get("name_conflict") is True,
            instance=document.text(fields.get("instance")),
        )
