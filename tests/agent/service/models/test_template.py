"""Workers are forks of a template: what they share, what they do not, and what happens when it ends."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agent.bundle.keyring import Keyring
from agent.bundle.tensor_spec import TensorSpec
from agent.bundle.verify import VerifiedBundle, verify
from agent.config.settings import QueueLimits, WorkerSettings
from agent.service.models import template as module
from agent.service.models.models import Models
from agent.service.models.template import Template
from agent.service.models.worker_process import WorkerProcess
from agent.worker.frames import Answer, Frame, Load, Ready, Request
from tests.agent.launching import PR_SET_CHILD_SUBREAPER, PROJECT, name_of, parent_of, prctl
from tests.agent.test_agent_process import pack
from tests.agent.worker.conftest import manifest, one_kernel, sealed, shared_kernels
from tests.bundles import Signer
from tests.fake_module import params
from tests.patience import until, wait_until

pytestmark = pytest.mark.slow

SPECS = (TensorSpec("x", "FP32", (4,)),), (TensorSpec("y", "FP32", (4,)),)


@pytest.fixture(scope="session")
def library(shared_file: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    return shared_kernels(shared_file)


@asynccontextmanager
async def running() -> AsyncIterator[Template]:
    template = Template()
    try:
        yield template
    finally:
        template.close()


class Served:
    """A worker with a model of one kernel."""

    def __init__(self, template: Template, library: Path, kernel: str = "twice") -> None:
        self._files = {
            "mod.so": library.read_bytes(),
            "mod.json": one_kernel(kernel).to_json(),
            "mod.params": params(),
        }
        self.frames: list[Frame] = []
        self.ends: list[str] = []
        self.process = WorkerProcess(
            kernel, launch=template.fork, on_frame=self.frames.append, on_end=self.ends.append
        )

    async def start(self) -> Served:
        descriptors = [sealed(each) for each in self._files.values()]
        described = manifest(self._files, *SPECS).to_bytes()
        try:
            await self.process.start(Load(tuple(self._files)), described, descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        await until(lambda: bool(self.frames))
        assert isinstance(self.frames[0].header, Ready), self.frames[0]
        return self

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    async def serves(self) -> bool:
        count = len(self.frames)
        self.process.send(Request(1, "application/octet-stream"), bytes(16))
        await until(lambda: len(self.frames) > count)
        header = self.frames[-1].header
        return isinstance(header, Answer) and header.status == 200


def links(pid: int) -> dict[int, str]:
    return {int(each.name): str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir()}


def children() -> set[int]:
    pid = os.getpid()
    return {int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def private_bytes(pid: int) -> int:
    """Return what a process shares with no other (proc_pid_smaps(5))."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


# A process between the template and a worker whose first thread ends before its second (qemu-user has such).
TWO_THREADS = """
import ctypes, os, sys, threading, time
from agent.worker import sandbox
from agent.worker.__main__ import _has_ended
between = os.getpid()
if os.fork():
    threading.Thread(target=time.sleep, args=(0.5,)).start()
    ctypes.CDLL(None).pthread_exit(None)
while not _has_ended(between):
    time.sleep(0.0002)
sandbox.end_with_parent()
time.sleep(1)
print("alive")
"""


def test_a_worker_whose_parent_has_another_thread_outlives_it() -> None:
    done = subprocess.run([sys.executable, "-c", TWO_THREADS], cwd=PROJECT, capture_output=True, check=False)
    assert (done.stdout, done.stderr) == (b"alive\n", b"")


async def test_a_template_has_one_thread_and_holds_nothing_that_a_worker_could_share(
    library: Path,
) -> None:
    async with running() as template:
        worker = await Served(template, library).start()
        pid = template.pid
        assert pid is not None
        assert (name_of(pid), name_of(worker.pid)) == ("edge-template", "edge-worker")
        assert len(list(Path(f"/proc/{pid}/task").iterdir())) == 1
        held = links(pid)
        assert held.pop(0) == "/dev/null"
        assert held.pop(1) == held.pop(2) != links(worker.pid)[2]
        [only] = held.values()
        assert only.startswith("socket:")
        # Memory that both could write.
        mappings = Path(f"/proc/{pid}/maps").read_text().splitlines()
        assert not [line for line in mappings if line.split()[1].endswith("s") and "w" in line.split()[1]]
        # A model that takes over a worker has no way to the template.
        assert only not in links(worker.pid).values()
        assert len([link for link in links(worker.pid).values() if link.startswith("socket:")]) == 1
        assert (parent_of(pid), parent_of(worker.pid)) == (os.getpid(), os.getpid())
        assert os.getsid(worker.pid) == worker.pid
        await worker.process.stop(5)
        assert worker.ends == ["ended with status 0"]


