"""A device's bundles in a report: each is verified completely, and checked for admission again."""

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
from agent.provision.finding import Finding, fail, ok, warn

# A small board takes a second to hash this much.
_SLOW_BYTES: Final = 50_000_000


def check_models(
    state_dir: Path, keyring: Keyring, machine: Machine, progress: Callable[[str], None]
) -> Iterator[Finding]:
    """Check the state directory, and verify each active bundle in it with the keys, for this machine.

    `progress` is called with a line of text before a bundle that takes a while.
    """
    try:
        exists = state_dir.is_dir()
        if exists:
            next(state_dir.iterdir(), None)  # an unreadable folder must not look empty
        active = read_active(state_dir) if exists else {}
        state_format.check(state_dir)
    except PermissionError:
        yield fail("models", f"{state_dir} cannot be read", "run it with sudo")
        return
    except EdgeError as error:
        yield fail("models", str(error), error.hint or "check the agent's log")
        return
    if not active:
        text = "no model is active" if exists else f"{state_dir} does not exist: no agent has run yet"
        yield ok("models", f"{text}; deploy one with edgebundle deploy or edge-agent install")
    counters = _counters(state_dir)
    for name in sorted(active):
        yield _check_model(active[name], state_dir, keyring, machine, counters.get(name), progress)


def _check_model(
    model: ActiveModel,
    state_dir: Path,
    keyring: Keyring,
    machine: Machine,
    counter: int | None,
    progress: Callable[[str], None],
) -> Finding:
    subject = f"{model.name} {model.version}"
    path = state_dir / "store" / f"{hex_digest(model.digest)}.bundle"
    try:
        size = path.stat().st_size
        if size > _SLOW_BYTES:
            progress(f"verifying {subject} ({size / 1e6:.0f} MB) ...")
        manifest, digest = verify_only(path, keyring)
        if digest != model.digest:
            return fail(
                "models", f"{subject}: expected bundle {model.digest}, got {digest}", "deploy it again"
            )
        floor = counter if model.counter_floor is None else model.counter_floor
        admit(manifest, machine, deployed_as=model.name, committed_counter=floor)
    except FileNotFoundError:
        return fail("models", f"{subject} is active, but its bundle is missing", "deploy it again")
    except PermissionError:
        return fail("models", f"{subject}: {path} cannot be read", "run it with sudo")
    except EdgeError as error:
        return fail("models", f"{subject}: {error} ({error.code})", error.hint or "deploy it again")
    if model.rolled_back is not None:
        back = model.rolled_back
        return warn(
            "models",
            f"{subject} serves, because {back.version} was rolled back: {back.reason}",
            "deploy a version that works, or the same one again",
        )
    memory = manifest.resources.needed_bytes(machine.threads) / 1e6
    return ok("models", f"{subject} is intact, signed, and made for this machine; it needs {memory:.0f} MB")


def _counters(state_dir: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in ("counters.json", "counters.json.mirror"):
        document = peek(state_dir / name)
        if isinstance(document, dict):
            for model, counter in document.items():
                if type(counter) is int:
                    found[model] = max(counter, found.get(model, 0))
    return found
