"""The agent's state topic: birth, clean stop and will, all retained and with the number of the session.

Promises: if a slow broker publishes the will of an earlier session late, a running agent does not stay
"offline", because it reads its own topic and corrects it.
Leaves to others: the number (`session_seq`).
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from agent.errors import BundleError
from agent.mqtt.connection import Connection
from agent.mqtt.message import Will
from agent.rate_limited_log import RateLimitedLog
from agent.wire.presence import AgentState
from agent.wire.presence import Presence as StateDocument
from agent.wire.topics import State, format_topic

_log = logging.getLogger(__name__)

# Two agents with the same name would otherwise contradict each other as fast as the broker delivers.
_REASSERT_INTERVAL_S: Final = 1.0
# Two agents with one name have different client identifiers, so the broker does not disconnect either.
_TWIN_INTERVAL_S: Final = 60.0
_INSTANCE_BYTES: Final = 4
# Our own documents come back to us, some after the next one was published.
_REMEMBERED: Final = 4


@dataclass(frozen=True, slots=True)
class Session:
    """One start of the agent: its device, its number, its version, and a random text.

    The numbers of two agents with one name may be equal.
    """

    device: str
    seq: int
    version: str
    instance: str = ""

    @classmethod
    def start(cls, device: str, seq: int, version: str) -> Session:
        """Make the session of this start."""
        return cls(device, seq, version, secrets.token_hex(_INSTANCE_BYTES))

    def document(
        self,
        state: AgentState,
        *,
        inference: bool | None = None,
        groups: bool | None = None,
        storage: str = "",
        name_conflict: bool = False,
    ) -> bytes:
        """Return the document for the state topic; a connection that is None is not in it.

        `storage` says why the disk cannot be written, `name_conflict` whether another agent has this name.
        """
        return StateDocument(
            state,
            self.seq,
            self.version,
            inference=_word(inference),
            groups=_word(groups),
            storage=storage,
            name_conflict=name_conflict,
            instance=self.instance,
        ).to_bytes()

    def will(self) -> Will:
        """Return the message that the broker publishes when the connection is lost."""
        return Will(format_topic(State(self.device)), self.document(AgentState.OFFLINE))


def _says_online(payload: bytes) -> bool:
    try:
        return StateDocument.from_bytes(payload).state == AgentState.ONLINE
    except BundleError:
        return False


def _word(up: bool | None) -> str:
    if up is None:
        return ""
    return AgentState.ONLINE if up else AgentState.OFFLINE


class Presence:
    """Keeps the state topic correct.

    The control connection speaks for the others as long as it lives, and its will for all of them. They have
    no wills: the wills of one device on one topic would overwrite each other in an undefined order.

    `call_later` makes a correction that comes too soon after so many seconds; None drops it. `storage` says
    why the disk cannot be written, from the next announcement on.
    """

    def __init__(
        self,
        session: Session,
        connection: Connection,
        clock: Callable[[], float] = time.monotonic,
        call_later: Callable[[float, Callable[[], None]], object] | None = None,
    ) -> None:
        self._session = session
        self._connection = connection
        self._clock = clock
        self._topic = format_topic(State(session.device))
        self._state = AgentState.ONLINE
        self._inference: bool | None = None
        self._groups: bool | None = None
        self._said: deque[bytes] = deque(maxlen=_REMEMBERED)
        # Why the disk cannot be written; empty while it can.
        self.storage = ""
        self._asserted_s = float("-inf")
        self._call_later = call_later
        self._heard = b""
        self._correction_is_due = False
        self._has_twin = False
        self._correction_log = RateLimitedLog(_log, _TWIN_INTERVAL_S, clock)
        self._twin_log = RateLimitedLog(_log, _TWIN_INTERVAL_S, clock)

    def announce(self) -> None:
        """Publish the current state."""
        self._asserted_s = self._clock()
        document = self._session.document(
            self._state,
            inference=self._inference,
            groups=self._groups,
            storage=self.storage,
            name_conflict=self._has_twin,
        )
        self._said.append(document)
        self._connection.publish(self._topic, document, retain=True)

    def connections_changed(self, *, inference: bool, groups: bool | None) -> None:
        """Take note whether the other connections are up; `groups` is None without groups."""
        if (inference, groups) == (self._inference, self._groups):
            return
        self._inference, self._groups = inference, groups
        if self._connection.connected:  # else it is announced at the next connect
            self.announce()

    def on_state(self, payload: bytes, *, retained: bool = True) -> None:
        """Read the state of this device, and correct it if it is wrong.

        What is not `retained` was published just now.
        """
        self._heard = payload
        if self._state != AgentState.ONLINE or payload in self._said:
            return
        if not retained:
            # A twin says that it is online, again and again; when it ends, it or its will says so.
            self._has_twin = _says_online(payload)
        if not retained and self._has_twin and self._twin_log.due():
            _log.warning(
                "another agent is online as %s: give one of them another name (edge-agent enroll --device)",
                self._session.device,
            )
        wait_s = self._asserted_s + _REASSERT_INTERVAL_S - self._clock()
        if wait_s <= 0:
            self._correct()
        elif self._call_later is not None and not self._correction_is_due:
            self._correction_is_due = True
            self._call_later(wait_s, self._correct)

    def _correct(self) -> None:
        """Publish the state again, if the retained message still differs."""
        self._correction_is_due = False
        if self._state != AgentState.ONLINE or self._heard in self._said or not self._connection.connected:
            return
        if self._correction_log.due():
            _log.info("the state topic says %.100s, correcting it", ascii(self._heard[:100]))
        self.announce()

    def stop(self) -> None:
        """Publish that the agent stops as intended."""
        self._has_twin = False
        self._state = AgentState.STOPPED
        self._inference = self._groups = None
        self.announce()
