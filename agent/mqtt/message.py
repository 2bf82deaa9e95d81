"""What arrives and what is left behind: one received message, and the will.

The decoder takes a PUBLISH packet without its fixed header and copies the payload once; the library's own
makes four copies of it and spends 0.4 ms on a 600 KB tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from agent.errors import MalformedPacketError
from agent.mqtt.properties import EMPTY, Properties, decode

_DUP: Final = 0x08
_QOS: Final = 0x06
_RETAIN: Final = 0x01


@dataclass(frozen=True, slots=True)
class Receipt:
    """What an acknowledgement needs of a message, without its payload.

    Attributes
    ----------
    packet_id, epoch
        An identifier is good for the connection it came over and no other.
    """

    packet_id: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Message:
    """One received message.

    Attributes
    ----------
    topic, payload, qos, retain, dup, properties
        As they came.
    receipt
        For its acknowledgement; None at QoS 0.
    """

    topic: str
    payload: bytes = field(repr=False)
    qos: int = 0
    retain: bool = False
    dup: bool = False
    properties: Properties = EMPTY
    receipt: Receipt | None = None


@dataclass(frozen=True, slots=True)
class Will:
    """What the broker says for a client that vanished."""

    topic: str
    payload: bytes
    qos: int = 1
    retain: bool = True


def decode_publish(flags: int, packet: bytes | bytearray, *, version: int, epoch: int) -> Message:
    """Decode a PUBLISH packet (MQTT 3.1.1 and 5.0, section 3.3).

    Parameters
    ----------
    flags
        The first byte of the fixed header.
    packet
        Everything behind the fixed header.
    version
        5 or 4 (for 3.1.1).
    epoch
        The number of the connection it came over.

    Raises
    ------
    MalformedPacketError
    """
    view = memoryview(packet)
    qos = (flags & _QOS) >> 1
    at = 2 + int.from_bytes(view[:2], "big")
    if qos > 1:
        raise MalformedPacketError(f"expected QoS 0 or 1, as subscribed, got {qos}")
    if at + 2 * qos > len(view):
        raise MalformedPacketError("the topic runs over the end of the packet")
    try:
        topic = str(view[2:at], "utf-8")
    except UnicodeDecodeError as error:
        raise MalformedPacketError(f"the topic is no UTF-8: {error}") from error
    receipt = None
    if qos:
        receipt = Receipt(int.from_bytes(view[at : at + 2], "big"), epoch)
        at += 2
    properties = EMPTY
    if version == 5:
        properties, at = decode(view, at)
    if not topic:
        raise MalformedPacketError("an empty topic: no topic alias was ever granted")
    return Message(
        topic=topic,
        payload=bytes(view[at:]),
        qos=qos,
        retain=bool(flags & _RETAIN),
        dup=bool(flags & _DUP),
        properties=properties,
        receipt=receipt,
    )