async def test_each_further_worker_takes_a_third_of_what_it_took_without_a_template(
    library: Path,
) -> None:
    async with running() as template:
        workers = [await Served(template, library).start() for _ in range(3)]
        for worker in workers:
            assert await worker.serves()
            # 24 MiB when each worker imported Python and numpy by itself.
            assert private_bytes(worker.pid) < 10 << 20
        for worker in workers:
            await worker.process.stop(5)


async def test_workers_live_on_without_their_template_and_the_next_one_waits_for_another(
    library: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running() as template:
        first = await Served(template, library).start()
        before = template.pid
        assert before is not None
        os.kill(before, signal.SIGKILL)
        await until(lambda: template.pid is None)
        assert "the template of workers ended (status -9)" in caplog.text
        assert not Path(f"/proc/{before}").exists()
        second, third = await asyncio.gather(*(Served(template, library).start() for _ in range(2)))
        killed = template.pid
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        # Its end is first seen by the one that asks it.
        wait_until(lambda: Path(f"/proc/{killed}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
        fourth = await Served(template, library).start()
        for worker in (first, second, third, fourth):
            assert await worker.serves()
            await worker.process.stop(5)
            assert worker.ends == ["ended with status 0"]


async def test_a_template_killed_at_any_time_costs_no_worker_and_leaves_no_process(
    library: Path,
) -> None:
    async with running() as template:
        chance = random.Random(1)
        before = children()

        async def kill_once() -> None:
            await until(lambda: template.pid is not None)
            await asyncio.sleep(chance.random() * 0.5)
            if template.pid is not None:
                os.kill(template.pid, signal.SIGKILL)

        for _ in range(6):
            killing = asyncio.create_task(kill_once())
            workers = [await Served(template, library).start() for _ in range(3)]
            await killing
            for worker in workers:
                assert await worker.serves()
                await worker.process.stop(5)
        template.close()
        assert not children() - before


async def test_a_template_that_is_slow_holds_up_only_the_worker_that_waits_for_it(library: Path) -> None:
    async with running() as template:
        first = await Served(template, library).start()
        assert template.pid is not None
        os.kill(template.pid, signal.SIGSTOP)
        starting = asyncio.create_task(Served(template, library).start())
        assert await first.serves()
        assert not starting.done()
        os.kill(template.pid, signal.SIGCONT)
        second = await starting
        for worker in (first, second):
            assert await worker.serves()
            await worker.process.stop(5)


async def test_a_worker_that_nobody_waits_for_is_not_left(library: Path) -> None:
    async with running() as template:
        first = await Served(template, library).start()
        before = children()
        assert template.pid is not None
        os.kill(template.pid, signal.SIGSTOP)
        starting = asyncio.create_task(Served(template, library).start())
        assert await first.serves()
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        second = await Served(template, library).start()
        for worker in (first, second):
            assert await worker.serves()
            await worker.process.stop(5)
        template.close()
        assert not children() - before


async def test_a_stuck_template_is_replaced(
    library: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running() as template:
        monkeypatch.setattr(module, "_FORK_LIMIT_S", 0.1)
        first = await Served(template, library).start()
        before = template.pid
        assert before is not None
        os.kill(before, signal.SIGSTOP)
        # The request may still be fulfilled, so it is not made again.
        with pytest.raises(TimeoutError):
            await Served(template, library).start()
        assert template.pid is None
        monkeypatch.undo()
        second = await Served(template, library).start()
        for worker in (first, second):
            assert await worker.serves()
            await worker.process.stop(5)


async def test_a_template_that_cannot_be_started_is_an_error_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running() as template:
        before = children()
        command = (sys.executable, "-c", "raise SystemExit('no numpy here')")
        monkeypatch.setattr(module, "template_command", lambda: command)
        with pytest.raises(ChildProcessError, match="whenever it is started"):
            await template.fork(())
        assert "the template of workers: no numpy here" in caplog.text
        assert not children() - before


async def test_a_worker_that_cannot_be_forked_is_an_error_and_the_template_goes_on(
    library: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running() as template:
        script = """
import os, sys
from agent.worker import __main__ as worker
fork, calls, template = os.fork, [], os.getpid()
def refuse():
    calls.append(1)
    if len(calls) == 1 or len(calls) == 3 and os.getpid() != template:
        raise OSError(11, "no process left")
    return fork()
os.fork = refuse
sys.exit(worker.main([sys.argv[1]]))
"""
    monkeypatch.setattr(module, "template_command", lambda: (sys.executable, "-c", script))
    # The first fork of all, then the second of the next worker: each in another process.
    for _ in range(2):
        with pytest.raises(OSError) as refused:
            await Served(template, library).start()
        assert refused.value.errno == errno.EAGAIN
    worker = await Served(template, library).start()
    await worker.process.stop(5)


async def test_a_worker_begins_when_the_process_in_between_is_gone(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = """
import os, sys, time
from agent.worker import __main__ as worker
end = os._exit
def end_late(status):
    time.sleep(0.3)
    end(status)
os._exit = end_late
sys.exit(worker.main([sys.argv[1]]))
"""
    monkeypatch.setattr(module, "template_command", lambda: (sys.executable, "-c", script))
    async with running() as template:
        worker = await Served(template, library).start()
        assert parent_of(worker.pid) == os.getpid()
        assert await worker.serves()
        await worker.process.stop(5)
        assert worker.ends == ["ended with status 0"]


@pytest.mark.parametrize("has_pidfd", [True, False])
async def test_where_the_agent_cannot_be_the_parent_workers_serve_and_end_all_the_same(
    library: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, has_pidfd: bool
) -> None:
    def refuse(_pid: int) -> int:
        raise OSError("an old kernel")

    # An emulator refuses it.
    prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    monkeypatch.setattr(module, "_PR_SET_CHILD_SUBREAPER", -1)
    if not has_pidfd:
        monkeypatch.setattr(os, "pidfd_open", refuse)
    async with running() as template:
        killed, stopped = [await Served(template, library).start() for _ in range(2)]
        assert "the kernel does not make the agent the parent of its workers" in caplog.text
        pids = killed.pid, stopped.pid
        assert os.getpid() not in map(parent_of, pids)
        assert await killed.serves()
        killed.process.kill()
        await until(lambda: bool(killed.ends))
        assert await stopped.serves()
        await stopped.process.stop(5)
        assert killed.ends == stopped.ends == ["ended"]
        await until(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in pids))


async def test_a_template_that_shares_with_one_worker_only_ends_after_a_while(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running() as template:
        first = await Served(template, library).start()
        monkeypatch.setattr(module, "_REST_S", 0.05)
        second = await Served(template, library).start()
        # Long enough for many checks.
        await asyncio.sleep(0.5)
        assert template.pid is not None
        await second.process.stop(5)
        await until(lambda: template.pid is None)
        assert await first.serves()
        monkeypatch.undo()
        third = await Served(template, library).start()
        for worker in (first, third):
            assert await worker.serves()
            await worker.process.stop(5)


async def test_the_template_ends_with_the_last_model(library: Path, tmp_path: Path) -> None:
    signer = Signer(tmp_path / "trust")
    before = children()
    models = Models(WorkerSettings(), QueueLimits(), lambda _name: None)
    for name in ("one", "other"):
        await models.activate(verified(signer, name, library))
    assert len(children() - before) == 3
    await models.deactivate("one")
    assert len(children() - before) == 2
    await models.deactivate("other")
    assert not children() - before
    await models.activate(verified(signer, "again", library))
    await models.close(5)
    assert not children() - before


def verified(signer: Signer, name: str, library: Path) -> VerifiedBundle:
    descriptor = os.memfd_create("bundle")
    try:
        os.write(descriptor, pack(signer, "twice", library.read_bytes(), name))
        return verify(descriptor, Keyring.from_dir(signer.trust))
    finally:
        os.close(descriptor)
