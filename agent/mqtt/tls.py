"""Certificates for the connection to the broker: read again for each connection, and watched for changes.

Promises: the broker's certificate and host name are always checked, TLS is at least 1.2, and OpenSSL never
asks for a password on a terminal; an error names the unusable file and what to do about it. Leaves to
others: when to check the files (`service`), and connecting (`transport`).
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import re
import ssl
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agent.errors import ConfigError
from agent.mqtt.settings import TlsSettings

if TYPE_CHECKING:
    from cryptography import x509

_log = logging.getLogger(__name__)

# A certificate chain has a few kilobytes, the system's authorities a quarter of a megabyte.
MAX_PEM_BYTES: Final = 4 << 20
_CERTIFICATE: Final = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


def tls_context(settings: TlsSettings) -> ssl.SSLContext:
    """Return a context with the current contents of the files; one that cannot be used raises ConfigError."""
    try:
        context = verifying_context(settings.ca)
    except OSError as error:  # ssl.SSLError is one
        raise _unusable("the authorities", settings.ca, error) from error
    if settings.certificate is None:
        return context
    try:
        context.load_cert_chain(settings.certificate, settings.key, password=_no_password)
    except OSError as error:
        raise _wrong_pair(settings, error) from error
    return context


def verifying_context(ca: Path | None) -> ssl.SSLContext:
    """Return a context that verifies servers, by the same rules under every Python.

    From 3.13 on, Python also asks for extensions that RFC 5280 prescribes, and that the certificates of small
    authorities often lack: those that OpenSSL 3.0 issues have no Authority Key Identifier. They only help to
    find issuers.

    Parameters
    ----------
    ca
        Path of the authorities' certificates in PEM; None for those of the system.

    Raises
    ------
    OSError
        If the file cannot be used.
    """
    context = ssl.create_default_context(cafile=ca)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def _no_password() -> bytes:
    # Without this, OpenSSL asks on the terminal, and a service hangs.
    return b""


def _wrong_pair(settings: TlsSettings, reason: OSError) -> ConfigError:
    assert settings.certificate is not None
    key = settings.key or settings.certificate
    for what, path, word in (
        ("the certificate", settings.certificate, b"-----BEGIN CERTIFICATE"),
        ("the key", key, b"PRIVATE KEY-----"),
    ):
        try:
            with path.open("rb") as file:
                text = file.read(MAX_PEM_BYTES)
        except OSError as error:
            return _unusable(what, path, error)
        if word not in text:
            return _unusable(what, path, reason)
        if path == key and b"ENCRYPTED" in text:
            return ConfigError(
                f"expected an unencrypted key in {path}, got one with a password",
                hint=f"decrypt it, and set mode 0640: openssl pkey -in {path} -out KEY",
            )
    if isinstance(reason, ssl.SSLError) and reason.reason == "KEY_VALUES_MISMATCH":
        return ConfigError(
            f"the key in {key} does not belong to the certificate in {settings.certificate}",
            hint="copy both files of one pair, the certificate last",
        )
    return _unusable("certificate and key", settings.certificate, reason)


def _unusable(what: str, path: Path | None, error: OSError) -> ConfigError:
    if isinstance(error, PermissionError):
        return ConfigError(
            f"cannot read {what} in {path}: {error.strerror}",
            hint=f"let the agent read it: chgrp edge-agent {path} && chmod 0640 {path}",
        )
    why = error.strerror if not isinstance(error, ssl.SSLError) else None
    return ConfigError(
        f"cannot use {what} in {path}: {why or 'no certificate or key in PEM form'}",
        hint="give a PEM file, which contains a line such as -----BEGIN CERTIFICATE-----",
    )


class CertificateFiles:
    """The files that TLS settings name, as they were when last checked.

    Parameters
    ----------
    settings
        The settings that name the files.
    """

    def __init__(self, settings: TlsSettings) -> None:
        self._settings = settings
        self._seen = self._stamps()
        self._expiries: dict[str, float] | None = None

    def changed(self) -> bool:
        """Look at the files; return whether any has changed since the last call. This blocks."""
        before, self._seen = self._seen, self._stamps()
        if self._seen != before or self._expiries is None:
            files = {"ca": self._settings.ca, "certificate": self._settings.certificate}
            found = {name: _first_end_s(path) for name, path in files.items() if path is not None}
            self._expiries = {name: end_s for name, end_s in found.items() if end_s is not None}
        return self._seen != before

    def check(self) -> None:
        """Check that the files can be used as they are now, and warn about a key that everyone can read.

        This blocks.

        Raises
        ------
        ConfigError
            If they cannot be used.
        """
        tls_context(self._settings)
        key = self._settings.key
        if key is not None and key.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH):
            _log.warning(
                "every user of this machine can read the key in %s: chgrp edge-agent %s && chmod 0640 %s",
                key,
                key,
                key,
            )

    def expiries(self) -> dict[str, float]:
        """Return by file when its first certificate expires, in seconds since the epoch.

        It is as of the last `changed`. Files that cannot be read are omitted: `check` says why.
        """
        return self._expiries or {}

    def _stamps(self) -> list[tuple[Path, int, int, int]]:
        """Return of each file what changes when it is written or replaced."""
        found = []
        for path in (self._settings.ca, self._settings.certificate, self._settings.key):
            with contextlib.suppress(OSError):
                if path is not None:
                    status = path.stat()
                    found.append((path, status.st_ino, status.st_size, status.st_mtime_ns))
        return found


def _first_end_s(path: Path) -> float | None:
    # Imported late: it takes 7.5 MiB, which an agent without certificates and without a model does not need.
    from cryptography import x509

    try:
        with path.open("rb") as file:
            text = file.read(MAX_PEM_BYTES)
        # The armhf package uses Debian 12's cryptography, which reads one certificate at a time.
        ends = [_end(x509.load_pem_x509_certificate(block)) for block in _CERTIFICATE.findall(text)]
    except (OSError, ValueError):
        return None
    return min(ends, default=None)


def _end(certificate: x509.Certificate) -> float:
    if hasattr(certificate, "not_valid_after_utc"):
        return certificate.not_valid_after_utc.timestamp()
    return certificate.not_valid_after.replace(tzinfo=datetime.UTC).timestamp()
