"""The questions of `enroll` on a terminal, for missing values only; each shows its default."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from agent.errors import ConfigError
from agent.mqtt.settings import parse_broker_url
from agent.provision.enrollment import Enrollment
from agent.wire.topics import is_device_name

# Gives up after this many wrong answers to one question.
_MAX_TRIES: Final = 5


def ask(
    enrollment: Enrollment,
    *,
    trusts: bool,
    read: Callable[[str], str] = input,
    read_secret: Callable[[str], str] = getpass.getpass,
) -> Enrollment:
    """Ask for missing values, and return the enrollment with them.

    `trusts` says whether the device already trusts a key. `read_secret` does not echo the answer. Raises
    ConfigError if all answers to a question were wrong.
    """
    host = socket.gethostname().partition(".")[0]
    if enrollment.device is None:
        name = _ask(read, f"This device's name [{host}]: ", _check_device, host)
        enrollment = replace(enrollment, device=name)
    if enrollment.broker is None:
        url = _ask(read, "Broker (mqtts://HOST[:PORT], or mqtt:// without TLS): ", _check_url, "")
        enrollment = replace(enrollment, broker=url)
    tls = parse_broker_url(enrollment.broker or "").tls
    if tls and enrollment.ca is None:
        ca = read("File with the authority of the broker's certificate [use the system's]: ").strip()
        enrollment = replace(enrollment, ca=ca or None)
    if tls and enrollment.certificate is None and enrollment.key is None:
        certificate = read("File with this device's own certificate [none]: ").strip()
        if certificate:
            key = read("File with the key of that certificate: ").strip()
            enrollment = replace(enrollment, certificate=certificate, key=key or None)
    if enrollment.username is None and enrollment.certificate is None:
        enrollment = replace(enrollment, username=read("User name at the broker [none]: ").strip() or None)
    known = enrollment.password is not None or enrollment.password_file is not None
    if enrollment.username is not None and not known:
        enrollment = replace(enrollment, password=read_secret("Its password [none]: ") or None)
    if not enrollment.trust and not trusts:
        key = _ask(read, "File with the public key to trust (signing.pub): ", _check_given, "")
        enrollment = replace(enrollment, trust=(key,))
    return enrollment


def _ask(read: Callable[[str], str], question: str, check: Callable[[str], str | None], default: str) -> str:
    for _ in range(_MAX_TRIES):
        answer = read(question).strip() or default
        complaint = check(answer)
        if complaint is None:
            return answer
        question = f"{complaint}\n{question.rpartition(chr(10))[2]}"
    raise ConfigError(
        f"expected a valid answer, got {_MAX_TRIES} invalid ones",
        hint="give the values as flags: see `edge-agent enroll --help`",
    )


def _check_device(answer: str) -> str | None:
    return None if is_device_name(answer) else "Expected 1 to 64 letters, digits, '.', '_' or '-'."


def _check_given(answer: str) -> str | None:
    return None if answer else "Without a key, the device cannot trust any bundle."


def _check_url(answer: str) -> str | None:
    try:
        parse_broker_url(answer)
    except ConfigError as error:
        return f"{error}."
    return None
