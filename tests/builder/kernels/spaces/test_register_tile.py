"""The register tile: extents without a remainder, and accumulators that fit the registers."""

from __future__ import annotations

import pytest
from tvm import s_tir as st
from tvm import te

from builder.kernels.spaces.register_tile import (
    TileChoices,
    best_tile,
    divisors,
    even_part,
    multiplies_by_element,
    tilings,
    unroll_rounds,
)
from builder.target.device_target import DeviceTarget, resolve
from tests.builder.kernels.machines import element_machine


def test_divisors_are_ascending_and_bounded() -> None:
    assert divisors(12, 6) == (1, 2, 3, 4, 6)
    assert divisors(7, 3) == (1,)


def test_tilings_are_even_and_include_the_divisors() -> None:
    assert tilings(73, 32) == (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 15, 19, 25)
    assert all(set(divisors(n, 32)) <= set(tilings(n, 32)) for n in range(1, 200))


def test_parts_are_divisors_unless_these_are_too_small() -> None:
    assert even_part(56, 30) == 28
    assert even_part(56, 56) == 56
    assert even_part(17, 8) == 6
    assert even_part(3, 100) == 3


def test_arm_and_only_arm_multiplies_by_an_element() -> None:
    assert multiplies_by_element(resolve("rpi4"))
    assert not multiplies_by_element(resolve("x86-64-v3"))


@pytest.mark.parametrize("columns", [1, 7, 14, 17, 56, 73])
def test_tile_leaves_registers_for_its_operands(columns: int, target: DeviceTarget) -> None:
    choices = TileChoices((8, columns), tilings(8, 8), tilings(columns, 32))
    v, c = best_tile(choices, target, held=False)
    assert v * c < target.simd.registers
    v, c = best_tile(choices, element_machine(), held=True)
    assert v * c + c < element_machine().simd.registers


def test_the_tile_is_one_by_one_if_nothing_fits(target: DeviceTarget) -> None:
    assert best_tile(TileChoices((64, 64), (64,), (64,)), target, held=False) == (1, 1)


@pytest.mark.parametrize(
    ("extent", "left"), [(1, 1), (2, 2), (3, 3), (4, 2), (6, 2), (8, 2), (12, 3), (7, 7)]
)
def test_rounds_are_never_unrolled_completely(extent: int, left: int) -> None:
    x = te.placeholder((extent,), "float32")
    sch = st.Schedule(te.create_prim_func([x, te.compute((extent,), lambda i: x[i] + 1.0, name="y")]))
    (loop,) = sch.get_loops(sch.get_sblock("y"))
    assert int(sch.get(unroll_rounds(sch, loop)).extent) == left


@pytest.mark.parametrize(("pixels", "left"), [(28, 2), (56, 4), (112, 8)])
def test_rounds_whose_loads_are_far_apart_are_not_unrolled(pixels: int, left: int) -> None:
    x = te.placeholder((8,), "float32")
    sch = st.Schedule(te.create_prim_func([x, te.compute((8,), lambda i: x[i] + 1.0, name="y")]))
    (loop,) = sch.get_loops(sch.get_sblock("y"))
    assert int(sch.get(unroll_rounds(sch, loop, bytes_apart=16 * pixels**2)).extent) == left
