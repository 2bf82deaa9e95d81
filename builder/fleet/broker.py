"""Which broker, as whom, and over which TLS: what the verbs' flags say about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from agent.mqtt.settings import BrokerSettings, TlsSettings, parse_broker_url
from builder.errors import FleetError


@dataclass(frozen=True, slots=True)
class Broker:
    """A broker and how to be let in.

    Attributes
    ----------
    url
        `mqtt://[user[:password]@]host[:port]` or `mqtts://...`. A password in it can be read by
        everybody on this machine while the command runs: `password_file` is the better place.
    cafile
        Authorities that the broker's certificate must lead to (`mqtts`); the system's if None.
    certificate, key
        This client's own, where the broker asks for them.
    password_file
        A file with the password on its first line.
    protocol
        `auto` (MQTT 5, and 3.1.1 where the broker refuses it), `5` or `3.1.1`.
    """

    url: str = field(repr=False)
    cafile: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    password_file: Path | None = None
    protocol: str = "auto"

    def settings(self) -> BrokerSettings:
        """Return what a connection is made with.

        Raises
        ------
        FleetError
            If files for TLS are given for a broker without it, or a password twice.
        ConfigError
            If the URL is none.
        """
        parts = urlsplit(self.url)
        password = None if parts.password is None else unquote(parts.password)
        place = parse_broker_url(_without_password(parts) if password is not None else self.url)
        if not place.tls and (self.cafile or self.certificate or self.key):
            raise FleetError(
                "certificates were given for a broker that is reached without TLS",
                hint="write mqtts:// instead of mqtt://",
            )
        if (self.certificate is None) != (self.key is None):
            raise FleetError("expected a certificate and its key, got one of them")
        if password is not None and self.password_file is not None:
            raise FleetError("a password is in the URL, and another in the password file")
        return BrokerSettings(
            host=place.host,
            port=place.port,
            tls=TlsSettings(self.cafile, self.certificate, self.key) if place.tls else None,
            username=None if place.username is None else unquote(place.username),
            password_file=self.password_file,
            password=password,
            protocol=self.protocol,
        )


def _without_password(parts: SplitResult) -> str:
    user, _, host = parts.netloc.rpartition("@")
    return parts._replace(netloc=f"{user.partition(':')[0]}@{host}").geturl()
