"""Enrolling a device: check its credentials with a real connection, then write them and its configuration.

Promises: nothing that the agent reads changes before the connection has worked. The configuration is replaced
last, in one step, and names newly written files, so that after a power failure the device has either its old
enrollment or the new one. The same enrollment again changes nothing; another one is refused without `force`.
With `force`, keys that are given replace those that were trusted.
Leaves the questions to `questions`, and the broker to `reach` and `rights`.
"""

from __future__ import annotations

import asyncio
import os
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.bundle.keyring import (
    KEY_SUFFIXES,
    REVOKED_FILE,
    Keyring,
    TrustedKey,
    parse_public_key,
    parse_revoked,
)
from agent.config.file import parse_config
from agent.config.keys import sample_config
from agent.config.settings import Config
from agent.durable import sync_folder
from agent.errors import ConfigError, EnrollmentError, UnreachableError
from agent.mqtt.settings import read_secret
from agent.provision import credentials
from agent.provision.checks.rights import check_broker
from agent.provision.enrollment import Enrollment, check_enrollment, is_text, key_files
from agent.provision.files import Owner, free_name, make_folder, write_file
from agent.provision.finding import Finding, failed
from agent.provision.template import Value, fill

SYSTEM_FOLDER: Final = Path("/etc/edge-agent")
_RETRY_S: Final = 3.0
_CREDENTIALS: Final = ("broker.password_file", "broker.ca", "broker.certificate", "broker.key")


@dataclass(frozen=True, slots=True)
class EnrollOptions:
    """The options of an enrollment.

    Credentials and keys go into the folder of `config`. `force` replaces another enrollment and, if keys are
    given, the trusted keys. `connect` tries the broker before anything is written. Network, name service and
    clock may take up to `wait_s`: a device that has just booted has none of them.
    """

    config: Path
    force: bool = False
    connect: bool = True
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Credential:
    """A file to write, and the configuration key that names it."""

    key: str
    name: str
    data: bytes
    secret: bool


@dataclass(frozen=True, slots=True)
class KeyFile:
    """A key file in the keyring: its name, and the id of its key."""

    name: str
    key_id: str

    def __str__(self) -> str:
        return f"{self.name} (key id {self.key_id[:16]})"


@dataclass(frozen=True, slots=True)
class EnrollmentResult:
    """What an enrollment has changed, and the configuration in force.

    `findings` are what the connection to the broker showed; empty if it was not tried. `trusted` and
    `removed` are the keys that are trusted now, and those that no longer are.
    """

    changed: bool
    config: Config
    findings: tuple[Finding, ...]
    trusted: tuple[KeyFile, ...]
    removed: tuple[KeyFile, ...]


def enroll(
    enrollment: Enrollment, options: EnrollOptions, progress: Callable[[str], None]
) -> EnrollmentResult:
    """Enroll this device; `progress` is called with a line of text before each slow step.

    Raises EnrollmentError if the values cannot be used, do not work, or would replace another enrollment, and
    ConfigError if a file cannot be read or written.
    """
    folder, owner = options.config.parent, Owner.of_service()
    text = _existing(options.config)
    check_enrollment(enrollment, enrolled=has_trusted_key(options.config))
    files = _credentials(enrollment)
    keys = [
        (credentials.trusted_key_id(raw, f"--trust {_shown(given)}"), _key_name(given), raw)
        for given in key_files(enrollment)
        for raw in [credentials.read_credential(given, enrollment.folder, "--trust")]
    ]
    make_folder(folder, owner)
    with _created() as created:
        values = _values(enrollment, folder, text, options.force)
        for file in files:
            path = free_name(folder / Path(file.name).parent, Path(file.name).name, file.data)
            if not path.exists():
                make_folder(path.parent, owner)
                write_file(path, file.data, owner, owner.mode(secret=file.secret))
                created.append(path)
            values[file.key] = str(path.relative_to(folder))
        filled = fill(text or sample_config(), values)
        _refuse_replacement(text, filled, options)
        config = parse_config(tomllib.loads(filled), {}, os.environ, folder=folder)
        _refuse_revoked(keys, config.trust_dir)
        findings = _check_connection(config, options, progress) if options.connect else ()
        if failed(findings):
            worst = next(finding for finding in findings if failed([finding]))
            raise EnrollmentError(worst.message, hint=worst.hint)
        changed = _add_keys(keys, config.trust_dir, owner)
        if filled != text:
            write_file(options.config, filled.encode(), owner, owner.mode(secret=True))
            changed = True
        created.clear()
    if text is not None:
        _remove_superseded(text, filled, folder)
    # Last: a power failure before leaves keys too many, not too few, and the same command again removes them.
    removed = _remove_other_keys(keys, config.trust_dir) if options.force and keys else ()
    trusted = _trusted(config.trust_dir)
    return EnrollmentResult(changed or bool(removed), config, tuple(findings), trusted, removed)


