"""Keys, certificates and passwords are checked before they are stored."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from agent.errors import ConfigError
from agent.provision import credentials
from agent.provision.credentials import certificates, check_pair, read_credential, trusted_key_id
from tests.agent.provision.authority import Authority


@pytest.mark.parametrize(
    ("since", "until", "level", "part"),
    [
        (-1, 90, "ok", "is valid until"),
        (-60, 20, "warn", "in 19 days"),
        (-60, -1, "fail", "expired on"),
        (1, 90, "fail", "is not valid before"),
    ],
)
def test_dates_of_certificates_are_checked(
    authority: Authority, since: int, until: int, level: str, part: str
) -> None:
    raw = authority.client("kitchen", since=since, until=until).read_bytes()
    found = certificates(raw, "c")[0].finding("certificate", datetime.datetime.now(datetime.UTC))
    assert (found.level.value, part in found.message) == (level, True)


def test_key_that_belongs_to_the_certificate_is_accepted_and_another_refused(authority: Authority) -> None:
    own, other = authority.client("kitchen"), authority.client("garage")
    check_pair(own.read_bytes(), own.with_suffix(".key").read_bytes())
    with pytest.raises(ConfigError, match="does not belong"):
        check_pair(own.read_bytes(), other.with_suffix(".key").read_bytes())
    with pytest.raises(ConfigError, match="expected a private key"):
        check_pair(own.read_bytes(), b"nothing")


def test_private_half_is_not_accepted_as_a_key_to_trust(authority: Authority) -> None:
    with pytest.raises(ConfigError, match="private half"):
        trusted_key_id(authority.ca.with_suffix(".key").read_bytes(), "--trust")


def test_damaged_certificate_is_refused(authority: Authority) -> None:
    damaged = authority.ca.read_bytes().replace(b"MII", b"AAA", 1)
    with pytest.raises(ConfigError, match="damaged"):
        certificates(damaged, "--ca")
    with pytest.raises(ConfigError, match="expected a certificate in PEM"):
        certificates(b"nothing", "--ca")


def test_credential_is_a_path_or_the_text_itself(tmp_path: Path, authority: Authority) -> None:
    text = authority.ca.read_text()
    assert read_credential(text, tmp_path, "--ca").strip() == text.strip().encode()
    assert read_credential("ca.pem", authority.folder, "--ca") == text.encode()
    with pytest.raises(ConfigError, match="cannot read"):
        read_credential("none.pem", tmp_path, "--ca")


def test_file_that_is_too_long_for_a_credential_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "MAX_CREDENTIAL_BYTES", 10)
    (tmp_path / "long.pem").write_bytes(bytes(11))
    with pytest.raises(ConfigError, match="at most 10 bytes"):
        read_credential("long.pem", tmp_path, "--ca")
