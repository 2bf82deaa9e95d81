"""Trusted keys and revoked keys.

Promises that every key is a P-256 public key, and that a bad file or line does not hide the others; while the
list of revoked keys is damaged, `require_complete` refuses. Leaves access to the folder to the file system.
"""

from __future__ import annotations

import binascii
import hashlib
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from agent.bundle.names import SHA256
from agent.errors import ConfigError, KeyringError
from agent.reading import open_at_once

# `cryptography` takes 8 MiB of memory, so it is imported only where it is used: an agent without a model does
# without it (docs/decisions/0015-plain-keys-without-cryptography.md).
if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

# A P-256 public key takes 178 bytes of PEM; the rest is room for comments around it.
MAX_KEY_FILE_BYTES: Final = 16 << 10
# Some 16000 key ids, a line of 65 bytes each.
MAX_REVOKED_FILE_BYTES: Final = 1 << 20
# Far more signers than a device trusts; each file is read at every verification.
MAX_KEYS: Final = 256
REVOKED_FILE: Final = "revoked"
_KEY_ID: Final = re.compile(r"(?<![0-9a-fA-F])[0-9a-fA-F]{64}(?![0-9a-fA-F])")
KEY_SUFFIXES: Final = (".pem", ".pub")
_PEM_HEAD: Final = b"-----BEGIN PUBLIC KEY-----\n"
_PEM_TAIL: Final = b"-----END PUBLIC KEY-----\n"
_PEM_LINE: Final = 64
# RFC 5480, 2: a SubjectPublicKeyInfo in DER with id-ecPublicKey, secp256r1 and an uncompressed point, whose
# two coordinates of 32 bytes follow.
_P256_HEAD: Final = bytes.fromhex("3059301306072a8648ce3d020106082a8648ce3d03010703420004")
_COORDINATE_BYTES: Final = 32
# The curve y^2 = x^3 - 3x + b over the integers modulo p (SEC 2, 2.4.2).
_P: Final = 0xFFFFFFFF00000001000000000000000000000000FFFFFFFFFFFFFFFFFFFFFFFF
_B: Final = 0x5AC635D8AA3A93E7B3EBBD55769886BC651D06B0CC53B0F63BCE3C3E27D2604B


@dataclass(frozen=True, slots=True)
class TrustedKey:
    """A public key.

    Attributes
    ----------
    spki
        Its SubjectPublicKeyInfo in DER.
    key_id
        Its name in signature files and everywhere else: the SHA-256 of its PEM in hexadecimal, which Model
        Signing calls `publicKey.hint`.
    former_id
        Its name in edgebundle before 2026-11-24, which lists of revoked keys may still have: the SHA-256 of
        `spki`.
    """

    spki: bytes
    key_id: str
    former_id: str

    @property
    def public_key(self) -> ec.EllipticCurvePublicKey:
        """The key as `cryptography` uses it."""
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        key = serialization.load_der_public_key(self.spki)
        assert isinstance(key, ec.EllipticCurvePublicKey)
        return key

    @classmethod
    def of(cls, public_key: ec.EllipticCurvePublicKey) -> TrustedKey:
        """Make a trusted key from a public key.

        Raises
        ------
        ValueError
            If it is not on P-256.
        """
        if public_key.curve.name != "secp256r1":
            raise ValueError(f"expected a key on P-256, got one on {public_key.curve.name}")
        return cls.of_spki(_spki(public_key))

    @classmethod
    def of_spki(cls, spki: bytes) -> TrustedKey:
        """Make a trusted key from a P-256 key's SubjectPublicKeyInfo in DER, which the caller has checked."""
        return cls(spki, hashlib.sha256(_pem(spki)).hexdigest(), hashlib.sha256(spki).hexdigest())


