"""Residuals of bytes, which are widened where they are added and not where they are computed."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pytest
from tvm import relax

from builder.compiling.lower import LoweredModule
from tests.builder.kernels.integer_machines import any_bytes, const, device, lower_for, numbers, run_here
from tests.builder.kernels.machines import Build, conv2d

_RANDOM: Final = np.random.default_rng(0)
_X: Final = any_bytes(_RANDOM, (1, 64, 5, 6), "uint8")
_W: Final = [any_bytes(_RANDOM, (64, 64, 1, 1), "int8") for _ in range(2)]
# Powers of two, so that all float32 numbers are exact.
_SCALES: Final = (2.0**-10, 2.0**-9)
_ZEROS: Final = (100, 131)


def block(operation: Any, order: tuple[int, int], users: int = 1) -> Build:
    """Return a block whose two branches are quantised before `operation` combines them.

    `order` says which branch comes first; the second one has `users` readers.
    """

    def build(v: relax.Expr) -> relax.Expr:
        bytes_ = []
        for k in order:
            y = relax.op.nn.conv2d(numbers(v, 3, "uint8"), numbers(relax.const(_W[k]), 0, "int8"))
            zero, scale = const(_ZEROS[k], "uint8"), const(1 / _SCALES[k], "float32")
            bytes_.append(relax.op.quantize(y, scale, zero, axis=0, out_dtype="uint8"))
        first, second = (numbers(bytes_[order.index(k)], _ZEROS[k], "uint8", _SCALES[k]) for k in (0, 1))
        total = relax.op.nn.relu(operation(first, second))
        total = relax.op.quantize(
            total, const(2.0**-9, "float32"), const(0, "uint8"), axis=0, out_dtype="uint8"
        )
        return relax.Tuple([total, bytes_[1]]) if users > 1 else total

    return build


def wanted(operation: Any) -> np.ndarray:
    """Return the bytes of a block."""
    parts = []
    for w, scale, zero in zip(_W, _SCALES, _ZEROS, strict=True):
        y = conv2d(_X.astype("i8") - 3, w) * scale
        parts.append((np.clip(np.rint(y) + zero, 0, 255) - zero) * scale)
    return np.clip(np.rint(np.maximum(operation(*parts), 0) * 2.0**9), 0, 255).astype("u1")


def stored(lowered: LoweredModule) -> list[str]:
    """Return the types of what kernels store."""
    return [
        str(binding.value.ty_args[0].dtype)
        for dataflow in lowered.main.body.blocks
        for binding in dataflow.bindings
        if getattr(binding.value, "ty_args", None)
    ]


@pytest.mark.parametrize("name", ["host", "cascadelake", "x86-64-v3", "rpi5", "rpi4"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize(("ours", "numpys"), [(relax.op.add, np.add), (relax.op.subtract, np.subtract)])
def test_no_kernel_stores_bytes_as_float32(name: str, order: tuple[int, int], ours: Any, numpys: Any) -> None:
    result = run_here(block(ours, order), {"x": _X}, device(name))
    assert np.array_equal(result.outputs[0], wanted(numpys))
    assert "float32" not in stored(result.lowered)


def test_bytes_with_another_reader_are_stored_once() -> None:
    lowered = lower_for(block(relax.op.add, (0, 1), users=2), {"x": _X}, device("sapphirerapids"))
    assert "float32" not in stored(lowered)
    assert len(lowered.kernels.functions) <= 5


def test_a_residual_of_float32_stays() -> None:
    residual = np.ones((1, 64, 5, 6), "f4")

    def build(v: relax.Expr, r: relax.Expr) -> relax.Expr:
        y = relax.op.nn.conv2d(numbers(v, 3, "uint8"), numbers(relax.const(_W[0]), 0, "int8"))
        return relax.op.add(y, r)

    result = run_here(build, {"x": _X, "r": residual}, device("host"))
    assert np.array_equal(result.outputs[0], conv2d(_X.astype("i8") - 3, _W[0]) + 1)