def has_trusted_key(config: Path) -> bool:
    """Return whether the keyring that belongs to a configuration has a key."""
    folder = config.parent / "keyring"
    try:
        text = _existing(config)
        if text is not None:
            stated = tomllib.loads(text).get("trust", {}).get("dir")
            folder = folder if stated is None else config.parent / stated
        Keyring.from_dir(folder)
    except (ConfigError, OSError, ValueError, AttributeError, TypeError):
        return False
    return True


def _existing(path: Path) -> str | None:
    try:
        return path.read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        hint = "run it with sudo" if isinstance(error, PermissionError) else None
        raise ConfigError(f"cannot read the configuration {path}: {error}", hint=hint) from error


def _credentials(enrollment: Enrollment) -> list[_Credential]:
    """Read and check all credentials except the trusted keys."""
    folder = enrollment.folder
    found: list[_Credential] = []

    def add(key: str, name: str, data: bytes, *, secret: bool = False) -> None:
        found.append(_Credential(f"broker.{key}", name, data, secret))

    password = enrollment.password
    if enrollment.password_file is not None:
        password = read_secret(folder / Path(enrollment.password_file).expanduser())
    if password is not None:
        if not password.isprintable():
            raise EnrollmentError(
                "password: expected one line of printable text, got other characters",
                hint="write only the password into the file, as text in UTF-8",
            )
        add("password_file", "broker.password", password.encode() + b"\n", secret=True)
    try:
        if enrollment.ca is not None:
            ca = credentials.read_credential(enrollment.ca, folder, "--cafile")
            credentials.certificates(ca, "--cafile")
            add("ca", "tls/ca.pem", ca)
        if enrollment.certificate is not None and enrollment.key is not None:
            certificate = credentials.read_credential(enrollment.certificate, folder, "--cert")
            key = credentials.read_credential(enrollment.key, folder, "--key")
            credentials.check_pair(certificate, key)
            add("certificate", "tls/device.pem", certificate)
            add("key", "tls/device.key", key, secret=True)
    except ConfigError as error:
        raise EnrollmentError(str(error), hint=error.hint) from error
    return found


def _values(enrollment: Enrollment, folder: Path, text: str | None, force: bool) -> dict[str, Value | None]:
    stated = {} if text is None else tomllib.loads(text)
    values: dict[str, Value | None] = {}
    if force:  # the new identity inherits nothing from the old one
        values |= dict.fromkeys((*_CREDENTIALS, "broker.username"))
    values["broker.url"] = enrollment.broker
    for name, value in (("device", enrollment.device), ("broker.username", enrollment.username)):
        if value is not None:
            values[name] = value
    if enrollment.groups:
        values["groups"] = enrollment.groups
    if enrollment.state_dir is not None:
        values["state_dir"] = enrollment.state_dir
    elif "state_dir" not in stated and folder.resolve() != SYSTEM_FOLDER:
        # Next to a configuration in the user's own folder; the service has a fixed place.
        values["state_dir"] = "state"
    if "dir" not in stated.get("trust", {}):
        values["trust.dir"] = "keyring"
    return values


def _refuse_replacement(text: str | None, filled: str, options: EnrollOptions) -> None:
    if text is None or options.force or filled == text:
        return
    url = tomllib.loads(text).get("broker", {}).get("url")
    if url is not None:
        raise EnrollmentError(
            f"this device is enrolled already, with other values ({options.config}, {url})",
            hint="replace that enrollment with --force",
        )


