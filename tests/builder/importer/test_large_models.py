"""Models that are too large for one message, with a limit that a small one exceeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from google.protobuf.message import Message
from onnx import helper

from builder import compile, load, run
from builder.errors import ModelError
from builder.importer import import_onnx, large_models
from builder.quantising.weights_only import quantize_weights
from tests.builder.importer.conftest import ModelMaker, Runner

LIMIT = 100_000


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of a hundred kilobytes are too large, and writing one as a message fails, as it would."""
    monkeypatch.setattr(large_models, "MAX_MESSAGE_BYTES", LIMIT)
    write = onnx.ModelProto.SerializeToString
    assert issubclass(onnx.ModelProto, Message)

    def refuse(model: onnx.ModelProto, **options: Any) -> bytes:
        raw: bytes = write(model, **options)
        assert len(raw) <= LIMIT, f"a message of {len(raw)} bytes was written"
        return raw

    monkeypatch.setattr(onnx.ModelProto, "SerializeToString", refuse)


def model(make_model: ModelMaker) -> onnx.ModelProto:
    """Two layers and a normalisation between them, whose weights have 270 kB."""
    draw = np.random.default_rng(0)
    weights = {
        "a": draw.standard_normal((64, 512)).astype(np.float32),
        "scale": np.ones(512, np.float32) * 1.5,
        "b": draw.standard_normal((512, 64)).astype(np.float32),
        "bias": draw.standard_normal(64).astype(np.float32),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"]),
        helper.make_node("Mul", ["h", "scale"], ["s"]),
        helper.make_node("Relu", ["s"], ["r"]),
        helper.make_node("MatMul", ["r", "b"], ["m"]),
        helper.make_node("Add", ["m", "bias"], ["y"]),
    ]
    return make_model(nodes, {"x": [1, 64]}, {"y": [1, 64]}, weights)


def saved(proto: onnx.ModelProto, folder: Path) -> Path:
    path = folder / "model.onnx"
    onnx.save(proto, str(path), save_as_external_data=True, location="model.data", size_threshold=100)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "error"), [("weights-int8", 0.03), ("weights-int4", 0.3)])
def test_external_weights_become_a_small_bundle(
    tmp_path: Path,
    make_model: ModelMaker,
    run_onnx: Runner,
    request: pytest.FixtureRequest,
    precision: Any,
    error: float,
) -> None:
    proto = model(make_model)
    x = np.random.default_rng(1).standard_normal((1, 64)).astype(np.float32)
    [wanted] = run_onnx(proto, {"x": x})
    path = saved(proto, tmp_path)
    request.getfixturevalue("limited")
    imported = load(path)
    quantised = quantize_weights(imported, precision)
    assert quantised.report.float_bytes > LIMIT
    package = compile(quantised.imported())
    [found] = run(package, {"x": x}).outputs.values()
    assert 0 < np.abs(found - wanted).max() < error * np.abs(wanted).max()


def test_what_is_imported_is_what_is_imported_in_one_message(
    tmp_path: Path, make_model: ModelMaker, run_onnx: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(model(make_model), tmp_path)
    whole = load(path)
    with monkeypatch.context() as patch:
        patch.setattr(large_models, "MAX_MESSAGE_BYTES", LIMIT)
        parts = load(path)
        assert large_models.is_too_large(parts.onnx)
    assert parts.source_sha256 == whole.source_sha256
    x = np.random.default_rng(1).standard_normal((1, 64)).astype(np.float32)
    np.testing.assert_allclose(
        run_onnx(parts.onnx, {"x": x})[0], run_onnx(whole.onnx, {"x": x})[0], rtol=1e-5, atol=1e-5
    )


def test_the_digest_of_a_model_in_memory_is_that_of_all_its_weights(
    make_model: ModelMaker, limited: None
) -> None:
    first, second = model(make_model), model(make_model)
    assert import_onnx(first).source_sha256 == import_onnx(second).source_sha256
    numbers = np.array(onnx.numpy_helper.to_array(second.graph.initializer[0]))
    numbers[3, 4] += 1
    second.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(numbers, "a"))
    assert import_onnx(first).source_sha256 != import_onnx(second).source_sha256


def test_too_many_weights_are_refused_before_they_are_read(
    tmp_path: Path, make_model: ModelMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builder.importer.model_file.MAX_WEIGHT_BYTES", 200_000)
    with pytest.raises(ModelError, match="expected at most 200000 bytes of weights"):
        load(saved(model(make_model), tmp_path))
