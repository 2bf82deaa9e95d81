"""What heuristics know about a core, and what Linux tells about the caches of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.target.core import Core, with_caches_of_this_machine
from builder.target.device_target import resolve
from builder.target.presets import PRESETS
from builder.target.simd import Simd

SIMD = Simd(8, 16, fma=True)
CORE = Core.of("x86_64", "znver3", SIMD)


def cpu0(folder: Path, caches: list[tuple[str, str, str, str]], threads: str = "0-1") -> Path:
    """Write Linux's folder of a processor: the level, type, size and sharing processors of its caches."""
    (folder / "topology").mkdir()
    (folder / "topology/thread_siblings_list").write_text(threads + "\n")
    for i, values in enumerate(caches):
        index = folder / f"cache/index{i}"
        index.mkdir(parents=True)
        for name, value in zip(("level", "type", "size", "shared_cpu_list"), values, strict=True):
            (index / name).write_text(value + "\n")
    return folder


def test_the_caches_are_those_of_this_machine(tmp_path: Path) -> None:
    caches = [
        ("1", "Data", "48K", "0-1"),
        ("1", "Instruction", "64K", "0-1"),
        ("2", "Unified", "2048K", "0-1"),
        ("3", "Unified", "32768K", "0-7"),
    ]
    core = with_caches_of_this_machine(CORE, cpu0(tmp_path, caches))
    assert (core.l1_bytes, core.l2_bytes) == (48 << 10, 2 << 20)
    assert core.products_per_ns == CORE.products_per_ns


def test_a_core_has_its_part_of_a_cache_that_cores_share(tmp_path: Path) -> None:
    caches = [("1", "Data", "32K", "0"), ("2", "Unified", "1024K", "0-3")]
    core = with_caches_of_this_machine(CORE, cpu0(tmp_path, caches, "0"))
    assert (core.l2_bytes, core.l2_cores) == (256 << 10, 4)


def test_threads_of_one_core_do_not_share(tmp_path: Path) -> None:
    caches = [("2", "Unified", "1024K", "0,64")]
    core = with_caches_of_this_machine(CORE, cpu0(tmp_path, caches, "0,64"))
    assert (core.l2_bytes, core.l2_cores) == (1 << 20, 1)


@pytest.mark.parametrize(
    "cache",
    [
        ("2", "Unified", "", "0"),
        ("2", "Unified", "0K", "0"),
        ("2", "Unified", "many", "0"),
        ("2", "Unified", "9999999999K", "0"),
        ("9", "Unified", "512K", "0"),
        ("2", "Instruction", "1024K", "0"),
    ],
)
def test_without_a_usable_description_the_usual_sizes_hold(
    tmp_path: Path, cache: tuple[str, str, str, str]
) -> None:
    assert with_caches_of_this_machine(CORE, cpu0(tmp_path, [cache])) == CORE


def test_a_malformed_list_of_processors_means_one(tmp_path: Path) -> None:
    caches = [("2", "Unified", "1024K", "0-x")]
    assert with_caches_of_this_machine(CORE, cpu0(tmp_path, caches, "")).l2_bytes == 1 << 20


def test_a_missing_folder_means_the_usual_sizes(tmp_path: Path) -> None:
    assert with_caches_of_this_machine(CORE, tmp_path / "none") == CORE


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
