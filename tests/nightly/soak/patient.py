"""A device as systemd runs its agent: restarted when it ends, killed when its watchdog starves.

Promises: nothing helps the agent except what the unit in `systemd/` promises: a restart after
`RestartSec`, and an end when no watchdog message has come for `WatchdogSec`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from tests.agent.launching import workers_of
from tests.nightly.soak.clocked_agent import OFFSET
from tests.nightly.soak.disk import Disk

DEVICE: Final = "kitchen"
RESTART_S: Final = 2.0
WATCHDOG_S: Final = 30.0
CONFIG: Final = """
[inference]
compute_limit_s = 2.0
"""


class Patient:
    """One device.

    Parameters
    ----------
    folder
        For its configuration, its clock, and its state if there is no `disk`.
    disk
        Where its state is; None for a folder, which no fault of a disk can reach.
    trust
        The folder with trusted keys.
    port
        Where it finds its broker.
    log
        The file that the agent's log is appended to.

    Attributes
    ----------
    starts
        How often the agent was started.
    """

    def __init__(self, folder: Path, disk: Disk | None, trust: Path, port: int, log: Path) -> None:
        self.starts = 0
        self.disk = disk
        self._folder = folder
        self._trust = trust
        self._port = port
        self._log = log
        self._powered = False
        self._process: subprocess.Popen[bytes] | None = None
        self._fed_s = 0.0
        self._clock = folder / "clock"
        self.shift_clock(0.0)
        (folder / "agent.toml").write_text(CONFIG)
        # As systemd makes them: gone after a power cut, kept over a restart.
        self._runtime = folder / "run"
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notify.bind(str(folder / "notify"))
        self._notify.setblocking(False)

    @property
    def pid(self) -> int | None:
        """The agent's process, if it runs."""
        running = self._process is not None and self._process.poll() is None
        return self._process.pid if self._process is not None and running else None

    @property
    def workers(self) -> list[int]:
        """The processes of its models."""
        pid = self.pid
        try:
            return [] if pid is None else workers_of(pid)
        except OSError:
            return []

    def shift_clock(self, seconds: float) -> None:
        """Set the wall clock, relative to the machine's."""
        if not self._clock.exists():
            self._clock.write_bytes(OFFSET.pack(seconds))
            return
        with self._clock.open("r+b") as file:
            file.write(OFFSET.pack(seconds))

    async def keep(self) -> None:
        """Do what systemd does, until cancelled."""
        while True:
            await asyncio.sleep(0.1)
            self._hear()
            if not self._powered:
                continue
            if self.pid is None:
                await asyncio.sleep(RESTART_S)
                if self._powered and self.pid is None:
                    self._start()
            elif time.monotonic() - self._fed_s > WATCHDOG_S:
                self.kill()

    def switch_on(self, *, read_only: bool = False) -> None:
        """Boot."""
        if self.disk is not None and not os.path.ismount(self.disk.path):
            self.disk.mount(read_only=read_only)
        shutil.rmtree(self._runtime, ignore_errors=True)
        self._runtime.mkdir()
        self._powered = True
        self._start()

    def cut_power(self) -> None:
        """Kill everything, and lose what was not synced."""
        self._powered = False
        if self.disk is not None:
            # Stopped first: a process writes nothing between the moment of the cut and its end.
            for pid in (*self.workers, *((self.pid,) if self.pid else ())):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
        self.kill()
        if self.disk is not None:
            self.disk.cut_power()

    def kill(self) -> None:
        """Kill the agent and its workers, as systemd ends what is left of a service."""
        process, workers = self._process, self.workers
        for pid in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if process is not None:
            process.kill()
            process.wait()

    def close(self) -> None:
        """Switch off for good."""
        self._powered = False
        self.kill()
        self._notify.close()

    def _start(self) -> None:
        state = self._folder / "state" if self.disk is None else self.disk.path / "state"
        command = [sys.executable, str(Path(__file__).with_name("clocked_agent.py")), str(self._clock), "run"]
        command += ["--config", str(self._folder / "agent.toml"), "--device", DEVICE]
        command += ["--broker", f"mqtt://127.0.0.1:{self._port}", "--trust", str(self._trust)]
        command += ["--state-dir", str(state)]
        environment = {
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[3]),
            "RUNTIME_DIRECTORY": str(self._runtime),
            "NOTIFY_SOCKET": str(self._folder / "notify"),
            "WATCHDOG_USEC": str(int(WATCHDOG_S * 1e6)),
        }
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        self.starts += 1
        self._fed_s = time.monotonic()

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._notify.recv(4096):
                self._fed_s = time.monotonic()
