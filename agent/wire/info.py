"""The info document: hardware, software and capabilities of a device, retained at `edge/v1/<device>/info`."""

from __future__ import annotations

from dataclasses import dataclass, field

from agent.wire import document
from agent.wire.topics import PREFIX


@dataclass(frozen=True, slots=True)
class Hardware:
    """What the agent runs on.

    Attributes
    ----------
    arch
        `x86_64`, `aarch64`, `armv7l`, `riscv64`, or another name that uname reports.
    board, cpu
        Names of board and processor; empty or None if unknown.
    cores
        Logical processors, or None if unknown.
    memory_bytes
        Physical memory, or None if unknown.
    features
        CPU features with the names of /proc/cpuinfo, sorted.
    """

    arch: str = ""
    board: str | None = None
    cpu: str | None = None
    cores: int | None = None
    memory_bytes: int | None = None
    features: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Software:
    """Versions of what the agent uses.

    Attributes
    ----------
    kernel, glibc, python
        Their versions; glibc is None with another C library.
    abi
        `tvm-ffi-<major>.<minor>`, or None if it is not installed.
    """

    kernel: str = ""
    glibc: str | None = None
    python: str = ""
    abi: str | None = None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What clients may ask of the agent.

    Attributes
    ----------
    content_types
        Of requests.
    sources
        Where it may fetch bundles: `mqtt` and https URL prefixes.
    groups
        Groups whose requests it takes.
    max_packet_bytes
        The longest MQTT packet that it accepts.
    """

    content_types: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    max_packet_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Sandbox:
    """What the sandbox of the device's workers consists of.

    Attributes
    ----------
    landlock
        Version of Landlock's ABI that is in force; 0 for none.
    missing
        Parts that are not in force: `landlock`, `seccomp`, `threads`; sorted.
    """

    landlock: int = 0
    missing: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether all parts are in force."""
        return not self.missing


def _read_sandbox(value: object) -> Sandbox | None:
    return document.read(Sandbox, value) if document.members(value) else None


def _write_sandbox(sandbox: Sandbox | None) -> object:
    return None if sandbox is None else {"complete": sandbox.complete, **document.write(sandbox)}


@dataclass(frozen=True, slots=True)
class Info:
    """One info document.

    Attributes
    ----------
    device
        The device's name.
    agent
        The agent's version.
    compatible
        Names of this machine that a bundle's `compatible` may require, sorted.
    sandbox
        The sandbox of its workers; None while there are none, and from older agents.
    """

    device: str
    agent: str
    hardware: Hardware = field(default=Hardware(), metadata=document.nested(Hardware))
    compatible: tuple[str, ...] = ()
    software: Software = field(default=Software(), metadata=document.nested(Software))
    capabilities: Capabilities = field(default=Capabilities(), metadata=document.nested(Capabilities))
    sandbox: Sandbox | None = field(default=None, metadata=document.form(_read_sandbox, _write_sandbox))

    def to_bytes(self) -> bytes:
        """Write the document."""
        first = {"device": self.device, "agent": self.agent, "protocol": PREFIX}
        return document.encode(first | document.write(self))

    @classmethod
    def from_bytes(cls, raw: bytes) -> Info:
        """Read the document tolerantly: a member of another type counts as absent.

        Raises
        ------
        EndlessDataError, FormatError
            If it is not a JSON object, or too long.
        """
        return document.read(cls, document.parse_object(raw, "the info document"))
