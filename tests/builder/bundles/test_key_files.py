from __future__ import annotations

import os
import resource
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from agent.bundle.keyring import Keyring, TrustedKey
from builder.bundles import key_files
from builder.errors import KeyFileError


def pem(key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey, password: bytes | None = None) -> bytes:
    encryption = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)


def write(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


@contextmanager
def no_file_larger_than(size: int) -> Iterator[None]:
    """Make larger writes fail with EFBIG, as they fail with ENOSPC on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_generated_keys_are_read_back_and_belong_together(tmp_path: Path) -> None:
    pair = key_files.generate(tmp_path / "new" / "keys")
    private = key_files.read_private(pair.private)
    assert list(Keyring.from_files([pair.public]).keys.values()) == [TrustedKey.of(private.public_key())]
    assert TrustedKey.of(private.public_key()).key_id == pair.key_id


def test_private_key_is_readable_only_by_its_owner_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        pair = key_files.generate(tmp_path / "keys")
    finally:
        os.umask(before)
    assert stat.S_IMODE(pair.private.stat().st_mode) == 0o600
    assert stat.S_IMODE(pair.public.stat().st_mode) == 0o644
    assert stat.S_IMODE(pair.private.parent.stat().st_mode) == 0o700


def test_key_id_is_the_digest_that_sha256sum_computes(tmp_path: Path) -> None:
    pair = key_files.generate(tmp_path)
    digest = subprocess.run(["sha256sum", str(pair.public)], check=True, capture_output=True).stdout
    assert digest.decode().split()[0] == pair.key_id


@pytest.mark.parametrize("present", [key_files.PRIVATE_NAME, key_files.PUBLIC_NAME])
def test_existing_keys_are_never_overwritten(tmp_path: Path, present: str) -> None:
    (tmp_path / present).write_text("precious")
    with pytest.raises(KeyFileError, match="already has keys") as caught:
        key_files.generate(tmp_path)
    assert caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == [present]
    assert (tmp_path / present).read_text() == "precious"


def test_nothing_is_left_behind_when_the_private_key_does_not_fit(tmp_path: Path) -> None:
    # The public key is 178 bytes and fits, the private one is 241 and does not.
    with no_file_larger_than(200), pytest.raises(KeyFileError, match="cannot write keys"):
        key_files.generate(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("")
    with pytest.raises(KeyFileError, match="keys"):
        key_files.generate(tmp_path / "keys")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_private_key_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = write(tmp_path / "k", pem(ec.generate_private_key(ec.SECP256R1())), mode)
    with pytest.raises(KeyFileError, match=f"{mode:04o}") as caught:
        key_files.read_private(path)
    assert caught.value.hint == f"chmod 600 {path}"


def test_key_from_openssl_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "openssl.key"
    subprocess.run(
        ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(path)],
        check=True,
        capture_output=True,
    )
    path.chmod(0o600)
    assert isinstance(key_files.read_private(path).curve, ec.SECP256R1)


def test_each_kind_of_bad_private_key_gets_its_own_message(tmp_path: Path) -> None:
    good = ec.generate_private_key(ec.SECP256R1())
    public = good.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    cases = {
        "expected an unencrypted key": pem(good, b"secret"),
        "got an EC secp384r1 key": pem(ec.generate_private_key(ec.SECP384R1())),
        "got a key of type Ed25519PrivateKey": pem(ed25519.Ed25519PrivateKey.generate()),
        "got a public key": public,
        "expected a private key in PEM": pem(good)[:-40],
        "got a file of more than": pem(good) * 100,
    }
    for message, content in cases.items():
        with pytest.raises(KeyFileError, match=message) as caught:
            key_files.read_private(write(tmp_path / "k", content))
        assert caught.value.hint, message
        assert "\n" not in str(caught.value)
    for content in (b"", b"-----BEGIN PRIVATE KEY-----\n\xff\xfe\n-----END PRIVATE KEY-----\n"):
        with pytest.raises(KeyFileError, match="expected a private key in PEM"):
            key_files.read_private(write(tmp_path / "k", content))


def test_missing_key_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="No such file") as caught:
        key_files.read_private(tmp_path / "absent")
    assert "keygen" in str(caught.value.hint)
