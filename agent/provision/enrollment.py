"""What a device is to be told: its name, its broker, who it is there, and whose bundles it trusts.

One value, from three places: flags, a file (TOML or JSON, for a first boot, where PEM text may stand in place
of files' names so that one file is enough), and answers on a terminal. Flags go before the file. Read
strictly: everything that is wrong is told at once.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from agent.errors import ConfigError, EnrollmentError
from agent.mqtt.settings import parse_broker_url
from agent.wire.topics import is_device_name

# A file with a few certificates in it; the configuration's own limit.
MAX_FILE_BYTES: Final = 1 << 20
_LISTS: Final = ("trust", "groups")


@dataclass(frozen=True, slots=True)
class Enrollment:
    """What a device is told.

    Attributes
    ----------
    device
        Its name; None for the host's.
    broker
        URL.
    username, password, password_file
        Who it is to the broker, if the broker asks for that.
    ca
        Authorities that may vouch for the broker, beside none of the system's.
    certificate, key
        The device's own.
    trust
        Public keys that bundles may be signed with.
    groups
        Groups whose requests it shares.
    state_dir
        Where it keeps bundles; None for the usual place.
    folder
        Where relative names of files begin.
    """

    device: str | None = None
    broker: str | None = None
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    password_file: str | None = None
    ca: str | None = None
    certificate: str | None = None
    key: str | None = field(default=None, repr=False)
    trust: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    state_dir: str | None = None
    folder: Path = Path()


# What a file may hold.
KEYS: Final = tuple(entry.name for entry in fields(Enrollment) if entry.name != "folder")


def read_enrollment(path: Path) -> Enrollment:
    """Read a file.

    Raises
    ------
    EnrollmentError
        If naming everything that is wrong with it.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise EnrollmentError(f"cannot read {path}: {error.strerror}") from error
    if len(raw) > MAX_FILE_BYTES:
        raise EnrollmentError(f"{path}: expected at most {MAX_FILE_BYTES} bytes, got more")
    try:
        text = raw.decode()
        document: Any = json.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise EnrollmentError(f"{path}: expected TOML or JSON: {error}") from error
    return parse_enrollment(document, path)


def parse_enrollment(document: Mapping[str, object], path: Path) -> Enrollment:
    """Read what `read_enrollment` has parsed; relative names of files begin where `path` lies.

    Raises
    ------
    EnrollmentError
        If naming everything that is wrong with it.
    """
    mistakes: list[str] = []
    values: dict[str, Any] = {}
    for name, value in document.items():
        if name not in KEYS:
            mistakes.append(f"{name}: no such key; expected are {', '.join(KEYS)}")
        elif name in _LISTS:
            items = [value] if isinstance(value, str) else value
            if isinstance(items, list) and all(isinstance(item, str) and item for item in items):
                values[name] = tuple(items)
            else:
                mistakes.append(f"{name}: expected a list of texts")
        elif isinstance(value, str) and value:
            values[name] = value
        else:
            mistakes.append(f"{name}: expected a text")
    if mistakes:
        raise EnrollmentError(f"{path} has mistakes:\n  " + "\n  ".join(mistakes))
    return Enrollment(**values, folder=path.parent)


def check_enrollment(enrollment: Enrollment, *, enrolled: bool) -> None:
    """Return if there is enough of it, and nothing contradicts.

    Parameters
    ----------
    enrolled
        The device trusts a key already.

    Raises
    ------
    EnrollmentError
        If naming everything that is wrong.
    """
    mistakes: list[str] = []
    tls = True
    if enrollment.broker is None:
        mistakes.append("--broker: expected mqtts://HOST[:PORT], got nothing")
    else:
        try:
            tls = parse_broker_url(enrollment.broker).tls
        except ConfigError as error:
            mistakes.append(f"--broker: {str(error).removeprefix('broker: ')}")
    if not enrollment.trust and not enrolled:
        mistakes.append("--trust: expected the public key of whoever signs your bundles, got nothing")
    named = [("--device", enrollment.device)] if enrollment.device is not None else []
    mistakes += [
        f"{flag}: expected 1 to 64 letters, digits, '.', '_' or '-', got {name!r:.80}"
        for flag, name in (*named, *(("--group", group) for group in enrollment.groups))
        if not is_device_name(name)
    ]
    if (enrollment.certificate is None) != (enrollment.key is None):
        mistakes.append("--certificate and --key: expected both, got one of them")
    secret = enrollment.password is not None or enrollment.password_file is not None
    if enrollment.password is not None and enrollment.password_file is not None:
        mistakes.append("password: expected it, or the file that holds it, got both")
    if secret and enrollment.username is None:
        mistakes.append("--username: expected one beside the password, got nothing")
    if not tls and (enrollment.ca or enrollment.certificate or enrollment.key):
        mistakes.append("--broker: expected mqtts:// beside certificates, got mqtt://")
    if mistakes:
        raise EnrollmentError(
            mistakes[0] if len(mistakes) == 1 else "this is not enough:\n  " + "\n  ".join(mistakes),
            hint="edge-agent enroll --help has an example; on a terminal it asks for what is missing",
        )
