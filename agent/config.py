"""The configuration file: every key in one table, read strictly, every mistake told at once.

`KEYS` is what the reader checks and what `sample_config` writes, so a key without an explanation cannot
exist. Secrets never stand in it: it names files that hold them.
"""

from __future__ import annotations

import os
import socket
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from agent.errors import ConfigError
from agent.mqtt.settings import PROTOCOLS, BrokerSettings, TlsSettings, parse_broker_url
from agent.mqtt.topics import is_device_name

# A configuration has fifty lines; a megabyte is another file.
MAX_CONFIG_BYTES: Final = 1 << 20
LOG_LEVELS: Final = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Config:
    """What the agent is told.

    The attributes are the keys of the file, with its sections' names in front; `KEYS` explains them.
    """

    device: str
    state_dir: Path
    groups: tuple[str, ...]
    compatible: tuple[str, ...]
    log_level: str
    broker: BrokerSettings
    trust_dir: Path
    sources_https: tuple[str, ...]
    sources_ca: Path | None
    inference_queue_requests: int
    inference_queue_bytes: int
    inference_default_deadline_s: float
    inference_compute_limit_s: float
    inference_crash_limit: int
    inference_crash_window_s: float
    worker_threads: int
    worker_memory_bytes: int
    worker_require_sandbox: bool
    metrics_interval_s: float
    shutdown_limit_s: float


@dataclass(frozen=True, slots=True)
class Kind:
    """What a value must be.

    Parameters
    ----------
    expected
        In words, for messages.
    check
        Whether a TOML value is one.
    """

    expected: str
    check: Callable[[object], bool]


@dataclass(frozen=True, slots=True)
class Key:
    """One key.

    Parameters
    ----------
    name
        With its section: `broker.url`.
    kind
        What its value must be.
    default
        Its value when it is absent; None where it is optional or has to be given.
    text
        What it means.
    required
        It has to be given.
    """

    name: str
    kind: Kind
    default: object
    text: str
    required: bool = False


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value) and value.isprintable()


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(_is_text(item) for item in value)


def _whole(least: int, most: int) -> Kind:
    return Kind(
        f"a whole number from {least} to {most}", lambda value: type(value) is int and least <= value <= most
    )


def _number(least: float, most: float) -> Kind:
    return Kind(
        f"a number from {least:g} to {most:g}",
        lambda value: type(value) in (int, float) and least <= cast(float, value) <= most,
    )


def _one_of(*words: str) -> Kind:
    return Kind("one of " + ", ".join(f'"{word}"' for word in words), lambda value: value in words)


_TEXT: Final = Kind("a text", _is_text)
_PATH: Final = Kind("a path", _is_text)
_TEXTS: Final = Kind("a list of texts", _is_texts)
_BOOL: Final = Kind("true or false", lambda value: isinstance(value, bool))
_DEVICE: Final = Kind(
    "1 to 64 letters, digits, '.', '_' or '-', and neither \"groups\" nor \"replies\"",
    lambda value: isinstance(value, str) and is_device_name(value),
)
_DEVICES: Final = Kind(
    "a list of such names",
    lambda value: isinstance(value, list) and all(_DEVICE.check(item) for item in value),
)
_MIB: Final = 1 << 20
_DAY_S: Final = 86_400

