from __future__ import annotations

import json

import numpy as np

from agent.worker.channel import Ready
from tests.agent.worker.conftest import Spawn


def test_a_model_is_served(spawn: Spawn) -> None:
    worker = spawn("twice")
    assert isinstance(worker.loaded, Ready), worker.loaded
    print(worker.loaded)
    np.testing.assert_array_equal(worker.infer_raw(1, 2, 3, 4), [2, 4, 6, 8])
    body = {"id": "a", "inputs": [{"name": "x", "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4.5]}]}
    answer, payload = worker.infer(json.dumps(body).encode(), content_type="application/json")
    assert answer.status == 200, answer
    assert json.loads(payload)["outputs"] == [
        {"name": "y", "datatype": "FP32", "shape": [4], "data": [2, 4, 6, 9]}
    ]
