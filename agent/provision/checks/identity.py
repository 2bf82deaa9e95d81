"""A device's identity in a report: configuration, file permissions, certificates, trusted keys."""

from __future__ import annotations

import datetime
import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

from agent.bundle.keyring import Keyring
from agent.config.settings import Config
from agent.errors import ConfigError
from agent.mqtt.settings import read_secret
from agent.provision.credentials import certificates, check_pair, read_credential
from agent.provision.files import SERVICE_GROUP
from agent.provision.finding import Finding, fail, ok, warn


def check_configuration(path: Path | None, config: Config) -> Iterator[Finding]:
    """Check the configuration, and who may read it and the secrets that it names."""
    broker, tls = config.broker, config.broker.tls
    yield ok("configuration", f"{path or 'no file'}: {config.device}, {broker.url}")
    if broker.tls is None and broker.host not in ("localhost", "127.0.0.1", "::1"):
        yield warn(
            "configuration",
            "the connection is not encrypted: others on the network can read names, images and passwords",
            "set up TLS at the broker (docs/mosquitto/) and enroll again with mqtts://",
        )
    secrets = [path, broker.password_file, None if tls is None else tls.key]
    for secret in secrets:
        if secret is not None:
            yield from _check_mode(secret)


def check_certificates(config: Config) -> Iterator[Finding]:
    """Check the dates of the certificates, and that they and the password can be used."""
    now = datetime.datetime.now(datetime.UTC)
    tls = config.broker.tls
    try:
        if tls is not None and tls.ca is not None:
            dates = certificates(read_credential(str(tls.ca), Path(), "broker.ca"), f"broker.ca {tls.ca}")
            # One of several authorities may have expired already: the one that lasts longest counts.
            yield max(dates, key=lambda one: one.until).finding("authority", now)
        if tls is not None and tls.certificate is not None and tls.key is not None:
            raw = read_credential(str(tls.certificate), Path(), "broker.certificate")
            check_pair(raw, read_credential(str(tls.key), Path(), "broker.key"))
            yield certificates(raw, "broker.certificate")[0].finding("certificate", now)
        if config.broker.password_file is not None:
            read_secret(config.broker.password_file)
    except ConfigError as error:
        yield fail("certificate", str(error), error.hint or "enroll again, with --force")


def check_keyring(config: Config) -> Iterator[Finding]:
    """Check the keys that bundles may be signed with."""
    folder = config.trust_dir
    try:
        keyring = Keyring.from_dir(folder)
    except ConfigError as error:
        yield fail("keyring", str(error), error.hint or "edge-agent enroll --trust signing.pub")
        return
    for fault in keyring.faults:
        yield fail("keyring", fault, "correct or remove it; edge-agent enroll --trust NEW.pub adds a key")
    if keyring.incomplete is not None:
        yield fail(
            "keyring",
            "no new bundle is accepted: a revoked key may be missing",
            "correct the file keyring/revoked",
        )
    trusted = sorted(key.key_id for key in keyring.keys.values() if not keyring.revokes(key))
    if trusted:
        revoked = f", {len(keyring.revoked)} revoked" if keyring.revoked else ""
        names = ", ".join(trusted)
        yield ok("keyring", f"{folder}: {len(trusted)} trusted ({names}){revoked}")
    else:
        yield fail("keyring", f"every key in {folder} is revoked", "edge-agent enroll --trust NEW.pub")
    for path in (folder, *(sorted(folder.iterdir()) if folder.is_dir() else ())):
        if not path.exists():
            continue  # a dangling link, reported above
        mode = path.stat().st_mode
        if mode & (stat.S_IWGRP | stat.S_IWOTH):
            yield fail("keyring", f"{path} is writable by users other than its owner", f"chmod go-w {path}")


def _check_mode(path: Path) -> Iterator[Finding]:
    try:
        status = path.stat()
    except OSError as error:
        yield fail("configuration", f"{path}: {error.strerror}", "enroll again, with --force")
        return
    if status.st_mode & (stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP):
        yield warn(
            "configuration",
            f"{path} is readable or writable by others (mode {stat.S_IMODE(status.st_mode):04o})",
            f"chmod 0640 {path}; chown root:{SERVICE_GROUP} {path}",
        )
    if os.geteuid() == 0 and not _service_reads(status):
        yield fail("configuration", f"the service cannot read {path}", f"chown root:{SERVICE_GROUP} {path}")


def _service_reads(status: os.stat_result) -> bool:
    """Return whether the service's user may read a file; True if there is no such user."""
    try:
        uid, gid = pwd.getpwnam(SERVICE_GROUP).pw_uid, grp.getgrnam(SERVICE_GROUP).gr_gid
    except KeyError:
        return True
    if status.st_uid == uid:
        return bool(status.st_mode & stat.S_IRUSR)
    if status.st_gid == gid:
        return bool(status.st_mode & stat.S_IRGRP)
    return bool(status.st_mode & stat.S_IROTH)
