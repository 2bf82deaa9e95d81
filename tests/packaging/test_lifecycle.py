"""The ARM packages from installation to purge, under qemu: whether the agent serves, and what is left."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from builder.fleet.deploy import deploy
from edgebundle import Broker, UnknownModelError
from tests.asking import ask
from tests.conftest import BrokerProcess
from tests.packaging.conftest import (
    DIGITS,
    Root,
    RunningAgent,
    running,
    wait_for,
    wait_until_online,
)
from tests.patience import PROGRAM_PATIENCE_S

pytestmark = pytest.mark.arm

MAX_INSTALL_S = 60
CONFIG = "/etc/edge-agent/agent.toml"
KEY = "/etc/edge-agent/keyring/signing.pub"
UNITS = ("edge-agent.service", "edge-agent-enroll.service")
PASSWORD = "/etc/edge-agent/broker.password"
# Files in which the system records an enabled service and a user.
SYSTEMS_OWN = re.compile(
    r"/etc/(passwd|group|shadow|gshadow|subuid|subgid)"
    r"|/etc/systemd/system/multi-user\.target\.wants/edge-agent(-enroll)?\.service"
    r"|/var/lib/systemd/deb-systemd-helper-enabled/(edge-agent(-enroll)?\.service\.dsh-also"
    r"|multi-user\.target\.wants/edge-agent(-enroll)?\.service)"
)


def install(root: Root, package: Path) -> str:
    shutil.copy(package, root.path / "tmp" / package.name)
    return root.run("apt-get", "install", "--yes", f"/tmp/{package.name}")


def children_cpu_s() -> float:
    """Return the CPU seconds of all child processes that have ended; the machine's load does not matter."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@contextlib.contextmanager
def serve(root: Root, folder: Path) -> Iterator[RunningAgent]:
    """Run the program as the unit does, as the package's user, and wait until it is ready."""
    command = root.command("edge-agent", "run", "--config", CONFIG, user="edge-agent:edge-agent")
    with running(command, folder / f"agent-{time.monotonic_ns()}.log") as agent:
        wait_for("the agent to serve", lambda: "serves as" in agent.log, PROGRAM_PATIENCE_S)
        yield agent


