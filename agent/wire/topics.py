"""Every topic of version 1, as two inverse functions.

Promises: `parse_topic(format_topic(t)) == t` for every topic, and `format_topic(parse_topic(s)) == s` for
every string that `parse_topic` accepts. No other module contains a topic string. The agent answers only to
topics that parse as a `Reply`.
Leaves to others: who may publish what, which the broker's access control list decides.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Final

from agent.bundle.names import LEVEL_NAME, MODEL_NAME, SHA256

PREFIX: Final = "edge/v1"
RESERVED_NAMES: Final = frozenset({"groups", "replies"})
# The client of a topic without a user: all of them are one client, whose name no user can have.
ANONYMOUS: Final = "anonymous"

_OFFSET: Final = re.compile(r"0|[1-9][0-9]{0,15}", re.ASCII)
# A client's user name at the broker, which may be an e-mail address.
_REPLY_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~:=@-]{0,127}", re.ASCII)
# The levels that a client adds below its reply space: at most 8, without wildcards, control characters, `$`.
_REPLY_SUFFIX: Final = re.compile(r"[A-Za-z0-9._~:=@-]{1,128}(/[A-Za-z0-9._~:=@-]{1,128}){0,7}", re.ASCII)
# Longer strings are refused before any pattern looks at them.
MAX_TOPIC_CHARACTERS: Final = 1024
# Home Assistant's discovery prefix; its default has 13 characters.
MAX_DISCOVERY_PREFIX_CHARACTERS: Final = 128
_DISCOVERY_PREFIX: Final = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")
# Requests use few topics: parsing one takes 4 us, looking it up in the cache a quarter of that.
_REMEMBERED_TOPICS: Final = 256


@dataclass(frozen=True, slots=True)
class State:
    """`edge/v1/<device>/state`: online, stopped or offline."""

    device: str


@dataclass(frozen=True, slots=True)
class Info:
    """`edge/v1/<device>/info`: hardware, features, versions, capabilities."""

    device: str


@dataclass(frozen=True, slots=True)
class Metrics:
    """`edge/v1/<device>/metrics`: counters and histograms, every interval."""

    device: str


@dataclass(frozen=True, slots=True)
class ModelState:
    """`edge/v1/<device>/models/<model>/state`: a model's metadata and state."""

    device: str
    model: str


@dataclass(frozen=True, slots=True)
class Infer:
    """`edge/v1/<device>/models/<model>/infer/<user>`: a request for this device.

    The broker vouches for the user, because its access list lets no other publish there. An empty user is the
    topic that ends in `/infer`, for networks without users.
    """

    device: str
    model: str
    user: str = ""


@dataclass(frozen=True, slots=True)
class GroupInfer:
    """`edge/v1/groups/<group>/models/<model>/infer/<user>`: a request for any device of a group.

    The user is that of `Infer`.
    """

    group: str
    model: str
    user: str = ""


@dataclass(frozen=True, slots=True)
class Desired:
    """`edge/v1/<device>/desired`: which models should run."""

    device: str


@dataclass(frozen=True, slots=True)
class Reported:
    """`edge/v1/<device>/reported`: which models run."""

    device: str


@dataclass(frozen=True, slots=True)
class Job:
    """`edge/v1/<device>/jobs/<job>`: the state of one deployment."""

    device: str
    job: str


@dataclass(frozen=True, slots=True)
class BlockWant:
    """`edge/v1/<device>/bundles/<digest>/want`: the agent asks for blocks; `digest` is 64 hex digits."""

    device: str
    digest: str


@dataclass(frozen=True, slots=True)
class Block:
    """`edge/v1/<device>/bundles/<digest>/block/<offset>`: raw bytes of a bundle from `offset` on."""

    device: str
    digest: str
    offset: int


@dataclass(frozen=True, slots=True)
class Reply:
    """`edge/v1/replies/<client>/<suffix>`: an answer; answers go to no other topic."""

    client: str
    suffix: str


