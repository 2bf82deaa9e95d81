"""The machine in a report: Python and its libraries, processor, clock, disk, memory, heat, sandbox.

Promises to change nothing. A check that could crash this process (a library for another processor) or cannot
be undone (a sandbox) runs in a separate process.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import agent
from agent import clock
from agent.bundle.machine import Machine
from agent.deploy.store.store import SPACE_MARGIN_BYTES
from agent.provision.finding import Finding, fail, ok, warn

_MIB: Final = 1 << 20
# Importing takes seconds under an emulator and on a first-generation Pi.
_PROBE_LIMIT_S: Final = 120
_IMPORTS: Final = """
import importlib.metadata as m
import cryptography, numpy, paho.mqtt, PIL.Image, tvm_ffi
names = ("apache-tvm-ffi", "numpy", "pillow", "cryptography", "paho-mqtt")
found = []
for name in names:
    try:
        found.append(f"{name} {m.version(name)}")
    except m.PackageNotFoundError:
        found.append(name)
print(", ".join(found))
"""
_SANDBOX: Final = """
import json, socket
from agent.worker import sandbox
ours, gate = socket.socketpair()
status = sandbox.close_files(sandbox.Limits(), gate)
parts = {"landlock": status.landlock, "seccomp": status.seccomp, "threads": status.threads}
print(json.dumps([str(status), [name for name, in_force in parts.items() if not in_force]]))
"""
_COMMAND_LINE: Final = "/boot/firmware/cmdline.txt"
# One or two workers take this much; with less, the kernel starts to kill processes.
_LOW_MEMORY_BYTES: Final = 64 * _MIB
# Raspberry Pi's firmware, "get_throttled": these bits for now, and 16 bits higher for "since boot".
_THROTTLED: Final = {
    0: "the supply voltage is too low",
    1: "the processor's frequency is capped",
    2: "the processor is throttled",
    3: "the soft temperature limit is reached",
}
_HOT_C: Final = 80.0


def check_python() -> Iterator[Finding]:
    """Check the interpreter, and load every library that serving needs."""
    mine = f"edge-agent {agent.__version__}, Python {platform.python_version()}"
    done = _run(_IMPORTS)
    if done.returncode == 0:
        yield ok("python", f"{mine}, {done.stdout.strip()}")
    elif done.returncode < 0:
        yield fail(
            "python",
            f"{mine}: loading its libraries ended with signal {-done.returncode}",
            "check that the package is for this processor: dpkg --print-architecture",
        )
    else:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        yield fail("python", f"{mine}: a library cannot be loaded: {last}", "install the package again")


def check_processor(machine: Machine) -> Iterator[Finding]:
    """Name the processor and the features that kernels may use."""
    name = ", ".join(part for part in (machine.board, machine.cpu_model) if part) or machine.arch
    needed = {"aarch64": "asimd", "armv7l": "neon", "x86_64": "avx2"}.get(machine.arch)
    text = f"{name}: {machine.arch}, {os.cpu_count()} cores, glibc {machine.glibc}"
    text += f", {machine.abi or 'no tvm-ffi'}"
    known = ("asimd", "asimddp", "asimdhp", "i8mm", "neon", "vfpv4", "avx2", "fma", "avx512f", "avx512_vnni")
    text += f"; {' '.join(word for word in known if word in machine.features) or 'no vector units known'}"
    if needed is not None and needed not in machine.features:
        yield warn(
            "processor", text, f"most bundles need {needed}; compile with a --target that does without it"
        )
    else:
        yield ok("processor", text)


def check_clock(*, now_s: float | None = None, synchronised: bool | None = None) -> Iterator[Finding]:
    """Check that the clock is later than the agent's build, and known to be synchronised."""
    now_s = time.time() if now_s is None else now_s
    synchronised = clock.is_synchronised() if synchronised is None else synchronised
    today = f"{datetime.datetime.fromtimestamp(now_s, datetime.UTC):%Y-%m-%d %H:%M} UTC"
    if now_s < clock.built_s() - 86_400:
        yield fail(
            "clock",
            f"it says {today}, which is before this agent was built",
            "set it, or no certificate is valid: timedatectl set-ntp true",
        )
    elif not synchronised:
        yield warn(
            "clock",
            f"it says {today}, and is not known to be synchronised",
            "synchronise it: timedatectl set-ntp true",
        )
    else:
        yield ok("clock", f"{today}, synchronised")


def check_disk(state_dir: Path) -> Iterator[Finding]:
    """Check the free space for bundles."""
    existing = state_dir
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if os.statvfs(existing).f_flag & os.ST_RDONLY:
        yield fail(
            "disk",
            f"the file system of {state_dir} is read-only: models are served, but none is installed",
            "look for errors of the card or disk: dmesg | grep -i error",
        )
        return
    usage = shutil.disk_usage(existing)
    text = f"{usage.free / 1e9:.1f} GB of {usage.total / 1e9:.1f} GB are free for {state_dir}"
    if usage.free < SPACE_MARGIN_BYTES:
        yield fail(
            "disk", text, "free at least 16 MiB, or no bundle is accepted: journalctl --vacuum-size=50M"
        )
    elif usage.free < 8 * SPACE_MARGIN_BYTES:
        yield warn("disk", text, "free some for larger bundles: journalctl --vacuum-size=50M, apt clean")
    else:
        yield ok("disk", text)


