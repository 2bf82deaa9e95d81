"""What the device says about itself: hardware and versions once, memory, load and temperature now.

Promises: reads files below /proc and /sys, never fails and never blocks for long; what cannot be read is
left out.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import agent
from agent.bundle.machine import Machine

CONTENT_TYPES: Final = (
    "application/json",
    "application/octet-stream",
    "image/jpeg",
    "image/png",
    "application/cbor",
)
# Cores of one chip and a few more; a server has hundreds of sensors that say nothing about inference.
_MAX_ZONES: Final = 16
_MAX_FILE_BYTES: Final = 64 << 10
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_TICKS: Final = os.sysconf("SC_CLK_TCK")

Gauges = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def describe(
    device: str, machine: Machine, *, sources: Sequence[str], groups: Sequence[str], max_packet_bytes: int
) -> dict[str, object]:
    """Return the document that is retained on the info topic."""
    return {
        "device": device,
        "agent": agent.__version__,
        "protocol": "edge/v1",
        "hardware": {
            "arch": machine.arch,
            "board": machine.board,
            "cpu": machine.cpu_model,
            "cores": os.cpu_count(),
            "memory_bytes": machine.memory_bytes,
            "features": sorted(machine.features),
        },
        "compatible": sorted(machine.compatible),
        "software": {
            "kernel": platform.release(),
            "glibc": machine.glibc,
            "python": platform.python_version(),
            "abi": machine.abi,
        },
        "capabilities": {
            "content_types": list(CONTENT_TYPES),
            "sources": list(sources),
            "groups": list(groups),
            "max_packet_bytes": max_packet_bytes,
        },
    }


class Host:
    """Measures the device.

    Parameters
    ----------
    state_dir
        Whose file system's free space is told.
    root
        `/`, but in tests.
    """

    def __init__(self, state_dir: Path, root: Path = Path("/")) -> None:
        self._state_dir = state_dir
        self._proc = root / "proc"
        self._sys = root / "sys"
        self._started_s = time.monotonic()

    def gauges(self) -> Gauges:
        """Measure."""
        out: Gauges = {("edge_agent_uptime_seconds", ()): round(time.monotonic() - self._started_s, 1)}
        statm = _read(self._proc / "self/statm").split()
        if len(statm) > 1:
            out["edge_agent_resident_memory_bytes", ()] = int(statm[1]) * _PAGE_BYTES
        # proc(5): the command may hold spaces, fields are counted from behind its parenthesis.
        stat = _read(self._proc / "self/stat").rpartition(")")[2].split()
        if len(stat) > 12:
            out["edge_agent_cpu_seconds_total", ()] = (int(stat[11]) + int(stat[12])) / _TICKS
        load = _read(self._proc / "loadavg").split()
        if load:
            out["edge_load1", ()] = float(load[0])
        for line in _read(self._proc / "meminfo").splitlines():
            if line.startswith("MemAvailable:"):
                out["edge_memory_available_bytes", ()] = int(line.split()[1]) * 1024
        for zone in sorted(self._sys.glob("class/thermal/thermal_zone*"))[:_MAX_ZONES]:
            kind, temperature = _read(zone / "type").strip(), _read(zone / "temp").strip()
            if temperature.lstrip("-").isdigit():
                out["edge_temperature_celsius", (("zone", kind or zone.name),)] = int(temperature) / 1000
        with contextlib.suppress(OSError):
            out["edge_state_free_bytes", ()] = shutil.disk_usage(self._state_dir).free
        return out


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_FILE_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
