"""Checks trusted keys, certificates and their private keys before they are stored.

Promises: a private key belongs to its certificate, a certificate can be parsed and its dates are known, and a
trusted key is a P-256 public key. Reads files, changes none.
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
from agent.provision.finding import Finding, fail, ok, warn

# A system's bundle of authorities takes a quarter of this.
MAX_CREDENTIAL_BYTES: Final = 1 << 20
# Long enough to notice, and to get a new certificate.
WARN_BEFORE: Final = datetime.timedelta(days=30)
_PEM: Final = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Dates:
    """When a certificate is valid, in UTC, and whose it is: the common name, or else the whole subject."""

    name: str
    since: datetime.datetime
    until: datetime.datetime

    def finding(self, subject: str, now: datetime.datetime) -> Finding:
        """Return a finding on whether the certificate is valid now, and for how long."""
        until = f"{self.until:%Y-%m-%d}"
        if now < self.since:
            return fail(
                subject,
                f"{self.name} is not valid before {self.since:%Y-%m-%d %H:%M} UTC, "
                f"and the clock says {now:%Y-%m-%d %H:%M}",
                "set the clock (timedatectl), or get another certificate",
            )
        if now > self.until:
            return fail(subject, f"{self.name} expired on {until}", "get a new certificate, and enroll again")
        if now > self.until - WARN_BEFORE:
            days = (self.until - now).days
            return warn(
                subject, f"{self.name} expires on {until}, in {days} days", "get a new certificate soon"
            )
        return ok(subject, f"{self.name} is valid until {until}")


def read_credential(given: str, folder: Path, what: str) -> bytes:
    """Return the bytes of a credential that is given as a path, or as the PEM text itself.

    A file that cannot be read, or is too long, raises ConfigError.
    """
    if given.lstrip().startswith("-----BEGIN "):
        return given.strip().encode() + b"\n"
    path = folder / Path(given).expanduser()
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_CREDENTIAL_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"{what}: cannot read {path}: {error.strerror}", hint="give the path of an existing file"
        ) from error
    if len(raw) > MAX_CREDENTIAL_BYTES:
        raise ConfigError(
            f"{what}: expected at most {MAX_CREDENTIAL_BYTES} bytes in {path}, got more",
            hint=f"give the file in PEM: {what} has a few kilobytes",
        )
    return raw


def trusted_key_id(raw: bytes, what: str) -> str:
    """Return the key id of a public key in PEM; a ConfigError says if it is the private half."""
    if b"PRIVATE KEY" in raw:
        raise ConfigError(
            f"{what}: expected a public key, got the private half, which must never be on a device",
            hint="give signing.pub, which edgebundle keygen wrote next to signing.key",
        )
    try:
        return key_id(parse_public_key(raw))
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}", hint=error.hint) from error


def certificates(raw: bytes, what: str) -> tuple[Dates, ...]:
    """Return the owner and the dates of each certificate in a PEM file.

    A file without one, or with one that is damaged, raises ConfigError.
    """
    blocks = _PEM.findall(raw)
    if not blocks:
        raise ConfigError(
            f"{what}: expected a certificate in PEM, got none",
            hint="give a file that contains -----BEGIN CERTIFICATE-----",
        )
    try:
        return tuple(_dates(x509.load_pem_x509_certificate(block)) for block in blocks)
    except ValueError as error:
        raise ConfigError(
            f"{what}: a certificate is damaged: {error}", hint="copy the file again from where it was made"
        ) from error


def check_pair(certificate: bytes, key: bytes) -> None:
    """Check that a private key belongs to a certificate, and has no password; raises ConfigError if not."""
    certificates(certificate, "certificate")
    try:
        private = serialization.load_pem_private_key(key, password=None)
    except TypeError as error:
        raise ConfigError(
            "key: expected an unencrypted key, got one with a passphrase",
            hint="decrypt it: openssl pkey -in locked.key -out device.key",
        ) from error
    except ValueError as error:
        raise ConfigError(
            "key: expected a private key in PEM, got none",
            hint="give the file that contains -----BEGIN PRIVATE KEY-----",
        ) from error
    form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    leaf = x509.load_pem_x509_certificate(_PEM.findall(certificate)[0])
    if private.public_key().public_bytes(*form) != leaf.public_key().public_bytes(*form):
        raise ConfigError(
            "key: it does not belong to the certificate", hint="give a key and a certificate that match"
        )


def _dates(certificate: x509.Certificate) -> Dates:
    # Debian 12's cryptography on 32-bit ARM has only the attributes without a time zone.
    since = getattr(certificate, "not_valid_before_utc", None)
    until = getattr(certificate, "not_valid_after_utc", None)
    if since is None or until is None:
        since = certificate.not_valid_before.replace(tzinfo=datetime.UTC)
        until = certificate.not_valid_after.replace(tzinfo=datetime.UTC)
    names = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    name = str(names[0].value) if names else certificate.subject.rfc4514_string()
    return Dates(name if name.isprintable() else ascii(name), since, until)
