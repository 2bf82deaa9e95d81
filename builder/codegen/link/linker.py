"""Link object files of kernels into `mod.so` for a device.

One linker serves every target on every host: zig's clang with lld, which includes each target's C library and
links against a given glibc version. The launcher (`launcher.c`, `workspace.c`) is compiled in, so a device
needs tvm-ffi but not TVM; `exports.map` keeps everything but the kernels local. The output depends only on
the inputs: it contains no paths, times or build identifiers.
"""

from __future__ import annotations

import io
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import tvm_ffi
from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from elftools.elf.sections import SymbolTableSection

from builder.errors import LinkError
from builder.target.device_target import DeviceTarget

LINK_TIMEOUT_S: Final = 300  # on first use, zig builds a target's C start files, which took 5 to 20 s

_SOURCES: Final = ("launcher.c", "workspace.c")

# These flags compile only the launcher: LLVM has already optimised the kernels.
_FLAGS: Final = (
    "-O2", "-g0", "-s", "-shared", "-fPIC", "-std=gnu11", "-fno-sanitize=all", "-fvisibility=default",
    "-Wall", "-Wextra", "-Werror", "-Wno-unused-command-line-argument",
    "-Wl,--build-id=none", "-Wl,-z,relro", "-Wl,-z,now", "-Wl,-z,noexecstack",
)  # fmt: skip


_REINSTALL: Final = "check that ziglang is as pip installed it: pip install --force-reinstall ziglang"


@dataclass(frozen=True, slots=True)
class SharedObject:
    """What a shared object needs and offers, read from its ELF headers.

    `machine`: ELF machine name, such as `EM_AARCH64`.
    `glibc`: newest glibc version of any symbol that it needs, such as `2.17`.
    `exports`, `imports`: names of dynamic symbols that it defines, and that it needs.
    """

    machine: str
    glibc: str
    exports: frozenset[str]
    imports: frozenset[str]


def link(kernels: bytes, target: DeviceTarget, others: Sequence[bytes] = ()) -> bytes:
    """Link relocatable objects with the launcher into a shared object.

    Parameters
    ----------
    kernels
        ELF relocatable object with the kernels, as TVM's LLVM back end writes it for `target`.
    target
        The device.
    others
        More such objects, whose kernels have other names.

    Returns
    -------
    bytes
        The shared object; equal inputs give equal bytes.

    Raises
    ------
    LinkError
        If the linker failed; the message quotes its first error.
    """
    # By default zig compiles for the host's CPU; the launcher must run wherever the kernels run.
    cpu = ["-mcpu=baseline"] if target.arch != "armv7l" else ["-mcpu=cortex_a7"]
    tiles = ["-DEDGE_TILES"] if target.dot.tiles else []
    with (
        resources.as_file(resources.files("builder.codegen.link")) as here,
        tempfile.TemporaryDirectory() as work,
    ):
        names = [f"kernels{number}.o" for number in range(1 + len(others))]
        for name, content in zip(names, (kernels, *others), strict=True):
            Path(work, name).write_bytes(content)
        command = [
            _zig(), "cc", "-target", target.zig_target, *cpu, *_FLAGS, *tiles,
            *(f"-I{path}" for path in include_paths()),
            f"-Wl,--version-script={here / 'exports.map'}",
            *names, *(str(here / name) for name in _SOURCES), "-o", "mod.so", "-lpthread", "-lm",
        ]  # fmt: skip
        try:
            done = subprocess.run(  # noqa: S603 - a program of a package that we need, and fixed arguments
                command, cwd=work, capture_output=True, text=True, timeout=LINK_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise LinkError(
                f"linking for {target.zig_target} took longer than {LINK_TIMEOUT_S} s",
                hint="compile it again when the machine is less busy",
            ) from error
        except OSError as error:
            raise LinkError(f"zig cannot be started: {error.strerror}", hint=_REINSTALL) from error
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or ["no message"]
            first = next((line for line in lines if "error" in line), lines[0])
            raise LinkError(
                f"linking for {target.zig_target} failed: {first.strip()[:300]}",
                hint=_REINSTALL,
            )
        return Path(work, "mod.so").read_bytes()


def _zig() -> str:
    """Path of zig. Running `python -m ziglang` would start a Python for each link."""
    found = find_spec("ziglang")
    if found is None or found.origin is None:
        raise LinkError("ziglang is missing", hint="pip install 'edgebundle[builder]'")
    return str(Path(found.origin).with_name("zig"))


def include_paths() -> list[str]:
    """Folders with the headers of tvm-ffi and DLPack."""
    include = Path(tvm_ffi.libinfo.find_include_path())
    return [str(include), str(tvm_ffi.libinfo.find_dlpack_include_path())]


def describe(code: bytes) -> SharedObject:
    """Read what a shared object needs and offers.

    Raises
    ------
    LinkError
        If the content is not an ELF file.
    """
    try:
        with io.BytesIO(code) as file:
            elf = ELFFile(file)
            exports, imports = _symbols(elf)
            return SharedObject(
                machine=str(elf["e_machine"]),
                glibc="{}.{}".format(*max(_versions_of_glibc(elf), default=(0, 0))),
                exports=exports,
                imports=imports,
            )
    except (ELFError, ValueError) as error:
        raise LinkError(f"expected an ELF shared object ({error})") from error


def _versions_of_glibc(elf: ELFFile) -> Iterator[tuple[int, int]]:
    """Yield the versions of glibc 2 that symbols need."""
    for section in elf.iter_sections():
        if not isinstance(section, GNUVerNeedSection):
            continue
        for _, versions in section.iter_versions():
            for version in versions:
                if version.name.startswith("GLIBC_2."):
                    major, minor = version.name.removeprefix("GLIBC_").split(".")[:2]
                    yield int(major), int(minor)


def _symbols(elf: ELFFile) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of the dynamic symbols that are defined here, and of those that are not."""
    dynsym = elf.get_section_by_name(".dynsym")
    if not isinstance(dynsym, SymbolTableSection):
        return frozenset(), frozenset()
    named = [symbol for symbol in dynsym.iter_symbols() if symbol.name]
    imports = frozenset(symbol.name for symbol in named if symbol["st_shndx"] == "SHN_UNDEF")
    return frozenset(symbol.name for symbol in named) - imports, imports
