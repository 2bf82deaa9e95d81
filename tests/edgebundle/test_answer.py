"""Answers as objects: every datatype, several lists, and bytes that are not an answer."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.bundle.tensor_spec import TensorSpec
from agent.mqtt.message import Message
from agent.mqtt.properties import Properties
from agent.wire.answer import MAX_JSON_VALUES
from agent.wire.tensors import format_tensor
from edgebundle import Answer, BadAnswerError, Box, Label, RefusedError, Timing
from edgebundle.answer import read_answer

TENSOR = r"x[0-9]?;(FP32|BYTES|INT8);[0-9,]{0,6}"
DTYPES = ["bool", *(f"{kind}{bits}" for kind in ("uint", "int") for bits in (8, 16, 32, 64))]
DTYPES += ["float16", "float32", "float64"]


def raw(arrays: dict[str, np.ndarray], **user: str) -> Message:
    tensors = []
    for name, array in arrays.items():
        spec = TensorSpec.from_dtype(name, array.dtype.name, array.shape)
        tensors.append(("tensor", format_tensor(spec.name, spec.datatype, spec.shape)))
    properties = Properties(
        content_type="application/octet-stream", user=(("__stat", "200"), *tensors, *user.items())
    )
    return Message("t", b"".join(array.tobytes() for array in arrays.values()), properties=properties)


def read(message: Message) -> Answer:
    answer = read_answer(message, agent="kitchen", model="m", total_s=1.0, attempts=2)
    assert isinstance(answer, Answer)
    return answer


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3)])
def test_every_datatype_is_read_as_it_was(dtype: str, shape: tuple[int, ...]) -> None:
    array = (np.random.default_rng(0).random(shape) * 3).astype(dtype)
    answer = read(raw({"x": array}))
    found = answer["x"]
    assert (found.dtype, found.shape) == (array.dtype, shape)
    np.testing.assert_array_equal(found, array)
    assert list(answer.output("x").flat()) == array.ravel().tolist()
    with pytest.raises(ValueError, match="read-only"):
        found[...] = 0
    spec = TensorSpec.from_dtype("x", dtype, shape)
    tensor = {"name": "x", "datatype": spec.datatype, "shape": list(shape), "data": array.tolist()}
    if not shape:
        tensor["data"] = [array.tolist()]
    body = json.dumps({"status": 200, "outputs": [tensor]}).encode()
    np.testing.assert_array_equal(read(Message("t", body))["x"], array)


def test_answer_is_a_mapping_and_a_missing_output_a_key_error() -> None:
    answer = read(raw({"b": np.zeros(1), "a": np.ones(1)}, traceparent="00"))
    assert (list(answer), len(answer), "a" in answer, answer.attempts) == (["b", "a"], 2, True, 2)
    assert answer.trace == (("traceparent", "00"),)
    assert (answer.labels, answer.boxes) == ((), ())
    with pytest.raises(KeyError, match="c"):
        answer["c"]
    assert (answer.timing, answer.latency_s, answer.timing.network_s) == (Timing(1.0), 1.0, None)


def test_several_lists_have_prefixes() -> None:
    scores, two = np.array([0.75, 0.25], np.float32), np.array([3, 1])
    arrays = {"kind_scores": scores, "kind_indices": two, "age_scores": scores[:1], "age_indices": two[1:]}
    answer = read(raw(arrays))
    assert answer.lists("indices") == ("kind_", "age_")
    assert answer.labels == (Label("3", 0.75, 3), Label("1", 0.25, 1))
    assert answer.labels_of("age_") == (Label("1", 0.75, 1),)
    assert answer.boxes == ()
    boxes = {"d_boxes": np.arange(8, dtype=np.float32).reshape(2, 4), "d_scores": scores, "d_classes": two}
    answer = read(raw(boxes))
    assert answer.boxes[1] == Box("1", 0.25, 1, 4, 5, 6, 7)
    assert (answer.boxes[1].width, answer.boxes[1].height, answer.boxes[1].centre) == (2, 2, (5, 6))
    assert answer.labels == ()


def test_outputs_of_a_model_that_only_sound_like_lists_are_arrays() -> None:
    answer = read(raw({"scores": np.zeros((2, 2)), "classes": np.zeros(2), "my_indices": np.zeros(2)}))
    assert (answer.labels, answer.boxes) == ((), ())


@pytest.mark.parametrize("wrong", [np.array([1, math.nan], np.float32), np.array([math.inf, 1], np.float16)])
def test_classes_that_are_not_finite_are_no_list(wrong: np.ndarray) -> None:
    scores, boxes = np.ones(2, np.float32), np.ones((2, 4), np.float32)
    answer = read(raw({"indices": wrong, "classes": wrong, "scores": scores, "boxes": boxes}))
    assert (answer.labels, answer.boxes) == ((), ())
    fine = np.array([1, 2], np.float32)
    answer = read(raw({"indices": fine, "classes": fine, "scores": scores, "boxes": boxes}))
    assert [label.index for label in answer.labels] == [box.index for box in answer.boxes] == [1, 2]
    assert answer.output("boxes").first(3) == (1, 1, 1)


@settings(max_examples=150, deadline=None)
@given(
    st.binary(max_size=200),
    st.lists(
        st.text(max_size=20) | st.from_regex(r"x[0-9]?;(FP32|BYTES|INT8);[0-9,]{0,6}", fullmatch=True),
        max_size=4,
    ),
    st.sampled_from(["application/octet-stream", "application/json", None]),
    st.sampled_from(["200", "404", "0", "x", "999", None]),
)
def test_any_bytes_are_an_answer_or_one_error(
    payload: bytes, tensors: list[str], content_type: str | None, status: str | None
) -> None:
    user = tuple(("tensor", tensor) for tensor in tensors)
    if status is not None:
        user = (("__stat", status), *user)
    message = Message("t", payload, properties=Properties(content_type=content_type, user=user))
    try:
        answer = read_answer(message, agent="a", model="m", total_s=0.1, attempts=1)
    except BadAnswerError as error:
        assert len(str(error)) < 600
    else:
        if isinstance(answer, Answer):
            assert sum(array.nbytes for array in answer.values() if array.dtype != object) <= len(payload)
            assert (len(answer.labels), len(answer.boxes)) == (0, 0)
        else:
            assert isinstance(answer, RefusedError)


# An answer whose values are nested far deeper than a tensor can be.
DEEP = (
    b'{"outputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": '
    + b"[" * 200_000
    + b"]" * 200_000
    + b"}]}"
)


@pytest.mark.parametrize("body", [b"[", b"[]", b"1", b"\xff", b'{"outputs": 1}', b"[" * 200_000, DEEP])
def test_json_that_is_no_answer(body: bytes) -> None:
    properties = Properties(user=(("__stat", "200"),))
    with pytest.raises(BadAnswerError):
        read_answer(Message("t", body, properties=properties), agent="a", model="m", total_s=0.1, attempts=1)


VALUES = MAX_JSON_VALUES + 1
TOO_MANY_TEXTS = 300_000


@pytest.mark.parametrize(
    "body",
    [
        b'{"outputs": [' + b",".join([b"[]"] * VALUES) + b"]}",
        b'{"outputs": [{"name": "x", "datatype": "FP32", "shape": [%d], "data": [%b]}]}'
        % (VALUES, b",".join([b"1"] * VALUES)),
        b"{" + b",".join(b'"%d":1' % index for index in range(VALUES)) + b"}",
    ],
    ids=["arrays", "numbers", "keys"],
)
def test_json_of_more_values_than_can_be_read_soon_is_not_parsed(
    body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.wire.document.json.loads", None)
    message = Message("t", body, properties=Properties(user=(("__stat", "200"),)))
    with pytest.raises(BadAnswerError, match=f"expected at most {MAX_JSON_VALUES} values in JSON") as caught:
        read_answer(message, agent="a", model="m", total_s=0.1, attempts=1)
    assert "MQTT 5" in str(caught.value.hint)


def test_more_texts_than_can_be_read_soon_are_not_read() -> None:
    described = (("__stat", "200"), ("tensor", "x;BYTES;7"), ("tensor", f"y;BYTES;{TOO_MANY_TEXTS}"))
    properties = Properties(content_type="application/octet-stream", user=described)
    message = Message("t", bytes(4 * (7 + TOO_MANY_TEXTS)), properties=properties)
    with pytest.raises(BadAnswerError, match="expected at most 262144 texts"):
        read_answer(message, agent="a", model="m", total_s=0.1, attempts=1)


def test_packet_that_was_cut_is_one_error() -> None:
    message: Any = Message("t", b"{}", refusal="expected a shorter packet, got one of 99 bytes")
    properties = Properties(user=(("__stat", "200"),))
    message = Message("t", b"{}", properties=properties, refusal=message.refusal)
    with pytest.raises(BadAnswerError, match="expected a shorter packet"):
        read_answer(message, agent="a", model="m", total_s=0.1, attempts=1)
