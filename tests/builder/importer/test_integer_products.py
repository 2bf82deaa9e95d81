"""MatMulInteger in each of its forms, against exact integers.

ONNX Runtime is no reference here: it saturates sums of pairs of uint8 times int8 on processors with AVX2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from builder.importer import import_onnx
from builder.kernels.rewriter import op_name
from tests.builder.importer.conftest import ModelMaker

_TYPES = {"uint8": TensorProto.UINT8, "int8": TensorProto.INT8}
# Shape of A; dtypes of A and B; zero points of A and B, None if the input is absent.
Zero = int | Sequence[int] | None
CASES: dict[str, tuple[tuple[int, ...], str, str, Zero, Zero]] = {
    "without zero points": ((3, 6), "uint8", "int8", None, None),
    "a zero point of A": ((3, 6), "uint8", "int8", 200, None),
    "one in a list": ((3, 6), "int8", "int8", [-128], [3]),
    "one for each row": ((3, 6), "uint8", "uint8", [0, 255, 7], 128),
    "one for each column": ((2, 3, 6), "int8", "int8", -5, [0, 1, -2, 0]),
    "rows of a batch": ((2, 3, 6), "uint8", "int8", [1, 2, 3], [1, 0, 0, -1]),
    "only of B": ((3, 6), "uint8", "uint8", None, [128, 127, 129, 128]),
    "differences wider than a byte": ((3, 6), "uint8", "uint8", 9, 0),
    "a vector": ((6,), "uint8", "int8", 9, 0),
    "one row": ((1, 6), "int8", "uint8", [4], 128),
}


def extremes(random: np.random.Generator, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    info = np.iinfo(dtype)
    return np.where(
        random.random(shape) < 0.5, info.max, random.integers(int(info.min), int(info.max) + 1, shape)
    ).astype(dtype)


def make(make_model: ModelMaker, name: str) -> tuple[onnx.ModelProto, NDArray[Any], NDArray[Any]]:
    """Return a model, its input and the exact result."""
    shape, left, right, a_zero, b_zero = CASES[name]
    random = np.random.default_rng(7)
    a, b = extremes(random, shape, left), extremes(random, (6, 4), right)
    weights = {"b": b}
    for key, zero, dtype in (("az", a_zero, left), ("bz", b_zero, right)):
        if zero is not None:
            weights[key] = np.array(zero, dtype)
    inputs = ["a", "b", "az" if a_zero is not None else "", "bz" if b_zero is not None else ""]
    node = helper.make_node("MatMulInteger", inputs, ["y"])
    rows = np.array(0 if a_zero is None else a_zero, "i8")
    rows = rows.reshape(-1, 1) if rows.size > 1 else rows.reshape(())
    exact = (a.astype("i8") - rows) @ (b.astype("i8") - np.array(0 if b_zero is None else b_zero, "i8"))
    output = {"y": (list(exact.shape), TensorProto.INT32)}
    return make_model([node], {"a": (list(shape), _TYPES[left])}, output, weights), a, exact


@pytest.mark.parametrize("name", CASES)
def test_sums_are_exact(name: str, make_model: ModelMaker, run_relax: Any, run_onnx: Any) -> None:
    model, a, exact = make(make_model, name)
    imported = import_onnx(model)
    (got,) = run_relax(imported.mod, [a])
    assert got.dtype == np.int32
    assert np.array_equal(got, exact)
    if name in ("one for each row", "rows of a batch"):
        return  # ONNX Runtime has only one zero point for A
    # The reference of later comparisons has weights of which ONNX Runtime computes exact sums.
    assert np.array_equal(run_onnx(imported.onnx, {"a": a})[0], exact)


@pytest.mark.parametrize(
    "name", ["without zero points", "a zero point of A", "one for each row", "a vector", "one row"]
)
def test_operands_stay_bytes(name: str, make_model: ModelMaker) -> None:
    mod = import_onnx(make(make_model, name)[0]).mod
    values = [b.value for block in mod["main"].body.blocks for b in block.bindings]
    products = [v for v in values if hasattr(v, "op") and op_name(v) == "relax.matmul"]
    assert [[str(arg.ty.dtype) for arg in v.args] for v in products] == [[CASES[name][1], "int8"]]


def test_a_product_of_two_inputs_is_left_to_tvm(make_model: ModelMaker, run_relax: Any) -> None:
    node = helper.make_node("MatMulInteger", ["a", "b"], ["y"])
    types = {"a": ([2, 3], TensorProto.UINT8), "b": ([3, 4], TensorProto.INT8)}
    model = make_model([node], types, {"y": ([2, 4], TensorProto.INT32)})
    a, b = np.full((2, 3), 255, "u1"), np.full((3, 4), -128, "i1")
    (got,) = run_relax(import_onnx(model).mod, [a, b])
    assert (got == -3 * 255 * 128).all()
