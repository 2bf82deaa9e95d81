from __future__ import annotations

import base64
import hashlib
import os
import string
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.bundle import keyring as keyring_module
from agent.bundle.keyring import Keyring, TrustedKey, key_id, parse_public_key, parse_revoked
from agent.errors import ConfigError, KeyringError

HEAD: Final = bytes.fromhex("3059301306072a8648ce3d020106082a8648ce3d03010703420004")
# P-256: the prime of its field, the order of its group, and two points with a small coordinate. The sum of
# that coordinate and the prime fits 32 bytes too: the same element of the field, but not a valid encoding.
FIELD: Final = 0xFFFFFFFF00000001000000000000000000000000FFFFFFFFFFFFFFFFFFFFFFFF
ORDER: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
Y_OF_0: Final = 0x66485C780E2F83D72433BD5D84A06BB6541C2AF31DAE871728BF856A174F93F4
X_OF_5: Final = 0xD7325D7646CD60D80A92738CEB345F844CFFAF35841022CAB176F692DE8DE1D7
DIGITS: Final = f"{string.ascii_uppercase}{string.ascii_lowercase}{string.digits}+/".encode()


def pem(key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey) -> bytes:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_key().public_bytes(serialization.Encoding.PEM, form)


def der_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    return TrustedKey.of(key.public_key()).spki


def plain_pem(der: bytes) -> bytes:
    """Return these bytes, valid DER or not, in the PEM that OpenSSL writes."""
    lines = textwrap.wrap(base64.b64encode(der).decode(), 64)
    return "\n".join(["-----BEGIN PUBLIC KEY-----", *lines, "-----END PUBLIC KEY-----", ""]).encode()


def point(x: int, y: int) -> bytes:
    return HEAD + x.to_bytes(32) + y.to_bytes(32)


def spliced(raw: bytes, at: int, cut: int, extra: bytes) -> bytes:
    at %= len(raw) + 1
    return raw[:at] + extra + raw[at + cut :]


def with_spare_bits(raw: bytes) -> bytes:
    """Set a bit of the last base64 digit that belongs to no byte."""
    at = raw.find(b"=") - 1
    return raw if at < 0 else spliced(raw, at, 1, DIGITS[DIGITS.index(raw[at]) | 1 :][:1])


FORMS: Final[tuple[Callable[[bytes], bytes], ...]] = (
    bytes,
    lambda raw: raw.replace(b"\n", b"\r\n"),
    lambda raw: raw.replace(b"\n", b"\r"),
    lambda raw: raw.replace(b"\n", b" \n"),
    lambda raw: raw.replace(b"\n", b"\n\n"),
    lambda raw: raw.replace(b"\n", b""),
    lambda raw: raw.removesuffix(b"\n"),
    lambda raw: raw + b"\n",
    lambda raw: raw + b"more",
    lambda raw: b"\xef\xbb\xbf" + raw,
    lambda raw: b"a comment\n" + raw,
    lambda raw: raw + raw,
    lambda raw: pem(ec.derive_private_key(44, ec.SECP256R1())) + raw,
    lambda raw: raw.replace(b"-----BEGIN PUBLIC KEY-----\n", b""),
    lambda raw: raw.replace(b"-----END PUBLIC KEY-----\n", b""),
    lambda raw: raw.replace(b"PUBLIC", b"EC PUBLIC"),
    lambda raw: raw.replace(b"=", b""),
    with_spare_bits,
)
DERS = st.one_of(
    st.integers(1, ORDER - 1).map(lambda scalar: der_of(ec.derive_private_key(scalar, ec.SECP256R1()))),
    st.binary(min_size=64, max_size=64).map(lambda coordinates: HEAD + coordinates),
    st.sampled_from(
        [
            point(0, Y_OF_0),
            point(0, FIELD - Y_OF_0),
            point(FIELD, Y_OF_0),
            point(X_OF_5, 5),
            point(X_OF_5, FIELD + 5),
            point(X_OF_5, FIELD - 5),
            HEAD + X_OF_5.to_bytes(32) + (5).to_bytes(31),
            HEAD + X_OF_5.to_bytes(32) + (5).to_bytes(33),
            point(0, 0),
            point(FIELD, FIELD),
        ]
    ),
)
SPLICES = st.tuples(st.integers(0, 200), st.integers(0, 3), st.binary(max_size=3))


@pytest.fixture
def key() -> ec.EllipticCurvePrivateKey:
    return ec.derive_private_key(42, ec.SECP256R1())


def test_key_id_is_the_digest_of_the_pem_that_openssl_writes(
    key: ec.EllipticCurvePrivateKey, tmp_path: Path
) -> None:
    (tmp_path / "a.pub").write_bytes(pem(key))
    command = ["openssl", "pkey", "-pubin", "-in", str(tmp_path / "a.pub")]
    written = subprocess.run(command, capture_output=True, check=True).stdout
    assert key_id(key.public_key()) == hashlib.sha256(written).hexdigest()


