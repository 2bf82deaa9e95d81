"""The properties of a PUBLISH packet, against paho's own encoder and against hostile bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties as PahoProperties

from agent.errors import MalformedPacketError
from agent.mqtt.message import Receipt, decode_publish, encode_publish
from agent.mqtt.properties import (
    MAX_PROPERTIES,
    MAX_USER_PROPERTIES,
    MAX_USER_PROPERTY_BYTES,
    Properties,
    decode,
    encode,
)

texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=0, max_size=40)
properties = st.builds(
    Properties,
    content_type=st.none() | texts,
    response_topic=st.none() | texts,
    correlation_data=st.none() | st.binary(max_size=40),
    expiry_s=st.none() | st.integers(0, 2**32 - 1),
    utf8=st.booleans(),
    user=st.lists(st.tuples(texts, texts), max_size=5).map(tuple),
)


def library_form(value: Properties) -> PahoProperties:
    out = PahoProperties(PacketTypes.PUBLISH)
    if value.utf8:
        out.PayloadFormatIndicator = 1
    if value.content_type is not None:
        out.ContentType = value.content_type
    if value.response_topic is not None:
        out.ResponseTopic = value.response_topic
    if value.correlation_data is not None:
        out.CorrelationData = value.correlation_data
    if value.expiry_s is not None:
        out.MessageExpiryInterval = value.expiry_s
    for pair in value.user:
        out.UserProperty = pair
    return out


@given(properties)
def test_encoding_is_pahos(value: Properties) -> None:
    assert encode(value) == library_form(value).pack()


@given(properties, st.binary(max_size=20), st.binary(max_size=20))
def test_what_is_encoded_is_decoded(value: Properties, before: bytes, behind: bytes) -> None:
    packed = encode(value)
    packet = memoryview(before + packed + behind)
    assert decode(packet, len(before)) == (value, None, len(before) + len(packed))


@pytest.mark.slow
@given(texts.filter(bool), st.binary(max_size=200), properties, st.booleans(), st.booleans(), st.booleans())
def test_packet_that_is_encoded_is_decoded(
    topic: str, payload: bytes, value: Properties, at_qos_1: bool, retain: bool, dup: bool
) -> None:
    for packed, version in ((encode(value), 5), (None, 4)):
        head = encode_publish(
            topic, len(payload), packet_id=7 if at_qos_1 else None, retain=retain, packed=packed, dup=dup
        )
        length = 2 if len(head) + len(payload) <= 129 else 3
        message = decode_publish(head[0], head[length:] + payload, version=version, epoch=1)
        assert (message.topic, message.payload) == (topic, payload)
        assert message.properties == (value if version == 5 else Properties())
        assert (message.qos, message.retain, message.dup) == (int(at_qos_1), retain, dup)
        assert message.receipt == (Receipt(7, 1) if at_qos_1 else None)


@given(st.binary(max_size=200))
def test_hostile_bytes_are_decoded_or_refused(raw: bytes) -> None:
    try:
        value, _refusal, end = decode(memoryview(raw), 0)
    except MalformedPacketError:
        return
    assert end <= len(raw)
    assert decode(memoryview(encode(value)), 0)[0] == value


@given(st.binary(max_size=200), st.integers(0, 15), st.sampled_from([4, 5]))
def test_hostile_packet_is_decoded_or_refused(raw: bytes, flags: int, version: int) -> None:
    try:
        message = decode_publish(0x30 | flags, raw, version=version, epoch=1)
    except MalformedPacketError:
        return
    assert message.topic
    assert len(message.payload) <= len(raw)


@pytest.mark.parametrize(
    ("packed", "why"),
    [
        (b"\x05\x23\x00\x01", "left"),
        (b"\x03\x23\x00\x01", "does not belong"),
        (b"\x06\x08\x00\x00\x08\x00\x00", "twice"),
        (b"\x04\x03\x00\x02\xff", "past the end"),
        (b"\x02\x02\x00", "past the end"),
        (b"\xff\xff\xff\xff\x01", "four bytes"),
    ],
)
def test_broken_properties_are_refused(packed: bytes, why: str) -> None:
    with pytest.raises(MalformedPacketError, match=why):
        decode(memoryview(packed), 0)


@pytest.mark.parametrize(
    "user",
    [
        (("a", "b"),) * (MAX_USER_PROPERTIES + 1),
        (("a", "b"),) * (10 * MAX_PROPERTIES),
        (("a" * 40_000, "b" * 40_000),),
        (("a", "b" * 1000),) * (MAX_USER_PROPERTY_BYTES // 1000 + 1),
    ],
    ids=["one too many", "far too many", "one too long", "too long together"],
)
def test_more_user_properties_than_we_keep_are_a_reason_to_refuse_and_no_error(
    user: tuple[tuple[str, str], ...],
) -> None:
    packed = encode(Properties(response_topic="r", correlation_data=b"c", user=user))
    value, refusal, end = decode(memoryview(packed + b"payload"), 0)
    assert refusal is not None
    assert "expected at most" in refusal
    assert (value.response_topic, value.correlation_data) == ("r", b"c")
    assert len(value.user) <= MAX_USER_PROPERTIES
    assert sum(len(name) + len(text) for name, text in value.user) <= MAX_USER_PROPERTY_BYTES
    assert end == len(packed)


def test_response_topic_is_found_behind_too_many_user_properties() -> None:
    response_topic = b"\x08\x00\x01r"
    for count, found in ((MAX_PROPERTIES - 1, "r"), (MAX_PROPERTIES, None)):
        user = encode(Properties(user=(("", ""),) * count))[2:]
        length = len(user) + len(response_topic)
        packed = bytes((length & 127 | 128, length >> 7)) + user + response_topic
        value, refusal, end = decode(memoryview(packed), 0)
        assert (value.response_topic, end) == (found, len(packed))
        assert refusal is not None


@pytest.mark.parametrize(
    ("packed", "what"),
    [
        (b"\x05\x03\x00\x02\xff\xfe", "Content Type"),
        (b"\x04\x03\x00\x01\x00", "Content Type"),
        (b"\x06\x08\x00\x03\xed\xa0\x80", "Response Topic"),  # a surrogate
        (b"\x07\x26\x00\x01a\x00\x01\xff", "user properties"),
        (b"\x07\x26\x00\x01\xff\x00\x01a", "user properties"),
    ],
)
def test_text_that_is_not_utf8_is_a_reason_to_refuse_and_no_error(packed: bytes, what: str) -> None:
    value, refusal, end = decode(memoryview(packed), 0)
    assert (
        refusal
        == f"expected {what if what[0] == 'u' else 'a ' + what} in UTF-8 without U+0000, got other bytes"
    )
    assert (value, end) == (Properties(), len(packed))


def test_topic_that_is_not_utf8_is_none_of_ours() -> None:
    message = decode_publish(0x32, b"\x00\x02\xff\xfe\x00\x07\x00", version=5, epoch=1)
    assert message.topic == "\xff\xfe"
    assert message.receipt is not None


@pytest.mark.slow
@given(
    st.lists(st.tuples(texts, texts), max_size=5),
    st.integers(0, 600),
    st.binary(max_size=200),
    st.sampled_from([0, 1]),
)
def test_no_valid_message_is_an_error(
    user: list[tuple[str, str]], more: int, payload: bytes, qos: int
) -> None:
    value = Properties(response_topic="r", user=(*user, *(("", ""),) * more))
    packet = b"\x00\x01t" + b"\x00\x01" * qos + library_form(value).pack() + payload
    message = decode_publish(0x30 | qos << 1, packet, version=5, epoch=1)
    assert message.payload == payload
    assert (message.refusal is None) == (len(value.user) <= MAX_USER_PROPERTIES)


def test_string_too_long_for_mqtt_is_refused() -> None:
    with pytest.raises(ValueError, match="65535"):
        encode(Properties(content_type="x" * 65536))
