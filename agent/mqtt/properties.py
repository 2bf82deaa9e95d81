"""The properties of a PUBLISH packet (MQTT 5.0, 3.3.2.3), decoded and encoded without copies of the payload.

A core without sockets: bytes in, a frozen value out. Properties that the agent does not use are handled by
the rules of the specification: subscription identifiers are skipped, and a topic alias is a protocol error,
because we never grant one.

Promises: decoding takes bounded time and memory, however many properties there are. What the broker itself
must get right (lengths, identifiers) is an error. What the publisher may have got wrong is not, because
brokers pass it on: text that is not UTF-8 (EMQX checks only in its strict mode), or more than our limits. The
message is then decoded as far as possible, and comes with the reason why it should be refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from agent.errors import MalformedPacketError

# The largest value of a two-byte length.
MAX_STRING_BYTES: Final = 65535
# A request has one user property for each raw tensor and a handful of others.
MAX_USER_PROPERTIES: Final = 256
# 256 descriptions of tensors with long names. Each string may have 65535 bytes, and there are two in each.
MAX_USER_PROPERTY_BYTES: Final = 64 * 1024
# Where the search for the Response Topic ends: walking over a property takes 0.5 us.
MAX_PROPERTIES: Final = 1024
MAX_EXPIRY_S: Final = 2**32 - 1

_TOO_MANY: Final = (
    f"expected at most {MAX_USER_PROPERTIES} user properties of {MAX_USER_PROPERTY_BYTES} bytes together, "
    "got more"
)

_PAYLOAD_FORMAT: Final = 0x01
_MESSAGE_EXPIRY: Final = 0x02
_CORRELATION_DATA: Final = 0x09
_SUBSCRIPTION_ID: Final = 0x0B
_USER_PROPERTY: Final = 0x26
# Those that are text: their fields, and their names.
_TEXTS: Final = {0x03: ("content_type", "a Content Type"), 0x08: ("response_topic", "a Response Topic")}


@dataclass(frozen=True, slots=True)
class Properties:
    """The properties of a message; all are empty with MQTT 3.1.1.

    Attributes
    ----------
    content_type
        The payload's media type.
    response_topic, correlation_data
        The topic for an answer, and the bytes that the answer must repeat.
    expiry_s
        Seconds until the message expires.
    utf8
        Whether the payload is declared to be UTF-8 text.
    user
        User properties: pairs of name and value, in order; names may repeat.
    """

    content_type: str | None = None
    response_topic: str | None = None
    correlation_data: bytes | None = None
    expiry_s: int | None = None
    utf8: bool = False
    user: tuple[tuple[str, str], ...] = ()

    def first(self, name: str) -> str | None:
        """Return the value of the first user property of that name, or None."""
        return next((value for key, value in self.user if key == name), None)

    def all(self, name: str) -> tuple[str, ...]:
        """Return the values of all user properties of that name, in order."""
        return tuple(value for key, value in self.user if key == name)


EMPTY: Final = Properties()


def encode(properties: Properties) -> bytes:
    """Encode properties, preceded by their length.

    A string that MQTT cannot represent, or an expiry that is out of range, raises ValueError.
    """
    out = bytearray()
    if properties.utf8:
        out += bytes((_PAYLOAD_FORMAT, 1))
    if properties.expiry_s is not None:
        if not 0 <= properties.expiry_s <= MAX_EXPIRY_S:
            raise ValueError(
                f"message expiry: expected 0 to {MAX_EXPIRY_S} seconds, got {properties.expiry_s}"
            )
        out.append(_MESSAGE_EXPIRY)
        out += properties.expiry_s.to_bytes(4, "big")
    for identifier, (field, _) in _TEXTS.items():
        if (text := getattr(properties, field)) is not None:
            out.append(identifier)
            _put_text(out, text)
    if properties.correlation_data is not None:
        out.append(_CORRELATION_DATA)
        _put(out, properties.correlation_data)
    for name, value in properties.user:
        out.append(_USER_PROPERTY)
        _put_text(out, name)
        _put_text(out, value)
    return encode_length(len(out)) + bytes(out)


def decode(packet: memoryview, start: int) -> tuple[Properties, str | None, int]:
    """Decode the properties that begin at `start`.

    Return them, why the message should be refused (they are incomplete then), or None, and the offset after
    them. Bytes that break the specification's rules in a way that only the broker can cause raise
    MalformedPacketError.
    """
    length, at = _decode_varint(packet, start)
    end = at + length
    if end > len(packet):
        raise MalformedPacketError(
            f"expected properties of {length} bytes, got a packet with {len(packet) - at} left"
        )
    seen: set[int] = set()
    found: dict[str, Any] = {}
    user: list[tuple[str, str]] = []
    room = MAX_USER_PROPERTY_BYTES
    walked = 0
    refusal: str | None = None
    while at < end:
        walked += 1
        if walked > MAX_PROPERTIES:
            refusal = f"expected at most {MAX_PROPERTIES} properties, got more"
            break
        identifier = packet[at]
        at += 1
        if identifier == _USER_PROPERTY:
            begin, middle = at, _skip_bytes(packet, at, end)
            at = _skip_bytes(packet, middle, end)
            room -= at - begin
            if len(user) == MAX_USER_PROPERTIES or room < 0:
                refusal = _TOO_MANY
                continue
            name, value = _text(packet[begin + 2 : middle]), _text(packet[middle + 2 : at])
            if name is None or value is None:
                refusal = _not_text("user properties")
            else:
                user.append((name, value))
            continue
        if identifier in seen and identifier != _SUBSCRIPTION_ID:
            raise MalformedPacketError(f"property 0x{identifier:02x} is given twice")
        seen.add(identifier)
        begin = at
        if identifier in _TEXTS:
            field, what = _TEXTS[identifier]
            at = _skip_bytes(packet, at, end)
            found[field] = text = _text(packet[begin + 2 : at])
            if text is None:
                refusal = _not_text(what)
        elif identifier == _CORRELATION_DATA:
            at = _skip_bytes(packet, at, end)
            found["correlation_data"] = bytes(packet[begin + 2 : at])
        elif identifier == _MESSAGE_EXPIRY:
            at += 4
            found["expiry_s"] = int.from_bytes(packet[begin:at], "big")
        elif identifier == _PAYLOAD_FORMAT:
            found["utf8"] = at < end and packet[at] == 1
            at += 1
        elif identifier == _SUBSCRIPTION_ID:
            _, at = _decode_varint(packet, at)
        else:
            raise MalformedPacketError(
                f"property 0x{identifier:02x} does not belong in a PUBLISH from a broker"
            )
        if at > end:
            raise MalformedPacketError("a property runs past the end of the properties")
    return Properties(user=tuple(user), **found), refusal, end


def _put(out: bytearray, value: bytes) -> None:
    if len(value) > MAX_STRING_BYTES:
        raise ValueError(f"expected an MQTT string of at most {MAX_STRING_BYTES} bytes, got {len(value)}")
    out += len(value).to_bytes(2, "big")
    out += value


def _put_text(out: bytearray, text: str) -> None:
    if "\0" in text:
        raise ValueError(f"expected an MQTT string without U+0000, got {text!a:.80}")
    _put(out, text.encode())


def _skip_bytes(packet: memoryview, at: int, end: int) -> int:
    """Return the offset after a string or binary data."""
    stop = at + 2 + int.from_bytes(packet[at : at + 2], "big")
    if stop > end or at + 2 > end:
        raise MalformedPacketError("a string runs past the end of the properties")
    return stop


def _text(raw: memoryview) -> str | None:
    """Decode a string; None if it is not text that MQTT allows (MQTT 5.0, 1.5.4)."""
    try:
        text = str(raw, "utf-8")
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def _not_text(what: str) -> str:
    return f"expected {what} in UTF-8 without U+0000, got other bytes"


def encode_length(length: int) -> bytes:
    """Encode a variable byte integer (MQTT 5.0, 1.5.5)."""
    out = bytearray()
    while True:
        length, low = divmod(length, 128)
        out.append(low | 0x80 if length else low)
        if not length:
            return bytes(out)


def _decode_varint(packet: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for place in range(4):  # MQTT 5.0, 1.5.5: at most four bytes
        if at >= len(packet):
            raise MalformedPacketError("a length runs past the end of the packet")
        byte = packet[at]
        at += 1
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at
    raise MalformedPacketError("expected a length of at most four bytes, got more")
