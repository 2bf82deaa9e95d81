"""The agent's footprint on a device: installed size, start time, and idle memory.

The agent is started with a broker that cannot be reached: many devices start before their network is up.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

# Packages that a device needs, without those of the builder. Their files are listed in pip's records.
DEVICE_PACKAGES: Final = (
    "edgebundle",
    "apache-tvm-ffi",
    "numpy",
    "paho-mqtt",
    "cryptography",
    "cffi",
    "pycparser",
    "pillow",
)
START_LIMIT_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class Footprint:
    """Figures of the agent on this machine.

    Attributes
    ----------
    installed_bytes
        Size of the agent's files and of its dependencies, as installed here.
    ready_s
        Seconds from exec to READY.
    idle_bytes
        Resident memory of the agent without a model.
    """

    installed_bytes: int
    ready_s: float
    idle_bytes: int


def measure() -> Footprint:
    """Start an agent, wait for READY on the notify socket, and measure it a second later."""
    import socket

    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        path = Path(folder, "notify")
        notify.bind(str(path))
        notify.settimeout(START_LIMIT_S)
        Path(folder, "trust").mkdir()
        _write_key(Path(folder, "trust"))
        command = [
            sys.executable,
            "-m",
            "agent",
            "run",
            "--broker",
            "mqtt://127.0.0.1:9",
            "--device",
            "bench",
        ]
        command += ["--trust", f"{folder}/trust", "--state-dir", f"{folder}/state"]
        start = time.perf_counter()
        agent = subprocess.Popen(
            command, env={**os.environ, "NOTIFY_SOCKET": str(path)}, stderr=subprocess.DEVNULL
        )
        try:
            while b"READY=1" not in notify.recv(4096):
                pass
            ready_s = time.perf_counter() - start
            time.sleep(1)
            idle_bytes = int(Path(f"/proc/{agent.pid}/statm").read_text().split()[1]) * os.sysconf(
                "SC_PAGE_SIZE"
            )
        finally:
            agent.terminate()
            agent.wait(10)
    return Footprint(_installed_bytes(), ready_s, idle_bytes)


def _write_key(folder: Path) -> None:
    from builder.bundles.key_files import generate

    pair = generate(folder / "pair")
    pair.public.rename(folder / "signing.pub")
    pair.private.unlink()
    (folder / "pair").rmdir()


def _installed_bytes() -> int:
    total = 0
    for name in DEVICE_PACKAGES:
        try:
            files = metadata.files(name) or []
        except metadata.PackageNotFoundError:
            continue
        total += sum(path.stat().st_size for file in files if (path := Path(str(file.locate()))).is_file())
    agent = Path(__file__).parents[1] / "agent"
    return total + sum(path.stat().st_size for path in agent.rglob("*.py"))