KEYS: Final = (
    Key("device", _DEVICE, None, "This device's name in topics; the host's name when absent."),
    Key(
        "state_dir", _PATH, None, "Where bundles and state are kept; $STATE_DIRECTORY or /var/lib/edge-agent."
    ),
    Key("groups", _DEVICES, [], "Groups whose requests this device shares with their other members."),
    Key("compatible", _TEXTS, [], "Further names of this machine that a bundle's `compatible` may ask for."),
    Key("log_level", _one_of(*LOG_LEVELS), "info", "How much is logged, to standard error."),
    Key("broker.url", _TEXT, None, "mqtt://HOST[:PORT], or mqtts:// for TLS.", required=True),
    Key("broker.username", _TEXT, None, "Who we are to the broker."),
    Key("broker.password_file", _PATH, None, "File whose first line is the password."),
    Key(
        "broker.ca",
        _PATH,
        None,
        "PEM file with authorities that may vouch for the broker; the system's if absent.",
    ),
    Key(
        "broker.certificate", _PATH, None, "PEM file with our own certificate, for brokers that ask for one."
    ),
    Key("broker.key", _PATH, None, "PEM file with the key of that certificate."),
    Key("broker.protocol", _one_of(*PROTOCOLS), "auto", 'MQTT version; "auto" tries 5 first.'),
    Key("broker.keepalive_s", _whole(5, 3600), 30, "A broker silent for 1.5 times this is given up."),
    Key("broker.session_expiry_s", _whole(0, 7 * _DAY_S), 600, "How long the broker keeps requests for us."),
    Key("broker.receive_maximum", _whole(1, 65535), 10_000, "Unanswered requests the broker may send us."),
    Key(
        "broker.max_packet_bytes",
        _whole(1024, 256 * _MIB - 1),
        64 * _MIB,
        "Largest message we take (MQTT 5).",
    ),
    Key(
        "trust.dir",
        _PATH,
        None,
        "Folder with the public keys (*.pub, *.pem) that bundles may be signed with.",
        True,
    ),
    Key("sources.https", _TEXTS, [], "URL prefixes that bundles may be fetched from; none when empty."),
    Key("sources.ca", _PATH, None, "PEM file with authorities for those; the system's if absent."),
    Key(
        "inference.queue_requests", _whole(1, 100_000), 64, "Requests that may wait for one model; then 503."
    ),
    Key("inference.queue_bytes", _whole(1, 1 << 40), 64 * _MIB, "Their payloads together."),
    Key("inference.default_deadline_s", _number(0.01, _DAY_S), 60.0, "For requests without Message Expiry."),
    Key(
        "inference.compute_limit_s", _number(0.01, _DAY_S), 30.0, "A worker that takes longer is ended; 408."
    ),
    Key("inference.crash_limit", _whole(1, 1000), 3, "So many dead workers ..."),
    Key(
        "inference.crash_window_s",
        _number(0.1, _DAY_S),
        60.0,
        "... within this time take a model out of service.",
    ),
    Key("worker.threads", _whole(0, 1024), 0, "Threads of one model's kernels; 0 for all cores."),
    Key(
        "worker.memory_bytes",
        _whole(0, 1 << 50),
        0,
        "Memory beyond what a bundle declares twice; 0: no limit.",
    ),
    Key(
        "worker.require_sandbox",
        _BOOL,
        False,
        "Run no model where the kernel has neither Landlock nor seccomp.",
    ),
    Key("metrics.interval_s", _number(0.1, _DAY_S), 10.0, "How often metrics are published."),
    Key(
        "shutdown.limit_s", _number(0, 3600), 10.0, "How long accepted requests may still take when we stop."
    ),
)
_BY_NAME: Final = {key.name: key for key in KEYS}
_SECTIONS: Final = frozenset(key.name.partition(".")[0] for key in KEYS if "." in key.name)


