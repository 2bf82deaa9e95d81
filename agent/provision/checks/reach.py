"""A connection to the broker, or why there is none: name, port, TLS, certificate, credentials.

Promises an error that names the cause and not the symptom: if the first attempt leaves two causes open (a
port that hangs up may or may not speak TLS), it looks a second time, without credentials or a client
name. Leaves to `rights` what the broker allows once we are connected.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from cryptography import x509

from agent.errors import BrokerError, UnreachableError
from agent.mqtt.connection import Connection
from agent.mqtt.diagnosis import Diagnosis, diagnose_error, diagnose_refusal, not_tls, tls_only
from agent.mqtt.engine import MQTT_5, Engine
from agent.mqtt.message import Message
from agent.mqtt.reason_codes import SILENCE, Reason, reason
from agent.mqtt.session import Owner
from agent.mqtt.settings import BrokerSettings
from agent.mqtt.transport import open_socket

# For the second look: the broker has answered once, so it is near.
_LOOK_S: Final = 5.0
# A refusal's alert comes at once, but after the client believes the handshake is done (RFC 8446, 4.4.2.4).
_ALERT_S: Final = 2.0


async def reach(
    settings: BrokerSettings, client_id: str, on_message: Callable[[Message], None]
) -> Connection:
    """Connect once, and return the open connection, which the caller closes.

    Raises UnreachableError, which says why, if there is none, and ConfigError if a password or certificate
    cannot be used.
    """
    connection = Connection(settings, Owner(on_message), client_id=client_id)
    try:
        await connection.connect()
    except BrokerError as error:
        await connection.close()
        if isinstance(error.__cause__, OSError):
            why = await _diagnose(error.__cause__, settings)
        else:
            why = await _diagnose_refusal(reason(error.reason_code), settings)
        raise UnreachableError(
            why.message, error.reason_code, hint=why.hint, kind=why.kind, passing=why.passing
        ) from error
    return connection


async def _diagnose(error: OSError, settings: BrokerSettings) -> Diagnosis:
    if isinstance(error, ssl.SSLCertVerificationError):
        names = await asyncio.to_thread(_certificate_names, settings.host, settings.port)
        return diagnose_error(error, settings, names=names or ())
    hung_up = isinstance(error, ssl.SSLEOFError | ConnectionResetError) or (
        isinstance(error, ssl.SSLError) and error.reason == "UNEXPECTED_EOF_WHILE_READING"
    )
    if hung_up and settings.tls is not None and await _speaks_plain(settings):
        return not_tls(settings)
    return diagnose_error(error, settings)


async def _diagnose_refusal(why: Reason, settings: BrokerSettings) -> Diagnosis:
    if why is not SILENCE:
        return diagnose_refusal(why, settings)
    if settings.tls is None:
        if await asyncio.to_thread(_certificate_names, settings.host, settings.port) is not None:
            return tls_only(settings)
    else:
        alert = await _alert(settings)
        if alert is not None:
            return diagnose_error(alert, settings)
    return diagnose_refusal(why, settings)


async def _speaks_plain(settings: BrokerSettings) -> bool:
    """Return whether the broker answers an empty CONNECT without TLS."""
    plain = replace(settings, tls=None, username=None, password_file=None, password=None)
    probe = Engine("", MQTT_5, bare=True)
    try:
        async with asyncio.timeout(_LOOK_S):
            answer = await probe.connect(await open_socket(plain), 0, plain)
    except OSError:
        return False
    probe.disconnect()
    return answer.reason is not None


async def _alert(settings: BrokerSettings) -> ssl.SSLError | None:
    """Return the alert that a broker of TLS 1.3 sends after the client believes the handshake is done."""
    sock = await open_socket(settings)
    readable = asyncio.Event()
    sock.watch(readable.set)
    try:
        async with asyncio.timeout(_ALERT_S):
            while True:
                readable.clear()
                sock.wake()
                try:
                    sock.recv(1)
                except (ssl.SSLWantReadError, BlockingIOError):
                    await readable.wait()
                else:
                    return None  # data, or a closed connection: the broker accepted the handshake
    except ssl.SSLError as error:
        return error
    except OSError:  # TimeoutError is one
        return None
    finally:
        sock.close()


def _certificate_names(host: str, port: int) -> tuple[str, ...] | None:
    """Return the names on the certificate that a port presents; None if it does not speak TLS.

    Only a TLS hello is sent, and the names are only shown to the user, so nothing needs to be trusted.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with (
            socket.create_connection((host, port), _LOOK_S) as sock,
            context.wrap_socket(sock, server_hostname=host) as wrapped,
        ):
            raw = wrapped.getpeercert(binary_form=True)
    except ssl.SSLError as error:
        # An alert proves TLS; a closed connection does not.
        return () if "ALERT" in (error.reason or "") else None
    except OSError:
        return None
    names: list[str] = []
    with contextlib.suppress(ValueError, x509.ExtensionNotFound):
        certificate = x509.load_der_x509_certificate(raw or b"")
        common = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
        names = [str(attribute.value) for attribute in common]
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        names = found.get_values_for_type(x509.DNSName)
        names += [str(address) for address in found.get_values_for_type(x509.IPAddress)]
    return tuple(name if name.isprintable() else ascii(name) for name in names)