Topic = (
    State
    | Info
    | Metrics
    | ModelState
    | Infer
    | GroupInfer
    | Desired
    | Reported
    | Job
    | BlockWant
    | Block
    | Reply
)


def is_device_name(name: str) -> bool:
    """Return whether `name` can be the device or group level of a topic."""
    return LEVEL_NAME.fullmatch(name) is not None and name not in RESERVED_NAMES


def is_reply_name(name: str) -> bool:
    """Return whether `name` can be the client level of a reply topic."""
    return _REPLY_NAME.fullmatch(name) is not None and name not in RESERVED_NAMES


def is_user_name(name: str) -> bool:
    """Return whether `name` can be the user who asks, in the topic of a request and of its answer."""
    return is_reply_name(name) and name != ANONYMOUS


def format_topic(topic: Topic) -> str:
    """Write a topic.

    Raises
    ------
    ValueError
        If `parse_topic` would not return it: a name contains `/` or `+`, for example.
    """
    match topic:
        case State(device):
            text = f"{PREFIX}/{device}/state"
        case Info(device):
            text = f"{PREFIX}/{device}/info"
        case Metrics(device):
            text = f"{PREFIX}/{device}/metrics"
        case ModelState(device, model):
            text = f"{PREFIX}/{device}/models/{model}/state"
        case Infer(device, model, user):
            text = f"{PREFIX}/{device}/models/{model}/infer{_below(user)}"
        case GroupInfer(group, model, user):
            text = f"{PREFIX}/groups/{group}/models/{model}/infer{_below(user)}"
        case Desired(device):
            text = f"{PREFIX}/{device}/desired"
        case Reported(device):
            text = f"{PREFIX}/{device}/reported"
        case Job(device, job):
            text = f"{PREFIX}/{device}/jobs/{job}"
        case BlockWant(device, digest):
            text = f"{PREFIX}/{device}/bundles/{digest}/want"
        case Block(device, digest, offset):
            text = f"{PREFIX}/{device}/bundles/{digest}/block/{offset}"
        case Reply(client, suffix):
            text = f"{PREFIX}/replies/{client}/{suffix}"
    if parse_topic(text) != topic:
        raise ValueError(f"expected names that can be levels of a topic, got {topic!r}")
    return text


def _below(user: str) -> str:
    return f"/{user}" if user else ""


def parse_topic(text: str) -> Topic | None:
    """Read a topic; return None for a string that `format_topic` would not write."""
    # Longer strings stay out of the cache, which bounds its memory.
    return _parse(text) if len(text) <= MAX_TOPIC_CHARACTERS else None


@functools.lru_cache(maxsize=_REMEMBERED_TOPICS)
def _parse(text: str) -> Topic | None:
    if not text.startswith(PREFIX + "/"):
        return None
    head, _, rest = text[len(PREFIX) + 1 :].partition("/")
    if head == "replies":
        return _parse_reply(rest)
    if head == "groups":
        match rest.split("/"):
            case [group, "models", model, "infer", *user] if is_device_name(group) and _is_asked(model, user):
                return GroupInfer(group, model, *user)
        return None
    if not is_device_name(head):
        return None
    return _parse_device_topic(head, rest.split("/"))


def _parse_reply(rest: str) -> Reply | None:
    client, _, suffix = rest.partition("/")
    if is_reply_name(client) and _REPLY_SUFFIX.fullmatch(suffix):
        return Reply(client, suffix)
    return None


def _is_asked(model: str, user: list[str]) -> bool:
    """Return whether a topic can end in a model's `infer` and these levels."""
    return MODEL_NAME.fullmatch(model) is not None and (
        not user or (len(user) == 1 and is_user_name(user[0]))
    )


