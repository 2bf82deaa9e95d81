"""`edge-agent enroll` against real brokers: what it writes, and what it reports."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from agent.bundle.keyring import Keyring
from agent.cli import main
from agent.config.file import load_config
from agent.config.keys import KEYS
from tests.agent.provision.authority import Authority
from tests.agent.provision.conftest import StartBroker
from tests.bundles import public_pem
from tests.conftest import BrokerProcess
from tests.kills import in_child, kill_at_system_call
from tests.patience import PATIENCE_S
from tests.ports import free_port

pytestmark = pytest.mark.slow

ACCESS_LIST = Path(__file__).parents[3] / "docs/mosquitto/edge.acl"


def enroll(folder: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command in this process: to start one takes longer than to enroll."""
    arguments = ["enroll", "--config", str(folder), *map(str, words)]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def enroll_process(folder: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "agent", "enroll", "--config", folder, *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """Check that an enrollment was refused in one line with a hint, and return that line."""
    assert done.returncode == 4, done
    lines = [line for line in done.stderr.splitlines() if not line.startswith("trying ")]
    assert len(lines) == 2, done.stderr
    assert lines[1].startswith("edge-agent: hint: ")
    return lines[0].removeprefix("edge-agent: error: ")


def test_device_is_enrolled_with_password_and_key_and_its_configuration_keeps_its_comments(
    tmp_path: Path, trust: Path, start_broker: StartBroker, passwords: Path
) -> None:
    broker = start_broker(f"password_file {passwords}\n")
    (tmp_path / "secret").write_text("hunter2\n")
    words = ("--device", "kitchen", "--broker", broker.url, "--trust", trust, "--username", "kitchen")
    done = enroll_process(tmp_path / "etc", *words, "--password-file", tmp_path / "secret")
    assert done.returncode == 0, done.stderr
    assert f"kitchen is enrolled: {tmp_path}/etc/agent.toml" in done.stdout

    found = contents(tmp_path / "etc")
    assert found.keys() == {"agent.toml", "broker.password", "keyring/signing.pub"}
    assert found["broker.password"] == b"hunter2\n"
    assert found["keyring/signing.pub"] == trust.read_bytes()
    for key in KEYS:
        assert key.text in found["agent.toml"].decode()
    config = load_config(tmp_path / "etc/agent.toml", {}, {})
    assert (config.device, config.broker.username) == ("kitchen", "kitchen")
    assert config.broker.password_file == tmp_path / "etc/broker.password"
    assert config.state_dir == tmp_path / "etc/state"
    for secret in ("agent.toml", "broker.password"):
        assert (tmp_path / "etc" / secret).stat().st_mode & 0o077 in (
            0,
            0o040,
        )  # readable by the service's group

    again = enroll(tmp_path / "etc", *words, "--password-file", tmp_path / "secret")
    assert (again.returncode, "nothing changed" in again.stdout) == (0, True)
    assert contents(tmp_path / "etc") == found


@pytest.mark.slow
def test_certificates_of_both_sides_are_written_next_to_the_configuration(
    tmp_path: Path, trust: Path, authority: Authority, start_broker: StartBroker
) -> None:
    lines = f"cafile {authority.ca}\nrequire_certificate true\nuse_identity_as_username true\n"
    broker = start_broker(lines + authority.server("127.0.0.1") + access_list(tmp_path))
    url = broker.url.replace("mqtt:", "mqtts:")
    own = authority.client("kitchen")
    words = ("--device", "kitchen", "--broker", url, "--trust", trust, "--ca", authority.ca)
    own_words = ("--certificate", own, "--key", own.with_suffix(".key"))

    # In TLS 1.3 a client learns only after the handshake that a certificate is required.
    assert "requires a client certificate" in refused(enroll(tmp_path / "etc", *words))
    stranger = Authority(tmp_path / "stranger").client("kitchen")
    foreign = ("--certificate", stranger, "--key", stranger.with_suffix(".key"))
    assert "refuses this device's certificate" in refused(enroll(tmp_path / "etc", *words, *foreign))
    mixed = ("--certificate", own, "--key", stranger.with_suffix(".key"))
    assert "does not belong to the certificate" in refused(enroll(tmp_path / "etc", *words, *mixed))
    assert contents(tmp_path / "etc") == {}

    done = enroll(tmp_path / "etc", *words, *own_words)
    assert done.returncode == 0, done.stderr
    found = contents(tmp_path / "etc")
    assert found.keys() == {
        *("agent.toml", "keyring/signing.pub"),
        *("tls/ca.pem", "tls/device.pem", "tls/device.key"),
    }
    assert (tmp_path / "etc/tls/device.key").stat().st_mode & 0o037 == 0

    # A renewed pair is refused without --force; with it, the new pair replaces the old one.
    new = authority.client("kitchen", until=200)
    assert "enrolled already" in refused(enroll(tmp_path / "etc", *words, *own_words))
    assert contents(tmp_path / "etc") == found
    assert enroll(tmp_path / "etc", *words, *own_words, "--force").returncode == 0
    renewed = contents(tmp_path / "etc")
    assert renewed.keys() - found.keys() == {"tls/device-2.pem", "tls/device-2.key"}
    assert renewed["tls/device-2.pem"] == new.read_bytes()
    assert "tls/device.pem" not in renewed


def access_list(tmp_path: Path) -> str:
    path = tmp_path / "edge.acl"
    shutil.copy(ACCESS_LIST, path)
    path.chmod(0o644)
    return f"acl_file {path}\n"


@pytest.mark.parametrize(
    ("name", "since", "until", "expected"),
    [
        ("broker.lan", -1, 90, r"certificate is not for 127\.0\.0\.1: it is for broker\.lan"),
        ("127.0.0.1", -90, -1, r"certificate has expired: this device's clock says \d{4}-"),
        ("127.0.0.1", 30, 90, r"certificate is not valid yet: this device's clock says \d{4}-"),
    ],
    ids=["another-name", "expired", "clock-behind"],
)
def test_invalid_certificate_of_the_broker_is_named(
    tmp_path: Path,
    trust: Path,
    authority: Authority,
    start_broker: StartBroker,
    name: str,
    since: int,
    until: int,
    expected: str,
) -> None:
    broker = start_broker(authority.server(name, since=since, until=until))
    words = ("--broker", broker.url.replace("mqtt:", "mqtts:"), "--trust", trust, "--ca", authority.ca)
    assert re.search(expected, refused(enroll(tmp_path / "etc", "--device", "kitchen", *words)))
    assert contents(tmp_path / "etc") == {}


@pytest.mark.slow
def test_unknown_authority_and_ports_of_the_other_kind_are_named(
    tmp_path: Path, trust: Path, authority: Authority, start_broker: StartBroker
) -> None:
    guarded, plain = start_broker(authority.server("127.0.0.1")), start_broker("")
    secure = guarded.url.replace("mqtt:", "mqtts:")

    def error_with(*words: str | Path) -> str:
        return refused(enroll(tmp_path / "etc", "--device", "kitchen", "--trust", trust, *words))

    assert "was not issued by an authority that this system trusts" in error_with("--broker", secure)
    assert "without TLS (mqtt://), got a TLS port" in error_with("--broker", guarded.url)
    swapped = plain.url.replace("mqtt:", "mqtts:")
    assert "expected TLS on port" in error_with("--broker", swapped, "--ca", authority.ca)
    assert f"nothing listens at mqtt://127.0.0.1:{free_port()}"[:33] in error_with(
        "--broker", f"mqtt://127.0.0.1:{free_port()}"
    )
    assert "no address is known" in error_with("--broker", "mqtt://no.such.host.invalid")
    with socket.create_server(("127.0.0.1", 0)) as web:
        port = web.getsockname()[1]
        assert "within 10 s" in error_with("--broker", f"mqtt://127.0.0.1:{port}")
    assert contents(tmp_path / "etc") == {}


def test_wrong_passwords_and_missing_rights_are_named(
    tmp_path: Path, trust: Path, start_broker: StartBroker, passwords: Path
) -> None:
    broker = start_broker(f"password_file {passwords}\n{access_list(tmp_path)}")
    (tmp_path / "wrong").write_text("guess\n")
    (tmp_path / "right").write_text("hunter2\n")

    def error_with(*words: str | Path) -> str:
        return refused(enroll(tmp_path / "etc", "--broker", broker.url, "--trust", trust, *words))

    user = ("--device", "kitchen", "--username", "kitchen", "--password-file")
    assert "does not accept the user name kitchen with this password" in error_with(*user, tmp_path / "wrong")
    # The password is right, but the device is another one: kitchen has no rights to its topics.
    other = ("--device", "garage", "--username", "kitchen", "--password-file", tmp_path / "right")
    assert "garage may not write edge/v1/garage/models/" in error_with(*other)
    assert contents(tmp_path / "etc") == {}
    done = enroll(tmp_path / "etc", "--broker", broker.url, "--trust", trust, *user, tmp_path / "right")
    assert done.returncode == 0, done.stderr


def test_other_enrollment_needs_force(tmp_path: Path, trust: Path, mosquitto: BrokerProcess) -> None:
    words = ("--broker", mosquitto.url, "--trust", trust, "--no-connect")
    assert enroll(tmp_path / "etc", "--device", "kitchen", *words).returncode == 0
    before = contents(tmp_path / "etc")
    error = refused(enroll(tmp_path / "etc", "--device", "garage", *words))
    assert "enrolled already" in error
    assert contents(tmp_path / "etc") == before
    assert enroll(tmp_path / "etc", "--device", "garage", *words, "--force").returncode == 0
    assert load_config(tmp_path / "etc/agent.toml", {}, {}).device == "garage"


def new_key(path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(public_pem(ec.generate_private_key(ec.SECP256R1())))
    return path


def trusted(folder: Path) -> set[str]:
    return {name for name in contents(folder) if name.startswith("keyring/")}


def test_forced_enrollment_with_keys_trusts_only_these(tmp_path: Path, trust: Path) -> None:
    etc = tmp_path / "etc"
    words = ("--broker", "mqtt://b", "--no-connect")
    second, new = new_key(tmp_path / "second.pub"), new_key(tmp_path / "new.pub")
    assert enroll(etc, "--device", "one", *words, "--trust", trust, "--trust", second).returncode == 0
    (etc / "keyring/revoked").write_text("0" * 64 + "\n")
    (etc / "keyring/README").write_text("who may sign")
    (etc / "keyring/damaged.pub").write_text("not a key")

    # Without keys, the new owner is told whom the device goes on trusting.
    kept = enroll(etc, "--device", "two", *words, "--force")
    assert kept.returncode == 0
    assert kept.stdout.count("still trusted: ") == 2
    assert f"still trusted: second.pub (key id {id_of(second)[:16]})" in kept.stdout

    done = enroll(etc, "--device", "two", *words, "--force", "--trust", new)
    assert done.returncode == 0
    left = {"keyring/new.pub", "keyring/revoked", "keyring/README", "keyring/damaged.pub"}
    assert trusted(etc) == left
    assert list(Keyring.from_dir(etc / "keyring").keys) == [id_of(new)]
    assert f"no longer trusted: signing.pub (key id {id_of(trust)[:16]})" in done.stdout
    assert f"trusted: new.pub (key id {id_of(new)[:16]})" in done.stdout
    again = enroll(etc, "--device", "two", *words, "--force", "--trust", new)
    assert "nothing changed" in again.stdout
    # Without --force, a key is added.
    assert enroll(etc, "--device", "two", *words, "--trust", second).returncode == 0
    assert len(Keyring.from_dir(etc / "keyring").keys) == 2


def test_key_that_the_device_revokes_is_not_trusted_again(tmp_path: Path, trust: Path) -> None:
    etc = tmp_path / "etc"
    words = ("--device", "one", "--broker", "mqtt://b", "--no-connect", "--force", "--trust")
    assert enroll(etc, *words, trust).returncode == 0
    new = new_key(tmp_path / "new.pub")
    (etc / "keyring/revoked").write_text(f"# leaked\n{id_of(new)}\n")
    before = contents(etc)
    assert f"new.pub is key {id_of(new)}" in refused(enroll(etc, *words, new))
    assert contents(etc) == before
    (etc / "keyring/revoked").write_text("leaked\n")
    assert "keyring/revoked: line 1: expected a key id" in refused(enroll(etc, *words, trust))


def test_refused_forced_enrollment_removes_no_key(tmp_path: Path, trust: Path) -> None:
    etc = tmp_path / "etc"
    words = ("--device", "one", "--broker", f"mqtt://127.0.0.1:{free_port()}")
    assert enroll(etc, *words, "--trust", trust, "--no-connect").returncode == 0
    before = contents(etc)
    assert "nothing listens" in refused(
        enroll(etc, *words, "--force", "--trust", new_key(tmp_path / "n.pub"))
    )
    assert contents(etc) == before


def test_killed_replacement_of_keys_leaves_a_key_and_the_same_command_ends_it(
    tmp_path: Path, trust: Path
) -> None:
    etc, new = tmp_path / "etc", new_key(tmp_path / "new.pub")
    words = ("--broker", "mqtt://b", "--no-connect", "--force", "--trust")
    seen = set()
    for at in itertools.count():
        shutil.rmtree(etc, ignore_errors=True)
        assert enroll(etc, "--device", "one", *words, trust).returncode == 0

        def scenario(at: int = at) -> None:
            kill_at_system_call(at)
            assert enroll(etc, "--device", "two", *words, new).returncode == 0

        killed = in_child(scenario) == signal.SIGKILL
        keys = frozenset(Keyring.from_dir(etc / "keyring").keys)
        device = load_config(etc / "agent.toml", {}, {}).device
        seen.add((device, keys))
        assert enroll(etc, "--device", "two", *words, new).returncode == 0
        assert set(Keyring.from_dir(etc / "keyring").keys) == {id_of(new)}
        if not killed:
            break
    both = frozenset({id_of(trust), id_of(new)})
    # The old owner's key goes only when the new enrollment is in force.
    assert seen == {
        ("one", frozenset({id_of(trust)})),
        ("one", both),
        ("two", both),
        ("two", frozenset({id_of(new)})),
    }


def id_of(path: Path) -> str:
    (key_id,) = Keyring.from_files([path]).keys
    return key_id


def test_a_folder_of_keys_is_trusted(tmp_path: Path, trust: Path) -> None:
    words = ("--device", "kitchen", "--broker", "mqtt://b", "--no-connect", "--trust")
    (trust.parent / "README").write_text("not a key")
    assert enroll(tmp_path / "etc", *words, trust.parent).returncode == 0
    assert contents(tmp_path / "etc")["keyring/signing.pub"] == trust.read_bytes()
    (tmp_path / "empty").mkdir()
    assert "with .pub or .pem files" in refused(enroll(tmp_path / "other", *words, tmp_path / "empty"))
    assert contents(tmp_path / "other") == {}


def test_file_that_is_not_a_key_or_certificate_is_refused_before_anything_is_written(
    tmp_path: Path, trust: Path, authority: Authority
) -> None:
    def error_with(*words: str | Path) -> str:
        return refused(
            enroll(tmp_path / "etc", "--device", "k", "--broker", "mqtts://b", "--no-connect", *words)
        )

    assert "private half" in error_with("--trust", authority.ca.with_suffix(".key"))
    assert "expected a public key in PEM" in error_with("--trust", authority.ca)
    assert "cannot read" in error_with("--trust", tmp_path / "none.pub")
    assert "expected a certificate in PEM" in error_with("--trust", trust, "--ca", trust)
    assert contents(tmp_path / "etc") == {}


@pytest.mark.slow
def test_one_file_is_enough_for_a_first_boot_and_the_broker_may_start_later(
    tmp_path: Path, trust: Path, authority: Authority
) -> None:
    own = authority.client("kitchen")
    broker = BrokerProcess("mosquitto", tmp_path, extra=authority.server("127.0.0.1"))
    document = {
        "device": "kitchen",
        "broker": broker.url.replace("mqtt:", "mqtts:"),
        "ca": authority.ca.read_text(),
        "certificate": own.read_text(),
        "key": own.with_suffix(".key").read_text(),
        "trust": [trust.read_text()],
    }
    (tmp_path / "first-boot.json").write_text(json.dumps(document))
    command = [sys.executable, "-m", "agent", "enroll", "--config", str(tmp_path / "etc")]
    command += ["--from", str(tmp_path / "first-boot.json"), "--wait", "40"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("trying ")
        assert "nothing listens at" in process.stderr.readline()
        broker.start()
        try:
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
            broker.stop()
    found = contents(tmp_path / "etc")
    assert found["keyring/trusted.pub"].strip() == trust.read_bytes().strip()
    assert found["tls/device.pem"] == own.read_bytes()


def test_killed_enrollment_leaves_the_device_with_the_old_or_the_new_one(tmp_path: Path, trust: Path) -> None:
    words = ("--trust", trust, "--no-connect", "--username", "u", "--force")
    (tmp_path / "one").write_text("first\n")
    (tmp_path / "two").write_text("second\n")

    def enrolled(device: str, host: str) -> int:
        own = ("--device", device, "--broker", f"mqtt://{host}", "--password-file", tmp_path / host)
        return enroll(tmp_path / "etc", *own, *words).returncode

    def killed_at(at: int, device: str, host: str) -> bool:
        def scenario() -> None:
            kill_at_system_call(at)
            assert enrolled(device, host) == 0

        return in_child(scenario) == signal.SIGKILL

    old, new = ("kitchen", "one", "first\n"), ("garage", "two", "second\n")
    states = []
    for at in itertools.count():
        shutil.rmtree(tmp_path / "etc", ignore_errors=True)
        assert enrolled(*old[:2]) == 0
        killed = killed_at(at, *new[:2])
        config = load_config(tmp_path / "etc/agent.toml", {}, dict(os.environ))
        assert config.broker.password_file is not None
        password = config.broker.password_file.read_text()
        states.append((config.device, config.broker.host, password))
        assert states[-1] in (old, new)
        if not killed:
            break
    assert (states[0], states[-1]) == (old, new)
    assert len(states) > 3, "a file for the password, the configuration, and the old password's removal"
    assert not killed_at(1000, *old[:2])
    assert load_config(tmp_path / "etc/agent.toml", {}, {}).device == "kitchen"
