"""What a target that means this machine takes from it: features, caches, cores."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.bundle.machine import Machine
from builder.target.core import Core
from builder.target.device_target import resolve
from builder.target.host import best_cpu, has_tiles, host_of, without_tiles
from builder.target.simd import Simd

CORE = Core.of("x86_64", "znver3", Simd(8, 16, fma=True))
MACHINE = Machine("x86_64", "", frozenset(), None, None, frozenset())


def core_at(cpu0: Path) -> Core:
    return host_of(MACHINE, "znver3", 4, cpu0).core(CORE)


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
    core = core_at(cpu0(tmp_path, caches))
    assert (core.l1_bytes, core.l2_bytes) == (48 << 10, 2 << 20)
    assert core.products_per_ns == CORE.products_per_ns


def test_a_core_has_its_part_of_a_cache_that_cores_share(tmp_path: Path) -> None:
    caches = [("1", "Data", "32K", "0"), ("2", "Unified", "1024K", "0-3")]
    core = core_at(cpu0(tmp_path, caches, "0"))
    assert (core.l2_bytes, core.l2_cores) == (256 << 10, 4)


def test_threads_of_one_core_do_not_share(tmp_path: Path) -> None:
    caches = [("2", "Unified", "1024K", "0,64")]
    core = core_at(cpu0(tmp_path, caches, "0,64"))
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
    assert core_at(cpu0(tmp_path, [cache])) == CORE


def test_a_malformed_list_of_processors_means_one(tmp_path: Path) -> None:
    caches = [("2", "Unified", "1024K", "0-x")]
    assert core_at(cpu0(tmp_path, caches, "")).l2_bytes == 1 << 20


def test_a_missing_folder_means_the_usual_sizes(tmp_path: Path) -> None:
    assert core_at(tmp_path / "none") == CORE


def machine_with_features_of(cpu: str, *, without: str = "") -> Machine:
    features = resolve(f"llvm -mtriple=x86_64-linux-gnu -mcpu={cpu}").features
    return Machine("x86_64", "", frozenset(features) - {without}, None, None, frozenset())


def test_a_model_newer_than_llvm_is_known_by_its_features() -> None:
    machine = machine_with_features_of("sapphirerapids")
    assert best_cpu(machine, "rocketlake") == "sapphirerapids"
    assert best_cpu(machine, "sapphirerapids") == "sapphirerapids"


def test_llvms_own_name_wins_over_others_with_the_same_features() -> None:
    assert best_cpu(machine_with_features_of("znver2"), "znver2") == "znver2"


def test_a_virtual_machine_that_hides_a_feature_gets_a_cpu_without_it() -> None:
    machine = machine_with_features_of("sapphirerapids", without="avx512f")
    cpu = best_cpu(machine, "sapphirerapids")
    assert "avx512f" not in resolve(f"llvm -mtriple=x86_64-linux-gnu -mcpu={cpu}").features
    assert resolve(f"llvm -mtriple=x86_64-linux-gnu -mcpu={cpu}").simd.lanes == 8


def test_a_virtual_machine_that_hides_tiles_keeps_the_rest_of_its_processor() -> None:
    machine = machine_with_features_of("sapphirerapids -mattr=-amx-tile")
    assert best_cpu(machine, "sapphirerapids") == "sapphirerapids"
    assert not has_tiles(machine)
    assert has_tiles(machine_with_features_of("sapphirerapids"))
    assert not has_tiles(machine_with_features_of("sapphirerapids", without="amx_int8"))
    assert without_tiles("sapphirerapids") == ("-amx-tile",)
    assert without_tiles("cascadelake") == ()


def test_a_machine_with_no_known_feature_gets_the_oldest_cpu() -> None:
    assert best_cpu(MACHINE, "znver4") == "x86-64"


def test_a_processor_whose_tiles_are_hidden_goes_without_them() -> None:
    hidden = machine_with_features_of("sapphirerapids -mattr=-amx-tile")
    assert host_of(hidden, "sapphirerapids", 4).without == ("-amx-tile",)
    assert host_of(machine_with_features_of("sapphirerapids"), "sapphirerapids", 4).without == ()