def test_a_key_that_was_revoked_by_its_former_id_is_revoked(
    key: ec.EllipticCurvePrivateKey, tmp_path: Path
) -> None:
    (tmp_path / "a.pub").write_bytes(pem(key))
    command = ["openssl", "pkey", "-pubin", "-in", str(tmp_path / "a.pub"), "-outform", "DER"]
    der = subprocess.run(command, capture_output=True, check=True).stdout
    trusted = TrustedKey.of(key.public_key())
    for revoked in (hashlib.sha256(der).hexdigest(), trusted.key_id):
        assert Keyring.of([key.public_key()], [revoked]).revokes(trusted)
    assert not Keyring.of([key.public_key()], ["0" * 64]).revokes(trusted)


def test_a_single_key_file_serves_as_a_folder(key: ec.EllipticCurvePrivateKey, tmp_path: Path) -> None:
    (tmp_path / "a.pub").write_bytes(pem(key))
    assert set(Keyring.from_dir(tmp_path / "a.pub").keys) == {key_id(key.public_key())}
    (tmp_path / "b.pub").write_text("no key")
    with pytest.raises(ConfigError, match="expected a public key"):
        Keyring.from_dir(tmp_path / "b.pub")


def test_folder_gives_its_keys_and_what_was_revoked(key: ec.EllipticCurvePrivateKey, tmp_path: Path) -> None:
    other = ec.derive_private_key(43, ec.SECP256R1())
    (tmp_path / "a.pub").write_bytes(pem(key))
    (tmp_path / "b.pem").write_bytes(pem(other))
    (tmp_path / "README").write_text("not a key")
    (tmp_path / "revoked").write_text(f"# lost in March\n\n{key_id(other.public_key())}\n")
    keyring = Keyring.from_dir(tmp_path)
    ids = {trusted.key_id for trusted in keyring.keys.values()}
    assert ids == {key_id(key.public_key()), key_id(other.public_key())}
    assert keyring.revoked == {key_id(other.public_key())}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "expected a public key in PEM"),
        (b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n", "expected a public key in PEM"),
        (pem(ec.derive_private_key(42, ec.SECP384R1())), "secp384r1"),
        (pem(ed25519.Ed25519PrivateKey.from_private_bytes(bytes(32))), "Ed25519"),
        (b"x" * 20000, "expected at most 16384 bytes"),
    ],
)
def test_file_without_a_p256_public_key_is_refused(raw: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.pub"
    path.write_bytes(raw)
    with pytest.raises(ConfigError, match=message) as error:
        Keyring.from_files([path])
    assert str(path) in str(error.value)


def test_every_form_of_a_key_gives_the_same_trusted_key(
    key: ec.EllipticCurvePrivateKey, tmp_path: Path
) -> None:
    public = key.public_key()
    point = public.public_bytes(serialization.Encoding.X962, serialization.PublicFormat.CompressedPoint)
    # The SubjectPublicKeyInfo of a compressed point is 32 bytes shorter, and so are its three lengths.
    compressed = bytes.fromhex("3039301306072a8648ce3d020106082a8648ce3d030107032200") + point
    text = base64.encodebytes(compressed)
    for form in (
        pem(key),
        b"a comment\n" + pem(key),
        pem(key).replace(b"\n", b"\r\n"),
        b"-----BEGIN PUBLIC KEY-----\n" + text + b"-----END PUBLIC KEY-----\n",
    ):
        path = tmp_path / "a.pub"
        path.write_bytes(form)
        assert list(Keyring.from_files([path]).keys.values()) == [TrustedKey.of(public)]


def test_point_that_is_not_on_the_curve_is_refused(key: ec.EllipticCurvePrivateKey, tmp_path: Path) -> None:
    der = bytearray(der_of(key))
    der[-1] ^= 1
    path = tmp_path / "a.pub"
    path.write_bytes(plain_pem(bytes(der)))
    with pytest.raises(ConfigError):
        Keyring.from_files([path])


@pytest.mark.slow
@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    der=DERS,
    in_der=st.none() | SPLICES,
    form=st.just(FORMS[0]) | st.sampled_from(FORMS),
    in_pem=st.none() | st.none() | SPLICES,
)
def test_key_is_read_exactly_as_cryptography_reads_it(
    tmp_path_factory: pytest.TempPathFactory,
    der: bytes,
    in_der: tuple[int, int, bytes] | None,
    form: Callable[[bytes], bytes],
    in_pem: tuple[int, int, bytes] | None,
) -> None:
    raw = form(plain_pem(der if in_der is None else spliced(der, *in_der)))
    raw = raw if in_pem is None else spliced(raw, *in_pem)
    path = tmp_path_factory.getbasetemp() / "any.pub"
    path.write_bytes(raw)
    try:
        expected = TrustedKey.of(parse_public_key(raw))
    except ConfigError as error:
        with pytest.raises(ConfigError) as caught:
            Keyring.from_files([path])
        assert str(caught.value) == f"{path}: {error}"
        return
    (found,) = Keyring.from_files([path]).keys.values()
    assert found == expected
    assert found.public_key.public_numbers() == parse_public_key(raw).public_numbers()


