"""The configuration file: strict reading, every mistake reported at once.

The file never holds secrets: it names files that hold them.
"""

from __future__ import annotations

import socket
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from agent.config.keys import KEYS, PATH
from agent.config.settings import (
    Config,
    HomeAssistantSettings,
    MetricsSettings,
    QueueLimits,
    WorkerSettings,
)
from agent.errors import ConfigError, PermissionDeniedError
from agent.mqtt.settings import BrokerSettings, TlsSettings, parse_broker_url
from agent.terminal import printable
from agent.wire.topics import is_device_name

DEFAULT_CONFIG: Final = Path("/etc/edge-agent/agent.toml")
# A configuration has about fifty lines; a file of a megabyte is something else.
MAX_CONFIG_BYTES: Final = 1 << 20
_BY_NAME: Final = {key.name: key for key in KEYS}
_SECTIONS: Final = frozenset(key.name.partition(".")[0] for key in KEYS if "." in key.name)


def load_config(
    path: Path | None,
    overrides: Mapping[str, str],
    environment: Mapping[str, str],
    *,
    unused: Mapping[str, str] | None = None,
) -> Config:
    """Read a configuration file.

    Parameters
    ----------
    path
        The file; None for no file.
    overrides
        Values from the command line, by key.
    environment
        For `$NAME` in paths, and for STATE_DIRECTORY and RUNTIME_DIRECTORY.
    unused
        Values for keys that the caller does not use, if the file does not give them.

    Raises
    ------
    ConfigError
        If the file cannot be read or has mistakes; the message names all of them.
    """
    raw = b""
    if path is not None:
        try:
            with path.open("rb") as file:
                raw = file.read(MAX_CONFIG_BYTES + 1)
        except PermissionError as error:
            raise PermissionDeniedError(f"cannot read the configuration {path}: {error.strerror}") from error
        except OSError as error:
            raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    if len(raw) > MAX_CONFIG_BYTES:
        raise ConfigError(f"{path}: expected a configuration of at most {MAX_CONFIG_BYTES} bytes, got more")
    try:
        document = tomllib.loads(raw.decode())
    except ValueError as error:  # TOMLDecodeError or UnicodeDecodeError
        raise ConfigError(f"{path}: expected TOML: {error}") from error
    for name, value in (unused or {}).items():
        section, _, key = name.partition(".")
        inner = document.setdefault(section, {})
        if isinstance(inner, dict):
            inner.setdefault(key, value)
    return parse_config(document, overrides, environment, folder=Path.cwd() if path is None else path.parent)


def parse_config(
    document: Mapping[str, object],
    overrides: Mapping[str, str],
    environment: Mapping[str, str],
    *,
    folder: Path,
) -> Config:
    """Make a configuration from a parsed file, whose relative paths start at `folder`.

    Raises
    ------
    ConfigError
        If the file has mistakes; the message names all of them, one a line.
    """
    mistakes: list[str] = []
    values: dict[str, Any] = {
        key.name: None if key.default is None else key.kind.make(key.default) for key in KEYS
    }
    values["device"] = socket.gethostname().partition(".")[0]
    values["state_dir"] = environment.get("STATE_DIRECTORY") or "/var/lib/edge-agent"
    values["inference.answers_dir"] = environment.get("RUNTIME_DIRECTORY")
    given = {**_flatten(document, mistakes), **overrides}
    for name, value in given.items():
        key = _BY_NAME.get(name)
        if key is None:
            mistakes.append(f"{name}: no such key{_resembling(name)}")
        elif not key.kind.check(value):
            mistakes.append(f"{name}: expected {key.kind.expected}, got {_shown(value)}")
        else:
            values[name] = key.kind.make(value)
    mistakes += [
        f"{key.name}: expected {key.kind.expected}, got nothing"
        for key in KEYS
        if key.required and key.name not in given
    ]
    for key in KEYS:
        if key.kind is PATH:
            # Paths from the command line start at the current directory.
            start = Path.cwd() if key.name in overrides else folder
            values[key.name] = _path(key.name, values[key.name], start, environment, mistakes)
    if not is_device_name(values["device"]):
        mistakes.append(f"device: the host name {values['device']!r} cannot be used in a topic; set `device`")
    broker = _broker(values, mistakes)
    if mistakes or broker is None:
        raise ConfigError(
            "the configuration has mistakes:\n  " + "\n  ".join(map(printable, mistakes)),
            hint="edge-agent config prints every key with an explanation",
        )
    settings = _of(Config, values)
    settings["max_deadline_s"] = max(settings["max_deadline_s"], settings["default_deadline_s"])
    settings["answers_dir"] = settings["answers_dir"] or settings["state_dir"]
    return Config(
        **settings,
        broker=broker,
        serves_revoked=values["trust.on_revoke"] == "serve",
        queue=QueueLimits(values["inference.queue_requests"], values["inference.queue_bytes"]),
        worker=WorkerSettings(**_of(WorkerSettings, values)),
        metrics=MetricsSettings(**_of(MetricsSettings, values)),
        home_assistant=HomeAssistantSettings(**_of(HomeAssistantSettings, values)),
    )


def _of(settings: type, values: Mapping[str, object]) -> dict[str, Any]:
    """Return the values of the keys that set fields of `settings`, by field."""
    return {
        place[1]: values[key.name]
        for key in KEYS
        if (place := key.place) is not None and place[0] is settings
    }


def _flatten(document: Mapping[str, object], mistakes: list[str]) -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in document.items():
        if name in _SECTIONS and isinstance(value, dict):
            flat.update({f"{name}.{inner}": item for inner, item in value.items()})
        elif name in _SECTIONS:
            mistakes.append(f"{name}: expected a section [{name}], got {_shown(value)}")
        else:
            flat[name] = value
    return flat


def _resembling(name: str) -> str:
    tail = name.rpartition(".")[2]
    near = [key.name for key in KEYS if key.name.rpartition(".")[2] == tail]
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _path(
    name: str, value: object, start: Path, environment: Mapping[str, str], mistakes: list[str]
) -> Path | None:
    if not isinstance(value, str):
        return None
    head, *rest = value.split("/")
    if head.startswith("$"):
        found = environment.get(head[1:].strip("{}"))
        if not found:
            mistakes.append(f"{name}: {head} is not set in the environment")
            return None
        head = found
    return start / "/".join((head, *rest)) if head or rest else None


def _broker(values: Mapping[str, Any], mistakes: list[str]) -> BrokerSettings | None:
    if not isinstance(values["broker.url"], str):
        return None
    try:
        url = parse_broker_url(values["broker.url"])
    except ConfigError as error:
        mistakes.append(f"broker.url: {error}")
        return None
    ca, certificate, key = (values[f"broker.{name}"] for name in ("ca", "certificate", "key"))
    if not url.tls and (ca or certificate or key):
        mistakes.append("broker: expected an mqtts:// URL with certificates, got mqtt://")
    if (certificate is None) != (key is None):
        mistakes.append("broker: expected both certificate and key, got one of them")
    username = values["broker.username"] or url.username
    if values["broker.password_file"] is not None and username is None:
        mistakes.append("broker: expected a username with password_file, got none")
    return BrokerSettings(
        host=url.host,
        port=url.port,
        tls=TlsSettings(ca, certificate, key) if url.tls else None,
        **_of(BrokerSettings, values) | {"username": username},
    )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
