"""What TVM's front end writes is replaced by what later passes know, with the same results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from tvm.ir import Call

from builder.calls.spans import bindings_of, names_of
from builder.importer.relax_module import convert
from builder.kernels.rewriter import op_name

ModelMaker = Callable[..., onnx.ModelProto]
Arrays = Sequence[np.ndarray]


def operators(mod: Any) -> list[str]:
    values = [binding.value for binding in bindings_of(mod)]
    return [op_name(value) for value in values if isinstance(value, Call)]


@pytest.mark.parametrize("sizes", [None, [1, 4, 2]])
def test_a_split_of_channels_is_slices(
    sizes: list[int] | None, make_model: ModelMaker, run_onnx: Any, run_relax: Any
) -> None:
    x = np.random.RandomState(1).randn(2, 7, 5).astype("f4")
    counts = sizes or [4, 3]
    names = [f"y{place}" for place in range(len(counts))]
    inputs, weights = (["x"], {}) if sizes is None else (["x", "s"], {"s": np.array(sizes)})
    how = {"num_outputs": 2} if sizes is None else {}
    node = helper.make_node("Split", inputs, names, name="parts", axis=1, **how)
    outputs = {name: [2, count, 5] for name, count in zip(names, counts, strict=True)}
    model = make_model([node], {"x": [2, 7, 5]}, outputs, weights, opset=18)
    mod = convert(model)
    assert operators(mod) == ["relax.strided_slice"] * len(counts)
    assert all(names_of(b.value) == ("parts",) for b in bindings_of(mod) if isinstance(b.value, Call))
    for got, wanted in zip(run_relax(mod, [x]), run_onnx(model, {"x": x}), strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("shape", [[2, 4, 5], [1, 4, 3, 2, 5]])
def test_a_batch_norm_of_signals_and_videos_is_a_scale_and_a_shift(
    shape: list[int], make_model: ModelMaker, run_onnx: Any, run_relax: Any
) -> None:
    state = np.random.RandomState(2)
    weights = {name: state.rand(4).astype("f4") + 0.5 for name in ("gamma", "beta", "mean", "variance")}
    node = helper.make_node("BatchNormalization", ["x", *weights], ["y"], name="norm", epsilon=1e-3)
    model = make_model([node], {"x": shape}, {"y": shape}, weights)
    mod = convert(model)
    assert operators(mod) == ["relax.multiply", "relax.add"]
    x = state.randn(*shape).astype("f4")
    np.testing.assert_allclose(run_relax(mod, [x])[0], run_onnx(model, {"x": x})[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("mode", "name"), [("constant", "constant"), ("reflect", "reflect"), ("edge", "replicate")]
)
def test_padding_is_an_operator(
    mode: str, name: str, make_model: ModelMaker, run_onnx: Any, run_relax: Any
) -> None:
    pads = np.array([0, 0, 1, 2, 0, 0, 2, 0])
    node = helper.make_node("Pad", ["x", "p"], ["y"], mode=mode)
    model = make_model([node], {"x": [1, 2, 4, 5]}, {"y": [1, 2, 7, 7]}, {"p": pads}, opset=18)
    mod = convert(model)
    assert operators(mod) == ["relax.nn.pad"]
    assert str(bindings_of(mod)[0].value.attrs.pad_mode) == name
    x = np.random.RandomState(3).randn(1, 2, 4, 5).astype("f4")
    np.testing.assert_array_equal(run_relax(mod, [x])[0], run_onnx(model, {"x": x})[0])