def changed(before: dict[str, bytes | str], after: dict[str, bytes | str]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


@pytest.mark.parametrize(
    ("suite", "arch", "target"),
    [
        ("bookworm", "arm64", "rpi4"),
        ("trixie", "arm64", "rpi4"),
        ("bookworm", "armhf", "rpi-armv7"),
        ("trixie", "armhf", "rpi-armv7"),
    ],
)
def test_install_enroll_serve_upgrade_downgrade_remove_purge(
    suite: str,
    arch: str,
    target: str,
    make_root: Callable[[str, str], Root],
    build_deb: Callable[..., Path],
    own_broker: BrokerProcess,
    keys: Path,
    compiled: Callable[..., Path],
    tmp_path: Path,
) -> None:
    root = make_root(arch, suite)
    clean = root.files()
    broker = Broker(own_broker.url)

    # Install: the package's files, their byte code, its user, the enabled service; nothing else.
    package, newer = build_deb(suite, arch), build_deb(suite, arch, 1)
    start_s, start_cpu_s = time.monotonic(), children_cpu_s()
    install(root, package)
    took_s = children_cpu_s() - start_cpu_s
    print(f"installed in {took_s:.0f} s of one core, {time.monotonic() - start_s:.0f} s by the clock")
    assert took_s <= MAX_INSTALL_S
    listed = set(root.run("dpkg", "--listfiles", "edge-agent").split("\n"))
    new = {
        name
        for name in changed(clean, root.files())
        if name not in listed and not SYSTEMS_OWN.fullmatch(name) and "/__pycache__/" not in name
    }
    # Each shipped file once more, in the folder of this installation.
    current = str(root.files()["/usr/lib/edge-agent/current"])
    made = {name for name in new if name.startswith(f"/usr/lib/edge-agent/{current}/")}
    shipped = {name.replace("/shipped/", f"/{current}/") for name in listed if "/shipped/" in name}
    assert made <= shipped
    assert new - made == {"/usr/lib/edge-agent/current"}
    assert root.run("stat", "--format=%U:%G %a", CONFIG).strip() == "root:edge-agent 640"
    assert root.run("stat", "--format=%U:%G %a", "/var/lib/edge-agent").strip() == "edge-agent:edge-agent 700"
    assert root.run("edge-agent", "version").startswith("edge-agent ")
    root.run(
        "/usr/lib/edge-agent/current/bin/python",
        "-I",
        "-c",
        "import tvm_ffi, numpy, PIL.Image, cbor2, prometheus_client",
    )

    # Not configured yet: one line says what is missing, and systemd does not retry on that exit status.
    output = root.run("edge-agent", "run", "--config", CONFIG, ok=False)
    assert "broker.url" in output
    assert "Traceback" not in output

    # Enroll: name, broker, credentials and a trusted key; each file readable only for those who need it.
    shutil.copy(keys / "signing.pub", root.path / "tmp")
    (root.path / "tmp/secret").write_text("hunter2\n")
    words: tuple[str, ...] = ("--device", suite, "--broker", own_broker.url, "--trust", "/tmp/signing.pub")
    words += ("--username", suite, "--password-file", "/tmp/secret")
    assert f"{suite} is enrolled: {CONFIG}" in root.run("edge-agent", "enroll", *words)
    for path, owned in ((CONFIG, "640"), (PASSWORD, "640"), (KEY, "644")):
        assert root.run("stat", "--format=%U:%G %a", path).strip() == f"root:edge-agent {owned}"
    config = root.path / CONFIG[1:]
    configured = config.read_bytes()
    assert "nothing changed" in root.run("edge-agent", "enroll", *words)
    assert "enrolled already" in root.run(
        "edge-agent", "enroll", *words, "--device", "x", "--no-connect", ok=False
    )
    assert config.read_bytes() == configured
    with serve(root, tmp_path):
        wait_until_online(suite, broker)
        done = deploy(compiled(target), suite, broker, wait_s=240)
        assert (done.status, done.code, done.message) == ("SUCCEEDED", "", "")
        answer = ask(suite, "digits", DIGITS / "seven.png", broker, deadline_s=120)
        assert answer.labels[0].label == "seven"

        # Check while it serves: nothing fails. (A warning: this emulator has no sandbox.)
        report = json.loads(root.run("edge-agent", "check", "--json", only_stdout=True))
        assert report["counts"]["fail"] == 0, report
        assert {"python", "models", "broker", "delay"} <= {row["subject"] for row in report["findings"]}
        assert any("digits 1.0.0 is intact" in row["message"] for row in report["findings"])

        # Upgrade while it serves: the running agent continues, and the configuration stays.
        install(root, newer)
        answer = ask(suite, "digits", DIGITS / "three.png", broker, deadline_s=120)
        assert answer.labels[0].label == "three"
    assert config.read_bytes() == configured

    # Restart: the newer agent serves the same model.
    with serve(root, tmp_path):
        answer = ask(suite, "digits", DIGITS / "five.png", broker, deadline_s=240)
        assert answer.labels[0].label == "five"
    state = {name: value for name, value in root.files().items() if name.startswith("/var/lib/edge-agent/")}
    assert state

    # Downgrade: refused, with nothing changed, while the state has a format that the older package does not
    # know; otherwise it works.
    older = f"/tmp/{package.name}"
    down = ("apt-get", "install", "--yes", "--allow-downgrades", older)
    marker = root.path / "var/lib/edge-agent/format"
    known = marker.read_text()
    marker.write_text("99\n")
    before = {name: value for name, value in root.files().items() if "/__pycache__/" not in name}
    assert "expected format 1 at most, got 99" in root.run(*down, ok=False)
    assert {name: value for name, value in root.files().items() if "/__pycache__/" not in name} == before
    assert root.run("dpkg-query", "--show", "--showformat=${Version} ${Status}", "edge-agent").endswith(
        "u1 install ok installed"
    )
    with serve(root, tmp_path) as agent:  # it can be reached, and leaves the newer state as it is
        assert "written by a newer agent" in agent.log
        with pytest.raises(UnknownModelError):
            ask(suite, "digits", DIGITS / "three.png", broker, deadline_s=120)
        assert "Traceback" not in agent.log
    marker.write_text(known)
    root.run(*down)
    assert config.read_bytes() == configured
    with serve(root, tmp_path):
        answer = ask(suite, "digits", DIGITS / "zero.png", broker, deadline_s=240)
        assert answer.labels[0].label == "zero"

    # Remove: the programs are gone, the user's data stay.
    root.run("apt-get", "remove", "--yes", "edge-agent")
    left = {name for name in changed(clean, root.files()) if not SYSTEMS_OWN.fullmatch(name)}
    masks = {f"/etc/systemd/system/{unit}" for unit in UNITS}  # and the files that record them
    masked = {f"/var/lib/systemd/deb-systemd-helper-masked/{unit}" for unit in UNITS}
    assert left == {CONFIG, KEY, PASSWORD, *state, *masks, *masked}
    assert {root.files()[mask] for mask in masks} == {"/dev/null"}

    # Install again: configuration and state are found.
    install(root, newer)
    assert config.read_bytes() == configured
    assert state.keys() <= root.files().keys()

    # Purge: nothing is left. The lists of users are equal except for their order.
    root.run("apt-get", "purge", "--yes", "edge-agent")
    after = root.files()
    assert {name for name in changed(clean, after) if not name.startswith("/etc/sub")} == set()
    assert not (root.path / "var/lib/edge-agent").exists()
    assert not (root.path / "etc/edge-agent").exists()
