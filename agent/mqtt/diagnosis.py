"""Why a connection to a broker failed: one line that says what was found, one that says what to do.

Does no I/O: exceptions and reasons in, words out. Facts that need a second look at the broker (whether a port
speaks TLS, which names are on the certificate) are looked up by the caller and passed in.
"""

from __future__ import annotations

import datetime
import errno
import os
import socket
import ssl
from dataclasses import dataclass
from typing import Final

from agent.errors import BrokerError, EdgeError
from agent.mqtt.reason_codes import LOST, Action, Reason
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
class Diagnosis:
    """Why there is no connection.

    Attributes
    ----------
    kind
        The cause in one word, for programs and tests: `dns`, `refused`, `timeout`, `unreachable`, `clock`,
        `expired`, `issuer`, `hostname`, `certificate`, `not_tls`, `tls`, `tls_only`, `password`,
        `not_authorized`, `client_id`, `silence`, `busy`, `broker`.
    message
        What was found.
    hint
        What to do about it.
    passing
        Whether the cause may go away by itself: the network may not be up yet, or the clock not set.
    """

    kind: str
    message: str
    hint: str
    passing: bool = False


def diagnose_error(error: OSError, settings: BrokerSettings, *, names: tuple[str, ...] = ()) -> Diagnosis:
    """Explain why no connection could be made.

    Parameters
    ----------
    error
        What `transport.open_socket` raised; ssl.SSLError is an OSError.
    names
        The names on the broker's certificate, if they were looked up.
    """
    where = settings.url
    if isinstance(error, ssl.SSLCertVerificationError):
        return _diagnose_certificate(error, settings, names)
    if isinstance(error, ssl.SSLError):
        return _diagnose_tls(error, settings)
    if isinstance(error, socket.gaierror):
        return Diagnosis(
            "dns",
            f"no address is known for the broker's name {settings.host} ({error.strerror})",
            f"check the name and this device's DNS: getent hosts {settings.host}",
            passing=True,
        )
    if isinstance(error, ConnectionRefusedError):
        other = 8883 if settings.tls is None else 1883
        return Diagnosis(
            "refused",
            f"nothing listens at {where}: connection refused",
            f"check that the broker runs, and its port ({settings.port} was tried; {other} is usual "
            f"{'with' if other == 8883 else 'without'} TLS)",
            passing=True,
        )
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return Diagnosis(
            "timeout",
            f"no answer from {where} within {settings.connect_timeout_s:g} s",
            "check the address, and that no firewall is between this device and the broker",
            passing=True,
        )
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return Diagnosis(
            "silence",
            f"{where} closed the connection before it accepted us",
            "check the port and the broker's log",
        )
    words = os.strerror(error.errno) if error.errno else str(error)
    return Diagnosis(
        "unreachable", f"cannot reach {where}: {words}", "check this device's network: ip route", passing=True
    )


def describe(error: BaseException, settings: BrokerSettings) -> str:
    """Return in a few words what an exception of a connection attempt means, with a hint if there is one."""
    if isinstance(error, ssl.SSLError):
        diagnosis = diagnose_error(error, settings)
        return f"{diagnosis.message}; {diagnosis.hint}"
    if isinstance(error, EdgeError) and error.hint is not None:
        return f"{error}; {error.hint}"
    if isinstance(error, TimeoutError) and not error.args:
        return "no answer in time"
    if isinstance(error, ConnectionError) and error.errno:
        return os.strerror(error.errno)  # asyncio replaces these words with its own
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def diagnose_refusal(why: Reason, settings: BrokerSettings) -> Diagnosis:
    """Explain why a broker that was reached did not accept us."""
    who = "no user name" if settings.username is None else f"the user name {settings.username}"
    match why.code:
        case 0x86 | 0x87 if settings.username is None:
            own = settings.tls is not None and settings.tls.certificate is not None
            return Diagnosis(
                "not_authorized",
                f"the broker at {settings.url} does not accept a client without a user name: {why}",
                "the certificate is valid, but the broker does not know its name: check the access list"
                if own
                else "give --username and --password-file, or a certificate that the broker knows",
            )
        case 0x86 | 0x87:
            return Diagnosis(
                "password" if why.code == 0x86 else "not_authorized",
                f"the broker at {settings.url} does not accept {who} with this password: {why}",
                "check user name and password at the broker (mosquitto: mosquitto_passwd)",
            )
        case 0x85:
            return Diagnosis(
                "client_id", f"the broker refuses this client's name: {why}", "rename the device"
            )
        case 0x8A:
            return Diagnosis(
                "broker", f"the broker has banned this client: {why}", "ask the broker's operator"
            )
    if why.connecting is Action.RETRY:
        return Diagnosis(
            "busy", f"the broker at {settings.url} is not ready: {why}", "try again later", passing=True
        )
    if why.connecting is Action.FALL_BACK:
        return Diagnosis(
            "silence",
            f"{settings.url} does not answer like an MQTT broker: {why}",
            "check the port, and broker.protocol if it is set",
        )
    return Diagnosis("broker", f"the broker at {settings.url} refused: {why}", "check the broker's log")


