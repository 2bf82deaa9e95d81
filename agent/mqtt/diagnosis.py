"""What a failed connection to a broker means: one line that says what was found, one that says what to do.

Promises to do no I/O: exceptions and reasons in, words out. What only a second look can tell (a plain port
spoken to in TLS, a name that is on the broker's certificate) is for whoever looks, and is passed in.
"""

from __future__ import annotations

import datetime
import errno
import os
import socket
import ssl
from dataclasses import dataclass
from typing import Final

from agent.errors import EdgeError
from agent.mqtt.reason_codes import Action, Reason
from agent.mqtt.settings import BrokerSettings

# OpenSSL, x509_vfy.h: what X509_verify_cert() found.
_NOT_YET_VALID: Final = 9
_EXPIRED: Final = 10
_UNKNOWN_ISSUER: Final = (2, 18, 19, 20, 21, 27)
_OTHER_NAME: Final = (62, 64)
_PLAIN_ANSWERS: Final = (
    "WRONG_VERSION_NUMBER",
    "HTTP_REQUEST",
    "PACKET_LENGTH_TOO_LONG",
    "RECORD_LAYER_FAILURE",
)
_WANTS_CERTIFICATE: Final = ("CERTIFICATE_REQUIRED", "HANDSHAKE_FAILURE")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no connection.

    Attributes
    ----------
    kind
        One word for programs and tests: `dns`, `refused`, `timeout`, `unreachable`, `clock`,
        `expired`, `issuer`, `hostname`, `certificate`, `not_tls`, `tls`, `tls_only`,
        `password`, `not_authorized`, `client_id`, `silence`, `busy`, `broker`.
    message
        What was found.
    hint
        What to do about it.
    passing
        It may mend itself: the network or the time of day may still come.
    """

    kind: str
    message: str
    hint: str
    passing: bool = False


def explain_error(error: OSError, settings: BrokerSettings, *, names: tuple[str, ...] = ()) -> Failure:
    """Explain why no connection could be made.

    Parameters
    ----------
    error
        What `transport.open_socket` raised; ssl.SSLError is an OSError too.
    names
        The names on the broker's certificate, where somebody looked.
    """
    where = settings.url
    if isinstance(error, ssl.SSLCertVerificationError):
        return _explain_certificate(error, settings, names)
    if isinstance(error, ssl.SSLError):
        return _explain_tls(error, settings)
    if isinstance(error, socket.gaierror):
        return Failure(
            "dns",
            f"no address is known for the broker's name {settings.host} ({error.strerror})",
            f"check the name and this device's DNS: getent hosts {settings.host}",
            passing=True,
        )
    if isinstance(error, ConnectionRefusedError):
        other = 8883 if settings.tls is None else 1883
        return Failure(
            "refused",
            f"nobody listens at {where}: connection refused",
            f"check that the broker runs and which port it listens on ({settings.port} was tried; {other} is "
            f"usual {'with' if other == 8883 else 'without'} TLS)",
            passing=True,
        )
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return Failure(
            "timeout",
            f"no answer from {where} within {settings.connect_timeout_s:g} s",
            "check the address, and that no firewall is between this device and the broker",
            passing=True,
        )
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return Failure(
            "silence",
            f"{where} ended the connection while it was being made",
            "check the port, and the broker's own log",
        )
    words = os.strerror(error.errno) if error.errno else str(error)
    return Failure(
        "unreachable", f"no way to {where}: {words}", "check this device's network: ip route", passing=True
    )


def describe(error: BaseException, settings: BrokerSettings) -> str:
    """Say in a few words what an exception of a connection attempt means, and where it helps what to do."""
    if isinstance(error, ssl.SSLError):
        failure = explain_error(error, settings)
        return f"{failure.message}; {failure.hint}"
    if isinstance(error, EdgeError) and error.hint is not None:
        return f"{error}; {error.hint}"
    if isinstance(error, TimeoutError) and not error.args:
        return "no answer in time"
    if isinstance(error, ConnectionError) and error.errno:
        return os.strerror(error.errno)  # asyncio puts its own words in place of these
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def explain_reason(why: Reason, settings: BrokerSettings) -> Failure:
    """Explain why a broker that was reached did not take us."""
    who = "no user name" if settings.username is None else f"the user name {settings.username}"
    match why.code:
        case 0x86 | 0x87 if settings.username is None:
            own = settings.tls is not None and settings.tls.certificate is not None
            return Failure(
                "not_authorized",
                f"the broker at {settings.url} does not take a client with no user name: {why}",
                "the certificate is in order, its name is unknown to the broker: see its access list"
                if own
                else "give --username and --password-file, or a certificate the broker knows",
            )
        case 0x86 | 0x87:
            return Failure(
                "password" if why.code == 0x86 else "not_authorized",
                f"the broker at {settings.url} does not take {who} with this password: {why}",
                "check user name and password against the broker's (mosquitto: mosquitto_passwd)",
            )
        case 0x85:
            return Failure(
                "client_id", f"the broker refuses the name of this client: {why}", "rename the device"
            )
        case 0x8A:
            return Failure(
                "broker", f"the broker has banned this client: {why}", "ask whoever runs the broker"
            )
    if why.connecting is Action.RETRY:
        return Failure(
            "busy", f"the broker at {settings.url} is not ready: {why}", "try again later", passing=True
        )
    if why.connecting is Action.FALL_BACK:
        return Failure(
            "silence",
            f"{settings.url} does not answer as an MQTT broker does: {why}",
            "check the port, and broker.protocol if one is set",
        )
    return Failure("broker", f"the broker at {settings.url} refused: {why}", "see the broker's own log")


def not_tls(settings: BrokerSettings) -> Failure:
    """Explain a plain port that was spoken to in TLS."""
    return Failure(
        "not_tls",
        f"port {settings.port} of {settings.host} does not speak TLS, and mqtts:// was asked for",
        "give the broker's TLS port (usually 8883); mqtt:// would send everything in the clear",
    )


def tls_only(settings: BrokerSettings) -> Failure:
    """Explain a TLS port that was spoken to in the clear."""
    return Failure(
        "tls_only",
        f"port {settings.port} of {settings.host} speaks TLS, and mqtt:// was asked for",
        f"write mqtts://{settings.host}:{settings.port}",
    )


def _explain_certificate(
    error: ssl.SSLCertVerificationError, settings: BrokerSettings, names: tuple[str, ...]
) -> Failure:
    today = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"
    if error.verify_code == _NOT_YET_VALID:
        return Failure(
            "clock",
            f"the broker's certificate is not valid yet: this device's clock says {today}",
            "set the clock (timedatectl), or wait until it is synchronised",
            passing=True,
        )
    if error.verify_code == _EXPIRED:
        return Failure(
            "expired",
            f"the broker's certificate has expired, by this device's clock ({today})",
            "renew it at the broker; if the date is wrong here: timedatectl",
        )
    if error.verify_code in _OTHER_NAME:
        stands = f"it is for {', '.join(names)}" if names else error.verify_message.rstrip(".")
        return Failure(
            "hostname",
            f"the broker's certificate is not for {settings.host}: {stands}",
            f"write mqtts://{names[0]}, or give the broker a certificate for {settings.host}"
            if names
            else f"give the broker a certificate for {settings.host}",
        )
    if error.verify_code in _UNKNOWN_ISSUER:
        ca = settings.tls.ca if settings.tls is not None else None
        return Failure(
            "issuer",
            f"the broker's certificate was not issued by {ca or 'an authority that this system knows'}: "
            f"{error.verify_message}",
            "give the authority that issued it: --ca, or broker.ca in the configuration",
        )
    return Failure(
        "certificate",
        f"the broker's certificate is refused: {error.verify_message}",
        "see it with: openssl s_client -connect " + f"{settings.host}:{settings.port}",
    )


def _explain_tls(error: ssl.SSLError, settings: BrokerSettings) -> Failure:
    name = error.reason or ""
    own = settings.tls.certificate if settings.tls is not None else None
    if name in _PLAIN_ANSWERS:
        return not_tls(settings)
    if own is None and any(part in name for part in _WANTS_CERTIFICATE):
        return Failure(
            "certificate",
            f"the broker at {settings.url} asks for a certificate of this device",
            "give it one with --certificate and --key",
        )
    if "ALERT" in name or "CERTIFICATE" in name:
        return Failure(
            "certificate",
            f"the broker at {settings.url} refuses this device's certificate {own or ''}: {name}".replace(
                "  ", " "
            ),
            "check who issued it, its dates, and what the broker's cafile holds",
        )
    return Failure(
        "tls", f"no TLS with {settings.url}: {name or error}", "check the port, and the broker's own log"
    )
