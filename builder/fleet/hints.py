"""What to do when an agent refuses a deployment; it reports the wire code of one of these classes."""

from __future__ import annotations

from typing import Final

from agent.bundle.counter_time import AHEAD_HINT
from agent.errors import (
    CounterAheadError,
    EdgeError,
    IncompatibleError,
    KeyRevokedError,
    MixAndMatchError,
    NoSpaceError,
    RollbackError,
    SelfTestError,
    SignatureError,
    SourceError,
)

AGENT_NAME: Final = "take a name from the first column of `edgebundle agents`"
OLD_REPORT: Final = "install this version of edge-agent on the device"

DEPLOYMENT_HINTS: Final[dict[type[EdgeError], str]] = {
    SignatureError: "sign the bundle with a key that this agent trusts: see `edgebundle sign --help`",
    RollbackError: "compile it again: the counter rises with each build, unless --security-counter sets it",
    CounterAheadError: f"compile it again: {AHEAD_HINT}",
    IncompatibleError: "compile it with the --target of that device, which `edgebundle agents` shows",
    KeyRevokedError: "sign it with a key that has not been revoked",
    MixAndMatchError: "the agent received another file than the one deployed: check what --source serves",
    NoSpaceError: "free some space on the device, or remove a model from it",
    SelfTestError: "the samples give other results on that device: compile for its CPU and features",
    SourceError: "over MQTT, keep the command running that sends it, and let the broker take larger packets; "
    "over https, add the source to the agent's allow-list",
}
_HINT_BY_CODE: Final = {error.code: hint for error, hint in DEPLOYMENT_HINTS.items()}


def deployment_hint(code: str | None) -> str:
    """Return what to do about a deployment that an agent ended with this wire code; empty if unknown."""
    return _HINT_BY_CODE.get(code or "", "")
