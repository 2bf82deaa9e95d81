"""What heuristics know about a core."""

from __future__ import annotations

import pytest

from builder.target.core import Core
from builder.target.device_target import resolve
from builder.target.presets import PRESETS
from builder.target.simd import Simd

SIMD = Simd(8, 16, fma=True)
CORE = Core.of("x86_64", "znver3", SIMD)


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "host"])
def test_the_core_of_a_preset_is_the_same_on_every_machine(name: str) -> None:
    target = resolve(name)
    assert target.core == Core.of(target.arch, target.cpu, target.simd)


def test_naming_the_cpu_of_a_preset_means_the_same_core() -> None:
    custom = resolve("llvm -mtriple=aarch64-linux-gnu -mcpu=cortex-a76")
    assert custom.core == resolve("rpi5").core


def test_an_unknown_cpu_has_the_usual_core_of_its_kind() -> None:
    assert Core.of("aarch64", "cortex-x99", Simd(4, 32, fma=True)) == resolve("rpi4").core
    assert Core.of("x86_64", "x86-64-v4", Simd(16, 32, fma=True)).l2_bytes == 1 << 20


def test_prefetches_are_for_cores_with_many_misses_in_flight() -> None:
    assert {name for name in PRESETS if resolve(name).core.prefetches} >= {"x86-64-v3"}
    assert not resolve("rpi4").core.prefetches
