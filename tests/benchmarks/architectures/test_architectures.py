"""Generated networks are valid and reproducible, and their outputs depend on their inputs."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from benchmarks.architectures import ARCHITECTURES, generate
from benchmarks.architectures.network import Network
from benchmarks.architectures.slim320 import priors

pytestmark = pytest.mark.slow

SMALL: dict[str, dict[str, int]] = {
    "resnet18": {"size": 64, "width": 16},
    "resnet50": {"size": 64, "width": 16},
    "resnet50-v2": {"size": 64, "width": 16},
    "mobilenetv2": {"size": 64},
    "mobilenetv3": {"size": 64},
    "efficientnet-b0": {"size": 64},
    "bert": {"layers": 2, "hidden": 96, "heads": 4, "vocabulary": 200, "positions": 64},
    "slim-320": {"height": 64, "width": 64},
}

network = functools.cache(generate)


def feeds(name: str, seed: int) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    if name == "bert":
        return {
            "input_ids": random.integers(0, 200, (1, 20)),
            "attention_mask": np.ones((1, 20), np.int64),
            "token_type_ids": np.zeros((1, 20), np.int64),
        }
    # Smooth blobs: pictures differ in their large structures, not in their noise.
    coarse = random.standard_normal((1, 3, 4, 4)).repeat(16, axis=2).repeat(16, axis=3)
    return {"data" if name == "resnet50-v2" else "input": coarse.astype(np.float32)}


def run(model: onnx.ModelProto, values: dict[str, Any]) -> list[Any]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return list(session.run(None, values))


def test_every_architecture_is_tested() -> None:
    assert set(SMALL) == set(ARCHITECTURES)


@pytest.mark.parametrize("name", SMALL)
def test_models_are_valid(name: str) -> None:
    onnx.checker.check_model(network(name, **SMALL[name]), full_check=True)


@pytest.mark.parametrize("name", SMALL)
def test_the_same_seed_gives_the_same_bytes_and_another_does_not(name: str) -> None:
    first, second, other = (
        generate(name, seed, **SMALL[name]).SerializeToString(deterministic=True) for seed in (0, 0, 1)
    )
    assert first == second
    assert first != other


@pytest.mark.parametrize("name", SMALL)
def test_activations_stay_sane_and_outputs_depend_on_inputs(name: str) -> None:
    model = network(name, **SMALL[name])
    first, second = (run(model, feeds(name, seed)) for seed in (1, 2))
    for one, other in zip(first, second, strict=True):
        assert np.isfinite(one).all()
        assert 0.1 < one.std() < 50
        assert np.abs(one - other).max() > 0.05 * one.std()


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("resnet18", 11.69),
        ("resnet50", 25.56),
        ("resnet50-v2", 25.55),
        ("mobilenetv2", 3.50),
        ("mobilenetv3", 5.48),
        ("efficientnet-b0", 5.29),
        ("bert", 109.48),
        ("slim-320", 0.2602),
    ],
)
def test_full_models_have_the_published_number_of_weights(
    name: str, millions: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Their number is counted, so they are not drawn: that takes seconds.
    monkeypatch.setattr(Network, "normal", lambda _self, *shape, **_: np.zeros(shape, np.float32))
    model = generate(name)
    # Running means and variances are statistics, which the papers do not count.
    counted = [
        t
        for t in model.graph.initializer
        if "running" not in t.name and t.data_type == onnx.TensorProto.FLOAT
    ]
    total = sum(int(np.prod(t.dims)) for t in counted) / 1e6
    assert total == pytest.approx(millions, rel=0.003)


def test_slim_320_has_the_boxes_of_the_original() -> None:
    model = generate("slim-320")
    shapes = {o.name: [d.dim_value for d in o.type.tensor_type.shape.dim] for o in model.graph.output}
    assert shapes == {"scores": [1, 4420, 2], "boxes": [1, 4420, 4]}
    first = priors(240, 320)[0]
    np.testing.assert_allclose(first, [0.0125, 0.01666667, 0.03125, 0.04166667], rtol=1e-5)


def test_resnet50_v2_has_the_zoos_form() -> None:
    model = generate("resnet50-v2", size=32, width=16)
    batch = model.graph.input[0].type.tensor_type.shape.dim[0]
    assert model.graph.input[0].name == "data"
    assert batch.dim_param == "N"
    assert model.ir_version == 3
    assert model.opset_import[0].version == 7
    assert {t.name for t in model.graph.initializer} < {value.name for value in model.graph.input}


def test_bert_has_the_traps_of_its_export() -> None:
    model = network("bert", **SMALL["bert"])
    operators = {node.op_type for node in model.graph.node}
    assert {
        "Shape",
        "Gather",
        "Unsqueeze",
        "Concat",
        "Slice",
        "Where",
        "Expand",
        "ConstantOfShape",
        "Erf",
    } <= operators
    assert "LayerNormalization" not in operators
    for value in model.graph.input:
        assert value.type.tensor_type.elem_type == onnx.TensorProto.INT64
        assert [d.dim_param for d in value.type.tensor_type.shape.dim] == ["batch_size", "sequence_length"]


def test_bert_ignores_masked_tokens() -> None:
    model = network("bert", **SMALL["bert"])
    values = feeds("bert", 1)
    values["attention_mask"][0, 10:] = 0
    first = run(model, values)[0]
    values["input_ids"][0, 10:] = 7
    np.testing.assert_allclose(run(model, values)[0][:, :10], first[:, :10], rtol=1e-4, atol=1e-5)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(KeyError, match="resnet50-v2"):
        generate("vgg")
