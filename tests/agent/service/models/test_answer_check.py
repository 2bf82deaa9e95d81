"""What the agent accepts from a worker, and what it does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.mqtt import properties as mqtt_properties
from agent.service.models.answer_check import fault_of
from agent.wire.answer import STATUSES, FinalAnswer
from agent.worker.frames import Answer

RAW, JSON, CBOR = "application/octet-stream", "application/json", "application/cbor"
RAW_ANSWER = Answer(1, 200, content_type=RAW, tensors=("y;FP32;2", "n;UINT8;"))
REFUSAL = Answer(1, 500, "why", JSON)


@pytest.mark.parametrize(
    ("answer", "payload"),
    [
        (RAW_ANSWER, bytes(9)),
        (replace(RAW_ANSWER, tensors=()), b""),
        (replace(RAW_ANSWER, tensors=("labels;BYTES;3",)), b"any size"),
        (Answer(1, 200, content_type=JSON), b"{}"),
        (Answer(1, 200, content_type=CBOR), b"\xa0"),
        *((replace(REFUSAL, status=status), b"{}") for status in (400, 408, 415, 500)),
        (replace(REFUSAL, message="x" * 500, queue_us=86_400_000_000), b"{}"),
    ],
)
def test_honest_answer_has_no_fault(answer: Answer, payload: bytes) -> None:
    assert fault_of(answer, payload) is None


@pytest.mark.parametrize(
    ("answer", "payload", "words"),
    [
        (replace(RAW_ANSWER, content_type="a\0b"), bytes(9), "content type"),
        (replace(RAW_ANSWER, content_type="text/\ud800"), bytes(9), "content type"),
        (replace(RAW_ANSWER, content_type="x" * 60_000), bytes(9), "content type"),
        (replace(RAW_ANSWER, content_type="image/png"), bytes(9), "content type"),
        (Answer(1, 200), b"", "content type"),
        (replace(RAW_ANSWER, tensors=("a\0b;UINT8;9",)), bytes(9), "printable ASCII"),
        (replace(RAW_ANSWER, tensors=("\ud800;UINT8;9",)), bytes(9), "printable ASCII"),
        (replace(RAW_ANSWER, tensors=("y;UINT8;9\n",)), bytes(9), "name;FP32;1,3,4"),
        (replace(RAW_ANSWER, tensors=("y;FLOAT;9",)), bytes(9), "datatype"),
        (replace(RAW_ANSWER, tensors=("x" * 60_000,)), bytes(9), "name;FP32;1,3,4"),
        (RAW_ANSWER, bytes(8), "expected 9 bytes"),
        (RAW_ANSWER, b"", "expected 9 bytes"),
        (replace(RAW_ANSWER, message="hello"), bytes(9), "no message"),
        (Answer(1, 200, content_type=JSON, tensors=("y;UINT8;2",)), b"{}", "tensors only"),
        (Answer(1, 200, content_type=JSON), "{ö}".encode(), "ASCII"),
        (replace(REFUSAL, status=503), b"{}", "expected a status among"),
        (replace(REFUSAL, status=404), b"{}", "expected a status among"),
        (replace(REFUSAL, status=-1), b"{}", "expected a status among"),
        (replace(REFUSAL, status=1 << 62), b"{}", "expected a status among"),
        (replace(REFUSAL, message=""), b"{}", "message of 1 to 500"),
        (replace(REFUSAL, message="x" * 501), b"{}", "message of 1 to 500"),
        (replace(REFUSAL, content_type=""), b"", "a refusal in"),
        (replace(REFUSAL, content_type=RAW), b"", "a refusal in"),
        (REFUSAL, b"", "empty payload"),
        (replace(REFUSAL, tensors=("y;UINT8;2",)), b"{}", "tensors only"),
        (replace(RAW_ANSWER, queue_us=-1), bytes(9), "durations"),
        (replace(RAW_ANSWER, encode_us=1 << 62), bytes(9), "durations"),
    ],
)
def test_dishonest_answer_is_described_in_one_line(answer: Answer, payload: bytes, words: str) -> None:
    fault = fault_of(answer, payload)
    assert fault is not None
    assert words in fault
    assert fault.isprintable()
    assert len(fault) < 300


texts = st.text(st.characters(codec=None), max_size=30)
answers = st.builds(
    Answer,
    seq=st.integers(),
    status=st.sampled_from(STATUSES) | st.integers(),
    message=texts,
    content_type=st.sampled_from(["", RAW, JSON, CBOR]) | texts,
    tensors=st.lists(st.sampled_from(["y;UINT8;3", "n;FP32;"]) | texts, max_size=3).map(tuple),
    queue_us=st.integers(),
)


@given(answers, st.binary(max_size=8))
def test_answer_without_a_fault_can_be_sent(answer: Answer, payload: bytes) -> None:
    if fault_of(answer, payload) is None:
        final: Any = FinalAnswer(
            answer.status, answer.message, answer.content_type, payload, "1.0.0", answer.tensors
        )
        encoded = mqtt_properties.encode(final.properties(correlation=b"c", expiry_s=5))
        assert b"\0" not in final.properties(correlation=None, expiry_s=5).content_type.encode()
        assert len(encoded) < 1 << 16
