"""How to connect to a broker: address, protocol version, credentials, TLS."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from agent.errors import ConfigError

_DEFAULT_PORTS: Final = {"mqtt": 1883, "mqtts": 8883}
PROTOCOLS: Final = ("auto", "5", "3.1.1")
# A password file has one line; a longer file is the wrong one.
MAX_SECRET_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """Settings for TLS; the broker's certificate and host name are always checked.

    Attributes
    ----------
    ca
        Authorities that may have issued the broker's certificate; None for the system's.
    certificate, key
        This client's own certificate and private key in PEM, for brokers that ask for them.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """One broker, and how to connect to it.

    Attributes
    ----------
    host, port
        Where the broker listens.
    tls
        None for a plain connection.
    username, password_file
        Credentials; the password is read from the file at each connect.
    password
        The password itself, for client commands that were not given a file.
    protocol
        "5", "3.1.1", or "auto": 5 first, 3.1.1 if the broker refuses 5.
    keepalive_s
        Seconds of silence before a ping; the broker gives up a silent connection after 1.5 times this.
    connect_timeout_s
        Limit for name look-up, connection, TLS handshake and CONNACK together.
    session_expiry_s
        How long the broker keeps a persistent session's messages for a client that is away.
    reconnect_spread_s
        The interval over which the clients of a fleet spread their attempts to connect again (see `backoff`);
        0 for a client that is not part of a fleet, which tries again at once.
    receive_maximum
        How many QoS 1 messages the broker may send before we acknowledge one. Each costs 2 KiB while it
        waits, and the garbage collector some 10 microseconds, during which nothing else runs. If they are
        few, the broker's queue fills, and mosquitto drops what it cannot queue, so requests get no 503.
    excess_messages, excess_bytes
        How many more, and how large in all, end the connection. Not the first one: mosquitto 2.0.11, which is
        that of Debian 12, sends all that it has queued once one message is acknowledged.
    max_packet_bytes
        The largest packet the broker may send (MQTT 5).
    receive_buffer_bytes
        What the kernel keeps of what the broker sent and we did not read: a message waits for all of that.
        None for as much as it likes, which is megabytes.
    quick_ack
        Whether to acknowledge TCP segments at once (see transport.py). False is only for measuring the delay
        of clients that do not.
    """

    host: str
    port: int = 1883
    tls: TlsSettings | None = None
    username: str | None = None
    password_file: Path | None = None
    password: str | None = field(default=None, repr=False)
    protocol: str = "auto"
    keepalive_s: int = 30
    connect_timeout_s: float = 10.0
    session_expiry_s: int = 600
    reconnect_spread_s: float = 0.0
    receive_maximum: int = 10_000
    excess_messages: int = 10_000
    excess_bytes: int = 64 << 20
    max_packet_bytes: int = 64 << 20
    receive_buffer_bytes: int | None = None
    quick_ack: bool = True

    @property
    def url(self) -> str:
        """The address as a URL, without secrets."""
        scheme = "mqtts" if self.tls is not None else "mqtt"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class BrokerUrl:
    """The parts of a broker's URL."""

    host: str
    port: int
    tls: bool
    username: str | None


def parse_broker_url(url: str) -> BrokerUrl:
    """Parse `mqtt://[user@]host[:port]` or `mqtts://[user@]host[:port]`.

    Raises
    ------
    ConfigError
        If it is not such a URL, or contains a password.
    """
    hint = "write mqtt://HOST, mqtts://HOST or mqtts://HOST:PORT"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"broker: {error}", hint=hint) from error
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
        raise ConfigError(f"broker: expected a URL with mqtt:// or mqtts://, got {url!r}", hint=hint)
    if parts.password is not None:
        raise ConfigError(
            "broker: a password in a URL is visible to every user of this machine",
            hint="put the password into a file, and name the file in password_file",
        )
    if port == 0:
        raise ConfigError("broker: expected a port from 1 to 65535, got 0", hint=hint)
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ConfigError(f"broker: expected nothing after host and port, got {url!r}", hint=hint)
    return BrokerUrl(
        host=parts.hostname,
        port=port or _DEFAULT_PORTS[parts.scheme],
        tls=parts.scheme == "mqtts",
        # RFC 3986, 3.2.1: an @ in a name, as in an e-mail address, may be written as %40.
        username=None if parts.username is None else unquote(parts.username),
    )


def read_secret(path: Path) -> str:
    """Read a password or token from a file: its first line.

    Raises
    ------
    ConfigError
        If the file cannot be read, is empty, or is too long for a secret.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_SECRET_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the secret in {path}: {error.strerror}") from error
    if len(raw) > MAX_SECRET_BYTES:
        raise ConfigError(f"{path}: expected a secret of at most {MAX_SECRET_BYTES} bytes, got more")
    line = raw.decode("utf-8", "replace").split("\n", 1)[0].rstrip("\r")
    if not line:
        raise ConfigError(f"{path}: expected a secret on the first line, got nothing")
    return line
