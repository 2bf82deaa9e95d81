"""The checks of configuration, file permissions, certificates and keys."""

from __future__ import annotations

from pathlib import Path

from agent.bundle.keyring import Keyring
from agent.config.file import load_config
from agent.provision.checks import identity
from agent.provision.finding import Level
from tests.agent.provision.authority import Authority
from tests.agent.provision.checks.rig import configuration, one


def test_keyring_that_others_can_write_or_with_only_revoked_keys_is_found(
    tmp_path: Path, trust: Path
) -> None:
    path = configuration(tmp_path / "etc", trust, 1)
    config = load_config(path, {}, {})
    assert one(identity.check_keyring(config)).level is Level.OK
    (tmp_path / "etc/keyring/signing.pub").chmod(0o664)
    assert [found.level for found in identity.check_keyring(config)] == [Level.OK, Level.FAIL]
    (tmp_path / "etc/keyring/signing.pub").chmod(0o644)
    [key_id] = [key.key_id for key in Keyring.from_dir(config.trust_dir).keys.values()]
    (tmp_path / "etc/keyring/revoked").write_text(key_id + "\n")
    assert "is revoked" in one(identity.check_keyring(config)).message


def test_unencrypted_connection_to_another_host_is_found(tmp_path: Path, trust: Path) -> None:
    path = configuration(tmp_path / "etc", trust, 1)
    local = load_config(path, {}, {})
    assert one(identity.check_configuration(path, local)).level is Level.OK
    path.write_text(path.read_text().replace("127.0.0.1", "broker.lan"))
    remote = list(identity.check_configuration(path, load_config(path, {}, {})))
    assert [(found.level, "not encrypted" in found.message) for found in remote] == [
        (Level.OK, False),
        (Level.WARN, True),
    ]


def test_configuration_that_others_can_read_is_found(tmp_path: Path, trust: Path) -> None:
    path = configuration(tmp_path / "etc", trust, 1)
    path.chmod(0o644)
    found = list(identity.check_configuration(path, load_config(path, {}, {})))
    assert [(one.level, "mode 0644" in one.message) for one in found] == [
        (Level.OK, False),
        (Level.WARN, True),
    ]


def test_certificate_with_the_key_of_another_is_found(
    tmp_path: Path, trust: Path, authority: Authority
) -> None:
    path = configuration(tmp_path / "etc", trust, 1)
    own, other = authority.client("kitchen"), authority.client("garage")
    lines = f'ca = "{authority.ca}"\ncertificate = "{own}"\nkey = "{{key}}"\n[trust]'
    text = path.read_text().replace("mqtt:", "mqtts:")
    path.write_text(text.replace("[trust]", lines.format(key=own.with_suffix(".key"))))
    good = list(identity.check_certificates(load_config(path, {}, {})))
    assert [found.subject for found in good] == ["authority", "certificate"]
    assert {found.level for found in good} == {Level.OK}
    path.write_text(text.replace("[trust]", lines.format(key=other.with_suffix(".key"))))
    bad = list(identity.check_certificates(load_config(path, {}, {})))
    assert bad[-1].level is Level.FAIL
    assert "does not belong to the certificate" in bad[-1].message