def _parse_device_topic(device: str, levels: list[str]) -> Topic | None:
    match levels:
        case ["state"]:
            return State(device)
        case ["info"]:
            return Info(device)
        case ["metrics"]:
            return Metrics(device)
        case ["desired"]:
            return Desired(device)
        case ["reported"]:
            return Reported(device)
        case ["models", model, "state"] if MODEL_NAME.fullmatch(model):
            return ModelState(device, model)
        case ["models", model, "infer", *user] if _is_asked(model, user):
            return Infer(device, model, *user)
        case ["jobs", job] if LEVEL_NAME.fullmatch(job):
            return Job(device, job)
        case ["bundles", digest, "want"] if SHA256.fullmatch(digest):
            return BlockWant(device, digest)
        case ["bundles", digest, "block", offset] if SHA256.fullmatch(digest) and _OFFSET.fullmatch(offset):
            return Block(device, digest, int(offset))
    return None


def asking_user(text: str) -> str | None:
    """Return the user in the topic of a request that `parse_topic` refuses; None if it has no such level."""
    before, _, last = text.rpartition("/")
    return last if before.endswith("/infer") else None


def infer_filters(device: str) -> tuple[str, str]:
    """Return the filters for requests to any model of a device; an unknown model is answered with 404.

    No topic matches both, so that no broker delivers a request twice.
    """
    every = f"{PREFIX}/{device}/models/+/infer"
    return every, f"{every}/+"


def group_filters(group: str, model: str) -> tuple[str, str]:
    """Return a group's shared subscriptions: the broker sends each request to one member."""
    every = f"$share/{group}/{format_topic(GroupInfer(group, model))}"
    return every, f"{every}/+"


def reply_filter(client: str, below: str = "") -> str:
    """Return the filter for everything in a client's reply space, or only for what is below `below` in it."""
    return f"{PREFIX}/replies/{client}/{below}/#" if below else f"{PREFIX}/replies/{client}/#"


def block_filter(device: str, digest: str) -> str:
    """Return the filter for all blocks of one bundle for a device."""
    return f"{PREFIX}/{device}/bundles/{digest}/block/+"


def all_jobs_filter() -> str:
    """Return the filter for the jobs of all devices."""
    return f"{PREFIX}/+/jobs/+"


def all_metrics_filter() -> str:
    """Return the filter for the metrics of all devices."""
    return f"{PREFIX}/+/metrics"


def states_filter() -> str:
    """Return the filter for the states of all devices."""
    return f"{PREFIX}/+/state"


def infos_filter() -> str:
    """Return the filter for the info documents of all devices."""
    return f"{PREFIX}/+/info"


def models_filter(device: str) -> str:
    """Return the filter for the states of all models of a device."""
    return f"{PREFIX}/{device}/models/+/state"


def all_models_filter() -> str:
    """Return the filter for the states of all models of all devices."""
    return f"{PREFIX}/+/models/+/state"


def model_states_filter(model: str) -> str:
    """Return the filter for the states of one model on all devices."""
    return f"{PREFIX}/+/models/{model}/state"


def fleet_filters() -> tuple[str, ...]:
    """Return the filters for the documents of every device about itself and its models."""
    return (states_filter(), infos_filter(), all_models_filter())


def reports_filter() -> str:
    """Return the filter for the reported documents of all devices."""
    return f"{PREFIX}/+/reported"


def is_discovery_prefix(prefix: str) -> bool:
    """Return whether Home Assistant's topics may begin with `prefix`: not those of agents."""
    return (
        len(prefix) <= MAX_DISCOVERY_PREFIX_CHARACTERS
        and _DISCOVERY_PREFIX.fullmatch(prefix) is not None
        and prefix.partition("/")[0] != PREFIX.partition("/")[0]
    )


def discovery_id(name: str) -> str:
    """Return a name with Home Assistant's characters only: letters, digits, '_' and '-'."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)


def discovery_topic(prefix: str, device: str) -> str:
    """Return where Home Assistant looks for a device's entities: the only topic outside `edge/v1`."""
    return f"{prefix}/device/edge_{discovery_id(device)}/config"
