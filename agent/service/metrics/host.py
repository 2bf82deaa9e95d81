"""The device: its hardware and versions for the info document, its memory, load and temperature as gauges.

Promises: reads only files in /proc and /sys, never fails and never blocks for long; values that cannot be
read are left out.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import agent
from agent.bundle.machine import Machine
from agent.service.metrics.metrics import Gauges
from agent.wire import content_types
from agent.wire.info import Capabilities, Hardware, Info, Software

# get_throttled of a Raspberry Pi's firmware: the lowest bits, in this order, say what happens now; the same
# bits shifted by 16 say what has happened since the boot.
_THROTTLE_CAUSES: Final = ("under_voltage", "frequency_capped", "throttled", "soft_temperature_limit")
_SINCE_BOOT_SHIFT: Final = 16
# All that happens now.
_SLOWED_DOWN: Final = 0xF
# Fields of the first line of /proc/stat, proc(5).
_CPU_MODES: Final = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
# Enough for the cores of one chip; a server has hundreds of sensors that do not matter for inference.
_MAX_ZONES: Final = 16
_MAX_FILE_BYTES: Final = 64 << 10
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_TICKS: Final = os.sysconf("SC_CLK_TCK")


def describe(
    device: str, machine: Machine, *, sources: Sequence[str], groups: Sequence[str], max_packet_bytes: int
) -> Info:
    """Return the info document."""
    return Info(
        device=device,
        agent=agent.__version__,
        hardware=Hardware(
            arch=machine.arch,
            board=machine.board,
            cpu=machine.cpu_model,
            cores=os.cpu_count(),
            memory_bytes=machine.memory_bytes,
            features=tuple(sorted(machine.features)),
        ),
        compatible=tuple(sorted(machine.compatible)),
        software=Software(
            kernel=platform.release(),
            glibc=machine.glibc,
            python=platform.python_version(),
            abi=machine.abi,
        ),
        capabilities=Capabilities(
            content_types=content_types.REQUESTS,
            sources=tuple(sources),
            groups=tuple(groups),
            max_packet_bytes=max_packet_bytes,
        ),
    )


class Host:
    """Measures the device.

    `usage` returns free bytes and size of the state directory's file system; empty if they are not known.
    """

    def __init__(self, usage: Callable[[], Sequence[int]], root: Path = Path("/")) -> None:
        self._usage = usage
        self._proc = root / "proc"
        self._sys = root / "sys"
        self._started_s = time.monotonic()

    def gauges(self) -> Gauges:
        """Return the current values: (name, labels) -> value."""
        out: Gauges = {("edge_agent_uptime_seconds", ()): round(time.monotonic() - self._started_s, 1)}
        statm = _read(self._proc / "self/statm").split()
        if len(statm) > 1:
            out["edge_agent_resident_memory_bytes", ()] = int(statm[1]) * _PAGE_BYTES
        cpu_s = _cpu_s(self._proc / "self/stat")
        if cpu_s is not None:
            out["edge_agent_cpu_seconds_total", ()] = cpu_s
        load = _read(self._proc / "loadavg").split()
        if load:
            out["edge_load1", ()] = float(load[0])
        for line in _read(self._proc / "meminfo").splitlines():
            if line.startswith("MemAvailable:"):
                out["edge_memory_available_bytes", ()] = int(line.split()[1]) * 1024
        usage = self._usage()
        if usage:
            out["edge_state_free_bytes", ()], out["edge_state_size_bytes", ()] = usage
        with contextlib.suppress(OSError):
            out["edge_agent_open_descriptors", ()] = len(os.listdir(self._proc / "self/fd"))  # noqa: PTH208
        self._add_processors(out)
        self._add_heat(out)
        return out

    def _add_processors(self, out: Gauges) -> None:
        times = _read(self._proc / "stat").partition("\n")[0].split()
        if times[:1] == ["cpu"]:
            for mode, ticks in zip(_CPU_MODES, times[1:], strict=False):
                out["edge_cpu_seconds_total", (("mode", mode),)] = int(ticks) / _TICKS
        for core in sorted(self._sys.glob("devices/system/cpu/cpu[0-9]*"))[:_MAX_ZONES]:
            kilohertz = _read(core / "cpufreq/scaling_cur_freq").strip()
            if kilohertz.isdigit():
                out["edge_cpu_frequency_hertz", (("core", core.name.removeprefix("cpu")),)] = (
                    int(kilohertz) * 1000
                )

    def _add_heat(self, out: Gauges) -> None:
        for zone in sorted(self._sys.glob("class/thermal/thermal_zone*"))[:_MAX_ZONES]:
            kind, temperature = _read(zone / "type").strip(), _read(zone / "temp").strip()
            if temperature.lstrip("-").isdigit():
                out["edge_temperature_celsius", (("zone", kind or zone.name),)] = int(temperature) / 1000
        for cooler in sorted(self._sys.glob("class/thermal/cooling_device*"))[:_MAX_ZONES]:
            state = _read(cooler / "cur_state").strip()
            if state.isdigit():
                name = f"{_read(cooler / 'type').strip()}-{cooler.name.removeprefix('cooling_device')}"
                out["edge_cooling_state", (("cooler", name),)] = int(state)
        # The value of `vcgencmd get_throttled`, without that program and its device.
        for file in sorted(self._sys.glob("devices/platform/soc*/*firmware*/get_throttled"))[:1]:
            try:
                bits = int(_read(file).strip(), 16)
            except ValueError:
                continue
            for bit, cause in enumerate(_THROTTLE_CAUSES):
                out["edge_throttled", (("cause", cause),)] = bits >> bit & 1
                out["edge_throttled_since_boot", (("cause", cause),)] = bits >> bit + _SINCE_BOOT_SHIFT & 1


def is_hot(sys: Path = Path("/sys")) -> bool:
    """Return whether a Raspberry Pi's firmware slows the device down now."""
    for file in sorted(sys.glob("devices/platform/soc*/*firmware*/get_throttled"))[:1]:
        with contextlib.suppress(ValueError):
            return bool(int(_read(file).strip(), 16) & _SLOWED_DOWN)
    return False


def process_cpu_s(pid: int | str) -> float | None:
    """Return the CPU seconds of a process, user and system together; None if it is gone."""
    return _cpu_s(Path("/proc") / str(pid) / "stat")


def _cpu_s(path: Path) -> float | None:
    # proc(5): the command may contain spaces, so fields are counted after its closing parenthesis.
    stat = _read(path).rpartition(")")[2].split()
    return (int(stat[11]) + int(stat[12])) / _TICKS if len(stat) > 12 else None


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_FILE_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
