"""What a worker answers for a model whose shapes change: every content type, and sizes that do not fit."""

from __future__ import annotations

import json

import cbor2
import numpy as np
import pytest

from agent.bundle.processing import Postprocess, TopK
from tests.agent.worker.batched_model import CBOR, JSON, ask, model, rows


def test_raw_tensors_of_any_size() -> None:
    made = model()
    for n in (6, 1, 2, 5):
        for properties in ((f"x;FP32;{n},3",), ()):
            answer, body = ask(made, rows(n).tobytes(), tensors=properties)
            assert (answer.status, answer.tensors) == (200, (f"y;FP32;{n},3",))
            np.testing.assert_array_equal(np.frombuffer(body, "<f4").reshape(n, 3), np.maximum(rows(n), 0))


def test_documents_of_any_size() -> None:
    made = model()
    for n in (3, 1):
        flat = rows(n).ravel().tolist()
        tensor = {"name": "x", "datatype": "FP32", "shape": [n, 3], "data": flat}
        answer, body = ask(made, json.dumps({"inputs": [tensor]}).encode(), content_type=JSON)
        (output,) = json.loads(body)["outputs"]
        assert (answer.status, output["shape"]) == (200, [n, 3])
        tensor["data"] = rows(n).tobytes()
        answer, body = ask(made, cbor2.dumps({"inputs": [tensor]}), content_type=CBOR)
        assert cbor2.loads(body)["outputs"][0]["data"] == np.maximum(rows(n), 0).tobytes()


@pytest.mark.parametrize(
    "shape", ["0,3", "7,3", "4294967295,3", "9999999999,3", "2,4", "2", "", "2,3,1", "-1,3", "2,,3"]
)
def test_sizes_that_do_not_fit_get_a_status_and_the_bounds(shape: str) -> None:
    made = model()
    answer, _ = ask(made, b"\0" * 24, tensors=(f"x;FP32;{shape}",))
    assert answer.status == 400
    if shape in {"0,3", "7,3"}:
        assert "batch must be from 1 to 6" in answer.message
    assert ask(made, rows(2).tobytes())[0].status == 200  # the next one is served


@pytest.mark.parametrize("shape", [[0, 3], [7, 3], [-1, 3], [10**30, 3], [True, 3], [2.0, 3], "2,3", [2], []])
def test_hostile_shapes_in_a_document(shape: object) -> None:
    tensor = {"name": "x", "datatype": "FP32", "shape": shape, "data": [0] * 6}
    answer, _ = ask(model(), json.dumps({"inputs": [tensor]}).encode(), content_type=JSON)
    assert answer.status == 400


@pytest.mark.parametrize("nbytes", [0, 1, 11, 13, 84, 10_000])
def test_bytes_that_are_no_size(nbytes: int) -> None:
    answer, _ = ask(model(), bytes(nbytes))
    assert answer.status == 400
    assert "x [batch=1..6,3]" in answer.message


def test_an_answer_of_one_item_is_made_of_one_item() -> None:
    made = model(Postprocess((TopK("y", 2),)))
    answer, _ = ask(made, rows(2).tobytes())
    assert answer.status == 400
    assert "expected a batch of 1, got 2" in answer.message
    answer, body = ask(made, rows(1).tobytes(), accept=JSON)
    best = np.argsort(-np.maximum(rows(1)[0], 0), kind="stable")[:2].tolist()
    assert {each["name"]: each["data"] for each in json.loads(body)["outputs"]}["indices"] == best
