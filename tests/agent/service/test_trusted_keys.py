"""Keys that cannot be used are logged when that changes, and counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.errors import ConfigError
from agent.service.trusted_keys import TrustedKeys
from tests.bundles import KEYRING, public_pem


def keyring_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if text.startswith("keyring: ")]


def test_damaged_key_is_logged_once_and_again_when_it_is_repaired(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "good.pub").write_bytes(public_pem())
    (tmp_path / "bad.pub").write_bytes(b"not a key")
    trusted = TrustedKeys(tmp_path)
    for _ in range(3):
        assert trusted.read().keys == KEYRING.keys
    [fault] = trusted.faults
    assert str(tmp_path / "bad.pub") in fault
    assert keyring_lines(caplog) == [f"keyring: {fault}"]
    (tmp_path / "bad.pub").unlink()
    for _ in range(3):
        trusted.check()
    assert not trusted.faults
    assert keyring_lines(caplog) == [f"keyring: {fault}", "keyring: all files can be used again"]


def test_folder_without_a_key_is_an_error_for_a_deployment_but_not_for_a_check(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trusted = TrustedKeys(tmp_path)
    trusted.check()
    with pytest.raises(ConfigError, match="expected 1 to"):
        trusted.read()
    assert len(trusted.faults) == len(keyring_lines(caplog)) == 1


def test_many_damaged_keys_do_not_fill_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "good.pub").write_bytes(public_pem())
    for number in range(20):
        (tmp_path / f"bad{number}.pub").write_bytes(b"not a key")
    trusted = TrustedKeys(tmp_path)
    trusted.check()
    assert len(trusted.faults) == 20
    assert len(keyring_lines(caplog)) == 8