def test_keyring_is_read_without_loading_cryptography(
    key: ec.EllipticCurvePrivateKey, tmp_path: Path
) -> None:
    (tmp_path / "a.pub").write_bytes(pem(key))
    script = (
        "import sys; from agent.bundle.keyring import Keyring; Keyring.from_dir(sys.argv[1]);"
        "print('cryptography' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, check=True)
    assert done.stdout == b"False\n"


def test_private_key_is_not_accepted_as_a_public_key(key: ec.EllipticCurvePrivateKey, tmp_path: Path) -> None:
    path = tmp_path / "signing.key"
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, plain))
    with pytest.raises(ConfigError):
        Keyring.from_files([path])


def test_missing_file_or_folder_or_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Keyring.from_files([tmp_path / "missing.pub"])
    with pytest.raises(ConfigError, match="cannot be read"):
        Keyring.from_dir(tmp_path / "missing")
    with pytest.raises(ConfigError, match="expected 1 to 256 keys, got 0"):
        Keyring.from_dir(tmp_path)


def make_folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize(
    "damage",
    [
        make_folder,
        os.mkfifo,
        lambda path: path.symlink_to("gone"),
        lambda path: path.write_text("no key id\n"),
        lambda path: path.write_bytes(b"\xff\xfe"),
        lambda path: path.write_bytes(bytes(2 << 20)),
    ],
)
def test_damaged_list_of_revoked_keys_lets_no_new_bundle_in_and_hides_no_key(
    key: ec.EllipticCurvePrivateKey, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    (tmp_path / "a.pub").write_bytes(pem(key))
    Keyring.from_dir(tmp_path).require_complete()
    damage(tmp_path / "revoked")
    keyring = Keyring.from_dir(tmp_path)
    assert [trusted.key_id for trusted in keyring.keys.values()] == [key_id(key.public_key())]
    assert len(keyring.faults) == 1
    with pytest.raises(KeyringError, match=r"revoked: .*: no new bundle is accepted"):
        keyring.require_complete()


@pytest.mark.parametrize("form", ["{} # lost in March", "{}.", "key {}", "\ufeff{}", "{}\nx"])
def test_id_in_a_damaged_line_is_revoked(key: ec.EllipticCurvePrivateKey, tmp_path: Path, form: str) -> None:
    (tmp_path / "a.pub").write_bytes(pem(key))
    found = key_id(key.public_key())
    for text in (found, found.upper()):
        (tmp_path / "revoked").write_text(form.format(text))
        assert Keyring.from_dir(tmp_path).revoked == {found}


@pytest.mark.parametrize("damage", [make_folder, os.mkfifo, lambda path: path.write_text("half a k")])
def test_bad_key_file_is_a_fault_and_hides_no_other_key(
    key: ec.EllipticCurvePrivateKey, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    (tmp_path / "a.pub").write_bytes(pem(key))
    damage(tmp_path / "b.pub")
    keyring = Keyring.from_dir(tmp_path)
    assert [trusted.key_id for trusted in keyring.keys.values()] == [key_id(key.public_key())]
    [fault] = keyring.faults
    assert fault.startswith(f"{tmp_path / 'b.pub'}: ")
    keyring.require_complete()


def test_keys_above_the_limit_are_a_fault_and_the_first_ones_count(
    key: ec.EllipticCurvePrivateKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyring_module, "MAX_KEYS", 1)
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.pub").write_bytes(pem(key))
    keyring = Keyring.from_dir(tmp_path)
    assert (len(keyring.keys), len(keyring.faults)) == (1, 1)


@pytest.mark.parametrize("line", ["abc", "A" * 64, "a" * 63, "a" * 65, "\xff" * 64])
def test_revoked_line_that_is_not_a_key_id_is_refused(line: str) -> None:
    with pytest.raises(ConfigError, match="line 2"):
        parse_revoked(f"# comment\n{line}\n".encode("latin-1"))


def test_key_on_another_curve_is_refused() -> None:
    with pytest.raises(ValueError, match="secp384r1"):
        Keyring.of([ec.derive_private_key(42, ec.SECP384R1()).public_key()])
