"""The settings that the agent runs with: frozen values with their defaults."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.mqtt.settings import BrokerSettings

# So long that 1000 agents with three connections each make at most 150 connects in any second, and so short
# that all of them are back within 30 s (docs/decisions/0018).
RECONNECT_SPREAD_S: Final = 28.0


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """How much may wait for one model.

    Attributes
    ----------
    requests
        How many requests; at a tenth of a second each, the last of 64 waits for longer than most deadlines.
    payload_bytes
        Their payloads together.
    """

    requests: int = 64
    payload_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Limits of every worker.

    Attributes
    ----------
    compute_limit_s
        Longest time for one request.
    crash_limit, crash_window_s
        So many deaths within so many seconds take a model out of service.
    threads
        Threads of one model's kernels; 0 for as many as it has processors.
    share_cores
        Whether several models have different processors.
    memory_bytes
        Address space of a worker beyond what its bundle's weights and tensors need; 0 for no limit.
    require_sandbox
        Refuse to load a model unless the sandbox is complete.
    sessions, session_idle_s, session_bytes
        Sessions of one model's clients, seconds after which an unused one ends, and their bytes together.
    batch
        Compute waiting requests together, if the model declares a batch.
    batch_delay_s
        How long after its arrival a request waits for others then.
    """

    compute_limit_s: float = 30.0
    crash_limit: int = 3
    crash_window_s: float = 60.0
    threads: int = 0
    share_cores: bool = True
    memory_bytes: int = 512 << 20
    require_sandbox: bool = False
    sessions: int = 16
    session_idle_s: float = 600.0
    session_bytes: int = 64 << 20
    batch: bool = False
    batch_delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """A host and a port to listen on."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> ListenAddress:
        """Read `HOST:PORT` or `[HOST]:PORT`.

        Raises
        ------
        ValueError
            If it has another form.
        """
        found = re.fullmatch(r"\[?([^\s/@\[\]]+)\]?:([0-9]{1,5})", text)
        if found is None or int(found[2]) > 65535:
            raise ValueError(f"expected HOST:PORT, got {text!r}")
        return cls(found[1], int(found[2]))


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """Every how many seconds metrics are published, and where the page for Prometheus listens, if at all."""

    interval_s: float = 10.0
    listen: ListenAddress | None = None


@dataclass(frozen=True, slots=True)
class HomeAssistantSettings:
    """How Home Assistant finds the device.

    Attributes
    ----------
    enabled
        Whether the device and its models are announced.
    prefix
        Home Assistant's discovery prefix.
    """

    enabled: bool = False
    prefix: str = "homeassistant"


@dataclass(frozen=True, slots=True)
class Config:
    """The agent's configuration; `KEYS` explains every key of the file.

    Attributes
    ----------
    device, state_dir, groups, compatible, log_level
        The keys of these names.
    broker, metrics, home_assistant
        The sections of these names.
    trust_dir, sources_https, sources_ca, shutdown_limit_s
        `trust.dir`, `sources.https`, `sources.ca`, `shutdown.limit_s`.
    serves_revoked
        Whether `trust.on_revoke` is `serve`.
    queue
        `inference.queue_requests` and `inference.queue_bytes`.
    default_deadline_s, max_deadline_s, answers_dir
        The keys of these names under `inference`; `max_deadline_s` is at least `default_deadline_s`;
        `answers_dir` is `state_dir` if the file leaves it open.
    worker
        The section `worker`, and the limits under `inference` that concern workers.
    """

    device: str
    state_dir: Path
    groups: tuple[str, ...]
    compatible: tuple[str, ...]
    log_level: str
    broker: BrokerSettings
    trust_dir: Path
    serves_revoked: bool
    sources_https: tuple[str, ...]
    sources_ca: Path | None
    queue: QueueLimits
    default_deadline_s: float
    max_deadline_s: float
    answers_dir: Path
    worker: WorkerSettings
    metrics: MetricsSettings
    home_assistant: HomeAssistantSettings
    shutdown_limit_s: float
