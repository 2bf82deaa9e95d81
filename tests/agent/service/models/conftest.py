"""Workers without processes: a test says when they are ready, answer or die."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from agent.bundle.manifest import Resources
from agent.config.settings import WorkerSettings
from agent.errors import RequestError
from agent.service.models.supervisor import Supervisor
from agent.service.models.worker_process import WorkerProcess
from agent.service.requests.answers import ReplyTo
from agent.service.requests.pending import Ends, Pending
from agent.worker.frames import Answer, Buffer, Frame, Header, Load, Ready, Request, Share, encode
from tests.bundles import Signer

READY = Ready(0.0, 0.0, 0, 1, 0, False, "no sandbox: a test")


class FakeProcess:
    """Replaces a `WorkerProcess`; it is ready at once, unless its `Workers` are silent or broken."""

    def __init__(
        self, workers: Workers, on_frame: Callable[[Frame], None], on_end: Callable[[str], None]
    ) -> None:
        self._workers = workers
        self.on_frame = on_frame
        self._on_end = on_end
        self.load: Load | None = None
        self.requests: list[tuple[Request, bytes]] = []
        self.shares: list[Share] = []
        self.pid: int | None = None
        self.started_s = 0.0
        self.killed = False
        # It takes long to end after it was killed.
        self.deaf = False

    async def start(self, load: Load, manifest: bytes, descriptors: Sequence[int]) -> None:
        assert manifest
        assert len(descriptors) == len(load.files)
        self.started_s = asyncio.get_running_loop().time()
        if self._workers.broken:
            raise OSError("out of processes")
        self.load = load
        self.pid = len(self._workers.processes)
        if not self._workers.silent:
            asyncio.get_running_loop().call_soon(self.on_frame, Frame(READY))

    def send(self, header: Header, payload: Buffer = b"") -> None:
        encode(header, payload)
        if isinstance(header, Request):
            self.requests.append((header, bytes(payload)))
        elif isinstance(header, Share):
            self.shares.append(header)

    def answer(self) -> None:
        """Answer the oldest request with its own payload."""
        request, payload = self.requests.pop(0)
        tensors = (f"y;UINT8;{len(payload)}",)
        self.on_frame(
            Frame(Answer(request.seq, 200, "", "application/octet-stream", tensors), memoryview(payload))
        )

    def die(self, how: str = "killed by SIGSEGV") -> None:
        if self.pid is not None:
            self.pid = None
            self._on_end(how)

    def kill(self) -> None:
        self.killed = True
        if not self.deaf:
            asyncio.get_running_loop().call_soon(self.die, "killed by SIGKILL")

    async def stop(self, limit_s: float) -> None:
        assert limit_s >= 0
        self.die("ended with status 0")

    def rss_bytes(self) -> int:
        return 0


@dataclass
class Workers:
    """Makes fake processes, and keeps them in the order in which they were made."""

    processes: list[FakeProcess] = field(default_factory=list)
    silent: bool = False
    broken: bool = False

    def __call__(
        self, name: str, *, on_frame: Callable[[Frame], None], on_end: Callable[[str], None]
    ) -> WorkerProcess:
        assert name == "echo"
        self.processes.append(FakeProcess(self, on_frame, on_end))
        return cast(WorkerProcess, self.processes[-1])

    @property
    def latest(self) -> FakeProcess:
        return self.processes[-1]


@dataclass
class Requests:
    """Makes requests, and records how each ended: a payload, or an error."""

    ended: dict[int, bytes | RequestError] = field(default_factory=dict)
    count: int = 0

    def new(
        self,
        payload: bytes = b"x",
        *,
        deadline_s: float = 60.0,
        content_type: str = "",
        client: str = "me",
        given_up_s: float | None = None,
    ) -> Pending:
        self.count += 1
        now_s = asyncio.get_running_loop().time()
        reply = ReplyTo(f"edge/v1/replies/{client}/a", b"1", 1, now_s + deadline_s)
        expires_s = now_s + (deadline_s if given_up_s is None else given_up_s)
        frame = Request(self.count, content_type, received_s=now_s, deadline_s=expires_s, client=client)
        return Pending("echo", reply, None, frame, payload, Ends(self._answered, self._refused))

    def _answered(self, pending: Pending, answer: Answer, payload: bytes, version: str) -> None:
        assert (answer.seq, version) == (pending.frame.seq, "1.0.0")
        self._end(pending, bytes(payload))

    def _refused(self, pending: Pending, error: RequestError) -> None:
        self._end(pending, error)

    def _end(self, pending: Pending, how: bytes | RequestError) -> None:
        assert pending.frame.seq not in self.ended
        self.ended[pending.frame.seq] = how


@pytest.fixture
def workers() -> Workers:
    return Workers()


@pytest.fixture
def requests() -> Requests:
    return Requests()


@dataclass
class Supervised:
    """A supervisor and what it reported."""

    supervisor: Supervisor
    states: list[str] = field(default_factory=list)
    rooms: int = 0


@pytest.fixture
def supervised(tmp_path: Path, workers: Workers) -> Callable[..., Supervised]:
    """Return a function that makes a supervisor of a bundle, with fake processes."""
    signer = Signer(tmp_path / "trust")

    def make(*, resources: Resources | None = None, **limits: Any) -> Supervised:
        made: Supervised

        def on_state() -> None:
            made.states.append(made.supervisor.state.name)

        def on_room() -> None:
            made.rooms += 1

        declared: dict[str, Any] = {
            name: limits.pop(name) for name in ("inputs", "outputs", "buckets") if name in limits
        }
        if resources is not None:
            declared["resources"] = resources
        settings = WorkerSettings(**limits)
        bundle = signer.bundle(**declared)
        made = Supervised(
            Supervisor(bundle, settings, Share((), 1), spawn=workers, on_room=on_room, on_state=on_state)
        )
        return made

    return make
