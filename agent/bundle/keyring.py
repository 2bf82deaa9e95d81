"""The keys that are trusted, and those that no longer are.

Promises that every key is a P-256 public key. Leaves who may write into the folder to the file system.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from agent.bundle.names import SHA256
from agent.errors import ConfigError

# A P-256 public key takes 178 bytes of PEM; the rest is room for comments around it.
MAX_KEY_FILE_BYTES: Final = 16 << 10
MAX_REVOKED_FILE_BYTES: Final = 1 << 20
MAX_KEYS: Final = 256
REVOKED_FILE: Final = "revoked"
_KEY_SUFFIXES: Final = (".pem", ".pub")


@dataclass(frozen=True, slots=True)
class TrustedKey:
    """A public key; `key_id` is how we call it, `hint` how a signature file does."""

    public_key: ec.EllipticCurvePublicKey
    key_id: str
    hint: str

    @classmethod
    def of(cls, public_key: ec.EllipticCurvePublicKey) -> TrustedKey:
        """Name a key.

        Raises
        ------
        ValueError
            If it is on another curve than P-256.
        """
        if not isinstance(public_key.curve, ec.SECP256R1):
            raise ValueError(f"a key is on P-256, not on {public_key.curve.name}")  # noqa: TRY004 - the type is right
        return cls(public_key, key_id(public_key), key_hint(public_key))


@dataclass(frozen=True, slots=True)
class Keyring:
    """Trusted keys by the hint in a signature file, and the ids of revoked ones."""

    keys: Mapping[str, TrustedKey]
    revoked: frozenset[str] = frozenset()

    @classmethod
    def of(cls, keys: Iterable[ec.EllipticCurvePublicKey], revoked: Iterable[str] = ()) -> Keyring:
        """Make a keyring of keys that are in memory.

        Raises
        ------
        ValueError
            If a key is on another curve than P-256.
        """
        trusted = [TrustedKey.of(key) for key in keys]
        return cls(MappingProxyType({key.hint: key for key in trusted}), frozenset(revoked))

    @classmethod
    def from_files(cls, paths: Iterable[str | Path], revoked: Iterable[str] = ()) -> Keyring:
        """Read public keys, one PEM file each.

        Raises
        ------
        ConfigError
            If a file cannot be read, or has no P-256 public key.
        """
        return cls.of([_load(Path(path)) for path in paths], revoked)

    @classmethod
    def from_dir(cls, folder: str | Path) -> Keyring:
        """Read all `*.pub` and `*.pem` of a folder, and its file `revoked`: one key id a line.

        Raises
        ------
        ConfigError
            If there is no key, or any of the files is not what it should be.
        """
        folder = Path(folder)
        try:
            paths = sorted(path for path in folder.iterdir() if path.suffix in _KEY_SUFFIXES)
        except OSError as error:
            raise ConfigError(f"the keyring {folder} cannot be read: {error.strerror}") from error
        if not 1 <= len(paths) <= MAX_KEYS:
            raise ConfigError(
                f"the keyring {folder} has {len(paths)} keys, expected 1 to {MAX_KEYS}",
                hint="copy the public key of whoever signs your bundles there, as NAME.pub",
            )
        return cls.from_files(paths, _revoked(folder / REVOKED_FILE))


def key_id(public_key: ec.EllipticCurvePublicKey) -> str:
    """SHA-256 of a key's SubjectPublicKeyInfo in DER, hexadecimal."""
    return hashlib.sha256(_public_bytes(public_key, serialization.Encoding.DER)).hexdigest()


def key_hint(public_key: ec.EllipticCurvePublicKey) -> str:
    """SHA-256 of a key's PEM, hexadecimal: what Model Signing puts into `publicKey.hint`."""
    return hashlib.sha256(_public_bytes(public_key, serialization.Encoding.PEM)).hexdigest()


def parse_public_key(raw: bytes) -> ec.EllipticCurvePublicKey:
    """Read a P-256 public key in PEM.

    Raises
    ------
    ConfigError
        If it is anything else.
    """
    try:
        key = serialization.load_pem_public_key(raw)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(
            "no public key in PEM is there", hint="expected is the .pub file that edgebundle keygen wrote"
        ) from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        kind = key.curve.name if isinstance(key, ec.EllipticCurvePublicKey) else type(key).__name__
        raise ConfigError(f"a public key on P-256 is expected, not {kind}")
    return key


def parse_revoked(raw: bytes) -> frozenset[str]:
    """Read key ids, one a line; empty lines and those that start with `#` are comments.

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
            raise ConfigError(f"line {number} is {text!r:.80}, expected a key id of 64 hexadecimal digits")
        ids.add(text)
    return frozenset(ids)


def _load(path: Path) -> ec.EllipticCurvePublicKey:
    try:
        return parse_public_key(_read(path, MAX_KEY_FILE_BYTES))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", hint=error.hint) from error


def _revoked(path: Path) -> frozenset[str]:
    # A link to nowhere is a list that got lost, not one that was never there.
    if not os.path.lexists(path):
        return frozenset()
    try:
        return parse_revoked(_read(path, MAX_REVOKED_FILE_BYTES))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _read(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            raw = file.read(limit + 1)
    except OSError as error:
        raise ConfigError(f"it cannot be read: {error.strerror}") from error
    if len(raw) > limit:
        raise ConfigError(f"it has more than {limit} bytes")
    return raw


def _public_bytes(public_key: ec.EllipticCurvePublicKey, encoding: serialization.Encoding) -> bytes:
    return public_key.public_bytes(encoding, serialization.PublicFormat.SubjectPublicKeyInfo)
