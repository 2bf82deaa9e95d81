"""A model is compared with what its own framework computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from builder.compiling.framework_parity import check_import
from builder.errors import ParityError
from builder.importer import ImportedModel, import_onnx
from builder.importer.frameworks.sample import FrameworkSample

X = np.random.default_rng(0).standard_normal((1, 6)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((6, 4)).astype(np.float32)
SCALE, ZERO = np.float32(0.05), np.uint8(128)


def model(*, quantised: bool = False) -> ImportedModel:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y" if not quantised else "m"])]
    weights = {"w": W}
    if quantised:
        weights |= {"s": np.array(SCALE), "z": np.array(ZERO)}
        nodes += [
            helper.make_node("QuantizeLinear", ["m", "s", "z"], ["q"]),
            helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
            helper.make_node("Relu", ["d"], ["y"]),
        ]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, 6))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (1, 4))],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()],
    )
    opset = [helper.make_opsetid("", 17)]
    return import_onnx(helper.make_model(graph, opset_imports=opset, ir_version=8))


def with_sample(
    imported: ImportedModel, *outputs: Any, steps: Any = (), rounding: float = 0.0
) -> ImportedModel:
    sample = FrameworkSample("PyTorch 2", {"x": X}, outputs, tuple(steps), rounding)
    return replace(imported, reference=sample)


def test_without_a_framework_nothing_is_compared() -> None:
    assert check_import(model()) is None


def test_a_model_that_agrees() -> None:
    agreement = check_import(with_sample(model(), X @ W))
    assert agreement is not None
    assert agreement.framework == "PyTorch 2"
    assert agreement.error < 1e-6
    assert agreement.text.startswith("agrees with PyTorch 2: relative error")


@pytest.mark.parametrize("factor", [1.001, 1.02, -1.0])
def test_a_model_that_differs_is_refused(factor: float) -> None:
    wrong = (X @ W * factor).astype(np.float32)
    with pytest.raises(ParityError, match=r"output y: expected a relative error .* against PyTorch 2"):
        check_import(with_sample(model(), wrong))


def test_half_precision_may_be_rounded_by_the_framework() -> None:
    rounded = (X @ W).astype(np.float16).astype(np.float32)
    with pytest.raises(ParityError):
        check_import(with_sample(model(), rounded))
    assert check_import(with_sample(model(), rounded, rounding=1e-2)) is not None
    with pytest.raises(ParityError):
        check_import(with_sample(model(), (X @ W * 1.02).astype(np.float32), rounding=1e-2))


def test_steps_are_compared_one_by_one() -> None:
    steps = np.clip(np.rint(X @ W / SCALE) + ZERO, 0, 255).astype(np.uint8)
    output = np.maximum((steps.astype(np.float32) - ZERO) * SCALE, 0).astype(np.float32)
    agreement = check_import(with_sample(model(quantised=True), output, steps=[steps]))
    assert agreement is not None
    assert "1 quantised tensors agree" in agreement.text
    off = steps.copy()
    off[0] = off[0] + 2
    wrong = np.maximum((off.astype(np.float32) - ZERO) * SCALE, 0).astype(np.float32)
    with pytest.raises(ParityError, match="quantised tensor q: expected the steps of PyTorch 2"):
        check_import(with_sample(model(quantised=True), wrong, steps=[off]))
