"""The packages for ARM from installation to purge, under qemu: what serves, and what stays."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from builder.fleet.broker import Broker
from builder.fleet.deploy import deploy
from builder.fleet.infer import infer
from tests.conftest import BrokerProcess
from tests.packaging.conftest import DIGITS, Root, RunningAgent, running

pytestmark = pytest.mark.arm

MAX_INSTALL_S = 60
CONFIG = "/etc/edge-agent/agent.toml"
KEY = "/etc/edge-agent/keyring/signing.pub"
# What the system keeps of a service that is enabled, and of a user.
SYSTEMS_OWN = re.compile(
    r"/etc/(passwd|group|shadow|gshadow|subuid|subgid)"
    r"|/etc/systemd/system/multi-user\.target\.wants/edge-agent\.service"
    r"|/var/lib/systemd/deb-systemd-helper-enabled/(edge-agent\.service\.dsh-also"
    r"|multi-user\.target\.wants/edge-agent\.service)"
)


def install(root: Root, package: Path) -> str:
    shutil.copy(package, root.path / "tmp" / package.name)
    return root.run("apt-get", "install", "--yes", f"/tmp/{package.name}")


def serve(root: Root, folder: Path) -> AbstractContextManager[RunningAgent]:
    """What the unit does: the program on the PATH, as the package's user."""
    command = root.command("edge-agent", "run", "--config", CONFIG, user="edge-agent:edge-agent")
    return running(command, folder / f"agent-{time.monotonic_ns()}.log")


def changed(before: dict[str, bytes | str], after: dict[str, bytes | str]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


@pytest.mark.parametrize(
    ("suite", "arch", "target"),
    [("bookworm", "arm64", "rpi4"), ("trixie", "arm64", "rpi4"), ("bookworm", "armhf", "rpi-armv7")],
)
def test_install_serve_upgrade_remove_purge(
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

    # Installed: the package's files, byte code beside them, its user, its service enabled; nothing else.
    package, newer = build_deb(suite, arch), build_deb(suite, arch, 1)
    start_s = time.monotonic()
    install(root, package)
    took_s = time.monotonic() - start_s
    print(f"installed in {took_s:.0f} s")
    assert took_s <= MAX_INSTALL_S
    listed = set(root.run("dpkg", "--listfiles", "edge-agent").split("\n"))
    new = {
        name
        for name in changed(clean, root.files())
        if name not in listed and not SYSTEMS_OWN.fullmatch(name) and "/__pycache__/" not in name
    }
    assert new == set()
    assert root.run("stat", "--format=%U:%G %a", CONFIG).strip() == "root:edge-agent 640"
    assert root.run("stat", "--format=%U:%G %a", "/var/lib/edge-agent").strip() == "edge-agent:edge-agent 700"
    assert root.run("edge-agent", "version").startswith("edge-agent ")
    root.run("/usr/lib/edge-agent/bin/python", "-I", "-c", "import tvm_ffi, numpy, PIL.Image, cbor2, prometheus_client")

    # Not configured yet: one line that says what is missing, and the status that systemd does not retry.
    said = root.run("edge-agent", "run", "--config", CONFIG, ok=False)
    assert "broker.url" in said
    assert "Traceback" not in said

    # Configured: a key, and two lines of the configuration.
    shutil.copy(keys / "signing.pub", root.path / KEY[1:])
    config = root.path / CONFIG[1:]
    text = config.read_text().replace("#url = ...", f'url = "{own_broker.url}"', 1)
    config.write_text(text.replace("#device = ...", f'device = "{suite}"', 1))
    configured = config.read_bytes()
    with serve(root, tmp_path):
        done = deploy(compiled(target), suite, broker, wait_s=240)
        assert (done.status, done.code, done.message) == ("SUCCEEDED", "", "")
        answer = infer(suite, "digits", DIGITS / "seven.png", broker, deadline_s=120)
        assert (answer.status, answer.top[0].label) == (200, "seven")

        # Upgraded while it serves: what runs goes on, and the owner's configuration stays.
        install(root, newer)
        answer = infer(suite, "digits", DIGITS / "three.png", broker, deadline_s=120)
        assert (answer.status, answer.top[0].label) == (200, "three")
    assert config.read_bytes() == configured

    # Started again: the newer agent serves the model without being told.
    with serve(root, tmp_path):
        answer = infer(suite, "digits", DIGITS / "five.png", broker, deadline_s=240)
        assert (answer.status, answer.top[0].label) == (200, "five")
    state = {name: value for name, value in root.files().items() if name.startswith("/var/lib/edge-agent/")}
    assert state

    # Removed: the programs are gone, the owner's data are not.
    root.run("apt-get", "remove", "--yes", "edge-agent")
    left = {name for name in changed(clean, root.files()) if not SYSTEMS_OWN.fullmatch(name)}
    mask = "/etc/systemd/system/edge-agent.service"  # and what remembers that dpkg set it
    masked = f"/var/lib/systemd/deb-systemd-helper-masked/{Path(mask).name}"
    assert left == {CONFIG, KEY, *state, mask, masked}
    assert root.files()[mask] == "/dev/null"

    # Installed again: it finds them.
    install(root, newer)
    assert config.read_bytes() == configured
    assert state.keys() <= root.files().keys()

    # Purged: as if it had never been there. The lists of users are the same but for their order.
    root.run("apt-get", "purge", "--yes", "edge-agent")
    after = root.files()
    assert {name for name in changed(clean, after) if not name.startswith("/etc/sub")} == set()
    assert not (root.path / "var/lib/edge-agent").exists()
    assert not (root.path / "etc/edge-agent").exists()
