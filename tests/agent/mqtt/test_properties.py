"""The properties of a PUBLISH packet, against paho's own encoder and against hostile bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties as PahoProperties

from agent.errors import MalformedPacketError
from agent.mqtt.message import decode_publish
from agent.mqtt.properties import MAX_USER_PROPERTIES, Properties, decode, encode

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
    assert decode(packet, len(before)) == (value, len(before) + len(packed))


@given(st.binary(max_size=200))
def test_hostile_bytes_are_decoded_or_refused(raw: bytes) -> None:
    try:
        value, end = decode(memoryview(raw), 0)
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
        (b"\x05\x03\x00\x02\xff\xfe", "UTF-8"),
        (b"\x04\x03\x00\x01\x00", "U\\+0000"),
        (b"\x02\x02\x00", "past the end"),
        (b"\xff\xff\xff\xff\x01", "four bytes"),
    ],
)
def test_broken_properties_are_refused(packed: bytes, why: str) -> None:
    with pytest.raises(MalformedPacketError, match=why):
        decode(memoryview(packed), 0)


def test_too_many_user_properties_are_refused() -> None:
    value = Properties(user=(("a", "b"),) * (MAX_USER_PROPERTIES + 1))
    with pytest.raises(MalformedPacketError, match="user properties"):
        decode(memoryview(encode(value)), 0)


def test_string_too_long_for_mqtt_is_refused() -> None:
    with pytest.raises(ValueError, match="65535"):
        encode(Properties(content_type="x" * 65536))