@dataclass(frozen=True, slots=True)
class Keyring:
    """The keys that a device trusts.

    Attributes
    ----------
    keys
        Key id -> key.
    revoked
        Ids of the revoked keys, which `keys` may still contain.
    faults
        What cannot be used in the folder, one line for each file or line.
    incomplete
        Why a revoked key may be missing from `revoked`, or None.
    """

    keys: Mapping[str, TrustedKey]
    revoked: frozenset[str] = frozenset()
    faults: tuple[str, ...] = ()
    incomplete: str | None = None

    @classmethod
    def of(cls, keys: Iterable[ec.EllipticCurvePublicKey], revoked: Iterable[str] = ()) -> Keyring:
        """Make a keyring from keys in memory.

        Parameters
        ----------
        keys
            Public keys on P-256.
        revoked
            Ids of revoked keys.

        Raises
        ------
        ValueError
            If a key is not on P-256.
        """
        return cls._of_trusted([TrustedKey.of(key) for key in keys], revoked)

    @classmethod
    def _of_trusted(cls, keys: Iterable[TrustedKey], revoked: Iterable[str]) -> Keyring:
        return cls(MappingProxyType({key.key_id: key for key in keys}), frozenset(revoked))

    @classmethod
    def from_files(cls, paths: Iterable[str | Path], revoked: Iterable[str] = ()) -> Keyring:
        """Read public keys, one PEM file each; `revoked` are ids of revoked keys.

        Raises
        ------
        ConfigError
            If a file cannot be read, or does not hold a P-256 public key.
        """
        return cls._of_trusted([_load(Path(path)) for path in paths], revoked)

    @classmethod
    def from_dir(cls, folder: str | Path) -> Keyring:
        """Read all `*.pub` and `*.pem` files of a folder, and its file `revoked`, one key id a line.

        Instead of a folder, the path may be a single key file.

        A file or line that is not valid becomes one of `faults`; the others remain in force.

        Raises
        ------
        ConfigError
            If there are no keys, or none is valid, or the folder cannot be read.
        """
        folder = Path(folder)
        if folder.is_file():
            return cls.from_files([folder])
        try:
            paths = sorted(path for path in folder.iterdir() if path.suffix in KEY_SUFFIXES)
        except OSError as error:
            raise ConfigError(f"{folder}: cannot be read: {error.strerror}") from error
        faults = [f"{path}: expected at most {MAX_KEYS} keys" for path in paths[MAX_KEYS : MAX_KEYS + 1]]
        keys = []
        for path in paths[:MAX_KEYS]:
            try:
                keys.append(_load(path))
            except ConfigError as error:
                faults.append(str(error))
        if not keys:
            why = faults[0] if faults else f"{folder}: expected 1 to {MAX_KEYS} keys, got 0"
            raise ConfigError(why, hint="copy the public key that verifies your bundles into it, as NAME.pub")
        revoked, wrong = _revoked(folder / REVOKED_FILE)
        names = MappingProxyType({key.key_id: key for key in keys})
        return cls(names, revoked, (*faults, *wrong), wrong[0] if wrong else None)

    def revokes(self, key: TrustedKey) -> bool:
        """Return whether a key is revoked, by its present or its former id."""
        return not self.revoked.isdisjoint((key.key_id, key.former_id))

    def revokes_id(self, key_id: str) -> bool:
        """Return whether the key with this id, which was trusted before, is revoked."""
        key = self.keys.get(key_id)
        return key_id in self.revoked if key is None else self.revokes(key)

    def require_complete(self) -> None:
        """Check that no revoked key may be missing, before a bundle is accepted that did not run before.

        Raises
        ------
        KeyringError
            If the list of revoked keys cannot be read completely.
        """
        if self.incomplete is not None:
            raise KeyringError(
                f"{self.incomplete}: no new bundle is accepted", hint="correct the file: one key id per line"
            )


def key_id(public_key: ec.EllipticCurvePublicKey) -> str:
    """Return the name of a key: the SHA-256 of its PEM in hexadecimal, Model Signing's `publicKey.hint`."""
    return hashlib.sha256(_pem(_spki(public_key))).hexdigest()


