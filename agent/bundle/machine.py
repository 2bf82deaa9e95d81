"""What this machine is: architecture, CPU features, glibc, ABI of tvm-ffi, and the names it goes by.

Promises to read files and ask libc, and nothing else: it runs no program and imports no kernel library.
Leaves the comparison with a bundle to `admission`.

Everything is about *this process*: a 32-bit Python on a 64-bit kernel is an `armv7l`, for that is what it
loads.
"""

from __future__ import annotations

import os
import re
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from agent.bundle.names import COMPATIBLE

# cpuinfo of a machine with hundreds of cores takes some 500 KiB; the device tree's properties a few hundred
# bytes.
_MAX_FILE_BYTES: Final = 4 << 20
# PyPA's "Recording installed projects": NAME-VERSION.dist-info, the name normalised.
_TVM_FFI: Final = re.compile(r"apache_tvm_ffi-([0-9][^-]*)\.dist-info")

# Name of an architecture -> what it is called here: as uname(2) does.
_ARCHES: Final = MappingProxyType(
    {
        "x86_64": "x86_64",
        "amd64": "x86_64",
        "aarch64": "aarch64",
        "arm64": "aarch64",
        "arm": "armv7l",
        "armv7": "armv7l",
        "armv7a": "armv7l",
        "armv7l": "armv7l",
        "armv7hf": "armv7l",
        "armv8l": "armv7l",
        "riscv64": "riscv64",
    }
)
# ELF's e_machine (System V ABI and its supplements) and class in bits.
_ELF: Final = MappingProxyType(
    {(62, 64): "x86_64", (183, 64): "aarch64", (40, 32): "armv7l", (243, 64): "riscv64", (3, 32): "i686"}
)
_X86: Final = ("x86_64", "i686")
_AT_HWCAP: Final = 16
# Linux, arch/arm64/include/uapi/asm/hwcap.h, bits of AT_HWCAP in order.
_HWCAP_AARCH64: Final = (
    "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc "
    "dcpop sha3 sm3 sm4 asimddp sha512 sve asimdfhm dit uscat ilrcpc flagm ssbs sb paca pacg"
)
# Linux, arch/arm/include/uapi/asm/hwcap.h.
_HWCAP_ARM: Final = (
    "swp half thumb 26bit fastmult fpa vfp edsp java iwmmxt crunch thumbee neon vfpv3 vfpv3d16 tls vfpv4 "
    "idiva idivt vfpd32 lpae evtstrm fphp asimdhp asimddp asimdfhm asimdbf16 i8mm"
)
# Arm's "CPU part" numbers (MIDR_EL1) of the boards that are in use.
_ARM_PARTS: Final = MappingProxyType(
    {
        "0xc07": "Cortex-A7",
        "0xc08": "Cortex-A8",
        "0xc09": "Cortex-A9",
        "0xc0f": "Cortex-A15",
        "0xd03": "Cortex-A53",
        "0xd04": "Cortex-A35",
        "0xd05": "Cortex-A55",
        "0xd07": "Cortex-A57",
        "0xd08": "Cortex-A72",
        "0xd09": "Cortex-A73",
        "0xd0a": "Cortex-A75",
        "0xd0b": "Cortex-A76",
        "0xd0c": "Neoverse-N1",
        "0xd41": "Cortex-A78",
    }
)


@dataclass(frozen=True, slots=True)
class Machine:
    """What a machine is, as far as a bundle asks.

    Attributes
    ----------
    arch
        `x86_64`, `aarch64`, `armv7l`, `riscv64`, or what uname says otherwise.
    cpu_model
        For people: `Cortex-A72`, or x86's model name; empty where unknown.
    features
        In the words of /proc/cpuinfo, those that every core has.
    glibc
        Version, as in `2.36`; None with another libc.
    abi
        `tvm-ffi-<major>.<minor>` of the tvm-ffi that is installed, or None.
    compatible
        The device tree's names of the board, `linux-<arch>`, and configured ones.
    board
        The board's own name, as in `Raspberry Pi 4 Model B Rev 1.4`; empty where there is none.
    memory_bytes
        Physical memory, or None where unknown.
    """

    arch: str
    cpu_model: str
    features: frozenset[str]
    glibc: str | None
    abi: str | None
    compatible: frozenset[str]
    board: str = ""
    memory_bytes: int | None = None

    @classmethod
    def detect(cls, root: str | os.PathLike[str] = "/", *, configured: Iterable[str] = ()) -> Machine:
        """Look at a machine; never fails, what cannot be read is unknown.

        Parameters
        ----------
        root
            Where proc lies; `/` is this machine. libc and tvm-ffi are always those of this process.
        configured
            Further names that the machine is compatible with.
        """
        proc = Path(root) / "proc"
        cpus = _cpuinfo(_text(proc / "cpuinfo"))
        arch = _arch(_read(proc / "self/exe", 64))
        board = _strings(_read(proc / "device-tree/model"))
        return cls(
            arch=arch,
            cpu_model=_cpu_model(arch, cpus),
            features=_features(arch, cpus, _hwcap(_read(proc / "self/auxv"))),
            glibc=_glibc(),
            abi=_abi(),
            compatible=frozenset(
                name
                for name in (*_strings(_read(proc / "device-tree/compatible")), f"linux-{arch}", *configured)
                if COMPATIBLE.fullmatch(name)
            ),
            board=board[0] if board else "",
            memory_bytes=_memory(_text(proc / "meminfo")),
        )


