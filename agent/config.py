"""The configuration file: every key in one table, strict reading, every mistake reported at once.

`KEYS` is what the reader checks and what `sample_config` prints, so there is no key without an explanation.
The file never holds secrets: it names files that hold them.
"""

from __future__ import annotations

import re
import socket
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from agent.errors import ConfigError, PermissionDeniedError
from agent.mqtt.settings import PROTOCOLS, BrokerSettings, TlsSettings, parse_broker_url
from agent.wire.topics import MAX_DISCOVERY_PREFIX_CHARACTERS, is_device_name, is_discovery_prefix

DEFAULT_CONFIG: Final = Path("/etc/edge-agent/agent.toml")
# A configuration has about fifty lines; a file of a megabyte is something else.
MAX_CONFIG_BYTES: Final = 1 << 20
# So long that 1000 agents with three connections each make at most 150 connects in any second, and so short
# that all of them are back within 30 s (docs/decisions/0018).
RECONNECT_SPREAD_S: Final = 28.0
LOG_LEVELS: Final = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How much may wait for one model.

    Attributes
    ----------
    requests
        How many requests; at a tenth of a second each, the last of 64 waits for longer than most deadlines.
    payload_bytes
        Their payloads together.
    """

    requests: int = 64
    payload_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Limits of every worker.

    Attributes
    ----------
    compute_limit_s
        Longest time for one request.
    crash_limit, crash_window_s
        So many deaths within so many seconds take a model out of service.
    threads
        Threads of one model's kernels; 0 for as many as it has processors.
    share_cores
        Whether several models have different processors.
    memory_bytes
        Address space of a worker beyond what its bundle's weights and tensors need; 0 for no limit.
    require_sandbox
        Refuse to load a model unless the sandbox is complete.
    """

    compute_limit_s: float = 30.0
    crash_limit: int = 3
    crash_window_s: float = 60.0
    threads: int = 0
    share_cores: bool = True
    memory_bytes: int = 512 << 20
    require_sandbox: bool = False


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """A host and a port to listen on."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> ListenAddress:
        """Read `HOST:PORT` or `[HOST]:PORT`.

        Raises
        ------
        ValueError
            If it has another form.
        """
        found = re.fullmatch(r"\[?([^\s/@\[\]]+)\]?:([0-9]{1,5})", text)
        if found is None or int(found[2]) > 65535:
            raise ValueError(f"expected HOST:PORT, got {text!r}")
        return cls(found[1], int(found[2]))


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """Where and how often metrics are published.

    Attributes
    ----------
    interval_s
        Seconds between two messages over MQTT.
    listen
        Where the page for Prometheus listens; None for no page.
    """

    interval_s: float
    listen: ListenAddress | None


@dataclass(frozen=True, slots=True)
class HomeAssistantSettings:
    """How Home Assistant finds the device.

    Attributes
    ----------
    enabled
        Whether the device and its models are announced.
    prefix
        Home Assistant's discovery prefix.
    """

    enabled: bool
    prefix: str


@dataclass(frozen=True, slots=True)
class Config:
    """The agent's configuration; `KEYS` explains every key of the file.

    Attributes
    ----------
    device, state_dir, groups, compatible, log_level
        The keys of these names.
    broker, metrics, home_assistant
        The sections of these names.
    trust_dir, sources_https, sources_ca, shutdown_limit_s
        `trust.dir`, `sources.https`, `sources.ca`, `shutdown.limit_s`.
    queue
        `inference.queue_requests` and `inference.queue_bytes`.
    default_deadline_s, max_deadline_s, answers_dir
        The keys of these names under `inference`; `max_deadline_s` is at least `default_deadline_s`;
        `answers_dir` is `state_dir` if the file leaves it open.
    worker
        The section `worker`, and the limits under `inference` that concern workers.
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
    queue: QueueLimits
    default_deadline_s: float
    max_deadline_s: float
    answers_dir: Path
    worker: WorkerSettings
    metrics: MetricsSettings
    home_assistant: HomeAssistantSettings
    shutdown_limit_s: float


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value.

    Attributes
    ----------
    expected
        A description for messages.
    check
        Returns whether a TOML value is of this kind.
    """

    expected: str
    check: Callable[[object], bool]


@dataclass(frozen=True, slots=True)
class Key:
    """One key.

    Attributes
    ----------
    name
        The key with its section: `broker.url`.
    kind
        The kind of its value.
    default
        Its value if the file does not give it, or None.
    text
        Its explanation.
    required
        Whether the file must give it.
    """

    name: str
    kind: Kind
    default: object
    text: str
    required: bool = False


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value) and value.isprintable()


def _is_address(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        ListenAddress.parse(value)
    except ValueError:
        return False
    return True


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


_TEXT: Final = Kind("a non-empty string", _is_text)
_PATH: Final = Kind("a path", _is_text)
_TEXTS: Final = Kind("a list of non-empty strings", _is_texts)
_BOOL: Final = Kind("true or false", lambda value: isinstance(value, bool))
_DEVICE: Final = Kind(
    "1 to 64 letters, digits, '.', '_' or '-', and neither \"groups\" nor \"replies\"",
    lambda value: isinstance(value, str) and is_device_name(value),
)
_LISTEN: Final = Kind("a string of the form HOST:PORT", _is_address)
_PREFIX: Final = Kind(
    f"1 to {MAX_DISCOVERY_PREFIX_CHARACTERS} letters, digits, '.', '_', '-' or '/', and not below edge/",
    lambda value: isinstance(value, str) and is_discovery_prefix(value),
)
_DEVICES: Final = Kind(
    "a list of names, each 1 to 64 letters, digits, '.', '_' or '-', and neither \"groups\" nor \"replies\"",
    lambda value: isinstance(value, list) and all(_DEVICE.check(item) for item in value),
)
_MIB: Final = 1 << 20
_DAY_S: Final = 86_400
_BROKER: Final = BrokerSettings("localhost")
_QUEUE: Final = QueueLimits()
_WORKER: Final = WorkerSettings()

KEYS: Final = (
    Key("device", _DEVICE, None, "This device's name in topics; the host name if absent."),
    Key(
        "state_dir",
        _PATH,
        None,
        "Folder for bundles and state; $STATE_DIRECTORY or /var/lib/edge-agent if absent.",
    ),
    Key("groups", _DEVICES, [], "Groups of devices with which this one shares requests."),
    Key("compatible", _TEXTS, [], "More names of this machine that a bundle's `compatible` may require."),
    Key(
        "log_level",
        _one_of(*LOG_LEVELS),
        "info",
        "The least important messages that are logged, to standard error.",
    ),
    Key("broker.url", _TEXT, None, "mqtt://HOST[:PORT], or mqtts:// for TLS.", required=True),
    Key("broker.username", _TEXT, None, "The user name for the broker."),
    Key("broker.password_file", _PATH, None, "File whose first line is the password."),
    Key(
        "broker.ca",
        _PATH,
        None,
        "PEM file with the authorities for the broker's certificate; the system's if absent.",
    ),
    Key(
        "broker.certificate",
        _PATH,
        None,
        "PEM file with the agent's certificate, for brokers that require one.",
    ),
    Key("broker.key", _PATH, None, "PEM file with the certificate's private key."),
    Key("broker.protocol", _one_of(*PROTOCOLS), _BROKER.protocol, 'MQTT version; "auto" tries 5 first.'),
    Key(
        "broker.keepalive_s",
        _whole(5, 3600),
        _BROKER.keepalive_s,
        "A connection without a message for 1.5 times this is closed.",
    ),
    Key(
        "broker.session_expiry_s",
        _whole(0, 7 * _DAY_S),
        _BROKER.session_expiry_s,
        "How long the broker keeps requests while the agent is away.",
    ),
    Key(
        "broker.reconnect_spread_s",
        _number(0, 3600),
        RECONNECT_SPREAD_S,
        "Agents reconnect at random moments within this time, so that a fleet does not return all at once.",
    ),
    Key(
        "broker.receive_maximum",
        _whole(1, 65535),
        _BROKER.receive_maximum,
        "Unanswered requests that the broker may send.",
    ),
    Key(
        "broker.max_packet_bytes",
        _whole(1024, 256 * _MIB - 1),
        _BROKER.max_packet_bytes,
        "Largest message that the agent accepts (MQTT 5).",
    ),
    Key(
        "trust.dir",
        _PATH,
        None,
        "Folder with the public keys (*.pub, *.pem) that bundles may be signed with.",
        True,
    ),
    Key("sources.https", _TEXTS, [], "URL prefixes that bundles may be downloaded from; none if empty."),
    Key(
        "sources.ca", _PATH, None, "PEM file with the authorities for these servers; the system's if absent."
    ),
    Key(
        "inference.queue_requests",
        _whole(1, 100_000),
        _QUEUE.requests,
        "Requests that may wait for one model; more are answered 503.",
    ),
    Key(
        "inference.queue_bytes", _whole(1, 1 << 40), _QUEUE.payload_bytes, "Bytes of their payloads together."
    ),
    Key(
        "inference.default_deadline_s",
        _number(0.01, _DAY_S),
        60.0,
        "Deadline of requests without Message Expiry.",
    ),
    Key(
        "inference.max_deadline_s",
        _number(0.01, _DAY_S),
        600.0,
        "No request waits and computes for longer; longer deadlines are shortened to this.",
    ),
    Key(
        "inference.compute_limit_s",
        _number(0.01, _DAY_S),
        _WORKER.compute_limit_s,
        "A request that computes for longer is answered 408.",
    ),
    Key(
        "inference.crash_limit",
        _whole(1, 1000),
        _WORKER.crash_limit,
        "A model is out of service after this many dead workers ...",
    ),
    Key(
        "inference.crash_window_s",
        _number(0.1, _DAY_S),
        _WORKER.crash_window_s,
        "... within this time.",
    ),
    Key(
        "inference.answers_dir",
        _PATH,
        None,
        "Folder where answers outlive the agent, best in memory; $RUNTIME_DIRECTORY or state_dir.",
    ),
    Key(
        "worker.threads", _whole(0, 1024), _WORKER.threads, "Threads of one model's kernels; 0 for all cores."
    ),
    Key(
        "worker.share_cores",
        _BOOL,
        _WORKER.share_cores,
        "Give each of several models its own processors; divided again when one comes or goes.",
    ),
    Key(
        "worker.memory_bytes",
        _whole(0, 1 << 50),
        _WORKER.memory_bytes,
        "Memory of a worker beyond its bundle's weights and tensors; 0 for no limit.",
    ),
    Key(
        "worker.require_sandbox",
        _BOOL,
        _WORKER.require_sandbox,
        "Run models only in a complete sandbox; `edge-agent check` says whether this kernel has it.",
    ),
    Key("metrics.interval_s", _number(0.1, _DAY_S), 10.0, "How often metrics are published."),
    Key(
        "metrics.listen",
        _LISTEN,
        None,
        "Address of a page for Prometheus, such as 127.0.0.1:9464, without a password; no page if absent.",
    ),
    Key(
        "home_assistant.enabled",
        _BOOL,
        False,
        "Announce this device and its models to Home Assistant; withdrawn when switched off.",
    ),
    Key("home_assistant.prefix", _PREFIX, "homeassistant", "Home Assistant's discovery prefix."),
    Key(
        "shutdown.limit_s",
        _number(0, 3600),
        10.0,
        "How long accepted requests may still take when the agent stops.",
    ),
)

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
    values = {key.name: key.default for key in KEYS}
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
            values[name] = value
    mistakes += [
        f"{key.name}: expected {key.kind.expected}, got nothing" for key in KEYS if _lacks(key, given)
    ]
    paths: dict[str, Path | None] = {}
    for key in KEYS:
        if key.kind is _PATH:
            # Paths from the command line start at the current directory.
            start = Path.cwd() if key.name in overrides else folder
            paths[key.name] = _path(key.name, values[key.name], start, environment, mistakes)
    if not is_device_name(str(values["device"])):
        mistakes.append(f"device: the host name {values['device']!r} cannot be used in a topic; set `device`")
    broker = _broker(values, paths, mistakes)
    if mistakes or broker is None:
        raise ConfigError(
            "the configuration has mistakes:\n  " + "\n  ".join(mistakes),
            hint="edge-agent config prints every key with an explanation",
        )
    state_dir, trust_dir = paths["state_dir"], paths["trust.dir"]
    assert state_dir is not None
    assert trust_dir is not None
    # The casts state what `kind.check` has established for each key.
    listen = cast("str | None", values["metrics.listen"])
    return Config(
        device=cast(str, values["device"]),
        state_dir=state_dir,
        groups=_strings(values["groups"]),
        compatible=_strings(values["compatible"]),
        log_level=cast(str, values["log_level"]),
        broker=broker,
        trust_dir=trust_dir,
        sources_https=_strings(values["sources.https"]),
        sources_ca=paths["sources.ca"],
        queue=QueueLimits(
            requests=cast(int, values["inference.queue_requests"]),
            payload_bytes=cast(int, values["inference.queue_bytes"]),
        ),
        default_deadline_s=cast(float, values["inference.default_deadline_s"]),
        max_deadline_s=max(
            cast(float, values["inference.max_deadline_s"]),
            cast(float, values["inference.default_deadline_s"]),
        ),
        answers_dir=paths["inference.answers_dir"] or state_dir,
        worker=WorkerSettings(
            compute_limit_s=cast(float, values["inference.compute_limit_s"]),
            crash_limit=cast(int, values["inference.crash_limit"]),
            crash_window_s=cast(float, values["inference.crash_window_s"]),
            threads=cast(int, values["worker.threads"]),
            share_cores=cast(bool, values["worker.share_cores"]),
            memory_bytes=cast(int, values["worker.memory_bytes"]),
            require_sandbox=cast(bool, values["worker.require_sandbox"]),
        ),
        metrics=MetricsSettings(
            interval_s=cast(float, values["metrics.interval_s"]),
            listen=None if listen is None else ListenAddress.parse(listen),
        ),
        home_assistant=HomeAssistantSettings(
            enabled=cast(bool, values["home_assistant.enabled"]),
            prefix=cast(str, values["home_assistant.prefix"]),
        ),
        shutdown_limit_s=cast(float, values["shutdown.limit_s"]),
    )


def _strings(value: object) -> tuple[str, ...]:
    return tuple(cast("list[str]", value))


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
        mistakes.append("broker: expected an mqtts:// URL with certificates, got mqtt://")
    if (certificate is None) != (key is None):
        mistakes.append("broker: expected both certificate and key, got one of them")
    username = values["broker.username"] or url.username
    if paths["broker.password_file"] is not None and username is None:
        mistakes.append("broker: expected a username with password_file, got none")
    return BrokerSettings(
        host=url.host,
        port=url.port,
        tls=TlsSettings(ca, certificate, key) if url.tls else None,
        username=cast("str | None", username),
        password_file=paths["broker.password_file"],
        protocol=cast(str, values["broker.protocol"]),
        keepalive_s=cast(int, values["broker.keepalive_s"]),
        session_expiry_s=cast(int, values["broker.session_expiry_s"]),
        reconnect_spread_s=float(cast(float, values["broker.reconnect_spread_s"])),
        receive_maximum=cast(int, values["broker.receive_maximum"]),
        max_packet_bytes=cast(int, values["broker.max_packet_bytes"]),
    )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def sample_config() -> str:
    """Return a configuration file with every key, its explanation and its default."""
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


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"'
    return str(value)
