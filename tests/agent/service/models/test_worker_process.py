"""A worker process is started, ended and reaped, whatever it does and whatever the kernel offers."""

from __future__ import annotations

import asyncio
import os
import sys
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agent.service.models import worker_process
from agent.service.models.worker_process import WorkerProcess
from agent.worker.frames import Frame, Load, Request, encode
from tests.agent.launching import executed
from tests.patience import PATIENCE_S

# The last argument is the number of the channel's descriptor.
# Nothing happens before the load has arrived: a worker that is gone before it cannot be started at all.
PRELUDE = (
    "import os, signal, socket, sys, time; channel = socket.socket(fileno=int(sys.argv[1]));"
    "channel.recv(1, socket.MSG_PEEK);"
)


@dataclass
class Recorder:
    """What a process reported."""

    frames: list[Frame] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def on_end(self, how: str) -> None:
        self.ends.append(how)
        self.ended.set()


@pytest.fixture
def member() -> Iterator[int]:
    descriptor = os.memfd_create("mod.so")
    yield descriptor
    os.close(descriptor)


async def start(script: str, member: int) -> tuple[WorkerProcess, Recorder]:
    recorder = Recorder()
    process = WorkerProcess(
        "echo",
        launch=executed((sys.executable, "-c", PRELUDE + script)),
        on_frame=recorder.frames.append,
        on_end=recorder.on_end,
    )
    await process.start(Load(("mod.so",)), b"{}", [member])
    return process, recorder


@pytest.fixture(params=["pidfd", "poll"])
def way_to_wait(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "poll":

        def refuse(_pid: int) -> int:
            raise OSError("an old kernel")

        monkeypatch.setattr(os, "pidfd_open", refuse)
    return str(request.param)


@pytest.mark.parametrize(
    ("script", "how", "grace_s"),
    [
        ("sys.exit(3)", "ended with status 3", 20),
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL", 20),
        ("channel.sendall(b'GET / HTTP/1.1' + bytes(100)); time.sleep(60)", "sent an invalid frame", 0.05),
    ],
)
async def test_end_is_reported_once_and_the_process_is_reaped(
    way_to_wait: str, member: int, script: str, how: str, grace_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "_END_GRACE_S", grace_s)
    process, recorder = await start(script, member)
    pid = process.pid
    await asyncio.wait_for(recorder.ended.wait(), PATIENCE_S)
    assert [end.partition(":")[0] for end in recorder.ends] == [how]
    assert process.pid is None
    assert process.rss_bytes() == 0
    assert not Path(f"/proc/{pid}").exists()


async def test_process_that_closes_its_channel_and_lives_is_killed(
    way_to_wait: str, member: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "_END_GRACE_S", 0.05)
    _, recorder = await start("channel.close(); time.sleep(60)", member)
    await asyncio.wait_for(recorder.ended.wait(), PATIENCE_S)
    assert recorder.ends == ["killed by SIGKILL"]


async def test_process_that_ignores_the_stop_is_killed(way_to_wait: str, member: int) -> None:
    process, recorder = await start("time.sleep(60)", member)
    assert process.rss_bytes() > 0
    await asyncio.wait_for(process.stop(0.05), PATIENCE_S)
    assert recorder.ends == ["killed by SIGKILL"]


async def test_process_that_cannot_take_its_files_leaves_nothing_behind(member: int) -> None:
    recorder = Recorder()
    process = WorkerProcess(
        "echo",
        launch=executed((sys.executable, "-c", PRELUDE + "time.sleep(60)")),
        on_frame=recorder.frames.append,
        on_end=recorder.on_end,
    )
    with pytest.raises(OSError, match="descriptor"):
        await process.start(Load(("mod.so",)), b"{}", [10_000])
    await asyncio.wait_for(recorder.ended.wait(), PATIENCE_S)
    assert process.pid is None


# It reads only once the test has looked, and answers with what follows the load.
READS_LATE = """
import pathlib
while not pathlib.Path({go!r}).exists(): time.sleep(0.01)
got, want = 0, {nbytes}
while got < want: got += len(channel.recv(min(want - got, 1 << 20)))
"""


async def test_large_request_that_a_worker_does_not_take_yet_is_in_memory_once(
    member: int, tmp_path: Path
) -> None:
    payload = bytes(8 << 20)
    load, requests = Load(("mod.so",)), (Request(1), Request(2))
    nbytes = sum(len(part) for part in encode(load, b"{}"))
    nbytes += sum(len(encode(request)[0]) + len(payload) for request in requests)
    process, recorder = await start(READS_LATE.format(go=str(tmp_path / "go"), nbytes=nbytes), member)
    tracemalloc.start()
    try:
        for request in requests:
            process.send(request, payload)
        await asyncio.sleep(0)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < len(payload) / 4
    (tmp_path / "go").touch()
    await asyncio.wait_for(recorder.ended.wait(), PATIENCE_S)
    assert recorder.ends == ["ended with status 0"], "it has read all, in parts"