def parse_public_key(raw: bytes) -> ec.EllipticCurvePublicKey:
    """Read a P-256 public key from PEM.

    Raises
    ------
    ConfigError
        If it is anything else.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key = serialization.load_pem_public_key(raw)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(
            "expected a public key in PEM", hint="use the .pub file that `edgebundle keygen` wrote"
        ) from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        kind = key.curve.name if isinstance(key, ec.EllipticCurvePublicKey) else type(key).__name__
        raise ConfigError(f"expected a public key on P-256, got {kind}")
    return key


def parse_revoked(raw: bytes) -> frozenset[str]:
    """Read the ids of revoked keys, one a line; empty lines and lines that begin with `#` are ignored.

    Raises
    ------
    ConfigError
        If a line is anything else.
    """
    ids = set()
    for number, line in enumerate(raw.decode("utf-8", "replace").splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        if not SHA256.fullmatch(text):
            raise ConfigError(f"line {number}: expected a key id of 64 hexadecimal digits, got {text!r:.80}")
        ids.add(text)
    return frozenset(ids)


def _load(path: Path) -> TrustedKey:
    try:
        raw = _read(path, MAX_KEY_FILE_BYTES)
        spki = _plain_spki(raw)
        return TrustedKey.of(parse_public_key(raw)) if spki is None else TrustedKey.of_spki(spki)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", hint=error.hint) from error


def _revoked(path: Path) -> tuple[frozenset[str], list[str]]:
    """Return the ids of revoked keys, and the faults of their list."""
    # A dangling link means that the list was lost, so it is an error; a folder without a list is not.
    if not os.path.lexists(path):
        return frozenset(), []
    try:
        raw = _read(path, MAX_REVOKED_FILE_BYTES)
    except ConfigError as error:
        return frozenset(), [f"{path}: {error}"]
    try:
        return parse_revoked(raw), []
    except ConfigError as error:
        # An id in a line that is otherwise wrong was probably meant to be revoked.
        ids = _KEY_ID.findall(raw.decode("utf-8", "replace"))
        return frozenset(found.lower() for found in ids), [f"{path}: {error}"]


def _read(path: Path, limit: int) -> bytes:
    try:
        with os.fdopen(open_at_once(path), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError("expected a regular file, got something else")
            raw = file.read(limit + 1)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}") from error
    if len(raw) > limit:
        raise ConfigError(f"expected at most {limit} bytes, got more")
    return raw


def _plain_spki(raw: bytes) -> bytes | None:
    """Return the SubjectPublicKeyInfo of a P-256 key in exactly the PEM of OpenSSL and `edgebundle keygen`.

    Return None for everything else, valid or not: `parse_public_key` then reads or refuses it.
    """
    try:
        spki = binascii.a2b_base64(raw.removeprefix(_PEM_HEAD).removesuffix(_PEM_TAIL))
    except binascii.Error:
        return None
    head, point = spki[: len(_P256_HEAD)], spki[len(_P256_HEAD) :]
    if head != _P256_HEAD or len(point) != 2 * _COORDINATE_BYTES or _pem(spki) != raw:
        return None
    x = int.from_bytes(point[:_COORDINATE_BYTES])
    y = int.from_bytes(point[_COORDINATE_BYTES:])
    on_curve = max(x, y) < _P and (y * y - x * x * x + 3 * x - _B) % _P == 0
    return spki if on_curve else None


def _pem(spki: bytes) -> bytes:
    text = binascii.b2a_base64(spki, newline=False)
    lines = [text[start : start + _PEM_LINE] for start in range(0, len(text), _PEM_LINE)]
    return _PEM_HEAD + b"\n".join(lines) + b"\n" + _PEM_TAIL


def _spki(public_key: ec.EllipticCurvePublicKey) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return public_key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