def unreachable(error: OSError, settings: BrokerSettings) -> BrokerError:
    """Return what to raise if no connection could be made."""
    if isinstance(error, ssl.SSLError):
        diagnosis = diagnose_error(error, settings)
        return BrokerError(diagnosis.message, LOST.code, hint=diagnosis.hint)
    other = _other_port(settings) if isinstance(error, ConnectionResetError) else ""
    return BrokerError(
        f"cannot reach the broker at {settings.url}: {describe(error, settings)}",
        LOST.code,
        hint=f"check the address, and whether the broker runs there{other}",
    )


def refused(why: Reason, settings: BrokerSettings) -> BrokerError:
    """Return what to raise if the broker did not accept us."""
    diagnosis = diagnose_refusal(why, settings)
    other = _other_port(settings) if diagnosis.kind == "silence" else ""
    return BrokerError(
        f"the broker at {settings.url} refused the connection: {why}", why.code, hint=diagnosis.hint + other
    )


def _other_port(settings: BrokerSettings) -> str:
    """Return what to add to a hint if the port closed the connection: perhaps it speaks TLS, or does not."""
    if settings.tls is None:
        return f"; if it needs TLS, write mqtts://{settings.host}, usually with port 8883"
    return f"; if it has no TLS, give the port that has it, usually 8883, not {settings.port}"


def not_tls(settings: BrokerSettings) -> Diagnosis:
    """Explain a connection with TLS to a port without TLS."""
    return Diagnosis(
        "not_tls",
        f"expected TLS on port {settings.port} of {settings.host} (mqtts://), got a plain port",
        "give the broker's TLS port (usually 8883); mqtt:// would send everything unencrypted",
    )


def tls_only(settings: BrokerSettings) -> Diagnosis:
    """Explain a connection without TLS to a port with TLS."""
    return Diagnosis(
        "tls_only",
        f"expected port {settings.port} of {settings.host} without TLS (mqtt://), got a TLS port",
        f"write mqtts://{settings.host}:{settings.port}",
    )


def _diagnose_certificate(
    error: ssl.SSLCertVerificationError, settings: BrokerSettings, names: tuple[str, ...]
) -> Diagnosis:
    today = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"
    if error.verify_code == _NOT_YET_VALID:
        return Diagnosis(
            "clock",
            f"the broker's certificate is not valid yet: this device's clock says {today}",
            "set the clock (timedatectl), or wait until it is synchronised",
            passing=True,
        )
    if error.verify_code == _EXPIRED:
        return Diagnosis(
            "expired",
            f"the broker's certificate has expired: this device's clock says {today}",
            "renew it at the broker; if this device's date is wrong: timedatectl",
        )
    if error.verify_code in _OTHER_NAME:
        issued_for = f"it is for {', '.join(names)}" if names else error.verify_message.rstrip(".")
        return Diagnosis(
            "hostname",
            f"the broker's certificate is not for {settings.host}: {issued_for}",
            f"write mqtts://{names[0]}, or give the broker a certificate for {settings.host}"
            if names
            else f"give the broker a certificate for {settings.host}",
        )
    if error.verify_code in _UNKNOWN_ISSUER:
        ca = settings.tls.ca if settings.tls is not None else None
        return Diagnosis(
            "issuer",
            f"the broker's certificate was not issued by {ca or 'an authority that this system trusts'}: "
            f"{error.verify_message}",
            "give the authority that issued it with --cafile, or broker.ca in the configuration",
        )
    return Diagnosis(
        "certificate",
        f"the broker's certificate is not accepted: {error.verify_message}",
        f"inspect it with: openssl s_client -connect {settings.host}:{settings.port}",
    )


def _diagnose_tls(error: ssl.SSLError, settings: BrokerSettings) -> Diagnosis:
    name = error.reason or ""
    own = settings.tls.certificate if settings.tls is not None else None
    if name in _PLAIN_ANSWERS:
        return not_tls(settings)
    if own is None and any(part in name for part in _WANTS_CERTIFICATE):
        return Diagnosis(
            "certificate",
            f"the broker at {settings.url} requires a client certificate",
            "give one with --cert and --key",
        )
    if "ALERT" in name or "CERTIFICATE" in name:
        return Diagnosis(
            "certificate",
            f"the broker at {settings.url} refuses this device's certificate {own or ''}: {name}".replace(
                "  ", " "
            ),
            "check its issuer, its dates, and the broker's cafile",
        )
    return Diagnosis(
        "tls",
        f"the TLS handshake with {settings.url} failed: {name or error}",
        "check the port and the broker's log",
    )
