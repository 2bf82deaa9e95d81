"""Every key of the configuration file in one table, and a sample of the file.

`KEYS` is what the reader checks and what `sample_config` prints, so there is no key without an explanation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Final, cast

from agent.config.settings import (
    RECONNECT_SPREAD_S,
    Config,
    HomeAssistantSettings,
    ListenAddress,
    MetricsSettings,
    QueueLimits,
    WorkerSettings,
)
from agent.mqtt.settings import PROTOCOLS, BrokerSettings
from agent.wire.topics import MAX_DISCOVERY_PREFIX_CHARACTERS, is_device_name, is_discovery_prefix

LOG_LEVELS: Final = ("debug", "info", "warning", "error")
ON_REVOKE: Final = ("stop", "serve")


# The settings of a section, beside those of `Config`.
_SETTINGS: Final[Mapping[str, type]] = {
    "broker": BrokerSettings,
    "inference": WorkerSettings,
    "worker": WorkerSettings,
    "metrics": MetricsSettings,
    "home_assistant": HomeAssistantSettings,
}


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value: what is `expected`, whether a TOML value is of it, and how its setting is made."""

    expected: str
    check: Callable[[object], bool]
    make: Callable[[Any], object] = lambda value: value


@dataclass(frozen=True, slots=True)
class Key:
    """One key, with its section, as in `broker.url`, and its explanation.

    `given` is its default, if its place has another one, or none.
    """

    name: str
    kind: Kind
    text: str
    given: object = None
    required: bool = False

    @property
    def place(self) -> tuple[type, str] | None:
        """The settings that it sets, and the field there; None if it is used in another way."""
        section, _, tail = self.name.rpartition(".")
        own, whole = _SETTINGS.get(section, Config), self.name.replace(".", "_")
        places: tuple[tuple[type, str], ...] = ((own, tail), (Config, whole), (Config, tail))
        return next((place for place in places if place[1] in _defaults(place[0])), None)

    @property
    def default(self) -> object:
        """Its value if the file does not give it; None for none."""
        if self.given is not None or self.place is None:
            return self.given
        settings, field = self.place
        return _defaults(settings)[field]


def _defaults(settings: type) -> dict[str, object]:
    return {each.name: None if each.default is MISSING else each.default for each in fields(settings)}


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
        float,
    )


def _one_of(*words: str) -> Kind:
    return Kind("one of " + ", ".join(f'"{word}"' for word in words), lambda value: value in words)


_TEXT: Final = Kind("a non-empty string", _is_text)
PATH: Final = Kind("a path", _is_text)
_TEXTS: Final = Kind("a list of non-empty strings", _is_texts, tuple)
_BOOL: Final = Kind("true or false", lambda value: isinstance(value, bool))
_DEVICE: Final = Kind(
    "1 to 64 letters, digits, '.', '_' or '-', and neither \"groups\" nor \"replies\"",
    lambda value: isinstance(value, str) and is_device_name(value),
)
_LISTEN: Final = Kind("a string of the form HOST:PORT", _is_address, ListenAddress.parse)
_PREFIX: Final = Kind(
    f"1 to {MAX_DISCOVERY_PREFIX_CHARACTERS} letters, digits, '.', '_', '-' or '/', and not below edge/",
    lambda value: isinstance(value, str) and is_discovery_prefix(value),
)
_DEVICES: Final = Kind(
    "a list of names, each 1 to 64 letters, digits, '.', '_' or '-', and neither \"groups\" nor \"replies\"",
    lambda value: isinstance(value, list) and all(_DEVICE.check(item) for item in value),
    tuple,
)
_MIB: Final = 1 << 20
_DAY_S: Final = 86_400
_QUEUE: Final = QueueLimits()

