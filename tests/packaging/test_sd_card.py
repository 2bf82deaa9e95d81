"""Preparing a card after the imager: adds one line to the first boot's script, and never adds it twice."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from agent.provision.enrollment import KEYS
from tests.bundles import public_pem
from tests.patience import PATIENCE_S
from tests.ports import free_port

SD_CARD = Path(__file__).resolve().parents[2] / "packaging/sd-card"
CALL = "/boot/firmware/edge-agent/first-boot.sh"
# What the imager writes for bookworm, shortened.
FIRSTRUN = """\
#!/bin/bash

set +e

/usr/lib/raspberrypi-sys-mods/imager_custom set_hostname kitchen
rm -f /boot/firstrun.sh
sed -i 's| systemd.run.*||g' /boot/cmdline.txt
exit 0
"""


@pytest.fixture
def boot(tmp_path: Path) -> Path:
    boot = tmp_path / "bootfs"
    boot.mkdir()
    (boot / "cmdline.txt").write_text("console=tty1\n")
    (tmp_path / "edge-agent_0.1.0+deb13_arm64.deb").write_bytes(b"a package")
    (tmp_path / "enroll.toml").write_text('broker = "mqtt://b"\n')
    return boot


def prepare(
    boot: Path, package: str = "edge-agent_0.1.0+deb13_arm64.deb"
) -> subprocess.CompletedProcess[str]:
    command = [SD_CARD / "prepare-card.sh", boot, boot.parent / package, boot.parent / "enroll.toml"]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("#cloud-config\nhostname: k\n", "runcmd:\n  - [sh, " + CALL + "]\n"),
        (
            "#cloud-config\nruncmd:\n  - [date]\nhostname: k\n",
            "runcmd:\n  - [sh, " + CALL + "]\n  - [date]\nhostname: k\n",
        ),
    ],
)
def test_preparing_a_card_twice_adds_one_command_to_cloud_init(
    boot: Path, before: str, expected: str
) -> None:
    (boot / "user-data").write_text(before)
    for _ in range(2):
        done = prepare(boot)
        assert done.returncode == 0, done.stderr
    text = (boot / "user-data").read_text()
    assert expected in text
    assert text.count(CALL) == 1
    assert text.startswith("#cloud-config\n")
    assert {path.name for path in (boot / "edge-agent").iterdir()} == {
        *("edge-agent_0.1.0+deb13_arm64.deb", "enroll.toml", "first-boot.sh"),
    }


def test_bookworms_imager_script_calls_ours_before_it_removes_itself(boot: Path) -> None:
    (boot / "firstrun.sh").write_text(FIRSTRUN)
    for _ in range(2):
        assert prepare(boot).returncode == 0
    lines = (boot / "firstrun.sh").read_text().splitlines()
    assert lines.index(f"sh {CALL} || true") == lines.index("rm -f /boot/firstrun.sh") - 1
    assert sum(CALL in line for line in lines) == 1


def test_a_newer_package_replaces_the_one_on_the_card(boot: Path) -> None:
    (boot / "user-data").write_text("#cloud-config\n")
    assert prepare(boot).returncode == 0
    (boot.parent / "edge-agent_0.2.0+deb13_arm64.deb").write_bytes(b"a newer one")
    assert prepare(boot, "edge-agent_0.2.0+deb13_arm64.deb").returncode == 0
    assert [path.name for path in (boot / "edge-agent").glob("*.deb")] == ["edge-agent_0.2.0+deb13_arm64.deb"]


def test_a_folder_or_file_of_another_kind_is_refused_with_error_and_hint(boot: Path) -> None:
    for done, expected in (
        (prepare(boot), "has neither user-data nor firstrun.sh"),
        (prepare(boot, "other.deb"), "expected a package edge-agent_*.deb"),
        (prepare(boot, "edge-agent_9.deb"), "does not exist"),
        (prepare(boot / "edge-agent"), "expected the boot partition"),
    ):
        assert done.returncode == 4
        error, hint = done.stderr.splitlines()
        assert error.startswith("error: ")
        assert expected in error
        assert hint.startswith("hint: ")


def test_the_first_boot_needs_exactly_one_package(tmp_path: Path) -> None:
    (tmp_path / "first-boot.sh").write_bytes((SD_CARD / "first-boot.sh").read_bytes())
    done = subprocess.run(["sh", tmp_path / "first-boot.sh"], capture_output=True, text=True, check=False)
    assert (done.returncode, "expected one edge-agent_*.deb" in done.stderr) == (1, True)


def test_the_shipped_examples_are_accepted_by_their_readers() -> None:
    document = tomllib.loads((SD_CARD / "enroll.toml").read_text())
    assert {"broker", "trust"} <= document.keys() <= set(KEYS)
    text = (SD_CARD / "user-data").read_text()
    assert text.startswith("#cloud-config\n")
    assert f"runcmd:\n  - [sh, {CALL}]\n" in text


def service_script(tmp_path: Path, *, connect: bool) -> str:
    """Return what the enrollment service runs, in folders of the test's own and without systemd."""
    unit = (SD_CARD.parents[1] / "systemd/edge-agent-enroll.service").read_text()
    (script,) = re.findall(r"^ExecStart=/bin/sh -eu -c '(.*?)'$", unit, re.MULTILINE | re.DOTALL)
    agent = f"{sys.executable} -m agent"
    for theirs, ours in (
        ("\\\n", ""),
        ("$$", "$"),
        ("/usr/bin/edge-agent enroll", f"{agent} enroll --config {tmp_path}/etc"),
        ("/boot/", f"{tmp_path}/boot/"),
        ("/etc/edge-agent", f"{tmp_path}/etc"),
        ("--wait 300 --start", "" if connect else "--no-connect"),
    ):
        assert theirs in script
        script = script.replace(theirs, ours)
    return script


