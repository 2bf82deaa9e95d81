"""`edge-agent check`: each thing that can be wrong with a device is found, named, and has a hint."""

from __future__ import annotations

import datetime
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from agent.bundle.keyring import Keyring
from agent.bundle.machine import Machine
from agent.deploy.store.active import ActiveModel
from agent.deploy.store.store import Store
from agent.provision.checks import identity, machine, models
from agent.provision.checks.finding import Finding, Level
from agent.provision.credentials import certificates
from agent.wire.reported import Origin
from tests.agent.provision.authority import Authority
from tests.bundles import Signer
from tests.conftest import BrokerProcess
from tests.ports import free_port

HERE = Machine("x86_64", "", frozenset({"avx2"}), "2.36", "tvm-ffi-0.1", frozenset({"linux-x86_64"}))
NAMES = {
    *("python", "processor", "clock", "memory", "heat", "sandbox", "service", "disk"),
    *("configuration", "keyring", "models", "broker", "rights", "delay"),
}


def one(findings: Iterable[Finding]) -> Finding:
    [finding] = findings
    if finding.level is not Level.OK:
        assert finding.hint
    return finding


def check(config: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "agent", "check", "--config", str(config), *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def configuration(folder: Path, trust: Path, port: int) -> Path:
    """Lay out what `enroll` would have."""
    (folder / "keyring").mkdir(parents=True)
    (folder / "keyring/signing.pub").write_bytes(trust.read_bytes())
    path = folder / "agent.toml"
    path.write_text(
        f'device = "kitchen"\nstate_dir = "state"\n[broker]\nurl = "mqtt://127.0.0.1:{port}"\n'
        '[trust]\ndir = "keyring"\n'
    )
    path.chmod(0o600)
    return path


def test_a_device_that_is_well_has_no_failure_and_the_report_changes_nothing(
    tmp_path: Path, trust: Path, mosquitto: BrokerProcess
) -> None:
    path = configuration(tmp_path / "etc", trust, mosquitto.port)
    before = sorted(tmp_path.rglob("*"))
    done = check(path, "--json")
    assert done.returncode == 0, done.stdout
    report = json.loads(done.stdout)
    assert report["ok"] is True
    assert {finding["subject"] for finding in report["findings"]} == NAMES
    # Debian's mosquitto delays small messages, which only somebody else's client has to wait for.
    [delay] = [finding for finding in report["findings"] if finding["subject"] == "delay"]
    assert (delay["level"], "set_tcp_nodelay" in delay["hint"]) == ("warn", True)
    assert report["counts"]["fail"] == 0
    assert sorted(tmp_path.rglob("*")) == before


def test_everything_that_is_wrong_is_in_one_report(tmp_path: Path, trust: Path) -> None:
    path = configuration(tmp_path / "etc", trust, free_port())
    (path.parent / "keyring/signing.pub").write_text("no key")
    path.chmod(0o644)
    done = check(path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    lines = done.stdout.splitlines()
    for start, part in (
        ("fail  keyring", "expected a public key in PEM"),
        ("fail  broker", "nothing listens at mqtt://127.0.0.1:"),
        ("warn  configuration", "is readable or writable by others (mode 0644)"),
    ):
        [line] = [line for line in lines if line.startswith(start)]
        assert part in line
        assert lines[lines.index(line) + 1].startswith("      hint: ")
    assert lines[-1].endswith(" fail")


def test_without_a_configuration_the_machine_is_looked_at_all_the_same(tmp_path: Path) -> None:
    done = check(tmp_path, "--no-connect")
    assert done.returncode == 1
    assert "fail  configuration  cannot read the configuration" in done.stdout
    assert "ok    python" in done.stdout


@pytest.mark.parametrize(
    ("year", "state", "level", "part"),
    [
        (1970, 0, "fail", "before this agent was built"),
        (2031, 5, "warn", "not synchronised"),
        (2031, 0, "ok", ""),
    ],
)
def test_a_clock_that_is_wrong_is_found(year: int, state: int, level: str, part: str) -> None:
    now_s = datetime.datetime(year, 6, 1, tzinfo=datetime.UTC).timestamp()
    found = one(machine.check_clock(now_s=now_s, state=state))
    assert (found.level.value, part in found.message) == (level, True)
    assert str(year) in found.message


def test_this_machines_clock_is_asked() -> None:
    assert one(machine.check_clock()).message.count(f"{time.gmtime().tm_year}") == 1


@pytest.mark.parametrize(
    ("bits", "millidegrees", "level", "part"),
    [
        ("0", "48312", "ok", "48 °C"),
        ("50005", "62000", "warn", "voltage is too low, the processor is throttled"),
        ("50000", "62000", "warn", "since boot: the supply voltage is too low, the processor is throttled"),
        ("0", "84000", "warn", "84 °C"),
        (None, None, "ok", "no sensor"),
    ],
)
def test_heat_and_a_weak_supply_are_found(
    tmp_path: Path, bits: str | None, millidegrees: str | None, level: str, part: str
) -> None:
    if bits is not None and millidegrees is not None:
        zone, firmware = (
            tmp_path / "sys/class/thermal/thermal_zone0",
            tmp_path / "sys/devices/platform/soc/soc:firmware",
        )
        zone.mkdir(parents=True)
        firmware.mkdir(parents=True)
        (zone / "temp").write_text(millidegrees + "\n")
        (firmware / "get_throttled").write_text(bits + "\n")
    found = one(machine.check_heat(tmp_path))
    assert (found.level.value, part in found.message) == (level, True), found


def test_little_memory_and_a_kernel_that_does_not_count_it_are_found(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 931000 kB\nMemAvailable: 40000 kB\n")
    (tmp_path / "sys/fs/cgroup/cgroup.controllers").write_text("cpuset cpu io pids\n")
    low, uncounted = machine.check_memory(tmp_path)
    assert (low.level, low.message) == (Level.WARN, "39 MiB of 909 MiB are available")
    assert (uncounted.level, "cmdline.txt" in (uncounted.hint or "")) == (Level.WARN, True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 931000 kB\nMemAvailable: 400000 kB\n")
    (tmp_path / "sys/fs/cgroup/cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    assert one(machine.check_memory(tmp_path)).level is Level.OK


def test_a_processor_without_the_vectors_that_kernels_need_is_found() -> None:
    assert one(machine.check_processor(HERE)).level is Level.OK
    assert one(machine.check_processor(replace(HERE, features=frozenset()))).level is Level.WARN


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    return Signer(tmp_path / "trust")


def installed(state: Path, raw: bytes, name: str = "echo") -> Path:
    """Make a bundle the active one; return where it lies."""
    store = Store(state)
    digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
    store.bundle_path(digest).write_bytes(raw)
    store.switch(ActiveModel(name, digest, "1.0.0", Origin.LOCAL, "job", None))
    return store.bundle_path(digest)


def look(state: Path, signer: Signer, this: Machine = HERE) -> Finding:
    return one(models.check_models(state, Keyring.from_dir(signer.trust), this, lambda _line: None))


def test_a_bundle_is_verified_to_its_last_byte(tmp_path: Path, signer: Signer) -> None:
    path = installed(tmp_path / "state", signer.packed())
    assert look(tmp_path / "state", signer).level is Level.OK

    raw = bytearray(path.read_bytes())
    raw[raw.index(b"\x7fELF") + 5] ^= 1
    path.write_bytes(raw)
    found = look(tmp_path / "state", signer)
    assert (found.level, "ERR_MIX_AND_MATCH" in found.message) == (Level.FAIL, True)

    path.unlink()
    assert "its bundle is missing" in look(tmp_path / "state", signer).message


def test_a_bundle_of_a_stranger_another_machine_or_an_older_counter_is_found(
    tmp_path: Path, signer: Signer
) -> None:
    stranger = Signer(tmp_path / "stranger")
    installed(tmp_path / "a", stranger.packed())
    assert "ERR_ARBITRARY_SOFTWARE" in look(tmp_path / "a", signer).message

    installed(tmp_path / "b", signer.packed())
    pi = replace(HERE, arch="aarch64", compatible=frozenset({"linux-aarch64"}))
    assert "ERR_INCOMPATIBLE" in look(tmp_path / "b", signer, pi).message
    Store(tmp_path / "b").commit_counter("echo", 7)
    assert "ERR_ROLLBACK" in look(tmp_path / "b", signer).message


def test_state_of_a_newer_agent_is_found_and_an_empty_one_is_well(tmp_path: Path, signer: Signer) -> None:
    assert look(tmp_path / "none", signer).level is Level.OK
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer/format").write_text("9\n")
    assert "written by a newer agent" in look(tmp_path / "newer", signer).message


@pytest.mark.parametrize(
    ("since", "until", "level", "part"),
    [
        (-1, 90, "ok", "is valid until"),
        (-60, 20, "warn", "in 19 days"),
        (-60, -1, "fail", "expired on"),
        (1, 90, "fail", "is not valid before"),
    ],
)
def test_dates_of_certificates_are_watched(
    authority: Authority, since: int, until: int, level: str, part: str
) -> None:
    raw = authority.client("kitchen", since=since, until=until).read_bytes()
    found = certificates(raw, "c")[0].finding("certificate", datetime.datetime.now(datetime.UTC))
    assert (found.level.value, part in found.message) == (level, True)


def test_a_keyring_that_others_can_write_or_whose_keys_are_revoked_is_found(
    tmp_path: Path, trust: Path
) -> None:
    from agent.config import load_config

    path = configuration(tmp_path / "etc", trust, 1)
    config = load_config(path, {}, {})
    assert one(identity.check_keyring(config)).level is Level.OK
    (tmp_path / "etc/keyring/signing.pub").chmod(0o664)
    assert [found.level for found in identity.check_keyring(config)] == [Level.OK, Level.FAIL]
    (tmp_path / "etc/keyring/signing.pub").chmod(0o644)
    [key_id] = [key.key_id for key in Keyring.from_dir(config.trust_dir).keys.values()]
    (tmp_path / "etc/keyring/revoked").write_text(key_id + "\n")
    assert "is revoked" in one(identity.check_keyring(config)).message
