"""ConvInteger in each of its forms, against exact integers and ONNX Runtime."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from builder.importer import import_onnx
from builder.kernels.rewriter import op_name
from tests.builder.importer.conftest import ModelMaker
from tests.builder.kernels.machines import conv2d


@dataclass(frozen=True)
class Case:
    """A convolution; `point` is the zero point of the input, None if there is none."""

    shape: tuple[int, ...] = (2, 3, 6, 7)
    kernel: tuple[int, ...] = (4, 3, 3, 2)
    dtype: str = "uint8"
    zero: int = 117
    point: int | None = 77
    how: dict[str, Any] = field(default_factory=lambda: {"pads": [1, 0, 2, 1]})


CASES = {
    "weights of nine bits": Case(),
    "weights of a sign": Case(dtype="int8", zero=-3),
    "no zero points": Case(zero=0, point=None),
    "strides and dilation": Case(how={"strides": [2, 1], "dilations": [1, 2], "pads": [2, 2, 2, 2]}),
    "one dimension": Case((1, 3, 20), (4, 3, 5), how={"pads": [2, 1], "strides": [2]}),
    "no padding": Case(zero=128, how={}),
}


def make(make_model: ModelMaker, case: Case) -> tuple[onnx.ModelProto, dict[str, Any], Any]:
    """Return a model whose zero point is an input, its inputs and the exact result."""
    random = np.random.default_rng(3)
    x = random.integers(0, 256, case.shape).astype(np.uint8)
    info = np.iinfo(case.dtype)
    w = random.integers(int(info.min), int(info.max) + 1, case.kernel).astype(case.dtype)
    given = {"strides": [1, 1], "dilations": [1, 1], "pads": [0, 0, 0, 0], **case.how}
    data, weights = x.astype("f8") - (case.point or 0), w.astype("f8") - case.zero
    one = len(case.shape) == 3
    if one:
        data, weights = data[:, :, None], weights[:, :, None]
        given = {
            "strides": [1, *case.how["strides"]],
            "pads": [0, case.how["pads"][0], 0, case.how["pads"][1]],
        }
    exact = conv2d(
        data,
        weights,
        strides=tuple(given["strides"]),
        padding=tuple(given["pads"]),
        dilation=tuple(given.get("dilations", (1, 1))),
    )
    exact = exact[:, :, 0] if one else exact
    types: dict[str, Any] = {"x": (list(case.shape), TensorProto.UINT8)}
    feeds = {"x": x}
    if case.point is not None:
        types["p"] = ([1], TensorProto.UINT8)
        feeds["p"] = np.array([case.point], np.uint8)
    node = helper.make_node(
        "ConvInteger", ["x", "w", "p" if case.point is not None else "", "z"], ["y"], **case.how
    )
    output = {"y": (list(exact.shape), TensorProto.INT32)}
    constants = {"w": w, "z": np.array(case.zero, case.dtype)}
    return make_model([node], types, output, constants), feeds, exact


@pytest.mark.parametrize("name", CASES)
def test_sums_are_exact(name: str, make_model: ModelMaker, run_relax: Any, run_onnx: Any) -> None:
    model, feeds, exact = make(make_model, CASES[name])
    imported = import_onnx(model)
    (got,) = run_relax(imported.mod, list(feeds.values()))
    assert got.dtype == np.int32
    assert np.array_equal(got, exact)
    assert np.array_equal(run_onnx(imported.onnx, feeds)[0], exact), "the reference"
    values = [b.value for block in imported.mod["main"].body.blocks for b in block.bindings]
    convolutions = [v for v in values if hasattr(v, "op") and op_name(v) == "relax.nn.conv2d"]
    assert {str(arg.ty.dtype) for v in convolutions for arg in v.args} == {"uint8", "int8"}
