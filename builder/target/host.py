"""What a target that means this machine takes from it: LLVM's name of its CPU, its cores and its caches.

Nothing else in `builder` asks the processor that it runs on, so tests replace `Host.detect` by any other.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Final

from tvm.target import Target
from tvm.target import codegen as llvm

from agent.bundle.machine import Machine
from builder.target.core import Core
from builder.target.features import CPUINFO_NAMES, GENERIC_CPU

_KIB: Final = 1 << 10
_TILES: Final = ("amx-tile", "amx-int8", "amx-bf16")
_AMD: Final = ("znver5", "znver4", "znver3", "znver2", "znver1")
_INTEL: Final = (
    "sapphirerapids",
    "graniterapids",
    "cooperlake",
    "icelake-server",
    "cascadelake",
    "alderlake",
)
_X86_LEVELS: Final = ("x86-64-v4", "x86-64-v3", "x86-64-v2")


@dataclass(frozen=True, slots=True)
class Host:
    """What a target that means this machine takes from it.

    `arch`: the machine's name as `uname -m` prints it.
    `cpu`: LLVM's name of the CPU with the most of its features, and no others.
    `without`: LLVM's attributes of features that `cpu` has and this machine does not, such as `-amx-tile`.
    `cores`: cores that this process may use.
    `l1_bytes`, `l2_bytes`: sizes of a core's data caches, 0 if they are not known. If cores share an L2
        cache, its part.
    `l2_cores`: how many cores share the L2 cache.
    """

    arch: str
    cpu: str
    without: tuple[str, ...]
    cores: int
    l1_bytes: int = 0
    l2_bytes: int = 0
    l2_cores: int = 1

    @classmethod
    def detect(cls) -> Host:
        """Return this machine."""
        return _detected()

    def core(self, usual: Core) -> Core:
        """Return `usual` with the caches of this machine, as far as they are known."""
        if self.l2_bytes:
            usual = replace(usual, l2_bytes=self.l2_bytes, l2_cores=self.l2_cores)
        return replace(usual, l1_bytes=self.l1_bytes or usual.l1_bytes)


@cache
def _detected() -> Host:
    return host_of(Machine.detect(), str(llvm.llvm_get_system_cpu()), len(os.sched_getaffinity(0)))


def host_of(
    machine: Machine, own: str, cores: int, cpu0: Path = Path("/sys/devices/system/cpu/cpu0")
) -> Host:
    """Return a machine as targets see it.

    The format of the files in `cpu0` is that of Linux's `Documentation/ABI/testing/sysfs-devices-system-cpu`.

    `own`: LLVM's name for its model.
    `cpu0`: linux's folder of the first processor.
    """
    cpu = best_cpu(machine, own)
    threads = _count(_read(cpu0 / "topology/thread_siblings_list")) or 1
    parts: dict[str, tuple[int, int]] = {}
    for index in cpu0.glob("cache/index*"):
        size = re.fullmatch(r"(\d{1,9})K", _read(index / "size"))
        if size and _read(index / "type") in ("Data", "Unified"):
            sharing = max(1, _count(_read(index / "shared_cpu_list")) // threads)
            parts[_read(index / "level")] = (int(size[1]) * _KIB // sharing, sharing)
    (l1_bytes, _), (l2_bytes, l2_cores) = (parts.get(level, (0, 1)) for level in ("1", "2"))
    without = () if has_tiles(machine) else without_tiles(cpu)
    return Host(machine.arch, cpu, without, cores, l1_bytes, l2_bytes, l2_cores)


def best_cpu(machine: Machine, own: str) -> str:
    """Return LLVM's name of the CPU with the most of a machine's features, and no others.

    LLVM goes by a table of models. For a model that is newer than LLVM, the table has an older one; and
    virtual machines hide features that LLVM expects of the model.

    `own`: LLVM's name for its model.
    """
    names = CPUINFO_NAMES.get(machine.arch, {})
    candidates = [own]
    if machine.arch == "x86_64":
        candidates += [*(_AMD if own.startswith("znver") else _INTEL), *_X86_LEVELS]
    fitting: dict[str, int] = {}
    for cpu in candidates:
        try:
            known = llvm.llvm_get_cpu_features(Target({"kind": "llvm", "mcpu": cpu}))
        except (ValueError, RuntimeError):
            continue
        needed = {names[str(f)] for f in known if str(f) in names and str(f) not in _TILES}
        if needed <= machine.features:
            fitting[cpu] = len(needed)
    return max(fitting, key=lambda cpu: fitting[cpu]) if fitting else GENERIC_CPU.get(machine.arch, "generic")


def has_tiles(machine: Machine) -> bool:
    """Whether a machine multiplies tiles. Virtual machines often hide that their processor does."""
    names = CPUINFO_NAMES["x86_64"]
    return machine.arch == "x86_64" and {names[feature] for feature in _TILES} <= machine.features


def without_tiles(cpu: str) -> tuple[str, ...]:
    """Return the attributes that make LLVM take `cpu` for one without tiles; none if it has none."""
    known = llvm.llvm_get_cpu_features(Target({"kind": "llvm", "mcpu": cpu}))
    return ("-amx-tile",) if any(str(feature) in _TILES for feature in known) else ()


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _count(cpus: str) -> int:
    """Return how many processors a list such as `0-3,8` names, 0 if it is malformed."""
    ranges = [re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part) for part in cpus.split(",")]
    return sum(int(r[2] or r[1]) - int(r[1]) + 1 for r in ranges if r) if all(ranges) else 0