def run_service(tmp_path: Path, *, connect: bool) -> subprocess.CompletedProcess[str]:
    script = ["sh", "-eu", "-c", service_script(tmp_path, connect=connect)]
    return subprocess.run(script, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@pytest.mark.slow
def test_secrets_leave_the_boot_partition_although_the_enrollment_fails(tmp_path: Path) -> None:
    folder = tmp_path / "boot/firmware/edge-agent"
    folder.mkdir(parents=True)
    (tmp_path / "etc").mkdir()
    (folder / "enroll.toml").write_text(
        f'device = "kitchen"\nbroker = "mqtt://127.0.0.1:{free_port()}"\nusername = "k"\n'
        f'password = "hunter2"\ntrust = """\n{public_pem().decode()}"""\n'
    )
    failed = run_service(tmp_path, connect=True)
    assert (failed.returncode, "nothing listens" in failed.stderr) == (4, True)
    assert list(folder.iterdir()) == []
    assert [path.name for path in (tmp_path / "etc").iterdir()] == ["enroll.json"]
    # The next attempt, also after a reboot, has the values from there, and removes them in the end.
    assert run_service(tmp_path, connect=False).returncode == 0
    assert {path.name for path in (tmp_path / "etc").iterdir()} == {
        "agent.toml",
        "broker.password",
        "keyring",
    }
    assert (
        "ConditionPathExists=|/etc/edge-agent/enroll.json"
        in (SD_CARD.parents[1] / "systemd/edge-agent-enroll.service").read_text()
    )


def test_first_boot_takes_the_secrets_before_the_service_waits_for_the_network() -> None:
    lines = (SD_CARD / "first-boot.sh").read_text().splitlines()
    taking = next(index for index, line in enumerate(lines) if "enroll --take enroll.toml" in line)
    assert any("dpkg --install" in line for line in lines[:taking])
    assert any("systemctl start" in line for line in lines[taking:])
