"""The limits that a worker sets itself before it loads a model: address space and processor time."""

from __future__ import annotations

import math
import os
from typing import Final

from agent.bundle.manifest import Manifest
from agent.config.settings import WorkerSettings
from agent.service.models.worker_process import CHECK_INTERVAL_S
from agent.worker.frames import Share

# Copies of a bundle's weights in a worker, if the bundle does not say what they become: in the executor's
# memory, and what kernels pack; Winograd's transform makes four of one.
_EARLY_WEIGHT_COPIES: Final = 5
# Of a thread of a kernel: RLIMIT_STACK of the sandbox, and its guard.
_STACK_BYTES: Final = (8 << 20) + (64 << 10)


def memory_bytes(settings: WorkerSettings, manifest: Manifest, share: Share) -> int:
    """Return the address space that a worker may take on top of what it has then; 0 for no limit.

    It cannot be raised later, so it suffices for as many threads as another share may have.
    """
    if not settings.memory_bytes:
        return 0
    resources = manifest.resources
    threads = max(share.threads, os.cpu_count() or 1)
    model = resources.needed_bytes(threads)
    if resources.thread_bytes is None:
        model += (_EARLY_WEIGHT_COPIES - 1) * resources.params_bytes
    files = sum(file.size for file in manifest.files.values())
    sessions = 0
    if manifest.states is not None or manifest.audio is not None:
        sessions = settings.session_bytes
    return settings.memory_bytes + sessions + files + model + threads * _STACK_BYTES


def cpu_s(settings: WorkerSettings, share: Share) -> int:
    """Return the processor seconds over all threads until the agent must allow more.

    The operating system enforces this limit, even if the agent cannot. It suffices for one request, and for
    what the worker computes until the agent looks again, even if the agent is late once.
    """
    seconds = settings.compute_limit_s + 2 * CHECK_INTERVAL_S
    return math.ceil(seconds * max(share.threads, len(share.cpus), os.cpu_count() or 1))
