"""What each MQTT 5 reason code means for us: try again, try again much later, fall back, or give up.

One table serves every packet that carries a code (MQTT 5.0, 2.4); paho maps the return codes of MQTT 3.1.1 to
it. Outcomes that no broker reports, such as a full queue of our own, have codes above 0xFF.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final


class Action(Enum):
    """What to do about a reason code."""

    DONE = "done"  # it worked
    RETRY = "retry"  # a temporary condition: retry with the usual back-off
    LATER = "later"  # someone must change something first: retry with the longest back-off, and log a warning
    FALL_BACK = "fall back"  # the broker does not speak this version of MQTT
    GIVE_UP = "give up"  # the same packet will never be accepted


@dataclass(frozen=True, slots=True)
class Reason:
    """One reason code.

    Attributes
    ----------
    code
        The byte on the wire; above 0xFF, an outcome of our own.
    name
        The specification's name for it.
    connecting
        What to do when it ends or refuses a connection (CONNACK, DISCONNECT).
    sending
        What to do when it refuses a message or a subscription (PUBACK, SUBACK).
    """

    code: int
    name: str
    connecting: Action
    sending: Action

    @property
    def failed(self) -> bool:
        """Whether the code reports a failure (MQTT 5.0, 2.4: 0x80 and above)."""
        return self.code >= FAILURE

    def __str__(self) -> str:
        return f"{self.name} (0x{self.code:02x})"


FAILURE: Final = 0x80

_DONE, _RETRY, _LATER, _FALL_BACK, _GIVE_UP = Action

_TABLE: Final = (
    #      code  name                                   connecting   sending
    Reason(0x00, "Success", _DONE, _DONE),
    Reason(0x01, "Granted QoS 1", _DONE, _DONE),
    Reason(0x02, "Granted QoS 2", _DONE, _DONE),
    Reason(0x04, "Disconnect with will message", _RETRY, _DONE),
    Reason(0x10, "No matching subscribers", _DONE, _DONE),
    Reason(0x11, "No subscription existed", _DONE, _DONE),
    Reason(0x18, "Continue authentication", _LATER, _GIVE_UP),
    Reason(0x19, "Re-authenticate", _LATER, _GIVE_UP),
    Reason(0x80, "Unspecified error", _RETRY, _RETRY),
    Reason(0x81, "Malformed packet", _RETRY, _GIVE_UP),
    Reason(0x82, "Protocol error", _RETRY, _GIVE_UP),
    Reason(0x83, "Implementation specific error", _RETRY, _RETRY),
    Reason(0x84, "Unsupported protocol version", _FALL_BACK, _GIVE_UP),
    Reason(0x85, "Client identifier not valid", _LATER, _GIVE_UP),
    Reason(0x86, "Bad user name or password", _LATER, _GIVE_UP),
    Reason(0x87, "Not authorized", _LATER, _GIVE_UP),
    Reason(0x88, "Server unavailable", _RETRY, _RETRY),
    Reason(0x89, "Server busy", _RETRY, _RETRY),
    Reason(0x8A, "Banned", _LATER, _GIVE_UP),
    Reason(0x8B, "Server shutting down", _RETRY, _RETRY),
    Reason(0x8C, "Bad authentication method", _LATER, _GIVE_UP),
    Reason(0x8D, "Keep alive timeout", _RETRY, _RETRY),
    # Another client connected under our name: reconnecting at once would start an endless mutual eviction.
    Reason(0x8E, "Session taken over", _LATER, _RETRY),
    Reason(0x8F, "Topic filter invalid", _LATER, _GIVE_UP),
    Reason(0x90, "Topic name invalid", _RETRY, _GIVE_UP),
    Reason(0x91, "Packet identifier in use", _RETRY, _RETRY),
    Reason(0x92, "Packet identifier not found", _RETRY, _DONE),
    Reason(0x93, "Receive maximum exceeded", _RETRY, _RETRY),
    Reason(0x94, "Topic alias invalid", _RETRY, _GIVE_UP),
    Reason(0x95, "Packet too large", _RETRY, _GIVE_UP),
    Reason(0x96, "Message rate too high", _RETRY, _RETRY),
    Reason(0x97, "Quota exceeded", _RETRY, _RETRY),
    Reason(0x98, "Administrative action", _RETRY, _RETRY),
    Reason(0x99, "Payload format invalid", _RETRY, _GIVE_UP),
    Reason(0x9A, "Retain not supported", _LATER, _GIVE_UP),
    Reason(0x9B, "QoS not supported", _LATER, _GIVE_UP),
    Reason(0x9C, "Use another server", _LATER, _RETRY),
    Reason(0x9D, "Server moved", _LATER, _RETRY),
    Reason(0x9E, "Shared subscriptions not supported", _LATER, _GIVE_UP),
    Reason(0x9F, "Connection rate exceeded", _RETRY, _RETRY),
    Reason(0xA0, "Maximum connect time", _RETRY, _RETRY),
    Reason(0xA1, "Subscription identifiers not supported", _LATER, _GIVE_UP),
    Reason(0xA2, "Wildcard subscriptions not supported", _LATER, _GIVE_UP),
)

NOT_CONNECTED: Final = Reason(0x100, "Not connected", _RETRY, _RETRY)
QUEUE_FULL: Final = Reason(0x101, "Too much is waiting for the broker", _RETRY, _RETRY)
EXPIRED: Final = Reason(0x102, "Expired before it was sent", _GIVE_UP, _GIVE_UP)
CLOSED: Final = Reason(0x103, "The connection was closed", _GIVE_UP, _GIVE_UP)
LOST: Final = Reason(0x104, "Connection lost", _RETRY, _RETRY)
SILENCE: Final = Reason(0x105, "Connection ended without an answer", _FALL_BACK, _RETRY)
RENEWED: Final = Reason(0x106, "Reconnecting with renewed credentials", _RETRY, _RETRY)
TOO_LARGE: Final = Reason(0x107, "Larger than the broker accepts", _GIVE_UP, _GIVE_UP)
# What the connection says of a message that is too large, and what a broker says.
TOO_LARGE_CODES: Final = frozenset({TOO_LARGE.code, 0x95})
POISON: Final = Reason(0x108, "Connection lost each time it was sent", _GIVE_UP, _GIVE_UP)
UNSENDABLE: Final = Reason(0x109, "MQTT cannot represent it", _GIVE_UP, _GIVE_UP)

# With one of these, a broker ends a connection because of a packet (MQTT 5.0, 3.14.2.1).
BLAMES_A_PACKET: Final = frozenset({0x81, 0x82, 0x87, 0x90, 0x94, 0x95, 0x99, 0x9A, 0x9B})

_OURS: Final = (
    NOT_CONNECTED,
    QUEUE_FULL,
    EXPIRED,
    CLOSED,
    LOST,
    SILENCE,
    RENEWED,
    TOO_LARGE,
    POISON,
    UNSENDABLE,
)
_BY_CODE: Final = {reason.code: reason for reason in (*_TABLE, *_OURS)}


def reason(code: int) -> Reason:
    """Return the row of a code; an unknown code is judged only by its failure bit."""
    known = _BY_CODE.get(code)
    if known is not None:
        return known
    name = f"Unknown reason code {code}"
    if code >= FAILURE:
        return Reason(code, name, Action.RETRY, Action.RETRY)
    return Reason(code, name, Action.DONE, Action.DONE)
