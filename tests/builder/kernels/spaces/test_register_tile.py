"""The register tile: extents without a remainder, and accumulators that fit the registers."""

from __future__ import annotations

import pytest

from builder.kernels.spaces.register_tile import best_tile, divisors, multiplies_by_element
from builder.target.device_target import DeviceTarget, resolve
from tests.builder.kernels.machines import element_machine


def test_divisors_are_ascending_and_bounded() -> None:
    assert divisors(12, 6) == (1, 2, 3, 4, 6)
    assert divisors(7, 3) == (1,)


def test_arm_and_only_arm_multiplies_by_an_element() -> None:
    assert multiplies_by_element(resolve("rpi4"))
    assert not multiplies_by_element(resolve("x86-64-v3"))


@pytest.mark.parametrize("columns", [1, 7, 14, 56])
def test_tile_leaves_registers_for_its_operands(columns: int, target: DeviceTarget) -> None:
    v, c = best_tile(divisors(8, 8), divisors(columns, 32), target, held=False)
    assert v * c < target.simd.registers
    v, c = best_tile(divisors(8, 8), divisors(columns, 32), element_machine(), held=True)
    assert v * c + c < element_machine().simd.registers


def test_the_tile_is_one_by_one_if_nothing_fits(target: DeviceTarget) -> None:
    assert best_tile((64,), (64,), target, held=False) == (1, 1)
