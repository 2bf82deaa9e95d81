"""From a message to an accepted request: its client, and its deadlines."""

from __future__ import annotations

from typing import Any

import pytest

from agent.mqtt.message import Message
from agent.mqtt.properties import Properties
from agent.service.requests.pending import MAX_DEADLINE_S, Deadlines, Ends, Pending
from agent.wire.envelope import MAX_ID_CHARACTERS
from agent.wire.request import MAX_CONTENT_TYPE_CHARACTERS, MAX_TENSOR_CHARACTERS
from agent.worker.frames import MAX_HEADER_BYTES, encode

TOPIC = "edge/v1/kitchen/models/echo/infer"


def read(payload: bytes = b"", asked_by: str | None = None, **properties: object) -> Pending:
    made = Properties(**{"response_topic": "edge/v1/replies/alice/1/2", **properties})  # type: ignore[arg-type]
    return Pending.read(
        Message(TOPIC, payload, 1, properties=made),
        "echo",
        asked_by,
        Ends(lambda *_: None, lambda *_: None),
        seq=1 << 62,
        now_s=1000.123456789,
        deadlines=Deadlines(60.0, 600.0),
    )


@pytest.mark.parametrize(
    ("expiry_s", "given_up_s", "answer_until_s"),
    [(None, 60, 60), (5, 5, 5), (599, 599, 599), (86_400, 600, 86_400), (2**32 - 1, 600, MAX_DEADLINE_S)],
)
def test_long_deadline_is_shortened_for_waiting_and_kept_for_the_answer(
    expiry_s: int | None, given_up_s: float, answer_until_s: float
) -> None:
    pending = read(expiry_s=expiry_s)
    assert pending.expires_s - 1000.123456789 == pytest.approx(given_up_s)
    assert pending.frame.deadline_s == pending.expires_s
    assert pending.reply.deadline_s - 1000.123456789 == pytest.approx(answer_until_s)


@pytest.mark.parametrize(
    "request_of_alice",
    [{}, {"payload": b'{"reply_to": "edge/v1/replies/alice/x", "inputs": []}', "response_topic": None}],
)
def test_client_is_the_user_in_the_topic_or_one_for_all(request_of_alice: dict[str, Any]) -> None:
    named = read(asked_by="alice", **request_of_alice)
    assert (named.client, named.frame.client, named.error) == ("alice", "alice", None)
    unnamed = read(**request_of_alice)
    assert (unnamed.client, unnamed.frame.client, unnamed.error) == ("anonymous", "anonymous", None)


@pytest.mark.parametrize("worst", ['"', "\\", "x"])
def test_every_request_within_the_limits_fits_a_frame(worst: str) -> None:
    described = [worst] * 200 + [worst * (MAX_TENSOR_CHARACTERS - 200)]
    user = (("accept", worst * MAX_CONTENT_TYPE_CHARACTERS), *(("tensor", each) for each in described))
    pending = read(content_type=worst * MAX_CONTENT_TYPE_CHARACTERS, user=user)
    assert pending.error is None
    head, _ = encode(pending.frame, b"")
    assert len(head) < MAX_HEADER_BYTES
    identifier = "\\ud83d\\ude00" * MAX_ID_CHARACTERS
    body = b'{"reply_to": "edge/v1/replies/bob/x", "id": "%s"}' % identifier.encode()
    pending = read(body, response_topic=None, user=user)
    assert pending.frame.id == "\N{GRINNING FACE}" * MAX_ID_CHARACTERS
    head, _ = encode(pending.frame, b"")
    assert len(head) < MAX_HEADER_BYTES