def load_config(path: Path | None, overrides: Mapping[str, str], environment: Mapping[str, str]) -> Config:
    """Read a configuration file.

    Parameters
    ----------
    path
        The file; None for no file.
    overrides
        Values from the command line, by key.
    environment
        For `$NAME` in paths, and STATE_DIRECTORY.

    Raises
    ------
    ConfigError
        Naming everything that is wrong.
    """
    raw = b""
    if path is not None:
        try:
            with path.open("rb") as file:
                raw = file.read(MAX_CONFIG_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    if len(raw) > MAX_CONFIG_BYTES:
        raise ConfigError(f"{path}: expected a configuration of at most {MAX_CONFIG_BYTES} bytes, got more")
    try:
        document = tomllib.loads(raw.decode())
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError are
        raise ConfigError(f"{path}: expected TOML: {error}") from error
    return parse_config(document, overrides, environment, folder=Path.cwd() if path is None else path.parent)


def parse_config(
    document: Mapping[str, object],
    overrides: Mapping[str, str],
    environment: Mapping[str, str],
    *,
    folder: Path,
) -> Config:
    """Make a configuration of a parsed file; `folder` is where its relative paths begin.

    Raises
    ------
    ConfigError
        Naming everything that is wrong, a line each.
    """
    mistakes: list[str] = []
    values = {key.name: key.default for key in KEYS}
    values["device"] = socket.gethostname().partition(".")[0]
    values["state_dir"] = environment.get("STATE_DIRECTORY") or "/var/lib/edge-agent"
    given = {**_flatten(document, mistakes), **overrides}
    for name, value in given.items():
        key = _BY_NAME.get(name)
        if key is None:
            mistakes.append(f"{name}: no such key{_resembling(name)}")
        elif not key.kind.check(value):
            mistakes.append(f"{name}: expected {key.kind.expected}, got {_shown(value)}")
        else:
            values[name] = value
    mistakes += [
        f"{key.name}: expected {key.kind.expected}, got nothing" for key in KEYS if _lacks(key, given)
    ]
    paths: dict[str, Path | None] = {}
    for key in KEYS:
        if key.kind is _PATH:
            # What is given on the command line begins where the user stands.
            start = Path.cwd() if key.name in overrides else folder
            paths[key.name] = _path(key.name, values[key.name], start, environment, mistakes)
    if not is_device_name(str(values["device"])):
        mistakes.append(f"device: the host's name {values['device']!r} cannot stand in a topic; set `device`")
    broker = _broker(values, paths, mistakes)
    if mistakes or broker is None:
        raise ConfigError(
            "the configuration has mistakes:\n  " + "\n  ".join(mistakes),
            hint="edge-agent config prints every key with its meaning",
        )
    state_dir, trust_dir = paths["state_dir"], paths["trust.dir"]
    assert state_dir is not None
    assert trust_dir is not None
    plain = {
        key.name.replace(".", "_"): tuple(value) if isinstance(value := values[key.name], list) else value
        for key in KEYS
        if key.kind is not _PATH and not key.name.startswith("broker.")
    }
    return Config(
        **plain,  # type: ignore[arg-type] # checked above, key by key
        broker=broker,
        state_dir=state_dir,
        trust_dir=trust_dir,
        sources_ca=paths["sources.ca"],
    )


def sample_config() -> str:
    """Return a configuration file with every key, its meaning and its default."""
    lines: list[str] = []
    section = ""
    for key in KEYS:
        head, _, tail = key.name.rpartition(".")
        if head != section:
            section = head
            lines += ["", f"[{head}]"]
        default = "" if key.default is None else f" = {_toml(key.default)}"
        lines += [f"# {key.text}", f"# Expected: {key.kind.expected}.", f"#{tail}{default or ' = ...'}"]
    return "\n".join(lines) + "\n"


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


def _lacks(key: Key, given: Mapping[str, object]) -> bool:
    return key.required and key.name not in given


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


def _broker(
    values: Mapping[str, object], paths: Mapping[str, Path | None], mistakes: list[str]
) -> BrokerSettings | None:
    if not isinstance(values["broker.url"], str):
        return None
    try:
        url = parse_broker_url(values["broker.url"])
    except ConfigError as error:
        mistakes.append(f"broker.url: {error}")
        return None
    ca, certificate, key = paths["broker.ca"], paths["broker.certificate"], paths["broker.key"]
    if not url.tls and (ca or certificate or key):
        mistakes.append("broker: expected a URL with mqtts:// beside certificates, got mqtt://")
    if (certificate is None) != (key is None):
        mistakes.append("broker: expected certificate and key together, got one of them")
    username = values["broker.username"] or url.username
    if paths["broker.password_file"] is not None and username is None:
        mistakes.append("broker: expected a username beside password_file, got none")
    return BrokerSettings(
        host=url.host,
        port=url.port,
        tls=TlsSettings(ca, certificate, key) if url.tls else None,
        username=cast("str | None", username),
        password_file=paths["broker.password_file"],
        protocol=cast(str, values["broker.protocol"]),
        keepalive_s=cast(int, values["broker.keepalive_s"]),
        session_expiry_s=cast(int, values["broker.session_expiry_s"]),
        receive_maximum=cast(int, values["broker.receive_maximum"]),
        max_packet_bytes=cast(int, values["broker.max_packet_bytes"]),
    )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"'
    return str(value)


def read_environment() -> Mapping[str, str]:
    """Return the process's environment."""
    return os.environ
