"""The bundles of a device, in a report: each verified from its first byte to its last, and admitted again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from agent.bundle.admission import admit
from agent.bundle.keyring import Keyring
from agent.bundle.machine import Machine
from agent.bundle.names import hex_digest
from agent.bundle.verify import verify_only
from agent.deploy.store import state_format
from agent.deploy.store.active import ActiveModel, read_active
from agent.deploy.store.state_file import peek
from agent.errors import EdgeError
from agent.provision.checks.finding import Finding, fail, ok

# Hashing takes a second for so much on a small board.
_SLOW_BYTES: Final = 50_000_000


def look_at_models(
    state_dir: Path, keyring: Keyring, machine: Machine, say: Callable[[str], None]
) -> Iterator[Finding]:
    """Look at the state directory and verify what is active in it.

    Parameters
    ----------
    say
        Called with what is being done, where it takes a while.
    """
    try:
        there = state_dir.is_dir()
        if there:
            next(state_dir.iterdir(), None)  # what cannot be read must not look as if it were not there
        active = read_active(state_dir) if there else {}
        state_format.check(state_dir)
    except PermissionError:
        yield fail("models", f"{state_dir} cannot be read", "run it with sudo")
        return
    except EdgeError as error:
        yield fail("models", str(error), error.hint or "see the agent's log")
        return
    if not active:
        text = "no model is active" if there else f"{state_dir} is not there: no agent has run yet"
        yield ok("models", f"{text}; edgebundle deploy, or edge-agent install, brings one")
    counters = _counters(state_dir)
    for name in sorted(active):
        yield _look_at(active[name], state_dir, keyring, machine, counters.get(name), say)


def _look_at(
    model: ActiveModel,
    state_dir: Path,
    keyring: Keyring,
    machine: Machine,
    counter: int | None,
    say: Callable[[str], None],
) -> Finding:
    subject = f"{model.name} {model.version}"
    path = state_dir / "store" / f"{hex_digest(model.digest)}.bundle"
    try:
        size = path.stat().st_size
        if size > _SLOW_BYTES:
            say(f"verifying {subject} ({size / 1e6:.0f} MB) ...")
        manifest, digest = verify_only(path, keyring)
        if digest != model.digest:
            return fail("models", f"{subject}: another bundle lies in its place", "deploy it again")
        admit(manifest, machine, deployed_as=model.name, committed_counter=counter)
    except FileNotFoundError:
        return fail("models", f"{subject} is active and its bundle is gone", "deploy it again")
    except PermissionError:
        return fail("models", f"{subject}: {path} cannot be read", "run it with sudo")
    except EdgeError as error:
        return fail("models", f"{subject}: {error} ({error.code})", error.hint or "deploy it again")
    needs = manifest.resources
    memory = (needs.arena_bytes + needs.params_bytes) / 1e6
    return ok("models", f"{subject} is whole, signed, and made for this machine; takes {memory:.0f} MB")


def _counters(state_dir: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in ("counters.json", "counters.json.mirror"):
        document = peek(state_dir / name)
        if isinstance(document, dict):
            for model, counter in document.items():
                if type(counter) is int:
                    found[model] = max(counter, found.get(model, 0))
    return found
