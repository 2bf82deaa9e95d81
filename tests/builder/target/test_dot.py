"""Which instruction multiplies small integers, for the cores that LLVM knows."""

from __future__ import annotations

import pytest

from builder.target.device_target import arch_of, dot_of, resolve
from builder.target.dot import TILE, Dot
from builder.target.presets import PRESETS

INSTRUCTIONS = {
    "cascadelake": ("x86.avx512.vpdpbusd.512", 16, "uint8"),
    "sapphirerapids": ("x86.avx512.vpdpbusd.512", 16, "uint8"),
    "znver4": ("x86.avx512.vpdpbusd.512", 16, "uint8"),
    "alderlake": ("x86.avx512.vpdpbusd.256", 8, "uint8"),
    "skylake-avx512": ("x86.avx512.pmaddw.d.512", 16, "int16"),
    # AVX-512 without instructions for bytes and words.
    "knl": ("x86.avx2.pmadd.wd", 8, "int16"),
    "znver3": ("x86.avx2.pmadd.wd", 8, "int16"),
    "x86-64-v3": ("x86.avx2.pmadd.wd", 8, "int16"),
    "x86-64-v2": ("x86.sse2.pmadd.wd", 4, "int16"),
    "sandybridge": ("x86.sse2.pmadd.wd", 4, "int16"),
    "x86-64": ("x86.sse2.pmadd.wd", 4, "int16"),
}


@pytest.mark.parametrize("cpu", INSTRUCTIONS)
def test_a_processor_of_x86_has_the_widest_instruction_of_its_features(cpu: str) -> None:
    target = resolve(f"llvm -mtriple=x86_64-linux-gnu -mcpu={cpu}")
    dot = target.dot
    assert (dot.name, dot.lanes, dot.data) == INSTRUCTIONS[cpu]
    assert dot.group == (4 if dot.data == "uint8" else 2)
    assert not dot.held


@pytest.mark.parametrize(
    ("cpu", "mattr", "name"),
    [
        ("cortex-a76", "+neon", "aarch64.neon.sdot.v4i32.v16i8"),
        ("cortex-a55", "+neon", "aarch64.neon.sdot.v4i32.v16i8"),
        ("neoverse-n1", "+neon", "aarch64.neon.sdot.v4i32.v16i8"),
        ("cortex-a72", "+neon", "aarch64.neon.saddlp"),
        ("cortex-a53", "+neon", "aarch64.neon.saddlp"),
        ("cortex-a72", "+neon,+dotprod", "aarch64.neon.sdot.v4i32.v16i8"),
        ("cortex-a76", "+neon,-dotprod", "aarch64.neon.saddlp"),
    ],
)
def test_a_64_bit_arm_core_multiplies_bytes_if_it_has_dot_products(cpu: str, mattr: str, name: str) -> None:
    dot = resolve(f"llvm -mtriple=aarch64-linux-gnu -mcpu={cpu} -mattr={mattr}").dot
    assert dot.name == name
    assert (dot.group, dot.data) == (4, "int8")
    assert dot.halves == (name == "aarch64.neon.saddlp")
    assert dot.held


@pytest.mark.parametrize(("preset", "held"), [("rpi-armv7", True), ("riscv64", False)])
def test_other_cores_multiply_as_any_core_does(preset: str, held: bool) -> None:
    dot = resolve(preset).dot
    assert (dot.name, dot.group, dot.data, dot.held) == ("", 1, "int16", held)


def test_only_a_processor_with_both_features_multiplies_tiles() -> None:
    tiles = resolve("llvm -mtriple=x86_64-linux-gnu -mcpu=sapphirerapids")
    assert (tiles.dot.tiles, tiles.dot.block) == (True, TILE.bytes)
    assert {"amx_tile", "amx_int8"} <= set(tiles.features)
    without = resolve("llvm -mtriple=x86_64-linux-gnu -mcpu=sapphirerapids -mattr=-amx-tile")
    assert (without.dot.tiles, without.dot.block) == (False, 16)
    assert not {"amx_tile", "amx_int8"} & set(without.features)
    assert not resolve("llvm -mtriple=x86_64-linux-gnu -mcpu=cooperlake").dot.tiles
    assert not Dot.of("x86_64", {"avx512vnni", "avx512f", "amx-tile"}).tiles


def test_two_features_are_needed_for_the_wide_instruction() -> None:
    # A hypervisor can hide a feature and leave the one that builds on it.
    assert Dot.of("x86_64", {"avx512vnni", "avx2"}).name == "x86.avx2.pmadd.wd"
    assert Dot.of("x86_64", {"avx512vnni", "avx512f", "avx512bw", "avxvnni"}).lanes == 16


@pytest.mark.parametrize(
    "spec",
    [
        *PRESETS,
        *(f"llvm -mtriple=x86_64-linux-gnu -mcpu={c}" for c in INSTRUCTIONS),
        "llvm -mtriple=arm64-linux-gnu -mcpu=cortex-a76",
        "llvm -mtriple=armv7a-linux-gnueabihf",
        "llvm -mtriple=amd64-linux-gnu -mcpu=cascadelake",
    ],
)
def test_blocks_have_whole_vectors_and_whole_groups(spec: str) -> None:
    target = resolve(spec)
    dot = target.dot
    assert dot.block % dot.lanes == dot.block % dot.group == 0
    assert dot_of(target.tvm_target) == dot, (
        "code is written for another instruction than it is scheduled for"
    )
    assert arch_of(target.tvm_target) == target.arch
