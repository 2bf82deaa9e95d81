"""The properties of this machine: architecture, CPU features, glibc, tvm-ffi's ABI, and its device types.

Promises to read only files and libc's configuration, and to ask the kernel only whether it saves AMX's tiles:
it runs no program and imports no kernel library. Leaves the comparison with a bundle to `admission`.

Everything describes *this process*: since a 32-bit Python on a 64-bit kernel loads 32-bit libraries, such a
machine is `armv7l`.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from agent.bundle.control_group import ControlGroup
from agent.bundle.names import COMPATIBLE
from agent.bundle.processors import Processors, cores_of

# With hundreds of cores, cpuinfo takes some 500 KiB; a property of the device tree takes far less.
_MAX_FILE_BYTES: Final = 4 << 20
# PyPA's "Recording installed projects": NAME-VERSION.dist-info, the name normalised.
_TVM_FFI: Final = re.compile(r"apache_tvm_ffi-([0-9][^-]*)\.dist-info")

# Any name of an architecture -> ours, which is uname(2)'s.
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
# x86-64's number of arch_prctl; linux/arch/x86/include/uapi/asm/prctl.h; XSAVE's component with the tiles.
_ARCH_PRCTL: Final = 158
_ARCH_GET_XCOMP_SUPP: Final = 0x1021
_XTILEDATA: Final = 18
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
# Arm's "CPU part" numbers (MIDR_EL1) of common boards.
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
    """The properties of a machine that decide whether it can run a bundle.

    Attributes
    ----------
    arch
        `x86_64`, `aarch64`, `armv7l`, `riscv64`, or uname's name of any other architecture.
    cpu_model
        For display: `Cortex-A72`, or x86's model name; empty if unknown.
    features
        CPU features that every core has, named as in /proc/cpuinfo.
    glibc
        Version, such as `2.36`; None if libc is not glibc.
    abi
        `tvm-ffi-<major>.<minor>` of the installed tvm-ffi, or None.
    compatible
        Device types: the device tree's, `linux-<arch>`, and configured ones.
    board
        The board's name, such as `Raspberry Pi 4 Model B Rev 1.4`; empty if it has none.
    memory_bytes
        Physical memory, or None if unknown.
    threads
        Threads of a kernel that the processors of this process can run at the same time.
    memory_limit_bytes
        Memory that the control groups of this process allow; None for no limit.
    """

    arch: str
    cpu_model: str
    features: frozenset[str]
    glibc: str | None
    abi: str | None
    compatible: frozenset[str]
    board: str = ""
    memory_bytes: int | None = None
    threads: int = 1
    memory_limit_bytes: int | None = None

    @classmethod
    def detect(cls, root: str | os.PathLike[str] = "/", *, configured: Iterable[str] = ()) -> Machine:
        """Detect the properties of a machine; those that cannot be read are left unknown.

        Parameters
        ----------
        root
            Folder that contains proc and sys; `/` is this machine. libc, tvm-ffi, and the processors that
            may be used are always this process's.
        configured
            Further device types.
        """
        proc = Path(root) / "proc"
        cpus = _cpuinfo(_text(proc / "cpuinfo"))
        arch = _arch(_read(proc / "self/exe", 64))
        board = _strings(_read(proc / "device-tree/model"))
        group = ControlGroup.detect(root)
        return cls(
            arch=arch,
            cpu_model=_cpu_model(arch, cpus),
            features=_usable(_features(arch, cpus, _hwcap(_read(proc / "self/auxv")))),
            glibc=_glibc(),
            abi=_abi(),
            compatible=frozenset(
                name
                for name in (*_strings(_read(proc / "device-tree/compatible")), f"linux-{arch}", *configured)
                if COMPATIBLE.fullmatch(name)
            ),
            board=board[0] if board else "",
            memory_bytes=_memory(_text(proc / "meminfo")),
            threads=Processors(cores_of(os.sched_getaffinity(0), root), group.processors).threads,
            memory_limit_bytes=group.memory_bytes,
        )


def arch_of_triple(triple: str) -> str:
    """Return our name of a target triple's architecture: `aarch64` for `arm64-linux-gnu`."""
    name = triple.partition("-")[0]
    return _ARCHES.get(name, name)


def _arch(executable: bytes) -> str:
    # From the ELF header of this interpreter: uname gives the kernel's architecture, which may be wider.
    if executable[:4] == b"\x7fELF" and len(executable) >= 20:
        bits = {1: 32, 2: 64}.get(executable[4], 0)
        order = "<" if executable[5] == 1 else ">"
        (machine,) = struct.unpack_from(f"{order}H", executable, 18)
        if (machine, bits) in _ELF:
            return _ELF[machine, bits]
    name = os.uname().machine
    return _ARCHES.get(name, name)


def _cpuinfo(text: str) -> list[dict[str, str]]:
    """Return a block for each processor, and last the lines about the whole board, such as a Pi's Model."""
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
    # Cores of one machine may differ, and a thread may run on any of them.
    features = set.intersection(*sets) if sets else set()
    # AT_HWCAP describes this process. cpuinfo describes the kernel, which may be 64-bit under a 32-bit
    # process, or, in an emulator, the host.
    names = {"aarch64": _HWCAP_AARCH64, "armv7l": _HWCAP_ARM}.get(arch, "").split()
    features |= {name for bit, name in enumerate(names) if hwcap >> bit & 1}
    return frozenset(features)


def _usable(features: frozenset[str]) -> frozenset[str]:
    """Leave out AMX if the kernel does not save its tiles: it may list the feature without supporting it."""
    tiles = frozenset(feature for feature in features if feature.startswith("amx_"))
    return features if not tiles or _saves_tiles() else features - tiles


def _saves_tiles() -> bool:
    """Whether processes may ask for the use of tiles (Linux 5.16 and later, arch_prctl(2))."""
    supported = ctypes.c_uint64()
    status = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_GET_XCOMP_SUPP, ctypes.byref(supported))
    return status == 0 and bool(supported.value >> _XTILEDATA & 1)


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
            # Only x86 has this key, so cpuinfo describes the host of an emulator.
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
    # The name of the package's metadata folder contains the version. Importing tvm_ffi would load its library
    # into this process, and importlib.metadata, which reads the same names, takes 0.7 MiB.
    for folder in sys.path:
        try:
            names = sorted(os.listdir(folder or "."))  # noqa: PTH208 - only names are needed
        except OSError:
            continue
        for name in names:
            if (found := _TVM_FFI.fullmatch(name)) is not None:
                return abi_of(found[1])
    return None


def abi_of(tvm_ffi_version: str) -> str:
    """Return the ABI of a version of tvm-ffi: `tvm-ffi-0.1` for `0.1.14.post1`."""
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
