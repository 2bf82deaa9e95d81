"""Targets given by name, as JSON and in the old syntax of TVM's command line."""

from __future__ import annotations

import json

import pytest

from builder.errors import TargetError
from builder.target.device_target import resolve
from builder.target.host import Host
from builder.target.presets import PRESETS


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_preset_resolves(name: str) -> None:
    target = resolve(name)
    assert target.name == name
    assert target.triple.split("-")[0] == target.arch
    assert target.cores >= 1


@pytest.mark.parametrize(
    ("name", "arch", "lanes", "needs"),
    [
        ("rpi3", "aarch64", 4, "asimd"),
        ("rpi4", "aarch64", 4, "asimd"),
        ("rpi5", "aarch64", 4, "asimddp"),
        ("rpi-armv7", "armv7l", 4, "neon"),
        ("x86-64-v3", "x86_64", 8, "avx2"),
    ],
)
def test_a_preset_lists_the_features_that_its_device_must_have(
    name: str, arch: str, lanes: int, needs: str
) -> None:
    target = resolve(name)
    assert (target.arch, target.simd.lanes) == (arch, lanes)
    assert needs in target.features


def test_a_raspberry_pi_4_does_not_need_aes_although_llvm_lists_it() -> None:
    assert "aes" not in resolve("rpi4").features


def test_host_is_native() -> None:
    assert resolve("host").is_native


def test_only_a_target_that_fits_this_machine_is_native() -> None:
    assert resolve("riscv64").is_native is False


def test_plain_llvm_means_this_machine() -> None:
    assert resolve("llvm").cpu == resolve("host").cpu


def test_the_old_syntax_means_the_same_as_json() -> None:
    old = resolve("llvm -mtriple=aarch64-linux-gnu -mcpu=cortex-a72 -mattr=+neon -num-cores=4")
    new = resolve(
        '{"kind":"llvm","mtriple":"aarch64-linux-gnu","mcpu":"cortex-a72","mattr":["+neon"],"num-cores":4}'
    )
    assert str(old.tvm_target) == str(new.tvm_target)
    assert (old.simd, old.features, old.zig_target) == (new.simd, new.features, new.zig_target)
    assert old.features == resolve("rpi4").features


def test_an_x86_target_may_have_fewer_features_than_this_machine() -> None:
    assert resolve("llvm -mcpu=x86-64-v2").simd.lanes == 4


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("rpi9", "unknown target 'rpi9'"),
        ("", "unknown target ''"),
        ("cuda", "unknown target 'cuda'"),
        ('llvm -mcpu="', "expected matching quotes, got 'llvm -mcpu="),
        ("llvm -mcpu=pentium99", "LLVM does not know the CPU 'pentium99'"),
        ("llvm cortex-a72", "expected -option=value, got 'cortex-a72'"),
        ("llvm -num-cores=many", "expected -num-cores from 1 to 1024, got 'many'"),
        ("llvm -num-cores=²", "expected -num-cores from 1 to 1024, got '²'"),
        ("llvm -bogus=1", "bogus"),
        ("{", "expected a JSON object"),
        ('{"kind":"cuda"}', "expected 'llvm', got 'cuda'"),
        ('{"kind":"llvm","mtriple":"arm-linux-gnueabi","mcpu":"cortex-a7"}', "hard-float"),
        ('{"kind":"llvm","mtriple":"x86_64-pc-windows-msvc"}', "expected a Linux triple"),
        ('{"kind":"llvm","mtriple":"sparc-linux-gnu"}', "expected a Linux triple"),
    ],
)
def test_a_bad_target_gets_one_line(spec: str, says: str) -> None:
    with pytest.raises(TargetError) as caught:
        resolve(spec)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_hint_names_the_triple_of_a_cpu_of_another_architecture() -> None:
    with pytest.raises(TargetError) as caught:
        resolve("llvm -mtriple=x86_64-linux-gnu -mcpu=cortex-a72")
    assert caught.value.hint is not None
    assert "-mtriple=aarch64-linux-gnu -mcpu=cortex-a72" in caught.value.hint


@pytest.mark.parametrize(("given", "attributes"), [("", ["-amx-tile"]), ("+gfni", ["+gfni", "-amx-tile"])])
def test_this_machine_without_tiles_is_compiled_for_without_them(
    given: str, attributes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Host("x86_64", "sapphirerapids", ("-amx-tile",), cores=2)
    monkeypatch.setattr(Host, "detect", lambda: here)
    target = resolve(f"llvm -mattr={given}" if given else "llvm")
    assert json.loads(target.description())["mattr"] == attributes
    assert not target.dot.tiles
    # Who names the tiles, or their processor and a triple, gets them.
    assert resolve("llvm -mattr=+amx-int8").dot.tiles
    assert resolve("llvm -mtriple=x86_64-linux-gnu -mcpu=sapphirerapids").dot.tiles


@pytest.mark.parametrize(
    ("cpu", "attributes", "kept"),
    [
        ("sapphirerapids", [], True),
        ("sapphirerapids", ["-amx-tile"], False),
        ("znver1", ["+amx-tile", "+amx-int8"], True),
        ("znver1", [], False),
    ],
)
def test_tile_registers_stay_as_kernels_chose_them(cpu: str, attributes: list[str], kept: bool) -> None:
    spec = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": cpu, "mattr": attributes}
    options = [str(option) for option in resolve(spec).tvm_target.attrs["cl-opt"]]
    assert ("-disable-post-ra:bool=true" in options) == kept
