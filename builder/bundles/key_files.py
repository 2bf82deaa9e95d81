"""Key files: the keys that sign bundles.

Promises that a private key is readable only by its owner and never overwrites another. Keys are unencrypted
EC P-256 in PEM, the format that OpenSSL and `model_signing` also write. Leaves trusted public keys to
`agent.bundle.keyring`.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from agent.bundle.keyring import key_id
from agent.durable import sync_folder
from builder.errors import KeyFileError
from builder.spelling import similar_file

PRIVATE_NAME: Final = "signing.key"
PUBLIC_NAME: Final = "signing.pub"
# A P-256 key in PEM takes 241 bytes; a larger file is something else and is not read.
MAX_KEY_FILE_BYTES: Final = 16 * 1024

_PUBLIC_MARK: Final = b"PUBLIC KEY-----"
_MAKE_HINT: Final = "make a pair of keys with `edgebundle keygen DIR`"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Where a new pair of keys was written.

    `key_id`: SHA-256 of the public key's SubjectPublicKeyInfo in DER, in hexadecimal; it names the key in
        messages.
    """

    private: Path
    public: Path
    key_id: str


def generate(directory: str | os.PathLike[str]) -> KeyPair:
    """Write a new pair of keys into a folder, which is created if it is missing.

    Raises
    ------
    KeyFileError
        If one of the two files exists or cannot be written; then no new file is left behind.
    """
    folder = Path(directory)
    key = ec.generate_private_key(ec.SECP256R1())
    private_pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public_pem = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    private, public = folder / PRIVATE_NAME, folder / PUBLIC_NAME
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _create(public, public_pem, mode=0o644)
        try:
            _create(private, private_pem, mode=0o600)
        except OSError:
            public.unlink(missing_ok=True)
            raise
        sync_folder(folder)
    except FileExistsError as error:
        raise KeyFileError(
            f"{folder} already has keys, which are never overwritten",
            hint="name another folder, or move the old keys away if no device trusts them",
        ) from error
    except OSError as error:
        raise KeyFileError(
            f"cannot write keys into {folder}: {error.strerror}", hint="name a folder that you can write to"
        ) from error
    return KeyPair(private, public, key_id(key.public_key()))


def read_private(path: str | os.PathLike[str]) -> ec.EllipticCurvePrivateKey:
    """Read a signing key.

    Raises
    ------
    KeyFileError
        If the file is missing, can be read by others, or is not an unencrypted P-256 key in PEM.
    """
    pem = _read(Path(path))
    if _PUBLIC_MARK in pem:
        raise KeyFileError(
            f"{path}: expected a private key, got a public key",
            hint=f"use {PRIVATE_NAME} beside it",
        )
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except TypeError as error:  # the library raises it if the key needs a password
        raise KeyFileError(
            f"{path}: expected an unencrypted key, got an encrypted one",
            hint="decrypt it: openssl pkey -in KEY -out signing.key",
        ) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise KeyFileError(f"{path}: expected a private key in PEM", hint=_MAKE_HINT) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise KeyFileError(f"{path}: expected an EC P-256 key, got {_kind(key)}", hint=_MAKE_HINT)
    return key


def _kind(key: object) -> str:
    if isinstance(key, ec.EllipticCurvePrivateKey):
        return f"an EC {key.curve.name} key"
    return f"a key of type {type(key).__name__.strip('_')}"


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            pem = file.read(MAX_KEY_FILE_BYTES + 1)
    except OSError as error:
        raise KeyFileError(
            f"cannot read the key {path}: {error.strerror}", hint=similar_file(path, otherwise=_MAKE_HINT)
        ) from error
    if len(pem) > MAX_KEY_FILE_BYTES:
        raise KeyFileError(
            f"{path}: expected a key in PEM, got a file of more than {MAX_KEY_FILE_BYTES} bytes",
            hint=_MAKE_HINT,
        )
    # `read_private` refuses a public key with a better message: chmod would not help there.
    if mode & (stat.S_IRWXG | stat.S_IRWXO) and _PUBLIC_MARK not in pem:
        raise KeyFileError(f"{path} can be read by others (mode {mode:04o})", hint=f"chmod 600 {path}")
    return pem


def _create(path: Path, content: bytes, *, mode: int) -> None:
    # Created exclusively and with its final mode: no other key is overwritten, and no other user can read it.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)  # regardless of the umask
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        path.unlink(missing_ok=True)
        raise
