"""Which parts of its sandbox a worker has, in the form in which the agent reports them."""

from __future__ import annotations

from collections.abc import Iterable

from agent.wire.info import Sandbox
from agent.worker.frames import Ready


def sandbox_of(ready: Ready) -> Sandbox:
    """Return the sandbox of a worker that is ready."""
    parts = {"landlock": ready.landlock > 0, "seccomp": ready.seccomp, "threads": ready.threads_bounded}
    return Sandbox(ready.landlock, tuple(name for name, in_force in parts.items() if not in_force))


def weakest(sandboxes: Iterable[Sandbox]) -> Sandbox | None:
    """Return the parts that all sandboxes have; None if there are no sandboxes.

    The workers of a device differ only if their bundles or limits do.
    """
    found = list(sandboxes)
    if not found:
        return None
    missing = {part for each in found for part in each.missing}
    return Sandbox(min(each.landlock for each in found), tuple(sorted(missing)))
