"""A worker's model with batches from 1 to 6, whose kernel is numpy's."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from agent.bundle.buckets import Buckets, Dimension, InputAxis, OutputAxis
from agent.bundle.processing import Postprocess
from agent.bundle.tensor_spec import TensorSpec
from agent.runtime.bucketed_module import BucketedModule
from agent.runtime.postprocess import Postprocessor
from agent.runtime.program import Kernels
from agent.worker.codec import import_cbor
from agent.worker.frames import Answer, Request
from agent.worker.model import Model, Prepared
from tests.bundles import FILES, make_manifest
from tests.fake_module import FakeModule, GraphBuilder, params

RAW, JSON, CBOR = "application/octet-stream", "application/json", "application/cbor"
BUCKETS = Buckets(
    (Dimension("batch", 1, 6, (2, 6)),),
    (InputAxis("x", 0, "batch"),),
    (OutputAxis("y", 0, "batch"),),
    "batch",
)
X, Y = TensorSpec("x", "FP32", (6, 3)), TensorSpec("y", "FP32", (6, 3))
MANIFEST = make_manifest({**FILES, "buckets/00.json": b"{}"}, inputs=(X,), outputs=(Y,), buckets=BUCKETS)


def model(postprocess: Postprocess | None = None, kernels: Kernels | None = None) -> Model:
    """y = relu(x), for batches from 1 to 6."""
    described = replace(MANIFEST, postprocess=postprocess)
    graphs = []
    for size in (2, 6):
        g = GraphBuilder()
        graphs.append(g.graph(g.call("relu", [g.input("x", (size, 3))], (size, 3))))
    module = BucketedModule(BUCKETS, (X,), (Y,), graphs, kernels or FakeModule())
    module.load_params(params())
    prepared = SimpleNamespace(
        manifest=described,
        preprocessor=None,
        postprocessor=Postprocessor(postprocess, described.smallest_outputs),
        cbor=import_cbor(),
        rows=None,
    )
    return Model(cast(Prepared, prepared), module, 0.0)


def ask(made: Model, payload: bytes, **fields: Any) -> tuple[Answer, bytes]:
    answer, body = made.answer(Request(7, **{"content_type": RAW, **fields}), memoryview(payload))
    return answer, bytes(body)


def rows(n: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(n).standard_normal((n, 3)).astype(np.float32)
