"""What a refused bundle means for the person at the workstation: which file it was, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from agent.errors import BundleError

# By the code of the refusal, an agent's or that of a check made here.
HINTS: Final = {
    "ERR_ARBITRARY_SOFTWARE": "is the bundle signed with a key that this agent trusts? `edgebundle sign`",
    "ERR_ROLLBACK": "compile it with a --security-counter that is not lower than the one on the device",
    "ERR_INCOMPATIBLE": "compile it with the --target of that device; `edgebundle agents` shows what it is",
    "ERR_KEY_REVOKED": "sign it with a key that has not been revoked",
    "ERR_MIX_AND_MATCH": "what arrived is not what was deployed: is another file at that address?",
    "ERR_NO_SPACE": "free some space on the device, or take a model out of service",
    "ERR_SELF_TEST": "the recorded samples come out differently there; compile it with the target's features",
    "ERR_SOURCE": "an https source must be on the agent's allow-list; without --source it goes over MQTT",
}
_HERE: Final = "expected the .bundle that `edgebundle compile` wrote, whole and unchanged"


@contextmanager
def named(path: str) -> Iterator[None]:
    """Have a bundle's refusal say which file it is about, and what to do where it does not say so itself."""
    try:
        yield
    except BundleError as error:
        error.args = (f"{path}: {error}",)
        if error.hint is None:
            ours = error.code != "ERR_ARBITRARY_SOFTWARE"
            error.hint = HINTS.get(error.code, _HERE) if ours else _HERE
        raise
