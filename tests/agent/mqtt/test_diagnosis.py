"""Each failure to connect has one kind, one message and one hint."""

from __future__ import annotations

import errno
import socket
import ssl
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.errors import ConfigError
from agent.mqtt.diagnosis import Diagnosis, describe, diagnose_error, diagnose_refusal, not_tls, tls_only
from agent.mqtt.reason_codes import LOST, SILENCE, reason
from agent.mqtt.settings import BrokerSettings, TlsSettings

PLAIN = BrokerSettings("broker.lan")
TLS = BrokerSettings("broker.lan", 8883, TlsSettings())
OWN = replace(TLS, tls=TlsSettings(certificate=Path("me.pem"), key=Path("me.key")))
NAMED = replace(PLAIN, username="kitchen")


def certificate_error(code: int, message: str = "it is bad") -> ssl.SSLCertVerificationError:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_code, error.verify_message = code, message
    return error


def tls_error(name: str) -> ssl.SSLError:
    error = ssl.SSLError(1, name)
    error.reason = name
    return error


@pytest.mark.parametrize(
    ("error", "kind", "passing"),
    [
        (socket.gaierror(-2, "Name or service not known"), "dns", True),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), "refused", True),
        (TimeoutError(), "timeout", True),
        (OSError(errno.ETIMEDOUT, "timed out"), "timeout", True),
        (ConnectionResetError(errno.ECONNRESET, "reset"), "silence", False),
        (BrokenPipeError(errno.EPIPE, "broken"), "silence", False),
        (OSError(errno.ENETUNREACH, "Network is unreachable"), "unreachable", True),
        (OSError("odd"), "unreachable", True),
    ],
)
def test_error_of_the_network_has_a_kind(error: OSError, kind: str, passing: bool) -> None:
    found = diagnose_error(error, PLAIN)
    assert (found.kind, found.passing) == (kind, passing)


@pytest.mark.parametrize(
    ("code", "kind", "passing"),
    [
        (9, "clock", True),
        (10, "expired", False),
        (18, "issuer", False),
        (20, "issuer", False),
        (62, "hostname", False),
        (64, "hostname", False),
        (23, "certificate", False),
    ],
)
def test_error_of_the_brokers_certificate_has_a_kind(code: int, kind: str, passing: bool) -> None:
    found = diagnose_error(certificate_error(code), TLS)
    assert (found.kind, found.passing) == (kind, passing)


def test_names_on_the_certificate_are_in_message_and_hint() -> None:
    found = diagnose_error(certificate_error(62), TLS, names=("mqtt.lan", "10.0.0.1"))
    assert found.message == "the broker's certificate is not for broker.lan: it is for mqtt.lan, 10.0.0.1"
    assert "mqtts://mqtt.lan" in found.hint


@pytest.mark.parametrize(
    ("name", "settings", "kind"),
    [
        ("WRONG_VERSION_NUMBER", TLS, "not_tls"),
        ("HTTP_REQUEST", TLS, "not_tls"),
        ("TLSV13_ALERT_CERTIFICATE_REQUIRED", TLS, "certificate"),
        ("SSLV3_ALERT_HANDSHAKE_FAILURE", TLS, "certificate"),
        ("TLSV1_ALERT_UNKNOWN_CA", OWN, "certificate"),
        ("NO_SHARED_CIPHER", TLS, "tls"),
    ],
)
def test_error_of_the_handshake_has_a_kind(name: str, settings: BrokerSettings, kind: str) -> None:
    assert diagnose_error(tls_error(name), settings).kind == kind


def test_missing_and_refused_certificate_of_the_device_are_told_apart() -> None:
    missing = diagnose_error(tls_error("TLSV13_ALERT_CERTIFICATE_REQUIRED"), TLS)
    refused = diagnose_error(tls_error("TLSV13_ALERT_CERTIFICATE_REQUIRED"), OWN)
    assert "requires a client certificate" in missing.message
    assert "refuses this device's certificate me.pem" in refused.message


@pytest.mark.parametrize(
    ("code", "settings", "kind", "passing"),
    [
        (0x86, NAMED, "password", False),
        (0x87, NAMED, "not_authorized", False),
        (0x86, PLAIN, "not_authorized", False),
        (0x87, OWN, "not_authorized", False),
        (0x85, PLAIN, "client_id", False),
        (0x8A, PLAIN, "broker", False),
        (0x88, PLAIN, "busy", True),
        (0x9D, PLAIN, "broker", False),
        (SILENCE.code, PLAIN, "silence", False),
        (LOST.code, PLAIN, "busy", True),
    ],
)
def test_refusal_has_a_kind(code: int, settings: BrokerSettings, kind: str, passing: bool) -> None:
    found = diagnose_refusal(reason(code), settings)
    assert (found.kind, found.passing) == (kind, passing)


def test_ports_with_and_without_tls_are_told_apart() -> None:
    assert "usually 8883" in not_tls(TLS).hint
    assert tls_only(PLAIN).hint == "write mqtts://broker.lan:1883"


def check_form(found: Diagnosis) -> None:
    assert found.message
    assert found.hint
    assert "\n" not in found.message + found.hint
    assert not found.message.endswith(".")


@given(st.integers(0, 0x1FF), st.sampled_from([PLAIN, TLS, OWN, NAMED]))
def test_every_reason_is_one_line_with_a_hint(code: int, settings: BrokerSettings) -> None:
    check_form(diagnose_refusal(reason(code), settings))


@given(st.integers(0, 100), st.sampled_from([TLS, OWN]))
def test_every_error_of_a_certificate_is_one_line_with_a_hint(code: int, settings: BrokerSettings) -> None:
    check_form(diagnose_error(certificate_error(code), settings))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (TimeoutError(), "no answer in time"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed"), "Connection refused"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), "No such file or directory"),
        (OSError("no address for broker.lan"), "no address for broker.lan"),
        (OSError(), "OSError"),
        (ConfigError("cannot read x", hint="chmod it"), "cannot read x; chmod it"),
        (ConfigError("cannot read x"), "cannot read x"),
        (
            certificate_error(10),
            "renew it at the broker; if this device's date is wrong: timedatectl",
        ),
    ],
)
def test_attempt_that_failed_is_described_in_a_few_words(error: BaseException, words: str) -> None:
    assert describe(error, TLS).endswith(words)
