"""The broker's address, TLS settings and credentials."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict
from urllib.parse import SplitResult, unquote, urlsplit

from agent.errors import ConfigError
from agent.mqtt.settings import PROTOCOLS, BrokerSettings, TlsSettings, parse_broker_url
from edgebundle.errors import UsageError


class BrokerOptions(TypedDict, total=False):
    """What the URL of a broker cannot say; all of it may be left out.

    Attributes
    ----------
    cafile
        Certificate authorities for the broker's certificate (`mqtts`); the system's by default.
    certificate, key
        This client's own, for a broker that asks for one.
    password_file
        A file with the user's password on its first line.
    mqtt_version
        `auto` (5, or 3.1.1 if the broker refuses it), `5` or `3.1.1`.
    """

    cafile: str | Path | None
    certificate: str | Path | None
    key: str | Path | None
    password_file: str | Path | None
    mqtt_version: str


@dataclass(frozen=True, slots=True)
class Broker:
    """A broker, and the credentials to connect to it.

    Attributes
    ----------
    url
        `mqtt://[user[:password]@]host[:port]` or `mqtts://...`. Every user of this machine can read a
        password in it while the command runs; prefer `password_file`.
    cafile
        Certificate authorities for the broker's certificate (`mqtts`); None for the system's.
    certificate, key
        This client's, if the broker asks for a certificate.
    password_file
        A file with the password on its first line.
    protocol
        `auto` (MQTT 5, or 3.1.1 if the broker refuses it), `5` or `3.1.1`.
    """

    url: str = field(repr=False)
    cafile: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    password_file: Path | None = None
    protocol: str = "auto"

    @classmethod
    def of(
        cls,
        url: str,
        *,
        cafile: str | Path | None = None,
        certificate: str | Path | None = None,
        key: str | Path | None = None,
        password_file: str | Path | None = None,
        mqtt_version: str = "auto",
    ) -> Broker:
        """Return the broker at a URL with `BrokerOptions`."""
        return cls(url, _path(cafile), _path(certificate), _path(key), _path(password_file), mqtt_version)

    @property
    def user(self) -> str | None:
        """The name that the broker knows this client by: that of the URL, or else the certificate's.

        None for an anonymous client, and if the certificate has no common name or cannot be read.
        """
        name = urlsplit(self.url).username
        if name is not None:
            return unquote(name)
        return None if self.certificate is None else _common_name(self.certificate)

    def settings(self) -> BrokerSettings:
        """Return the settings of a connection.

        Raises
        ------
        UsageError
            If the URL is not an MQTT URL, TLS files are given for a URL without TLS, or there are two
            passwords.
        """
        try:
            parts = urlsplit(self.url)
        except ValueError as error:
            raise UsageError(f"broker: {error}", hint="write mqtt://HOST or mqtts://HOST:PORT") from error
        password = None if parts.password is None else unquote(parts.password)
        try:
            place = parse_broker_url(_without_password(parts) if password is not None else self.url)
        except ConfigError as error:
            raise UsageError(
                str(error), hint=error.hint or "write mqtt://HOST or mqtts://HOST:PORT"
            ) from error
        if not place.tls and (self.cafile or self.certificate or self.key):
            raise UsageError(
                "expected an mqtts:// URL with certificates, got mqtt://",
                hint="write mqtts:// instead of mqtt://",
            )
        if self.protocol not in PROTOCOLS:
            raise UsageError(
                f"MQTT version: expected one of {', '.join(PROTOCOLS)}, got {self.protocol!r:.40}",
                hint=f"write protocol={next(iter(PROTOCOLS))!r}",
            )
        if (self.certificate is None) != (self.key is None):
            raise UsageError(
                "expected a certificate and its key, got only one of them", hint="give both, or none"
            )
        if password is not None and self.password_file is not None:
            raise UsageError(
                "expected one password, got one in the URL and one in the password file",
                hint="remove the password from the URL",
            )
        return BrokerSettings(
            host=place.host,
            port=place.port,
            tls=TlsSettings(self.cafile, self.certificate, self.key) if place.tls else None,
            username=place.username,
            password_file=self.password_file,
            password=password,
            protocol=self.protocol,
        )


def _without_password(parts: SplitResult) -> str:
    user, _, host = parts.netloc.rpartition("@")
    return parts._replace(netloc=f"{user.partition(':')[0]}@{host}").geturl()


def _common_name(certificate: Path) -> str | None:
    """Return the name that a certificate was issued to, which mosquitto uses as the user name."""
    # Loaded only here: most commands need no certificate.
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    try:
        subject = x509.load_pem_x509_certificate(certificate.read_bytes()).subject
    except (OSError, ValueError):
        return None  # connecting reports it, with a hint
    names = subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else None


def _path(path: str | Path | None) -> Path | None:
    return None if path is None else Path(path)
