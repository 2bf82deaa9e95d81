"""Products of small integers with constant weights, against exact integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import relax

from builder.kernels.decisions import heuristic
from builder.kernels.spaces import integer_matmul
from builder.target.device_target import DeviceTarget
from tests.builder.kernels.integer_machines import (
    DEVICES,
    RandomChooser,
    any_bytes,
    device,
    numbers,
    run_here,
)


def multiply(
    x: np.ndarray, w: np.ndarray, zeros: tuple[int, int], target: DeviceTarget, choose: Any = heuristic
) -> None:
    """Multiply as numbers with scales of 1, and compare with the sums of integers."""
    kind = str(x.dtype)

    def build(v: relax.Expr) -> relax.Expr:
        return relax.op.matmul(
            numbers(v, zeros[0], kind), numbers(relax.const(w), zeros[1], str(w.dtype), axis=1)
        )

    result = run_here(build, {"x": x}, target, choose)
    assert integer_matmul.KIND in result.schedules
    wanted = (x.astype("i8") - zeros[0]) @ (w.astype("i8") - zeros[1])
    assert np.array_equal(result.outputs[0].astype("i8"), wanted)


# Shape of the left operand, columns, dtype, zero point.
CASES: list[tuple[tuple[int, ...], int, str, int]] = [
    ((1, 64), 10, "uint8", 255),
    ((7, 33), 40, "int8", -128),
    ((2, 5, 18), 17, "uint8", 0),
    ((1, 13, 3), 1, "int8", 127),
    ((2, 3, 4, 30), 31, "uint8", 128),
    ((1, 1), 9, "int8", 3),
    ((7, 65), 40, "uint8", 3),
    ((16, 16), 64, "int8", 0),
    ((3, 1, 21), 100, "uint8", 7),
    ((5, 2), 16, "int8", -1),
    ((1, 200), 3, "uint8", 130),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), list(zip(DEVICES, CASES, strict=True)))
def test_sums_are_exact(name: str, case: tuple[tuple[int, ...], int, str, int]) -> None:
    shape, columns, kind, zero = case
    random = np.random.default_rng(6)
    w = any_bytes(random, (shape[-1], columns), "int8")
    multiply(any_bytes(random, shape, kind), w, (zero, 0), device(name))


@pytest.mark.parametrize("name", ["rpi5", "alderlake"])
def test_weights_with_a_zero_point_fit_a_byte_or_stay_numbers(name: str) -> None:
    random = np.random.default_rng(8)
    x, w = any_bytes(random, (3, 10), "uint8"), random.integers(100, 220, (10, 6)).astype("uint8")
    multiply(x, w, (5, 128), device(name))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seed"), [("rpi4", 1), ("cascadelake", 3)])
def test_every_point_of_the_space_is_valid(name: str, seed: int) -> None:
    random, chooser = np.random.default_rng(seed), RandomChooser(seed)
    multiply(
        any_bytes(random, (11, 40), "int8"),
        any_bytes(random, (40, 50), "int8"),
        (4, 0),
        device(name),
        chooser,
    )
    assert set(chooser.made) >= {"rows", "k"}


def test_panels_are_filled_with_zeros() -> None:
    packed = integer_matmul.pack(np.arange(5 * 3, dtype="int8").reshape(5, 3), panel=4, group=2)
    assert packed.shape == (1, 3, 4, 2)
    assert packed[0, 1, 2].tolist() == [2 * 3 + 2, 3 * 3 + 2]
    assert not packed[0, :, 3].any()
    assert not packed[0, 2, :, 1].any()