def arch_of_triple(triple: str) -> str:
    """Return our name of a target triple's architecture: `aarch64` for `aarch64-linux-gnu`."""
    name = triple.partition("-")[0]
    return _ARCHES.get(name, name)


def _arch(executable: bytes) -> str:
    # The ELF header of this very interpreter: uname tells the kernel's architecture, which may be wider.
    if executable[:4] == b"\x7fELF" and len(executable) >= 20:
        bits = {1: 32, 2: 64}.get(executable[4], 0)
        order = "<" if executable[5] == 1 else ">"
        (machine,) = struct.unpack_from(f"{order}H", executable, 18)
        if (machine, bits) in _ELF:
            return _ELF[machine, bits]
    name = os.uname().machine
    return _ARCHES.get(name, name)


def _cpuinfo(text: str) -> list[dict[str, str]]:
    """Split into processors; what stands apart from all of them (a Pi's Model) is the last."""
    blocks = []
    for paragraph in re.split(r"\n\s*\n", text):
        pairs = (line.partition(":") for line in paragraph.splitlines())
        block = {key.strip().lower(): value.strip() for key, colon, value in pairs if colon}
        if block:
            blocks.append(block)
    return blocks


def _features(arch: str, cpus: list[dict[str, str]], hwcap: int) -> frozenset[str]:
    if arch == "riscv64":
        sets = [_riscv_extensions(cpu["isa"]) for cpu in cpus if "isa" in cpu]
    else:
        key = "flags" if arch in _X86 else "features"
        sets = [set(cpu[key].split()) for cpu in cpus if key in cpu]
    # Cores of one machine may differ, and a thread runs on any of them.
    features = set.intersection(*sets) if sets else set()
    # AT_HWCAP is told to each process in its own words: cpuinfo is the kernel's, which may be 64-bit under a
    # 32-bit process, or the host's under an emulator.
    names = {"aarch64": _HWCAP_AARCH64, "armv7l": _HWCAP_ARM}.get(arch, "").split()
    features |= {name for bit, name in enumerate(names) if hwcap >> bit & 1}
    return frozenset(features)


def _riscv_extensions(isa: str) -> set[str]:
    # The RISC-V Instruction Set Manual, volume I, "ISA Extension Naming Conventions": rv64imafdc_zicsr_...
    base, *longer = isa.lower().split("_")
    return set(base.removeprefix("rv64").removeprefix("rv32")) | set(longer)


def _hwcap(auxv: bytes) -> int:
    word = struct.calcsize("P")
    pairs = struct.iter_unpack("NN" if word == 8 else "II", auxv[: len(auxv) // (2 * word) * (2 * word)])
    return next((value for key, value in pairs if key == _AT_HWCAP), 0)


def _cpu_model(arch: str, cpus: list[dict[str, str]]) -> str:
    for cpu in cpus:
        if "vendor_id" in cpu and arch not in _X86:
            # An emulator's host.
            continue
        if model := _ARM_PARTS.get(cpu.get("cpu part", "")) or cpu.get("model name") or cpu.get("uarch"):
            return model
    return ""


def _memory(text: str) -> int | None:
    found = re.search(r"^MemTotal:\s*(\d{1,15}) kB$", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _glibc() -> str | None:
    try:
        version = os.confstr("CS_GNU_LIBC_VERSION")
    except (ValueError, OSError):
        return None
    name, _, number = (version or "").partition(" ")
    return number if name == "glibc" and number else None


def _abi() -> str | None:
    # The name of the distribution's metadata folder tells the version. Importing tvm_ffi would load its
    # library into this process, and importlib.metadata, which reads the same names, takes 0.7 MiB of it.
    for folder in sys.path:
        try:
            names = sorted(os.listdir(folder or "."))  # noqa: PTH208 - names alone are wanted
        except OSError:
            continue
        for name in names:
            if (found := _TVM_FFI.fullmatch(name)) is not None:
                return abi_of(found[1])
    return None


def abi_of(tvm_ffi_version: str) -> str:
    """Return the ABI's name of a tvm-ffi version: `tvm-ffi-0.1` of `0.1.14.post1`."""
    return "tvm-ffi-" + ".".join(tvm_ffi_version.split(".")[:2])


def _strings(raw: bytes) -> list[str]:
    return [part for part in raw.decode("ascii", "replace").split("\0") if part]


def _text(path: Path) -> str:
    return _read(path).decode("utf-8", "replace")


def _read(path: Path, limit: int = _MAX_FILE_BYTES) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(limit)
    except OSError:
        return b""
