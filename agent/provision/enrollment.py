"""The values that a device is enrolled with: its name, its broker, its credentials, and the keys it trusts.

They come from flags, from a file, and from answers on a terminal; flags take precedence over the file. The
file is TOML or JSON, for a first boot; it may contain PEM text in place of paths, so that one file is
enough. All mistakes in it are reported at once.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from agent.bundle.keyring import KEY_SUFFIXES
from agent.errors import ConfigError, EnrollmentError
from agent.mqtt.settings import parse_broker_url
from agent.terminal import printable
from agent.wire.topics import is_device_name

# Enough for a file with a few certificates; the configuration has the same limit.
MAX_FILE_BYTES: Final = 1 << 20
_LISTS: Final = ("trust", "groups")


@dataclass(frozen=True, slots=True)
class Enrollment:
    """The values that a device is enrolled with.

    `ca` are the authorities for the broker's certificate, in place of the system's; certificate and key are
    the device's own. `trust` are the public keys that bundles may be signed with, `groups` those whose
    requests the device shares. Relative paths start from `folder`. What is None or empty has its default, or
    is not needed.
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


# Fields whose flags have other names. A file may use both: earlier versions knew only the fields.
_FLAGS: Final = MappingProxyType({"ca": "cafile", "certificate": "cert"})
_FIELDS: Final = tuple(entry.name for entry in fields(Enrollment) if entry.name != "folder")
# Key of a file -> field.
KEYS: Final = MappingProxyType({_FLAGS.get(name, name): name for name in _FIELDS})


def read_enrollment(path: Path) -> Enrollment:
    """Read an enrollment from a TOML or JSON file; an EnrollmentError names all mistakes in it."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise EnrollmentError(
            f"cannot read {path}: {error.strerror}", hint="give the path of a file that you may read"
        ) from error
    if len(raw) > MAX_FILE_BYTES:
        raise EnrollmentError(
            f"{path}: expected at most {MAX_FILE_BYTES} bytes, got more", hint="give the file of one device"
        )
    try:
        text = raw.decode()
        document: Any = json.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise EnrollmentError(
            f"{path}: expected TOML or JSON: {error}",
            hint='write lines such as device = "kitchen", or the same as a JSON object',
        ) from error
    return parse_enrollment(document, path)


def parse_enrollment(document: Mapping[str, object], path: Path) -> Enrollment:
    """Read an enrollment from a parsed document; relative paths start from the folder of `path`.

    An EnrollmentError names all mistakes.
    """
    mistakes: list[str] = []
    values: dict[str, Any] = {}
    keys: dict[str, str] = {}
    for key, value in document.items():
        name = KEYS.get(key, key)
        before = keys.setdefault(name, key)
        if name not in _FIELDS:
            mistakes.append(f"{key}: unknown key, expected one of {', '.join(KEYS)}")
        elif before != key:
            mistakes.append(f"{key}: given twice, also as {before}")
        elif name in _LISTS:
            items = [value] if isinstance(value, str) else value
            if isinstance(items, list) and all(isinstance(item, str) and item for item in items):
                values[name] = tuple(items)
            else:
                mistakes.append(f"{key}: expected a list of non-empty strings")
        elif isinstance(value, str) and value:
            values[name] = value
        else:
            mistakes.append(f"{key}: expected a non-empty string")
    if mistakes:
        raise EnrollmentError(
            f"{path} has mistakes:\n  " + "\n  ".join(map(printable, mistakes)),
            hint="docs/install.md shows such a file",
        )
    return Enrollment(**values, folder=path.parent)


def check_enrollment(enrollment: Enrollment, *, enrolled: bool) -> None:
    """Check that the values are complete and do not contradict each other.

    A device that is `enrolled` trusts a key already. An EnrollmentError names all mistakes.
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
        mistakes.append("--trust: expected the public key that your bundles are signed with, got nothing")
    named = [("--device", enrollment.device)] if enrollment.device is not None else []
    mistakes += [
        f"{flag}: expected 1 to 64 letters, digits, '.', '_' or '-', got {name!r:.80}"
        for flag, name in (*named, *(("--group", group) for group in enrollment.groups))
        if not is_device_name(name)
    ]
    if (enrollment.certificate is None) != (enrollment.key is None):
        mistakes.append("--cert and --key: expected both, got one of them")
    secret = enrollment.password is not None or enrollment.password_file is not None
    if enrollment.password is not None and enrollment.password_file is not None:
        mistakes.append("password: expected password or password_file, got both")
    if secret and enrollment.username is None:
        mistakes.append("--username: expected a user name with the password, got nothing")
    if not tls and (enrollment.ca or enrollment.certificate or enrollment.key):
        mistakes.append("--broker: expected mqtts:// with certificates, got mqtt://")
    if mistakes:
        raise EnrollmentError(
            mistakes[0]
            if len(mistakes) == 1
            else "the enrollment has mistakes:\n  " + "\n  ".join(map(printable, mistakes)),
            hint="see the example in edge-agent enroll --help; on a terminal it asks for missing values",
        )


def is_text(given: str) -> bool:
    """Return whether a credential is given as its PEM text, and not as the name of a file."""
    return given.lstrip().startswith("-----BEGIN ")


def key_files(enrollment: Enrollment) -> list[str]:
    """Return the keys to trust, with the key files of a folder in its place; none raises ConfigError."""
    found: list[str] = []
    for given in enrollment.trust:
        path = None if is_text(given) else enrollment.folder / Path(given).expanduser()
        if path is None or not path.is_dir():
            found.append(given)
            continue
        files = sorted(str(file) for file in path.iterdir() if file.suffix in KEY_SUFFIXES)
        if not files:
            raise ConfigError(
                f"--trust: expected a folder with .pub or .pem files, got {path} without",
                hint="copy signing.pub, which edgebundle keygen wrote, into it",
            )
        found += files
    return found
