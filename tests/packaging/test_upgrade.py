"""An upgrade while the agent serves: the package's own scripts, on files that dpkg replaces one by one.

`test_lifecycle.py` and `test_booted.py` do the same with dpkg and systemd.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packaging.conftest import PROJECT

pytestmark = pytest.mark.slow

# A program that starts a worker for each line, as the agent does, and a worker that has two modules.
AGENT = """\
#!@HOME@/bin/python -I
import subprocess, sys
print(sys.executable, flush=True)
for line in sys.stdin:
    print(subprocess.run([sys.executable, "-I", "-c", '''
import pathlib, sys
sys.path.insert(0, str(pathlib.Path(sys.executable).parent.parent / "lib"))
import one, two
print(one.VERSION, two.VERSION)
'''], capture_output=True, text=True).stdout.strip(), flush=True)
"""
TOOLS = {
    "dpkg-query": "printf %s $VERSION",
    "deb-systemd-invoke": 'echo "$*: $(readlink $FOLDER/usr/lib/edge-agent/current)" >>$FOLDER/invoked',
    "systemctl": 'case $1 in show) echo "$STATE" ;; esac',
    **dict.fromkeys(("getent", "adduser", "chown", "deb-systemd-helper"), "true"),
}


class Device:
    """The folders of a device, and the package's scripts, which take them for the system's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "usr/lib/edge-agent"
        self.variables = {"FOLDER": str(folder), "VERSION": "1.0+deb12", "STATE": "active"}
        for name in ("etc/edge-agent/keyring", "var/lib/edge-agent", "run/systemd/system", "tools"):
            (folder / name).mkdir(parents=True)
        (folder / "etc/edge-agent/agent.toml").touch()
        for name, body in TOOLS.items():
            self.tool(name, body)

    def tool(self, name: str, body: str) -> None:
        path = self.folder / "tools" / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def unpack(self, version: int, *names: str) -> None:
        """Replace files as dpkg does: each one whole, one after the other."""
        shipped = self.home / "shipped"
        for name in ("bin", "lib"):
            (shipped / name).mkdir(parents=True, exist_ok=True)
        contents = {f"lib/{name}.py": f"VERSION = {version}\n" for name in ("one", "two")}
        contents |= {
            "bin/edge-agent": AGENT,
            "pyvenv.cfg": f"home = {Path(sys.executable).resolve().parent}\n",
        }
        for name in names or contents:
            (shipped / f"{name}.dpkg-new").write_text(contents[name])
            (shipped / f"{name}.dpkg-new").chmod(0o755 if name.startswith("bin") else 0o644)
            (shipped / f"{name}.dpkg-new").rename(shipped / name)
        if not (shipped / "bin/python").is_symlink():
            (shipped / "bin/python").symlink_to(Path(sys.executable).resolve())

    def script(self, name: str, *words: str, ok: bool = True) -> None:
        text = (PROJECT / "packaging/files" / name).read_text("utf-8")
        for system in ("/usr/lib/edge-agent", "/etc/edge-agent", "/var/lib/edge-agent", "/run/systemd"):
            text = text.replace(system, f"{self.folder}{system}")
        path = self.folder / name
        path.write_text(text)
        tools = {"PATH": f"{self.folder / 'tools'}:/usr/sbin:/usr/bin:/sbin:/bin"}
        done = subprocess.run(
            ["/bin/sh", path, *words],
            env=tools | self.variables,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert not ok or done.returncode == 0, done.stderr

    def versions(self) -> list[str]:
        return sorted(path.name for path in self.home.iterdir() if path.name not in ("shipped", "current"))

    def start(self) -> Agent:
        return Agent(self.home / "current/bin/edge-agent")

    def start_and_stop(self) -> str:
        """Return the versions of a worker of an agent that starts now."""
        agent = self.start()
        try:
            return agent.worker()
        finally:
            agent.stop()


class Agent:
    """The program, as the link names it when it starts."""

    def __init__(self, program: Path) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([program], stdin=pipe, stdout=pipe, text=True, bufsize=1)
        assert self._process.stdout is not None
        self.python = Path(self._process.stdout.readline().strip())

    def worker(self) -> str:
        """Start a worker, and return the versions of its modules."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("start\n")
        return self._process.stdout.readline().strip()

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def device(tmp_path: Path) -> Device:
    device = Device(tmp_path)
    device.unpack(1)
    device.script("postinst", "configure")
    return device


@pytest.fixture
def agent(device: Device) -> Iterator[Agent]:
    agent = device.start()
    yield agent
    agent.stop()


def test_workers_that_start_during_an_upgrade_are_all_of_the_old_version(
    device: Device, agent: Agent
) -> None:
    assert agent.worker() == "1 1"
    device.script("prerm", "upgrade", "2.0+deb12")
    device.unpack(2, "lib/one.py")  # half of it
    assert agent.worker() == "1 1"
    assert device.start_and_stop() == "1 1"  # systemd starts it again meanwhile
    device.unpack(2)
    assert agent.worker() == "1 1"

    device.variables["VERSION"] = "2.0+deb12"
    device.script("postinst", "configure", "1.0+deb12")
    invoked = (device.folder / "invoked").read_text().splitlines()
    assert invoked[-1] == f"restart edge-agent.service: {(device.home / 'current').readlink()}"
    assert agent.worker() == "1 1"  # it was not restarted here: its version stays
    assert device.start_and_stop() == "2 2"
    assert [name.rpartition(".")[0] for name in device.versions()] == ["1.0+deb12", "2.0+deb12"]

    agent.stop()
    device.script("postinst", "configure", "2.0+deb12")  # also a repair: made again from the package
    assert [name.rpartition(".")[0] for name in device.versions()] == ["2.0+deb12"]
    assert device.start_and_stop() == "2 2"


def test_downgrade_switches_back(device: Device) -> None:
    device.unpack(2)
    device.variables["VERSION"] = "2.0+deb12"
    device.script("postinst", "configure", "1.0+deb12")
    device.unpack(1)
    device.variables["VERSION"] = "1.0+deb12"
    device.script("postinst", "configure", "2.0+deb12")
    assert device.start_and_stop() == "1 1"
    assert [name.rpartition(".")[0] for name in device.versions()] == ["1.0+deb12"]


@pytest.mark.parametrize("step", ["cp", "sed", "sync", "ln", "mv"])
def test_power_that_fails_in_any_step_leaves_a_version_that_runs(device: Device, step: str) -> None:
    device.unpack(2)
    device.tool(step, "kill -9 $PPID")
    device.script("postinst", "configure", "1.0+deb12", ok=False)
    assert device.start_and_stop() == "1 1"
    (device.folder / "tools" / step).unlink()
    device.script("postinst", "configure", "1.0+deb12")
    assert device.start_and_stop() == "2 2"
    assert len(device.versions()) == 1


def test_upgrade_that_is_given_up_leaves_the_old_version(device: Device) -> None:
    before = (device.home / "current").readlink()
    device.unpack(2, "lib/one.py")
    device.script("postinst", "abort-upgrade", "2.0+deb12")
    assert (device.home / "current").readlink() == before
    assert device.start_and_stop() == "1 1"


def test_old_version_stays_while_its_successor_does_not_start(device: Device) -> None:
    device.unpack(2)
    device.variables |= {"VERSION": "2.0+deb12", "STATE": "activating"}
    device.script("postinst", "configure", "1.0+deb12")
    assert [name.rpartition(".")[0] for name in device.versions()] == ["1.0+deb12", "2.0+deb12"]


def test_byte_code_is_compiled_and_shipped_files_take_no_space_twice(device: Device) -> None:
    current = device.home / "current"
    assert list(current.glob("lib/__pycache__/one.*.pyc"))
    assert (current / "lib/one.py").samefile(device.home / "shipped/lib/one.py")
    assert not list(device.home.glob("shipped/**/__pycache__"))


def test_removal_leaves_only_what_dpkg_removes_itself(device: Device) -> None:
    device.script("prerm", "remove")
    assert sorted(path.name for path in device.home.iterdir()) == ["shipped"]
    device.script("postinst", "abort-remove")
    assert device.start_and_stop() == "1 1"
