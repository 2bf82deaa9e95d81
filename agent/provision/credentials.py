"""What a key to trust, a certificate, its key and a password must be, before they are put anywhere.

Promises values that were looked into: a certificate's own key belongs to it, dates are in force, a key to
trust is a P-256 public key. Reads files, changes none.
"""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from agent.bundle.keyring import key_id, parse_public_key
from agent.errors import ConfigError
from agent.provision.checks.finding import Finding, fail, ok, warn

# A system's bundle of authorities takes a quarter of it.
MAX_CREDENTIAL_BYTES: Final = 1 << 20
# Long enough to notice and to get another one.
WARN_BEFORE: Final = datetime.timedelta(days=30)
_PEM: Final = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Dates:
    """When a certificate holds, and whose it is."""

    name: str
    since: datetime.datetime
    until: datetime.datetime

    def finding(self, subject: str, now: datetime.datetime) -> Finding:
        """Say whether it holds now."""
        until = f"{self.until:%Y-%m-%d}"
        if now < self.since:
            return fail(
                subject,
                f"{self.name} is not valid before {self.since:%Y-%m-%d %H:%M} UTC, "
                f"the clock says {now:%Y-%m-%d %H:%M}",
                "set the clock (timedatectl), or get another certificate",
            )
        if now > self.until:
            return fail(
                subject, f"{self.name} has expired on {until}", "get another certificate, and enroll again"
            )
        if now > self.until - WARN_BEFORE:
            days = (self.until - now).days
            return warn(
                subject, f"{self.name} expires on {until}, in {days} days", "get another certificate soon"
            )
        return ok(subject, f"{self.name} is valid until {until}")


def read_credential(given: str, folder: Path, what: str) -> bytes:
    """Return the bytes of a credential that is given as a file's name, or is the PEM text itself.

    Raises
    ------
    ConfigError
        If the file cannot be read, or is far too long.
    """
    if given.lstrip().startswith("-----BEGIN "):
        return given.strip().encode() + b"\n"
    path = folder / Path(given).expanduser()
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_CREDENTIAL_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"{what}: cannot read {path}: {error.strerror}", hint="name a file that is there"
        ) from error
    if len(raw) > MAX_CREDENTIAL_BYTES:
        raise ConfigError(f"{what}: {path} has more than {MAX_CREDENTIAL_BYTES} bytes")
    return raw


def trusted_key_id(raw: bytes, what: str) -> str:
    """Return the id of a key to trust.

    Raises
    ------
    ConfigError
        If it is none; where it is the secret half, that is said.
    """
    if b"PRIVATE KEY" in raw:
        raise ConfigError(
            f"{what}: this is the private half of a key, which must never be on a device",
            hint="give signing.pub, which edgebundle keygen wrote beside signing.key",
        )
    try:
        return key_id(parse_public_key(raw))
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}", hint=error.hint) from error


def certificates(raw: bytes, what: str) -> tuple[Dates, ...]:
    """Return whose the certificates in a PEM file are, and when they hold.

    Raises
    ------
    ConfigError
        If there is none, or one is damaged.
    """
    blocks = _PEM.findall(raw)
    if not blocks:
        raise ConfigError(
            f"{what}: expected a certificate in PEM, found none", hint="-----BEGIN CERTIFICATE-----"
        )
    try:
        return tuple(_dates(x509.load_pem_x509_certificate(block)) for block in blocks)
    except ValueError as error:
        raise ConfigError(f"{what}: a certificate in it is damaged: {error}") from error


def check_pair(certificate: bytes, key: bytes) -> None:
    """Return if a key is the certificate's.

    Raises
    ------
    ConfigError
        If it is another's, is locked by a passphrase, or is none.
    """
    certificates(certificate, "certificate")
    try:
        private = serialization.load_pem_private_key(key, password=None)
    except TypeError as error:
        raise ConfigError(
            "key: it is locked by a passphrase, and nobody is there to type it",
            hint="openssl pkey -in locked.key -out device.key",
        ) from error
    except ValueError as error:
        raise ConfigError("key: expected a private key in PEM, found none") from error
    form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    leaf = x509.load_pem_x509_certificate(_PEM.findall(certificate)[0])
    if private.public_key().public_bytes(*form) != leaf.public_key().public_bytes(*form):
        raise ConfigError(
            "key: it does not belong to the certificate", hint="give the pair that was made together"
        )


def _dates(certificate: x509.Certificate) -> Dates:
    # Debian 12's cryptography on 32-bit ARM has only the names without a time zone.
    since = getattr(certificate, "not_valid_before_utc", None)
    until = getattr(certificate, "not_valid_after_utc", None)
    if since is None or until is None:
        since = certificate.not_valid_before.replace(tzinfo=datetime.UTC)
        until = certificate.not_valid_after.replace(tzinfo=datetime.UTC)
    names = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    name = str(names[0].value) if names else certificate.subject.rfc4514_string()
    return Dates(name if name.isprintable() else ascii(name), since, until)
