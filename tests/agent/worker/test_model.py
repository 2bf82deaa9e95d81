"""What a worker answers, without a process: any request, any result, and never more than a frame holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import cbor2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.bundle.tensor_spec import TensorSpec
from agent.runtime.graph_executor import GraphModule
from agent.service.models.answer_check import fault_of
from agent.worker import model as model_module
from agent.worker.codec import import_cbor
from agent.worker.frames import Answer, Request, encode
from agent.worker.model import Model, Prepared
from tests.agent.worker.conftest import manifest

RAW, JSON, CBOR = "application/octet-stream", "application/json", "application/cbor"
X = np.array([1, 2, 3, 4], np.float32)


class TwiceModule:
    """Replaces a `GraphModule`: y = 2 x."""

    kernels = None

    def __init__(self, failure: Exception | None = None) -> None:
        self.x = np.zeros(4, np.float32)
        self.y = np.zeros(4, np.float32)
        self.failure = failure

    def input_view(self, _name: str) -> np.ndarray[Any, Any]:
        return self.x

    def output_view(self, _index: int) -> np.ndarray[Any, Any]:
        return self.y

    def run(self) -> None:
        if self.failure is not None:
            raise self.failure
        self.y[:] = 2 * self.x


def make(failure: Exception | None = None, results: Mapping[str, Any] | None = None) -> Model:
    described = manifest({"mod.so": b""}, (TensorSpec("x", "FP32", (4,)),), (TensorSpec("y", "FP32", (4,)),))
    prepared = SimpleNamespace(
        manifest=described,
        preprocessor=None,
        postprocessor=lambda outputs, _placement: outputs if results is None else results,
        cbor=import_cbor(),
        rows=None,
    )
    return Model(cast(Prepared, prepared), cast(GraphModule, TwiceModule(failure)), 0.0)


def ask(model: Model, payload: bytes, **fields: Any) -> tuple[Answer, bytes]:
    """Return a request's answer, which must be one that the agent accepts."""
    answer, body = model.answer(Request(7, **{"content_type": RAW, **fields}), memoryview(payload))
    payload = bytes(body)
    encode(answer, payload)  # fits a frame
    assert answer.seq == 7
    assert fault_of(answer, payload) is None
    return answer, payload


def test_result_in_each_content_type() -> None:
    model = make()
    answer, payload = ask(model, X.tobytes())
    assert (answer.status, answer.tensors) == (200, ("y;FP32;4",))
    assert payload == (2 * X).tobytes()
    for accept, loads in ((JSON, json.loads), (CBOR, cbor2.loads)):
        answer, payload = ask(model, X.tobytes(), accept=accept)
        assert (answer.status, answer.content_type) == (200, accept)
        assert loads(payload)["outputs"][0]["name"] == "y"


def test_the_models_own_outputs_replace_those_of_the_postprocess() -> None:
    model = make(results={"labels": (b"seven",)})
    assert ask(model, X.tobytes())[0].tensors == ("labels;BYTES;1",)
    answer, payload = ask(model, X.tobytes(), accept=f"{RAW};postprocess=none")
    assert (answer.status, answer.content_type, answer.tensors) == (200, RAW, ("y;FP32;4",))
    assert payload == (2 * X).tobytes()
    tensor = {"name": "x", "datatype": "FP32", "shape": [4], "data": X.tolist()}
    document = json.dumps({"inputs": [tensor], "parameters": {"postprocess": "none"}}).encode()
    answer, payload = ask(model, document, content_type=JSON, client_json=True)
    assert json.loads(payload)["outputs"][0]["data"] == (2 * X).tolist()


@pytest.mark.parametrize("content_type", ["", JSON, RAW, CBOR, "image/png", "text/plain"])
@pytest.mark.parametrize("accept", [None, "text/plain"])
def test_refusal_is_json_whatever_was_sent_and_wanted(content_type: str, accept: str | None) -> None:
    answer, payload = ask(make(), b"?", content_type=content_type, accept=accept)
    assert answer.status in {400, 415}
    assert answer.content_type == JSON
    assert answer.message.startswith(json.loads(payload)["error"])


def test_refusal_without_properties_has_the_same_members_as_the_agents_own() -> None:
    _, payload = ask(make(), b"?", content_type="text/plain", client_json=True, id="mine")
    document = json.loads(payload)
    assert document.pop("error") == document.pop("message")
    assert document == {"model_name": "probe", "id": "mine", "status": 415}


