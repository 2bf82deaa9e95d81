"""A device's service, as systemd reports it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from agent.errors import ConfigError
from agent.provision.finding import Finding, fail, ok, warn

UNIT: Final = "edge-agent.service"
# Starting takes as long as loading the models; systemd itself gives up after TimeoutStartSec.
_START_LIMIT_S: Final = 300
_ASK_LIMIT_S: Final = 20


def systemd_runs() -> bool:
    """Return whether systemd is this machine's service manager (sd_booted(3))."""
    return Path("/run/systemd/system").is_dir() and shutil.which("systemctl") is not None


def state() -> dict[str, str]:
    """Return the unit's properties by name; empty without systemd or without the unit."""
    if not systemd_runs():
        return {}
    names = "LoadState,ActiveState,SubState,UnitFileState,NRestarts,Result,ConditionResult,ExecMainStatus"
    done = _systemctl("show", UNIT, f"--property={names}", limit_s=_ASK_LIMIT_S)
    found = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    return found if found.get("LoadState") == "loaded" else {}


def check_service() -> Iterator[Finding]:
    """Check the state of the unit."""
    if not systemd_runs():
        yield ok(
            "service", "systemd is not running here: the agent must be started and restarted by other means"
        )
        return
    found = state()
    if not found:
        yield warn(
            "service", f"{UNIT} is not installed", "install the package, or run edge-agent run yourself"
        )
        return
    active, restarts = found.get("ActiveState", ""), found.get("NRestarts", "0")
    text = f"{active} ({found.get('SubState', '')}), {found.get('UnitFileState', '')}"
    if active == "active":
        if restarts not in ("", "0"):
            yield warn("service", f"{text}, restarted {restarts} times", f"journalctl -u {UNIT} -b")
        else:
            yield ok("service", text)
    elif found.get("ExecMainStatus") == "78":  # it is tried again every two minutes
        yield fail(
            "service", f"{text}: the configuration is wrong", f"journalctl -u {UNIT} -n 20 names the key"
        )
    elif found.get("ConditionResult") == "no":
        yield fail("service", f"{text}: no trusted key", f"edge-agent enroll, then systemctl start {UNIT}")
    else:
        yield fail("service", f"{text}, result {found.get('Result', '')}", f"sudo systemctl start {UNIT}")


def restart() -> None:
    """Start or restart the service, and return when it is serving; raises ConfigError if not."""
    if not systemd_runs():
        raise ConfigError("--start: systemd is not running here", hint="start the agent with edge-agent run")
    done = _systemctl("restart", UNIT, limit_s=_START_LIMIT_S)
    if done.returncode or state().get("ActiveState") != "active":
        last = (done.stderr.strip().splitlines() or ["the unit is not active"])[-1]
        raise ConfigError(f"{UNIT} did not start: {last}", hint=f"journalctl -u {UNIT} -n 20")


def _systemctl(*words: str, limit_s: float) -> subprocess.CompletedProcess[str]:
    program = shutil.which("systemctl")
    assert program is not None
    try:
        return subprocess.run(  # noqa: S603 - systemd's own program
            [program, *words], capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess([], 1, "", f"no answer from systemd within {limit_s:g} s")
