"""The info document: hardware, software and capabilities of a device, retained at `edge/v1/<device>/info`."""

from __future__ import annotations

from dataclasses import dataclass

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
    hardware: Hardware = Hardware()
    compatible: tuple[str, ...] = ()
    software: Software = Software()
    capabilities: Capabilities = Capabilities()
    sandbox: Sandbox | None = None

    def to_bytes(self) -> bytes:
        """Write the document."""
        hardware, software, capabilities = self.hardware, self.software, self.capabilities
        sandbox = self.sandbox
        return document.encode(
            {
                "device": self.device,
                "agent": self.agent,
                "protocol": PREFIX,
                "hardware": {
                    "arch": hardware.arch,
                    "board": hardware.board,
                    "cpu": hardware.cpu,
                    "cores": hardware.cores,
                    "memory_bytes": hardware.memory_bytes,
                    "features": hardware.features,
                },
                "compatible": self.compatible,
                "software": {
                    "kernel": software.kernel,
                    "glibc": software.glibc,
                    "python": software.python,
                    "abi": software.abi,
                },
                "capabilities": {
                    "content_types": capabilities.content_types,
                    "sources": capabilities.sources,
                    "groups": capabilities.groups,
                    "max_packet_bytes": capabilities.max_packet_bytes,
                },
                "sandbox": None
                if sandbox is None
                else {
                    "complete": sandbox.complete,
                    "landlock": sandbox.landlock,
                    "missing": sandbox.missing,
                },
            }
        )

    @classmethod
    def from_bytes(cls, raw: bytes) -> Info:
        """Read the document tolerantly: a member of another type counts as absent.

        Raises
        ------
        EndlessDataError, FormatError
            If it is not a JSON object, or too long.
        """
        fields = document.parse_object(raw, "the info document")
        hardware = document.members(fields.get("hardware"))
        software = document.members(fields.get("software"))
        capabilities = document.members(fields.get("capabilities"))
        sandbox = document.members(fields.get("sandbox"))
        return cls(
            device=document.text(fields.get("device")),
            agent=document.text(fields.get("agent")),
            hardware=Hardware(
                arch=document.text(hardware.get("arch")),
                board=document.optional_text(hardware.get("board")),
                cpu=document.optional_text(hardware.get("cpu")),
                cores=document.integer(hardware.get("cores")),
                memory_bytes=document.integer(hardware.get("memory_bytes")),
                features=document.texts(hardware.get("features")),
            ),
            compatible=document.texts(fields.get("compatible")),
            software=Software(
                kernel=document.text(software.get("kernel")),
                glibc=document.optional_text(software.get("glibc")),
                python=document.text(software.get("python")),
                abi=document.optional_text(software.get("abi")),
            ),
            capabilities=Capabilities(
                content_types=document.texts(capabilities.get("content_types")),
                sources=document.texts(capabilities.get("sources")),
                groups=document.texts(capabilities.get("groups")),
                max_packet_bytes=document.integer(capabilities.get("max_packet_bytes")) or 0,
            ),
            sandbox=Sandbox(
                landlock=document.integer(sandbox.get("landlock")) or 0,
                missing=document.texts(sandbox.get("missing")),
            )
            if sandbox
            else None,
        )
