"""What a worker is asked, what it gives back, how it is, and within which limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agent.errors import RequestError
from agent.service.requests.requests import InferRequest
from agent.worker.channel import Answer, Buffer


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Limits of every worker.

    Attributes
    ----------
    compute_limit_s
        Longest time for one request.
    crash_limit, crash_window_s
        So many deaths within so many seconds take a bundle out of service.
    threads, cpus
        As in `channel.Load`.
    memory_bytes
        Address space a worker may take beyond what its bundle's weights and tensors need; 0 for no limit.
    require_sandbox
        Refuse to load where the kernel offers no sandbox.
    command
        The worker's program, None for our own.
    """

    compute_limit_s: float = 30.0
    crash_limit: int = 3
    crash_window_s: float = 60.0
    threads: int = 0
    cpus: tuple[int, ...] = ()
    memory_bytes: int = 0
    require_sandbox: bool = False
    command: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request: an answer with its payload and the version that gave it, or an error."""

    answer: Answer | None = None
    payload: Buffer = b""
    version: str = ""
    error: RequestError | None = None


@dataclass(slots=True, eq=False)
class Sent:
    """One request that was handed over; `finish` is called exactly once."""

    request: InferRequest
    payload: bytes
    finish: Callable[[Outcome], None]
    seq: int = 0
