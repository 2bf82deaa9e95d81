"""Every key of the configuration file, in one table: what it is called, what it must be, what it means.

`agent.config` checks files against it and `sample_config` writes it down, so a key without an explanation
cannot exist.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, cast

from agent.mqtt.settings import PROTOCOLS
from agent.wire.topics import is_device_name

LOG_LEVELS: Final = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Kind:
    """What a value must be.

    Attributes
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

    Attributes
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


def _is_address(value: object) -> bool:
    found = re.fullmatch(r"[^\s/@]+:([0-9]{1,5})", value) if isinstance(value, str) else None
    return found is not None and int(found[1]) <= 65535


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
PATH: Final = Kind("a path", _is_text)
_TEXTS: Final = Kind("a list of texts", _is_texts)
_BOOL: Final = Kind("true or false", lambda value: isinstance(value, bool))
_DEVICE: Final = Kind(
    "1 to 64 letters, digits, '.', '_' or '-', and neither \"groups\" nor \"replies\"",
    lambda value: isinstance(value, str) and is_device_name(value),
)
_LISTEN: Final = Kind("a text of the form HOST:PORT", _is_address)
_PREFIX: Final = Kind(
    "1 to 128 letters, digits, '.', '_', '-' or '/', and not below edge/",
    lambda value: (
        isinstance(value, str)
        and re.fullmatch(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*", value) is not None
        and len(value) <= 128
        and not f"{value}/".startswith("edge/")
    ),
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
        "state_dir", PATH, None, "Where bundles and state are kept; $STATE_DIRECTORY or /var/lib/edge-agent."
    ),
    Key("groups", _DEVICES, [], "Groups whose requests this device shares with their other members."),
    Key("compatible", _TEXTS, [], "Further names of this machine that a bundle's `compatible` may ask for."),
    Key("log_level", _one_of(*LOG_LEVELS), "info", "How much is logged, to standard error."),
    Key("broker.url", _TEXT, None, "mqtt://HOST[:PORT], or mqtts:// for TLS.", required=True),
    Key("broker.username", _TEXT, None, "Who we are to the broker."),
    Key("broker.password_file", PATH, None, "File whose first line is the password."),
    Key(
        "broker.ca",
        PATH,
        None,
        "PEM file with authorities that may vouch for the broker; the system's if absent.",
    ),
    Key("broker.certificate", PATH, None, "PEM file with our own certificate, for brokers that ask for one."),
    Key("broker.key", PATH, None, "PEM file with the key of that certificate."),
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
        PATH,
        None,
        "Folder with the public keys (*.pub, *.pem) that bundles may be signed with.",
        True,
    ),
    Key("sources.https", _TEXTS, [], "URL prefixes that bundles may be fetched from; none when empty."),
    Key("sources.ca", PATH, None, "PEM file with authorities for those; the system's if absent."),
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
    Key(
        "inference.answers_dir",
        PATH,
        None,
        "Where answers outlive the agent, best in memory; $RUNTIME_DIRECTORY or state_dir.",
    ),
    Key("worker.threads", _whole(0, 1024), 0, "Threads of one model's kernels; 0 for all cores."),
    Key(
        "worker.share_cores",
        _BOOL,
        True,
        "Several models: each has processors of its own, shared out anew when one comes or goes.",
    ),
    Key(
        "worker.memory_bytes",
        _whole(0, 1 << 50),
        512 * _MIB,
        "Memory beyond what a bundle's weights and tensors need; 0: no limit.",
    ),
    Key(
        "worker.require_sandbox",
        _BOOL,
        False,
        "Run no model where the kernel has neither Landlock nor seccomp.",
    ),
    Key("metrics.interval_s", _number(0.1, _DAY_S), 10.0, "How often metrics are published."),
    Key(
        "metrics.listen",
        _LISTEN,
        None,
        "Where Prometheus may read them, 127.0.0.1:9464 say; there is no password. Nowhere when absent.",
    ),
    Key(
        "home_assistant.enabled",
        _BOOL,
        False,
        "Announce this device and its models to Home Assistant; taken back when switched off.",
    ),
    Key("home_assistant.prefix", _PREFIX, "homeassistant", "Home Assistant's discovery prefix."),
    Key(
        "shutdown.limit_s", _number(0, 3600), 10.0, "How long accepted requests may still take when we stop."
    ),
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


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"'
    return str(value)