def check_memory(root: Path = Path("/")) -> Iterator[Finding]:
    """Check the available memory, and whether the kernel can enforce the service's limit on it."""
    found = {
        key: int(value.split()[0]) * 1024
        for key, _, value in (line.partition(":") for line in _text(root / "proc/meminfo").splitlines())
        if value.split()
    }
    available, total = found.get("MemAvailable", 0), found.get("MemTotal", 0)
    text = f"{available / _MIB:.0f} MiB of {total / _MIB:.0f} MiB are available"
    if available < _LOW_MEMORY_BYTES:
        yield warn("memory", text, "stop other programs or run smaller models, or a model may not start")
    else:
        yield ok("memory", text)
    controllers = _text(root / "sys/fs/cgroup/cgroup.controllers")
    booted = (root / "run/systemd/system").is_dir()  # sd_booted(3)
    if booted and controllers and "memory" not in controllers.split():
        yield warn(
            "memory",
            "the kernel does not count the memory of services: MemoryMax= of the unit has no effect",
            "add cgroup_enable=memory to the line in /boot/firmware/cmdline.txt, and reboot",
        )


def check_heat(root: Path = Path("/")) -> Iterator[Finding]:
    """Check the temperature, and whether heat or a weak power supply slows the processor down."""
    read = [_text(zone) for zone in sorted((root / "sys/class/thermal").glob("thermal_zone*/temp"))]
    degrees = [int(text) / 1000 for text in read if text.strip().lstrip("-").isdigit()]
    firmware = sorted((root / "sys/devices/platform").glob("soc*/*firmware*/get_throttled"))
    raw = _text(firmware[0]).strip() if firmware else ""
    bits = int(raw, 16) if raw and all(digit in "0123456789abcdefx" for digit in raw.lower()) else 0
    now = [words for bit, words in _THROTTLED.items() if bits >> bit & 1]
    before = [words for bit, words in _THROTTLED.items() if bits >> bit + 16 & 1]
    text = f"{max(degrees):.0f} °C" if degrees else "no sensor"
    hint = "add a heat sink or a fan; for low voltage, use the manufacturer's power supply"
    if now:
        yield warn("heat", f"{text}; {', '.join(now)}", hint)
    elif before:
        yield warn("heat", f"{text}; since boot: {', '.join(before)}", hint)
    elif degrees and max(degrees) >= _HOT_C:
        yield warn("heat", text, hint)
    else:
        yield ok("heat", text)


def check_sandbox(*, required: bool) -> Iterator[Finding]:
    """Enter a worker's sandbox in a separate process, and report which parts the kernel supports."""
    done = _run(_SANDBOX)
    try:
        status, missing = json.loads(done.stdout)
    except ValueError:
        last = done.stderr.strip()[-200:]
        text, missing = f"it cannot be set up: {last}", ["landlock", "seccomp", "threads"]
    else:
        text = f"workers get {status}"
    yield judge_sandbox(text, missing, required=required)


def judge_sandbox(text: str, missing: Sequence[str], *, required: bool, root: Path = Path("/")) -> Finding:
    """Return the finding about a sandbox that gives workers `text`, with a hint for each `missing` part."""
    if not missing:
        return ok("sandbox", text)
    hint = "; ".join(_sandbox_hint(part, root) for part in missing)
    if required:
        return fail("sandbox", f"{text}, but worker.require_sandbox demands a complete one", hint)
    return warn("sandbox", text, hint)


def _sandbox_hint(part: str, root: Path) -> str:
    if part == "seccomp":
        return "seccomp: use a kernel with CONFIG_SECCOMP_FILTER"
    if part == "threads":
        return (
            "threads: use Linux 5.7 or later, in a container engine that has no seccomp listener of its own"
        )
    # The boot parameter replaces the list, so it must repeat the modules that are active now.
    active = _text(root / "sys/kernel/security/lsm").strip()
    modules = [name for name in active.split(",") if name and name != "capability"]
    value = ",".join(["landlock", *modules]) if modules else "landlock,lockdown,yama,integrity,apparmor"
    raspberry_pi = (root / _COMMAND_LINE.lstrip("/")).exists()
    where = f"the line in {_COMMAND_LINE}" if raspberry_pi else "the kernel's command line"
    return f"landlock: add lsm={value} to {where}, and reboot; it needs Linux 5.13 or later"


def _run(program: str) -> subprocess.CompletedProcess[str]:
    # The path of our own modules matters only when they are not installed.
    path = os.pathsep.join([str(Path(agent.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    try:
        return subprocess.run(  # noqa: S603 - our own interpreter and text
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=_PROBE_LIMIT_S,
            check=False,
            env={**os.environ, "PYTHONPATH": path},
            cwd="/",
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess([], 1, "", f"not done within {_PROBE_LIMIT_S} s")


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MIB).decode("utf-8", "replace")
    except OSError:
        return ""
