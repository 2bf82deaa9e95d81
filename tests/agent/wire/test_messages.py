"""Requests and answers: written as a message by one side, read by the other."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.bundle.tensor_spec import TensorSpec
from agent.errors import FormatError, InputError, OverloadedError, UnanswerableError
from agent.mqtt.message import Message
from agent.mqtt.properties import Properties, encode
from agent.wire.answer import STATUSES, FinalAnswer, read_answer, refusal
from agent.wire.answer_head import MAX_STATUS_MESSAGE_CHARACTERS, AnswerHead, one_line
from agent.wire.content_types import JSON, RAW
from agent.wire.envelope import MAX_ID_CHARACTERS, Envelope
from agent.wire.request import (
    MAX_CONTENT_TYPE_CHARACTERS,
    MAX_CORRELATION_BYTES,
    MAX_TENSOR_CHARACTERS,
    MAX_TRACE_CHARACTERS,
    MIN_ANONYMOUS_SESSION_CHARACTERS,
    InferMessage,
)
from agent.worker import frames
from agent.worker.frames import MAX_HEADER_BYTES, Request

TOPIC = "edge/v1/kitchen/models/digits/infer"
REPLY = "edge/v1/replies/alice/1"
TRACE = (("traceparent", "00-ab"),)


def sent(request: InferMessage) -> Message:
    return Message(TOPIC, request.body, 1, properties=request.properties())


@given(
    body=st.binary(max_size=20),
    content_type=st.sampled_from([JSON, RAW, "image/png"]),
    tensors=st.lists(st.sampled_from(["x;FP32;1", "y;INT64;2,3"]), max_size=3).map(tuple),
    accept=st.none() | st.just(RAW),
    correlation=st.none() | st.binary(max_size=10),
    deadline_s=st.none() | st.integers(1, 1000).map(float),
    trace=st.sampled_from([(), TRACE]),
)
def test_request_with_properties_is_read_as_it_was_written(**values: Any) -> None:
    request = InferMessage(reply_to=REPLY, **values)
    assert InferMessage.from_message(sent(request)) == request


def test_deadline_is_at_least_a_second_in_mqtt() -> None:
    request = InferMessage(reply_to=REPLY, body=b"", deadline_s=0.001)
    assert request.properties().expiry_s == 1


@given(identifier=st.none() | st.text(max_size=20), deadline_s=st.none() | st.floats(0.001, 1e6))
def test_request_with_an_envelope_is_read_as_it_was_written(
    identifier: str | None, deadline_s: float | None
) -> None:
    request = InferMessage.with_envelope(Envelope(REPLY, identifier, deadline_s), b'{"inputs": []}')
    assert InferMessage.from_message(Message(TOPIC, request.body, 1)) == request
    assert json.loads(request.body)["inputs"] == []


def test_envelope_replaces_the_keys_that_a_body_has() -> None:
    body = b'{"reply_to": "edge/v1/replies/mallory/1", "id": "theirs", "inputs": [1]}'
    request = InferMessage.with_envelope(Envelope(REPLY, "ours", 2.5), body)
    assert json.loads(request.body) == {"reply_to": REPLY, "id": "ours", "deadline_s": 2.5, "inputs": [1]}


@pytest.mark.parametrize("body", [b"", b"[]", b"1", b"{", b"\xff"])
def test_envelope_needs_a_json_object(body: bytes) -> None:
    with pytest.raises(FormatError):
        InferMessage.with_envelope(Envelope(REPLY), body)


@pytest.mark.parametrize(
    ("properties", "payload", "reason"),
    [
        (Properties(), b"\xff\xd8\xff", "no_response_topic"),
        (Properties(), b"{}", "no_response_topic"),
        (Properties(content_type="image/png"), b"{}", "no_response_topic"),
        (Properties(), b'{"reply_to":1}', "no_response_topic"),
        (Properties(), b'{"reply_to":"edge/v1/kitchen/desired"}', "foreign_response_topic"),
        (Properties(response_topic="$SYS/x"), b"", "foreign_response_topic"),
        (Properties(response_topic="edge/v1/replies/a"), b"", "foreign_response_topic"),
        (Properties(response_topic="edge/v1/replies/a/#"), b"", "foreign_response_topic"),
        (Properties(response_topic="edge/v1/replies/" + "a" * 2000), b"", "foreign_response_topic"),
    ],
)
def test_request_without_a_usable_reply_topic_is_unanswerable(
    properties: Properties, payload: bytes, reason: str
) -> None:
    with pytest.raises(UnanswerableError) as caught:
        InferMessage.from_message(Message(TOPIC, payload, 1, properties=properties))
    assert caught.value.reason == reason
    assert len(str(caught.value)) < 400


def test_identifier_of_an_envelope_is_bounded() -> None:
    for length, fits in ((MAX_ID_CHARACTERS, True), (MAX_ID_CHARACTERS + 1, False)):
        body = json.dumps({"reply_to": REPLY, "id": "x" * length}).encode()
        with contextlib.nullcontext() if fits else pytest.raises(UnanswerableError, match="id"):
            InferMessage.from_message(Message(TOPIC, body, 1))


@pytest.mark.parametrize(
    ("properties", "status", "what"),
    [
        ({"content_type": "x" * (MAX_CONTENT_TYPE_CHARACTERS + 1)}, 415, "Content Type"),
        ({"content_type": "image/\N{SNOWMAN}"}, 415, "Content Type"),
        ({"user": (("accept", "x" * 22_000),)}, 415, "accept"),
        ({"user": (("tensor", "x" * MAX_TENSOR_CHARACTERS), ("tensor", "x"))}, 400, "tensors"),
        ({"user": (("tensor", "\x1f" * 10),)}, 400, "tensors"),
        ({"correlation_data": b"x" * (MAX_CORRELATION_BYTES + 1)}, 400, "Correlation Data"),
    ],
)
def test_property_over_its_limit_is_refused_with_what_was_expected(
    properties: dict[str, Any], status: int, what: str
) -> None:
    message = Message(TOPIC, b"", 1, properties=Properties(response_topic=REPLY, **properties))
    request = InferMessage.from_message(message)
    assert request.refusal is not None
    assert request.refusal.status == status
    assert what in str(request.refusal)
    assert len(str(request.refusal)) < MAX_STATUS_MESSAGE_CHARACTERS
    assert (request.content_type, request.accept, request.tensors) == (JSON, None, ())


# A message with U+0000 in a text is malformed: agent/mqtt/properties.py refuses it before a request is read.
characters = st.characters(codec="utf-8", exclude_characters="\0")
any_text = st.one_of(
    st.text(characters, max_size=30),
    st.builds(lambda text, count: text * count, st.text(characters, max_size=3), st.integers(0, 30_000)),
)


@pytest.mark.slow
@given(
    content_type=st.none() | any_text,
    correlation=st.none() | st.binary(max_size=10),
    user=st.lists(st.tuples(st.sampled_from(["tensor", "accept", "traceparent", "x"]), any_text), max_size=6),
)
def test_any_request_is_refused_or_fits_the_frame_for_a_worker_and_its_answer_is_short(
    content_type: str | None, correlation: bytes | None, user: list[tuple[str, str]]
) -> None:
    properties = Properties(content_type, REPLY, correlation, user=tuple(user))
    request = InferMessage.from_message(Message(TOPIC, b"", 1, properties=properties))
    frame = Request(
        seq=1,
        content_type=request.content_type,
        tensors=request.tensors,
        accept=request.accept,
        id="\N{GRINNING FACE}" * MAX_ID_CHARACTERS,
    )
    assert len(frames.encode(frame)[0]) <= MAX_HEADER_BYTES + 16
    error = request.refusal or InputError("x")
    answer = refusal(error, AnswerHead("digits"))
    sent = answer.properties(correlation=request.correlation, expiry_s=5, trace=request.trace)
    assert len(answer.payload) + len(encode(sent)) < 8192


def test_message_that_mqtt_allows_and_we_do_not_is_refused() -> None:
    message = Message(TOPIC, b"", 1, properties=Properties(response_topic=REPLY), refusal="expected less")
    error = InferMessage.from_message(message).refusal
    assert error is not None
    assert (error.status, str(error)) == (400, "expected less")


@pytest.mark.parametrize(
    "trace",
    [
        (("tracestate", "x" * (MAX_TRACE_CHARACTERS + 1)),),
        (("tracestate", "x" * 1000), ("traceparent", "x" * 1000)),
        (("traceparent", "x"),) * 200,
    ],
)
def test_trace_context_that_is_too_long_is_not_carried_on(trace: tuple[tuple[str, str], ...]) -> None:
    message = Message(TOPIC, b"", 1, properties=Properties(response_topic=REPLY, user=trace))
    request = InferMessage.from_message(message)
    assert (request.trace, request.refusal) == ((), None)


@given(st.binary(max_size=60) | st.text('{}[]":,\\ ab1', max_size=40).map(str.encode))
def test_any_payload_is_a_request_or_unanswerable(payload: bytes) -> None:
    with contextlib.suppress(UnanswerableError):
        InferMessage.from_message(Message(TOPIC, payload, 1))


@given(
    status=st.sampled_from(STATUSES),
    message=st.text(min_size=1, max_size=20).map(one_line),
    version=st.sampled_from(["", "1.0.0"]),
)
def test_answer_of_raw_tensors_is_read_as_it_was_written(status: int, message: str, version: str) -> None:
    answer = FinalAnswer(status, message, RAW, b"\0" * 12, version, ("x;FP32;1", "y;INT64;1"))
    properties = answer.properties(correlation=b"c", expiry_s=5, trace=TRACE)
    assert (properties.correlation_data, properties.expiry_s, properties.first("traceparent")) == (
        b"c",
        5,
        "00-ab",
    )
    read = read_answer(Message(REPLY, answer.payload, 1, properties=properties))
    assert (read.status, read.message, read.model_version) == (status, message, version)
    assert read.raw == answer.payload
    assert read.raw_tensors == (TensorSpec("x", "FP32", (1,)), TensorSpec("y", "INT64", (1,)))


@pytest.mark.parametrize("has_envelope", [False, True])
def test_refusal_says_the_same_in_properties_and_in_json(has_envelope: bool) -> None:
    error = OverloadedError("digits has 64 requests waiting", hint="ask again later")
    answer = refusal(error, AnswerHead("digits", id="7", has_envelope=has_envelope))
    properties = answer.properties(correlation=None, expiry_s=5)
    for message in (
        Message(REPLY, answer.payload, 1, properties=properties),
        Message(REPLY, answer.payload, 1),
    ):
        read = read_answer(message)
        knows_status = has_envelope or message.properties is properties
        assert (read.status, read.message) == (503 if knows_status else 0, str(error))
    body = json.loads(answer.payload)
    assert (body["error"], body["hint"]) == (str(error), "ask again later")
    assert ("status" in body, body.get("id")) == ((True, "7") if has_envelope else (False, None))


def test_head_has_the_status_only_for_requesters_without_properties() -> None:
    assert AnswerHead("m", "1.0.0", "7").to_document() == {
        "model_name": "m",
        "model_version": "1.0.0",
        "id": "7",
    }
    head = AnswerHead("m", "1.0.0", has_envelope=True).to_document(500, "why")
    assert (head["status"], head["message"]) == (500, "why")


def test_status_message_is_one_printable_line_of_bounded_length() -> None:
    assert one_line("a\nb\x1b[31m\u2028") == "a?b?[31m?"
    assert len(one_line("x" * 5000)) == MAX_STATUS_MESSAGE_CHARACTERS


@pytest.mark.parametrize(
    ("properties", "payload"),
    [
        (Properties(user=(("__stat", "ok"),)), b"{}"),
        (Properties(user=(("__stat", "2000"),)), b"{}"),
        (Properties(user=(("__stat", "-1"),)), b"{}"),
        (Properties(content_type=RAW, user=(("__stat", "200"), ("tensor", "x"))), b""),
        (Properties(), b"[]"),
        (Properties(), b"\xff"),
        (Properties(), b'{"status":200,"outputs":{"a":1}}'),
        (Properties(), b'{"status":200,"outputs":[{"name":1}]}'),
    ],
)
def test_what_is_not_an_answer_is_an_error(properties: Properties, payload: bytes) -> None:
    with pytest.raises(FormatError):
        read_answer(Message(REPLY, payload, 1, properties=properties))


@given(st.binary(max_size=60))
def test_any_answer_is_read_or_an_error(payload: bytes) -> None:
    with contextlib.suppress(FormatError):
        read_answer(Message(REPLY, payload, 1))


def asked(reply_to: str, **options: Any) -> Iterator[Message]:
    """Yield the same request with the properties of MQTT 5, and without."""
    session = options.get("session")
    user = () if session is None else (("session", session),)
    yield Message(
        TOPIC, b"", 1, properties=Properties(response_topic=reply_to, correlation_data=b"1", user=user)
    )
    document = {"reply_to": reply_to, "id": "1", "inputs": []} | options
    yield Message(TOPIC, json.dumps(document).encode(), 1)


def test_answer_goes_only_to_the_user_who_asks() -> None:
    for message in asked(REPLY):
        assert InferMessage.from_message(message, "alice").refusal is None
        refused = InferMessage.from_message(message, "mallory")
        assert refused.refusal is not None
        assert refused.refusal.status == 400
        assert str(refused.refusal).startswith(
            "expected a Response Topic below edge/v1/replies/mallory/, whose user asks, got one below "
            "edge/v1/replies/alice/"
        )
        assert (refused.reply_to, refused.correlation) == ("edge/v1/replies/mallory/1", b"1")


def test_refusal_of_another_users_response_topic_is_short_whatever_the_names() -> None:
    longest = "edge/v1/replies/" + "a" * 128 + "/x"
    for message in asked(longest):
        refused = InferMessage.from_message(message, "m" * 128)
        assert len(str(refused.refusal)) < MAX_STATUS_MESSAGE_CHARACTERS
    for message in asked(f"edge/v1/replies/a/{'/'.join(['x' * 124] * 8)}"):
        assert InferMessage.from_message(message, "a").refusal is None
        with pytest.raises(UnanswerableError, match="expected a Response Topic below"):
            InferMessage.from_message(message, "m" * 128)


@pytest.mark.parametrize("user", ["", "a b", "+", "m" * 129, "groups", "$x"])
def test_user_that_no_answer_can_reach_is_unanswerable(user: str) -> None:
    for message in asked(REPLY):
        with pytest.raises(UnanswerableError, match="expected the name of a user") as caught:
            InferMessage.from_message(message, user)
        assert caught.value.reason == "foreign_user"


def test_nobody_is_called_as_those_without_a_user() -> None:
    for message in asked("edge/v1/replies/anonymous/1"):
        refused = InferMessage.from_message(message, "anonymous")
        assert "expected the name of a user" in str(refused.refusal)
        assert refused.reply_to == "edge/v1/replies/anonymous/1"


def test_session_without_a_user_has_a_name_that_is_hard_to_guess() -> None:
    short, long = ("x" * (MIN_ANONYMOUS_SESSION_CHARACTERS - less) for less in (1, 0))
    for message in asked(REPLY, session=short):
        assert InferMessage.from_message(message, "alice").refusal is None
        refusal = InferMessage.from_message(message).refusal
        assert refusal is not None
        assert refusal.status == 400
        assert "expected a random name of at least 16 characters" in str(refusal)
    for message in asked(REPLY, session=long):
        assert InferMessage.from_message(message).refusal is None