def test_message_about_thousands_of_inputs_fits_a_frame() -> None:
    inputs = [{"name": f"input {n}", "datatype": "FP32", "shape": [1], "data": [1]} for n in range(20_000)]
    answer, _ = ask(make(), json.dumps({"inputs": inputs}).encode(), content_type=JSON)
    assert answer.status == 400
    assert "expected the inputs 'x', got 'input 0'" in answer.message


def test_id_that_is_not_unicode_text_does_not_end_the_worker() -> None:
    body = {"id": "\ud800", "inputs": [{"name": "x", "datatype": "FP32", "shape": [4], "data": [1] * 4}]}
    for accept in (JSON, CBOR, RAW):
        answer, _ = ask(make(), json.dumps(body).encode(), content_type=JSON, accept=accept)
        assert answer.status in {200, 400}


def test_unexpected_error_costs_one_answer_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    answer, payload = ask(make(ZeroDivisionError("a bug")), X.tobytes())
    assert answer.status == 500
    assert json.loads(payload)["error"] == "the worker failed: ZeroDivisionError"
    assert "a bug" in caplog.text


@pytest.mark.parametrize("value", [np.float32(0.1234567), 0.1234567, np.int64(1 << 60)])
def test_json_answer_over_the_limit_names_the_way_that_has_room(
    monkeypatch: pytest.MonkeyPatch, value: Any
) -> None:
    monkeypatch.setattr(model_module, "MAX_ANSWER_BYTES", 1 << 20)
    model = make(results={"big": np.full(1 << 17, value)})
    answer, payload = ask(model, X.tobytes(), accept=JSON)
    assert answer.status == 500
    assert "at most 1048576 bytes" in answer.message
    assert "application/octet-stream" in answer.message
    assert "output 'big' has 131072 values" in json.loads(payload)["error"]
    assert ask(model, X.tobytes(), accept=RAW)[0].status == 200


@pytest.mark.parametrize("accept", [JSON, RAW, CBOR])
def test_answer_that_no_content_type_has_room_for_is_refused(
    monkeypatch: pytest.MonkeyPatch, accept: str
) -> None:
    monkeypatch.setattr(model_module, "MAX_ANSWER_BYTES", 1000)
    answer, _ = ask(make(results={"big": np.zeros(1000, np.float32)}), X.tobytes(), accept=accept)
    assert answer.status == 500
    assert "at most 1000 bytes" in answer.message
    assert "octet-stream" not in answer.message


def test_more_outputs_than_properties_have_room_for_are_refused() -> None:
    results = {f"{number:0200}": np.zeros(1, np.float32) for number in range(1000)}
    answer, _ = ask(make(results=results), X.tobytes())
    assert answer.status == 500
    assert JSON in answer.message
    assert ask(make(results=results), X.tobytes(), accept=JSON)[0].status == 200


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)
tensor_values = st.fixed_dictionaries(
    {"name": st.sampled_from(["x", "y"]) | json_values},
    optional={
        "datatype": st.sampled_from(["FP32", "BYTES", "INT64"]) | json_values,
        "shape": st.sampled_from([[4], [2, 2], [], [1 << 64]]) | json_values,
        "data": st.lists(st.floats(allow_nan=False) | json_values, max_size=5) | json_values,
        "parameters": json_values,
    },
)
documents = st.fixed_dictionaries(
    {"inputs": st.lists(tensor_values, max_size=3) | json_values},
    optional={"id": st.text(st.characters(codec=None)) | json_values, "outputs": json_values},
)
bodies = (
    st.binary(max_size=40)
    | st.just(X.tobytes())
    | documents.map(lambda document: json.dumps(document).encode())
    | json_values.map(cbor2.dumps)
)
types = st.sampled_from(["", JSON, RAW, CBOR, "image/jpeg", "application/json; charset=utf-8"]) | st.text(
    st.characters(codec=None), max_size=20
)


@pytest.mark.slow
@given(
    payload=bodies,
    content_type=types,
    accept=st.none() | types,
    tensors=st.lists(st.just("x;FP32;4") | st.text(st.characters(codec=None), max_size=20), max_size=3),
    name=st.none() | st.text(st.characters(codec=None), max_size=256),
    client_json=st.booleans(),
)
def test_every_request_gets_an_answer_that_the_agent_accepts(
    payload: bytes,
    content_type: str,
    accept: str | None,
    tensors: list[str],
    name: str | None,
    client_json: bool,
) -> None:
    answer, _ = ask(
        make(),
        payload,
        content_type=content_type,
        accept=accept,
        tensors=tuple(tensors),
        id=name,
        client_json=client_json,
    )
    assert "failed" not in answer.message
