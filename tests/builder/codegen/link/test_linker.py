"""Every target links on this machine, to a file that needs only an old glibc and tvm-ffi."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tvm

from builder.codegen.kernel_object import compile_object
from builder.codegen.link.linker import describe, link
from builder.errors import LinkError
from builder.target.device_target import GLIBC, resolve
from builder.target.presets import PRESETS

MACHINES = {"aarch64": "EM_AARCH64", "armv7l": "EM_ARM", "riscv64": "EM_RISCV", "x86_64": "EM_X86_64"}
Doubling = Callable[[], tvm.IRModule]
CONTROL = {
    "__tvm_ffi_edge_flush_denormals",
    "__tvm_ffi_edge_set_threads",
    "__tvm_ffi_edge_threads",
}


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_target_links(name: str, doubling: Doubling) -> None:
    target = resolve(name)
    made = describe(link(compile_object(doubling(), target), target))
    assert made.machine == MACHINES[target.arch]
    assert tuple(map(int, made.glibc.split("."))) <= tuple(map(int, GLIBC.split(".")))
    assert {"__tvm_ffi_double", *CONTROL} <= made.exports
    assert all(name.startswith("__tvm_ffi_") for name in made.exports)
    assert [name for name in made.imports if name.startswith(("TVM", "__TVM"))] == [
        "TVMFFIErrorSetRaisedFromCStrParts"
    ]


def test_linking_twice_gives_the_same_bytes(doubling: Doubling) -> None:
    target = resolve("rpi4")
    kernels = compile_object(doubling(), target)
    assert link(kernels, target) == link(compile_object(doubling(), target), target)


def test_an_object_of_another_machine_is_refused_in_one_line(doubling: Doubling) -> None:
    kernels = compile_object(doubling(), resolve("rpi4"))
    with pytest.raises(LinkError) as caught:
        link(kernels, resolve("x86-64-v3"))
    assert "\n" not in str(caught.value)


def test_a_missing_linker_is_named(doubling: Doubling, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = compile_object(doubling(), resolve("rpi4"))
    monkeypatch.setattr("builder.codegen.link.linker.find_spec", lambda _name: None)
    with pytest.raises(LinkError, match="ziglang") as caught:
        link(kernels, resolve("rpi4"))
    assert caught.value.hint is not None
    assert "pip install" in caught.value.hint


def test_a_linker_that_cannot_be_started_is_named(
    doubling: Doubling, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = compile_object(doubling(), resolve("rpi4"))
    monkeypatch.setattr("builder.codegen.link.linker._zig", lambda: "/nowhere/zig")
    with pytest.raises(LinkError, match="zig cannot be started: No such file") as caught:
        link(kernels, resolve("rpi4"))
    assert caught.value.hint is not None


def test_a_file_that_is_not_elf_is_refused() -> None:
    with pytest.raises(LinkError, match="ELF"):
        describe(b"not an object")
