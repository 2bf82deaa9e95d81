"""Targets: descriptions of a device for the compiler, the linker and the admission check on the device.

A `DeviceTarget` is resolved once, from a preset (`rpi4`), a TVM target as JSON, or the old syntax of TVM's
command line (`llvm -mcpu=cascadelake`). It holds the options for LLVM and for the linker, and the CPU
features that the device must have. Resolving measures nothing. It reads Linux's description of the processor
(`/proc/cpuinfo` and `/sys/devices/system/cpu`), and only for a target that means this machine.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tvm.target import Target
from tvm.target import codegen as llvm

from agent.bundle.machine import Machine
from builder.errors import TargetError, lines_of
from builder.target.core import Core
from builder.target.dot import Dot
from builder.target.features import CPUINFO_NAMES, GENERIC_CPU
from builder.target.host import Host
from builder.target.presets import PRESETS, unknown_target
from builder.target.simd import Simd

_FORM: Final = (
    'write --target "llvm -mtriple=aarch64-linux-gnu -mcpu=cortex-a72", or give a preset such as rpi4'
)

GLIBC: Final = "2.28"  # Debian 10 and later; older systems have no Python that is new enough


@dataclass(frozen=True, slots=True)
class DeviceTarget:
    """A device to compile for.

    Attributes
    ----------
    name
        The preset's name, or `custom`.
    tvm_target
        The target for TVM's code generator.
    triple, cpu, arch
        LLVM's names, such as `aarch64-linux-gnu` and `cortex-a72`, and the machine's name as `uname -m`
        prints it, such as `aarch64`.
    features
        CPU features that the device must have, named as in `/proc/cpuinfo`; sorted.
    zig_target
        The target for the linker, including the glibc version.
    simd
        The vector unit.
    dot
        Its instruction for products of small integers.
    cores
        Number of cores, for choices that are made at compile time.
    core
        How fast one of them computes and reads, and its caches.
    """

    name: str
    tvm_target: Target
    triple: str
    cpu: str
    arch: str
    features: tuple[str, ...]
    zig_target: str
    simd: Simd
    dot: Dot
    cores: int
    core: Core

    def description(self) -> str:
        """The TVM target as canonical JSON: the key of tuning records."""
        config = {"kind": "llvm", "mtriple": self.triple, "mcpu": self.cpu, "mattr": self._mattr()}
        return json.dumps(config, sort_keys=True, separators=(",", ":"))

    def _mattr(self) -> list[str]:
        return [str(a) for a in self.tvm_target.attrs.get("mattr", [])]

    @property
    def looks_up_bytes(self) -> bool:
        """Whether a few of its instructions read a table of 256 bytes."""
        return "avx512vbmi" in self.features

    @property
    def is_native(self) -> bool:
        """Whether this machine can run the kernels."""
        machine = Machine.detect()
        return machine.arch == self.arch and set(self.features) <= machine.features


# Limits of LLVM's analyses of memory accesses; its defaults are 100, 250 and 100. With the defaults, if the
# loop of a tile has more than 250 accesses to accumulators, LLVM stores and reloads them for each product.
_LLVM_LIMITS: Final = {
    "memdep-block-scan-limit": 2000,
    "licm-mssa-max-acc-promotion": 5000,
    "licm-mssa-optimization-cap": 5000,
}

# Kernels choose tile registers themselves, and configure them: those of sums have other rows than those of
# factors. On some processors (such as znver1), LLVM orders instructions once more after it has chosen
# registers, and then replaces a register by a free one, whatever its configuration is.
_KEEP_TILES: Final = "-disable-post-ra:bool=true"


def resolve(spec: str | Mapping[str, Any]) -> DeviceTarget:
    """Resolve a preset, a TVM target as JSON, or a target in the old syntax of TVM's command line.

    Parameters
    ----------
    spec
        A preset's name; a TVM target as a JSON object or a mapping; or
        `llvm [-mcpu=..] [-mtriple=..] [-mattr=+a,+b] [-mfloat-abi=..] [-num-cores=N]`.

    Raises
    ------
    TargetError
        If the preset, an option or the CPU is unknown, the JSON is malformed, or the kind is not `llvm`.
    """
    if isinstance(spec, str) and spec in PRESETS:
        return _build(spec, dict(PRESETS[spec].config))
    config = dict(_parse(spec)) if isinstance(spec, str) else dict(spec)
    return _build("custom", config)


def _parse(spec: str) -> Mapping[str, Any]:
    text = spec.strip()
    if text.startswith("{"):
        try:
            parsed: dict[str, Any] = json.loads(text)
        except ValueError as error:
            raise TargetError(
                f"target: expected a JSON object, got {text[:80]!r} ({error})", hint=_FORM
            ) from error
        return parsed
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise TargetError(f"target: expected matching quotes, got {text[:80]!r}", hint=_FORM) from error
    if not words or words[0] != "llvm":
        raise unknown_target(spec)
    config: dict[str, Any] = {"kind": "llvm"}
    for word in words[1:]:
        match = re.fullmatch(r"--?([a-z-]+)=(.+)", word)
        if match is None:
            raise TargetError(f"target: expected -option=value, got {word[:80]!r}", hint=_FORM)
        key, value = match.groups()
        if key == "mattr":
            config[key] = value.split(",")
        elif key == "num-cores":
            if not re.fullmatch("[0-9]{1,4}", value) or not 1 <= int(value) <= 1024:
                raise TargetError(
                    f"target: expected -num-cores from 1 to 1024, got {value[:20]!r}",
                    hint="write -num-cores=4, or leave it out",
                )
            config[key] = int(value)
        else:
            config["mtriple" if key in ("target", "device") else key] = value
    return config


def _build(name: str, config: dict[str, Any]) -> DeviceTarget:
    if config.get("kind") != "llvm":
        raise TargetError(
            f"target kind: expected 'llvm', got {config.get('kind')!r}",
            hint="edgebundle compiles for CPUs; the agent has no GPU executor",
        )
    here = "mtriple" not in config  # as in TVMC, plain "llvm" means this machine
    if here:
        host = Host.detect()
        config["mtriple"] = f"{host.arch}-linux-gnu"
        here = config.setdefault("mcpu", host.cpu) == host.cpu
        attributes = [str(each) for each in config.get("mattr", [])]
        if here and host.without and not any("amx-" in each for each in attributes):
            config["mattr"] = [*attributes, *host.without]
    if "num-cores" not in config:
        config["num-cores"] = Host.detect().cores
    triple = str(config["mtriple"])
    arch, abi = _split_triple(triple)
    cpu = str(config.setdefault("mcpu", GENERIC_CPU[arch]))
    if not llvm.llvm_is_valid_cpu(cpu, triple):
        message = f"target: LLVM does not know the CPU {cpu[:60]!r} for {triple}"
        raise TargetError(message, hint=_cpu_hint(cpu, arch))
    try:
        # First without cl-opt, so that an error message does not show it.
        known = {str(f) for f in llvm.llvm_get_cpu_features(Target(config))}
        # A register tile is one long block. With its default limits, LLVM gives up looking for values that
        # are already in registers and for accumulators that need no memory (docs/decisions/0005).
        options = [f"-{limit}:uint={value}" for limit, value in _LLVM_LIMITS.items()]
        if "amx-tile" in known:
            options.append(_KEEP_TILES)
        config.setdefault("cl-opt", options)
        tvm_target = Target(config)
    except (ValueError, RuntimeError, TypeError) as error:
        raise TargetError(f"target: {lines_of(error)[-1][-200:]}", hint=_FORM) from error
    names = CPUINFO_NAMES[arch]
    simd = Simd.of(arch, known)
    core = Core.of(arch, cpu, simd)
    return DeviceTarget(
        name=name,
        tvm_target=tvm_target,
        triple=triple,
        cpu=cpu,
        arch=arch,
        features=tuple(sorted(names[f] for f in known if f in names)),
        zig_target=f"{'arm' if arch == 'armv7l' else arch}-linux-{abi}.{GLIBC}",
        simd=simd,
        dot=Dot.of(arch, known),
        cores=int(config["num-cores"]),
        core=Host.detect().core(core) if here else core,
    )


def arch_of(target: Target) -> str:
    """Return the architecture of a TVM target, as `uname -m` prints it."""
    triple = target.attrs.get("mtriple")
    name = Machine.detect().arch if triple is None else str(triple).partition("-")[0]
    return _ARCH_ALIASES.get(name, name)


def dot_of(target: Target) -> Dot:
    """Return the instruction for products of small integers of a TVM target."""
    return Dot.of(arch_of(target), features_of(target))


def features_of(target: Target) -> frozenset[str]:
    """Return the features of a TVM target, as LLVM names them."""
    return frozenset(str(feature) for feature in llvm.llvm_get_cpu_features(target))


def _cpu_hint(cpu: str, arch: str) -> str:
    """A hint: the triple that has this CPU, or examples of CPUs for this architecture."""
    for other in ("aarch64-linux-gnu", "x86_64-linux-gnu", "riscv64-linux-gnu"):
        if not other.startswith(arch) and llvm.llvm_is_valid_cpu(cpu, other):
            return f'name its architecture too: "llvm -mtriple={other} -mcpu={cpu}"'
    return "for example " + (
        "cascadelake, znver4, x86-64-v3" if arch == "x86_64" else "cortex-a72, cortex-a76"
    )


_ARCH_ALIASES: Final = {
    "arm": "armv7l",
    "armv7": "armv7l",
    "armv7a": "armv7l",
    "arm64": "aarch64",
    "amd64": "x86_64",
}


def _split_triple(triple: str) -> tuple[str, str]:
    """`aarch64-unknown-linux-gnu` -> `("aarch64", "gnu")`."""
    parts = triple.split("-")
    arch = _ARCH_ALIASES.get(parts[0], parts[0])
    if arch not in CPUINFO_NAMES or "linux" not in parts:
        known = ", ".join(CPUINFO_NAMES)
        raise TargetError(
            f"target: expected a Linux triple for {known}, got {triple[:60]!r}",
            hint=_FORM,
        )
    abi = parts[-1]
    if arch == "armv7l" and abi != "gnueabihf":
        raise TargetError(
            f"target: expected a hard-float triple (…-linux-gnueabihf), got {triple[:60]!r}",
            hint="soft-float systems are not supported; Raspberry Pi OS and Debian armhf are hard float",
        )
    return arch, "gnueabihf" if arch == "armv7l" else "gnu"