KEYS: Final = (
    Key("device", _DEVICE, "This device's name in topics; the host name if absent."),
    Key(
        "state_dir", PATH, "Folder for bundles and state; $STATE_DIRECTORY or /var/lib/edge-agent if absent."
    ),
    Key("groups", _DEVICES, "Groups of devices with which this one shares requests.", []),
    Key("compatible", _TEXTS, "More names of this machine that a bundle's `compatible` may require.", []),
    Key(
        "log_level",
        _one_of(*LOG_LEVELS),
        "The least important messages that are logged, to standard error.",
        "info",
    ),
    Key("broker.url", _TEXT, "mqtt://HOST[:PORT], or mqtts:// for TLS.", required=True),
    Key("broker.username", _TEXT, "The user name for the broker."),
    Key("broker.password_file", PATH, "File whose first line is the password."),
    Key(
        "broker.ca",
        PATH,
        "PEM file with the authorities for the broker's certificate; the system's if absent.",
    ),
    Key("broker.certificate", PATH, "PEM file with the agent's certificate, for brokers that require one."),
    Key("broker.key", PATH, "PEM file with the certificate's private key."),
    Key("broker.protocol", _one_of(*PROTOCOLS), 'MQTT version; "auto" tries 5 first.'),
    Key(
        "broker.keepalive_s", _whole(5, 3600), "A connection without a message for 1.5 times this is closed."
    ),
    Key(
        "broker.session_expiry_s",
        _whole(0, 7 * _DAY_S),
        "How long the broker keeps requests while the agent is away.",
    ),
    Key(
        "broker.reconnect_spread_s",
        _number(0, 3600),
        "Agents reconnect at random moments within this time, so that a fleet does not return all at once.",
        RECONNECT_SPREAD_S,
    ),
    Key("broker.receive_maximum", _whole(1, 65535), "Unanswered requests that the broker may send."),
    Key(
        "broker.max_packet_bytes",
        _whole(1024, 256 * _MIB - 1),
        "Largest message that the agent accepts (MQTT 5).",
    ),
    Key(
        "trust.dir",
        PATH,
        "Folder with the public keys (*.pub, *.pem) that bundles may be signed with.",
        required=True,
    ),
    Key(
        "trust.on_revoke",
        _one_of(*ON_REVOKE),
        "Whether a model stops when its bundle's key is revoked, or serves until it is replaced.",
        ON_REVOKE[0],
    ),
    Key("sources.https", _TEXTS, "URL prefixes that bundles may be downloaded from; none if empty.", []),
    Key("sources.ca", PATH, "PEM file with the authorities for these servers; the system's if absent."),
    Key(
        "inference.queue_requests",
        _whole(1, 100_000),
        "Requests that may wait for one model; more are answered 503.",
        _QUEUE.requests,
    ),
    Key(
        "inference.queue_bytes", _whole(1, 1 << 40), "Bytes of their payloads together.", _QUEUE.payload_bytes
    ),
    Key(
        "inference.default_deadline_s",
        _number(0.01, _DAY_S),
        "Deadline of requests without Message Expiry.",
        60.0,
    ),
    Key(
        "inference.max_deadline_s",
        _number(0.01, _DAY_S),
        "No request waits and computes for longer; longer deadlines are shortened to this.",
        600.0,
    ),
    Key(
        "inference.compute_limit_s",
        _number(0.01, _DAY_S),
        "A request that computes for longer is answered 408.",
    ),
    Key(
        "inference.crash_limit", _whole(1, 1000), "A model is out of service after this many dead workers ..."
    ),
    Key("inference.crash_window_s", _number(0.1, _DAY_S), "... within this time."),
    Key(
        "inference.batch",
        _BOOL,
        "Compute waiting requests together, if the model was compiled with a changing batch.",
    ),
    Key(
        "inference.batch_delay_s",
        _number(0, 1),
        "How long after its arrival a request waits for others; 0 to wait for none.",
    ),
    Key(
        "inference.answers_dir",
        PATH,
        "Folder where answers outlive the agent, best in memory; $RUNTIME_DIRECTORY or state_dir.",
    ),
    Key("worker.threads", _whole(0, 1024), "Threads of one model's kernels; 0 for all cores."),
    Key(
        "worker.share_cores",
        _BOOL,
        "Give each of several models its own processors; divided again when one comes or goes.",
    ),
    Key(
        "worker.memory_bytes",
        _whole(0, 1 << 50),
        "Memory of a worker beyond its bundle's weights and tensors; 0 for no limit.",
    ),
    Key(
        "worker.require_sandbox",
        _BOOL,
        "Run models only in a complete sandbox; `edge-agent check` says whether this kernel has it.",
    ),
    Key(
        "worker.sessions",
        _whole(1, 100_000),
        "Sessions of one model; beyond, the client with the most loses its least recently used one.",
    ),
    Key("worker.session_idle_s", _number(1, 7 * _DAY_S), "A session that is unused for this long ends."),
    Key(
        "worker.session_bytes", _whole(1 << 16, 1 << 40), "Bytes of the states of all sessions of one model."
    ),
    Key("metrics.interval_s", _number(0.1, _DAY_S), "How often metrics are published."),
    Key(
        "metrics.listen",
        _LISTEN,
        "Address of a page for Prometheus, such as 127.0.0.1:9464, without a password; no page if absent.",
    ),
    Key(
        "home_assistant.enabled",
        _BOOL,
        "Announce this device and its models to Home Assistant; withdrawn when switched off.",
    ),
    Key("home_assistant.prefix", _PREFIX, "Home Assistant's discovery prefix."),
    Key(
        "shutdown.limit_s",
        _number(0, 3600),
        "How long accepted requests may still take when the agent stops.",
        10.0,
    ),
)


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
