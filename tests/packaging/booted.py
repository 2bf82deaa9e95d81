"""A Debian root booted with its own systemd, in a systemd-nspawn container."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.packaging.conftest import Root, wait_for
from tests.patience import PATIENCE_S, PROGRAM_PATIENCE_S


class Booted:
    """A running system in `root`. It uses this machine's network, and so reaches a broker on the loopback."""

    def __init__(self, root: Root, log: Path) -> None:
        self._log = log
        root.unmount_system()
        # The unified hierarchy of control groups: otherwise systemd does not notice that a killed service is
        # empty. And no seccomp filter for the container: systemd 252's does not know Landlock.
        environment = dict(os.environ, SYSTEMD_NSPAWN_UNIFIED_HIERARCHY="1", SYSTEMD_SECCOMP="0")
        command = [
            "systemd-nspawn",
            "--quiet",
            "--register=no",
            "--keep-unit",
            "-D",
            str(root.path),
            "--boot",
        ]
        with log.open("wb") as out:
            self._nspawn = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment
            )
        wait_for("the container's first process", lambda: self._leader() is not None, PROGRAM_PATIENCE_S)
        leader = self._leader()
        assert leader is not None
        self._enter = [
            "nsenter",
            "--target",
            leader,
            "--mount",
            "--uts",
            "--ipc",
            "--pid",
            "--root",
            "--wd=/",
        ]
        wait_for("systemd to have booted", self._is_up, PROGRAM_PATIENCE_S)

    def _leader(self) -> str | None:
        if self._nspawn.poll() is not None:
            pytest.fail(f"systemd-nspawn ended with {self._nspawn.returncode}:\n{self.console}")
        children = Path(f"/proc/{self._nspawn.pid}/task/{self._nspawn.pid}/children").read_text().split()
        for child in children:
            if Path(f"/proc/{child}/comm").read_text().strip() == "systemd":
                return child
        return None

    def _is_up(self) -> bool:
        state = self.run("systemctl", "is-system-running", ok=False).strip()
        return state in ("running", "degraded")

    @property
    def console(self) -> str:
        return self._log.read_text(errors="replace")

    def run(self, *words: str, ok: bool = True) -> str:
        """Run a program in the system and return its output; `ok=False` accepts any exit status."""
        done = subprocess.run(
            [
                *self._enter,
                "/usr/bin/env",
                "-i",
                "--chdir=/",
                "PATH=/usr/sbin:/usr/bin",
                "LC_ALL=C.UTF-8",
                *words,
            ],
            capture_output=True,
            text=True,
            timeout=PROGRAM_PATIENCE_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        if ok and done.returncode:
            pytest.fail(f"{words} gave {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def show(self, *properties: str, unit: str = "edge-agent") -> dict[str, str]:
        """Return properties of a unit."""
        lines = self.run("systemctl", "show", unit, *(f"--property={name}" for name in properties))
        return dict(line.split("=", 1) for line in lines.splitlines())

    def journal(self, unit: str = "edge-agent") -> str:
        """Return the log of a unit."""
        return self.run("journalctl", "--no-pager", "--unit", unit)

    def stop(self) -> None:
        """Shut the system down."""
        self._nspawn.send_signal(signal.SIGTERM)
        try:
            self._nspawn.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._nspawn.kill()
            self._nspawn.wait()
            pytest.fail(f"the container did not halt:\n{self.console[-3000:]}")
        time.sleep(0.2)
