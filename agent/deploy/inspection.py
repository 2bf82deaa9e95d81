"""A bundle on disk, before it runs: verified, and admitted to this device.

Promises: a bundle that is returned has the digest that was asked for, a trusted key has signed it, and it may
run here now. Leaves to others: running it (`installer`), and when the keys are complete enough for a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Final

from agent import clock
from agent.bundle.admission import admit
from agent.bundle.counter_time import highest_counter
from agent.bundle.verify import VerifiedBundle, verify
from agent.deploy.parts import Parts
from agent.disk_thread import in_disk_thread
from agent.errors import DiskError, MixAndMatchError, StoreError

# Reading and hashing 2 GiB from a slow card takes less; a disk that does not respond takes longer.
VERIFY_LIMIT_S: Final = 600.0


async def inspect(
    parts: Parts,
    name: str,
    digest: str,
    counter_floor: int | None = None,
    *,
    is_new: bool = False,
    deployed: bool = False,
) -> VerifiedBundle:
    """Verify the bundle on disk with this digest, and check that it may run here as `name`.

    `counter_floor` is the security counter that it must meet; None for the committed one. `is_new` says that
    it was in service neither last nor before, and `deployed` that it replaces another one and does not only
    return to service.
    """
    try:
        async with asyncio.timeout(VERIFY_LIMIT_S):
            verified, highest = await in_disk_thread(_verify, parts, digest, is_new, deployed)
    except TimeoutError as error:
        raise DiskError(f"{digest} could not be read within {VERIFY_LIMIT_S:g} s") from error
    except OSError as error:
        raise StoreError(f"reading {digest}: {error.strerror}") from error
    with contextlib.ExitStack() as undo:
        undo.callback(verified.close)
        if verified.digest != digest:
            raise MixAndMatchError(f"expected a bundle with {digest}, got {verified.digest}")
        committed = parts.store.committed_counter(name)
        admit(
            verified.manifest,
            parts.circumstances.machine,
            deployed_as=name,
            committed_counter=committed if counter_floor is None else counter_floor,
            highest_counter=highest,
        )
        undo.pop_all()
    return verified


def _verify(parts: Parts, digest: str, is_new: bool, deployed: bool) -> tuple[VerifiedBundle, int | None]:
    """Return the bundle on disk, and the highest counter that a new one may have. This blocks."""
    keyring = parts.circumstances.read_keys()
    if parts.circumstances.serves_revoked and not deployed:
        keyring = replace(keyring, revoked=frozenset())
    stored = parts.store.has(digest)
    path = parts.store.bundle_path(digest) if stored else parts.store.part_path(digest)
    highest = highest_counter(clock.now_s(), synchronised=clock.is_synchronised()) if is_new else None
    return verify(path, keyring), highest
