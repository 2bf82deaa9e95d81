"""The state document: whether an agent is online, retained at `edge/v1/<device>/state`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
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
        always = ("state", "session_seq", "version")
        return document.encode(
            {name: value for name, value in asdict(self).items() if value or name in always}
        )

    @classmethod
    def from_bytes(cls, raw: bytes) -> Presence:
        """Read the document tolerantly.

        Raises
        ------
        EndlessDataError, FormatError
            If it is not a JSON object, or too long.
        """
        found = document.read(cls, document.parse_object(raw, "the state document"))
        return found if found.state else replace(found, state=UNKNOWN)