def _check_connection(
    config: Config, options: EnrollOptions, progress: Callable[[str], None]
) -> tuple[Finding, ...]:
    """Connect as the device, and retry until the time is up if the cause of the failure may pass."""
    end_s = time.monotonic() + options.wait_s
    progress(f"trying {config.broker.url} as {config.device} ...")
    logged: str | None = None
    while True:
        try:
            return tuple(asyncio.run(check_broker(config.broker, config.device, config.groups)))
        except UnreachableError as error:
            why = str(error)
            if not error.passing or time.monotonic() + _RETRY_S > end_s:
                raise EnrollmentError(why, hint=error.hint) from error
            if why != logged:
                progress(f"{why}; trying again for {end_s - time.monotonic():.0f} s")
                logged = why
        time.sleep(_RETRY_S)


def _refuse_revoked(keys: list[tuple[str, str, bytes]], folder: Path) -> None:
    """Check that no key to trust is on the device's list of revoked keys, which outlives enrollments."""
    path = folder / REVOKED_FILE
    try:
        revoked = parse_revoked(path.read_bytes())
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", hint="run it with sudo") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", hint="correct the file: one key id per line") from error
    for key_id, name, raw in keys:
        key = TrustedKey.of(parse_public_key(raw))
        if not revoked.isdisjoint((key.key_id, key.former_id)):
            raise EnrollmentError(
                f"--trust: {name} is key {key_id}, which {path} revokes",
                hint="trust another key, or remove that line",
            )


def _add_keys(keys: list[tuple[str, str, bytes]], folder: Path, owner: Owner) -> bool:
    """Add keys (id, file name, PEM) to the keyring; return whether any was new."""
    make_folder(folder, owner)
    present = {key.key_id for key in _trusted(folder)}
    added = False
    for key_id, name, raw in keys:
        if key_id not in present:
            write_file(free_name(folder, name, raw), raw, owner, owner.mode(secret=False))
            added = True
    return added


def _remove_other_keys(keys: list[tuple[str, str, bytes]], folder: Path) -> tuple[KeyFile, ...]:
    """Remove all keys from the keyring but these, and return the removed ones."""
    kept = {key_id for key_id, _, _ in keys}
    others = tuple(key for key in _trusted(folder) if key.key_id not in kept)
    try:
        for key in others:
            (folder / key.name).unlink(missing_ok=True)
        sync_folder(folder)
    except OSError as error:
        raise ConfigError(
            f"cannot remove a key from {folder}: {error.strerror}", hint="remove it yourself: it is trusted"
        ) from error
    return others


def _trusted(folder: Path) -> tuple[KeyFile, ...]:
    """Return the key files of a folder; what is no key is not trusted, and `edge-agent check` reports it."""
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.suffix in KEY_SUFFIXES:
            with suppress(ConfigError):
                (key_id,) = Keyring.from_files([path]).keys
                found.append(KeyFile(path.name, key_id))
    return tuple(found)


def _remove_superseded(before: str, after: str, folder: Path) -> None:
    """Remove credentials that `enroll` wrote and only the old configuration names."""
    named = [
        {
            folder / value
            for key in _CREDENTIALS
            if isinstance(value := broker.get(key.removeprefix("broker.")), str)
        }
        for broker in (tomllib.loads(text).get("broker", {}) for text in (before, after))
    ]
    for path in named[0] - named[1]:
        if path.parent == folder / "tls" or (path.parent == folder and path.name.startswith("broker")):
            path.unlink(missing_ok=True)


@contextmanager
def _created() -> Iterator[list[Path]]:
    """Collect new files, and remove them at the end unless the list was cleared."""
    created: list[Path] = []
    try:
        yield created
    finally:
        for path in created:
            path.unlink(missing_ok=True)
            if path.parent.name == "tls" and not any(path.parent.iterdir()):
                path.parent.rmdir()


def _key_name(given: str) -> str:
    if is_text(given):
        return "trusted.pub"
    path = Path(given)
    return path.name if path.suffix in (".pub", ".pem") else f"{path.name}.pub"


def _shown(given: str) -> str:
    return "(text)" if is_text(given) else given
