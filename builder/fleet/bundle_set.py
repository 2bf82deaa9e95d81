"""Bundle sets: several bundles of one model. Each device gets the best one that it can run.

The bundles differ in precision (float, int8) or in the core that they were compiled for. Each is signed by
itself, so a device trusts a variant of a set exactly as it trusts any other bundle.

Promises a decision that needs only what an agent has published about its device, and no request. The decision
is advice: the device checks everything again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.bundle.admission import check_machine
from agent.bundle.machine import Machine
from agent.bundle.manifest import Manifest
from agent.errors import IncompatibleError
from agent.wire.info import Info
from builder.errors import FleetError, PackageError
from builder.fleet.printable import printable

SUFFIX: Final = ".bundle"
# A set has a variant for each core and precision; a folder with more is not a set.
MAX_VARIANTS: Final = 32
_COMPARED: Final = ("name", "version", "security_counter", "inputs", "outputs")


@dataclass(frozen=True, slots=True)
class Variant:
    """One bundle of a set.

    `manifest`: its manifest, which is not verified.
    """

    path: Path
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Refusal:
    """A variant that a device cannot run, and why."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Choice:
    """What a device takes of a set.

    `fitting`: the variants that it can run, the best first.
    """

    fitting: tuple[Variant, ...]
    refused: tuple[Refusal, ...]


@dataclass(frozen=True, slots=True)
class BundleSet:
    """Bundles of one model.

    `variants`: at least one, in the order of preference.
    """

    variants: tuple[Variant, ...]

    @classmethod
    def of(cls, variants: Sequence[Variant]) -> BundleSet:
        """Return the set of these variants.

        Raises `PackageError` if they are not of one model: name, version, security counter, inputs and
            outputs must be equal.
        """
        first = variants[0]
        for other in variants[1:]:
            for field in _COMPARED:
                wanted, found = getattr(first.manifest, field), getattr(other.manifest, field)
                if wanted != found:
                    shown = "" if field in ("inputs", "outputs") else f": {wanted} and {found}"
                    raise PackageError(
                        f"expected bundles of one model, got two that differ in {field.replace('_', ' ')}"
                        f"{shown} ({first.path.name}, {other.path.name})",
                        hint=_HINTS.get(field, "deploy the bundles of one model at a time"),
                    )
        return cls(tuple(variants))

    def choose(self, info: Info) -> Choice:
        """Sort the variants for a device.

        Those that were compiled for exactly its core come first, then those that use more of its CPU
        features, then those that are earlier in the set.
        """
        machine = machine_of(info)
        core = _core(info.hardware.cpu or "")
        fitting, refused = [], []
        for place, variant in enumerate(self.variants):
            target = variant.manifest.target
            try:
                check_machine(variant.manifest, machine)
            except IncompatibleError as error:
                refused.append(Refusal(variant.path.name, printable(str(error))))
                continue
            fitting.append((_core(target.cpu) != core, -len(target.features), place, variant))
        return Choice(tuple(entry[-1] for entry in sorted(fitting, key=lambda e: e[:3])), tuple(refused))


_HINTS: Final = {
    "security_counter": "compile all of them with the same --security-counter: a device that changes from "
    "one to another must not see a downgrade",
    "version": "compile all of them with the same --model-version",
}


def machine_of(info: Info) -> Machine:
    """Return a device as admission sees it, from what its agent has published.

    Raises `FleetError` if the agent has not published what it runs on.
    """
    hardware = info.hardware
    if not hardware.arch or not info.compatible:
        raise FleetError(
            f"expected {printable(info.device) or 'the agent'} to say what it runs on, got an info document "
            "without it",
            hint="deploy one bundle, compiled for this device",
        )
    return Machine(
        arch=hardware.arch,
        cpu_model=hardware.cpu or "",
        features=frozenset(hardware.features),
        glibc=info.software.glibc,
        abi=info.software.abi,
        compatible=frozenset(info.compatible),
        memory_bytes=hardware.memory_bytes,
        threads=hardware.cores or 1,
    )


def list_files(paths: Sequence[str | Path]) -> list[Path]:
    """Return the files of a set: files as they are named, and the bundles of folders by name.

    Raises
    ------
    PackageError
        If a folder has no bundle, a file is named twice, or there are more than `MAX_VARIANTS`.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir():
            files.append(path)
            continue
        found = sorted(path.glob(f"*{SUFFIX}"))
        if not found:
            raise PackageError(
                f"{path}: expected a folder with files *{SUFFIX}, got none",
                hint=f"compile with -o {path}/MODEL{SUFFIX} first, or give the files",
            )
        files += found
    if len(files) > MAX_VARIANTS:
        raise PackageError(
            f"expected at most {MAX_VARIANTS} bundles of one model, got {len(files)}",
            hint="deploy only those that some device needs: one for each kind of machine",
        )
    if len({file.resolve() for file in files}) != len(files):
        raise PackageError(
            "expected different bundles, got the same file twice", hint="give each bundle once"
        )
    return files


def _core(name: str) -> str:
    """Return a core's name without case and separators: `cortex-a72` and `Cortex-A72` are one."""
    return "".join(character for character in name.lower() if character.isalnum())
