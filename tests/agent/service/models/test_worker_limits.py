"""What the agent enforces on a worker from outside: threads, processors, processor time."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent.bundle.processors import cores_of
from agent.bundle.tensor_spec import TensorSpec
from agent.service.models import thread_gate, worker_log, worker_process
from agent.service.models.confinement import sandbox_of
from agent.service.models.processor_meter import ProcessorMeter
from agent.service.models.template import Template
from agent.service.models.thread_gate import ThreadGate, thread_limit
from agent.service.models.worker_process import WorkerProcess
from agent.worker.frames import Answer, Failed, Frame, Load, Ready, Request, Share
from tests.agent.launching import executed
from tests.agent.worker.conftest import kernel_library, manifest, one_kernel, sealed
from tests.fake_module import params
from tests.patience import until

__all__ = ["kernel_library"]

PRELUDE = """
import ctypes, os, signal, socket, sys, threading, time
from agent.worker import sandbox
from agent.worker.channel import Channel
from agent.worker.frames import Answer, Failed, Ready
connection = socket.socket(fileno=int(sys.argv[1]))
gate = socket.socket(fileno=int(sys.argv[2]))
channel = Channel(connection)
loaded, descriptors = channel.receive_load()
def ready():
    channel.send(Ready(0.0, 0.0, 0, 1, 0, True, "a test", True))
def spin():
    while True: pass
"""
SANDBOXED = """
status = sandbox.close_files(sandbox.Limits(), gate)
sandbox.close_loading(status)
gate.close()
"""


@dataclass
class Worker:
    """A process and what it reported."""

    process: WorkerProcess
    frames: list[Frame]
    ends: list[str]

    async def report(self) -> str:
        await until(lambda: bool(self.frames) and isinstance(self.frames[-1].header, Failed))
        header = self.frames[-1].header
        assert isinstance(header, Failed)
        return header.message


@asynccontextmanager
async def started(script: str, load: Load | None = None) -> AsyncIterator[Worker]:
    frames: list[Frame] = []
    ends: list[str] = []
    command = (sys.executable, "-c", PRELUDE + script)
    process = WorkerProcess("echo", launch=executed(command), on_frame=frames.append, on_end=ends.append)
    member = os.memfd_create("mod.so")
    try:
        await process.start(load or Load(("mod.so",)), b"{}", [member])
        yield Worker(process, frames, ends)
    finally:
        process.kill()
        await until(lambda: bool(ends))
        os.close(member)


def entries(folder: str) -> list[str]:
    return [each.name for each in Path(folder).iterdir()]


async def test_a_worker_starts_only_so_many_threads_and_goes_on() -> None:
    script = """
count = 0
try:
    while count < 200:
        threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
        count += 1
except RuntimeError:
    pass
channel.send(Failed("ERR", str(count)))
channel.receive()
"""
    async with started(SANDBOXED + script) as worker:
        # The main thread counts, too.
        assert int(await worker.report()) == thread_limit(0) - 1
        assert not worker.ends


async def test_threads_that_start_others_at_once_stay_below_twice_the_limit() -> None:
    script = """
def multiply():
    while True:
        try:
            threading.Thread(target=multiply, daemon=True).start()
        except RuntimeError:
            time.sleep(0.01)
        else:
            time.sleep(0.001)
threading.Thread(target=multiply, daemon=True).start()
time.sleep(0.2)
channel.send(Failed("ERR", str(threading.active_count())))
channel.receive()
"""
    async with started(SANDBOXED + script) as worker:
        assert int(await worker.report()) < 2 * thread_limit(0)


async def test_neither_processes_nor_a_gate_of_its_own_are_left_to_a_worker() -> None:
    # The listener's descriptor must not stay with the process that it decides about.
    script = """
try:
    os.fork()
    forked = "forked"
except PermissionError:
    forked = "refused"
held = []
for fd in range(3, 64):
    try: os.fstat(fd)
    except OSError: continue
    held.append(fd)
channel.send(Failed("ERR", f"{forked} {held == sorted({connection.fileno(), *descriptors})}"))
"""
    async with started(SANDBOXED + script) as worker:
        assert await worker.report() == "refused True"


@pytest.mark.parametrize("sandboxed", [True, False])
async def test_what_a_worker_says_about_its_sandbox_is_what_it_said_before_it_ran_a_model(
    sandboxed: bool,
) -> None:
    lie = 'channel.send(Ready(0.0, 0.0, 0, 1, 99, True, "complete", True)); channel.receive()'
    script = (SANDBOXED if sandboxed else "") + lie
    async with started(script) as worker:
        await until(lambda: bool(worker.frames))
        ready = worker.frames[0].header
        assert isinstance(ready, Ready)
        assert (ready.landlock > 0, ready.seccomp, ready.threads_bounded) == (sandboxed,) * 3
        assert ready.landlock < 99


async def test_a_worker_without_seccomp_reports_landlock_all_the_same() -> None:
    script = """
def absent(*arguments, **options): raise OSError(38, "Function not implemented")
vars(sandbox)["_set_filter"] = absent
status = sandbox.close_files(sandbox.Limits(), gate)
assert not status.threads and not status.seccomp and status.landlock
ready()
channel.receive()
"""
    async with started(script) as worker:
        await until(lambda: bool(worker.frames))
        ready = worker.frames[0].header
        assert isinstance(ready, Ready)
        assert sandbox_of(ready).missing == ("seccomp", "threads")
        assert ready.landlock > 0


async def test_a_worker_that_dies_leaves_no_descriptor_and_no_busy_loop() -> None:
    before = len(entries("/proc/self/fd"))
    async with started(SANDBOXED + "ready(); channel.receive(); os.kill(os.getpid(), 9)") as worker:
        await until(lambda: bool(worker.frames))
        used_s = time.process_time()
        worker.process.kill()
        await until(lambda: bool(worker.ends))
        assert worker.ends == ["killed by SIGKILL"]
        assert len(entries("/proc/self/fd")) == before + len(["the member"])
        assert time.process_time() - used_s < 1


async def test_a_worker_that_hands_over_nothing_is_served_all_the_same() -> None:
    async with started("gate.close(); ready(); channel.receive()") as worker:
        await until(lambda: bool(worker.frames))
        assert worker.process.pid is not None


async def test_a_gate_without_a_listener_closes_quietly() -> None:
    gate = ThreadGate("echo", 4)
    theirs = socket.socket(fileno=os.dup(gate.theirs.fileno()))
    gate.watch(os.getpid())
    theirs.sendall(b"no descriptor")
    theirs.close()
    await asyncio.sleep(0)
    gate.close()
    gate.close()


async def test_a_worker_that_asks_for_threads_all_the_time_does_not_keep_the_agent_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(thread_gate, "_DECISIONS", 20)
    monkeypatch.setattr(thread_gate, "_INTERVAL_S", 0.2)
    script = """
ready()
count = 0
began_s = time.monotonic()
while time.monotonic() < began_s + 0.5:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    count += 1
channel.send(Failed("ERR", f"{count} {time.monotonic() - began_s}"))
channel.receive()
"""
    async with started(SANDBOXED + script) as worker:
        count, took_s = map(float, (await worker.report()).split())
        # Three or four intervals; without the limit it starts some thousand.
        assert 0 < count <= (2 + took_s / 0.2) * 20


async def test_lines_of_a_worker_are_named_bounded_and_printable(caplog: pytest.LogCaptureFixture) -> None:
    script = r"""
os.write(2, b"first\n<0>edge-agent: \x1b[31mred\xff\n" + b"x" * 5000)
os.write(1, b"\nlast words")
os._exit(3)
"""
    async with started(script) as worker:
        await until(lambda: bool(worker.ends))
    assert worker.ends == ["ended with status 3"]
    lines = [record.getMessage() for record in caplog.records]
    assert lines[:2] == ["echo: its worker: first", "echo: its worker: <0>edge-agent: ?[31mred\\xff"]
    assert lines[-1] == "echo: its worker: last words"
    assert max(map(len, lines)) < 600


async def test_a_worker_that_writes_without_end_waits_and_the_agent_logs_little(
    caplog: pytest.LogCaptureFixture,
) -> None:
    script = """
ready()
threading.Thread(target=lambda: [os.write(2, b"x\\n" * 1000) for _ in range(10**9)], daemon=True).start()
channel.receive()
channel.send(Failed("ERR", "it serves"))
channel.receive()
"""

    def lines() -> int:
        return sum(record.name == worker_log.__name__ for record in caplog.records)

    began_s = time.monotonic()
    async with started(script) as worker:
        await until(lambda: bool(worker.frames))
        used_s = time.process_time()
        await until(lambda: lines() >= worker_log._LINES)
        worker.process.send(Request(1))
        assert await worker.report() == "it serves"
        assert time.process_time() - used_s < 2
    intervals = 1 + (time.monotonic() - began_s) // worker_log._INTERVAL_S
    assert lines() <= intervals * worker_log._LINES


async def test_a_worker_does_not_outlive_its_agent() -> None:
    # Even one that closes nothing and ignores the end of its channel.
    child = "from agent.worker import sandbox; sandbox.end_with_parent(); print(1, flush=True); input()"
    parent = f"""
import subprocess, sys, time
process = subprocess.Popen([sys.executable, "-c", {child!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
process.stdout.readline()
print(process.pid, flush=True)
time.sleep(100)
"""
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE)
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()
    # Its new parent may not have reaped it.
    state = Path(f"/proc/{worker}/stat")
    await until(lambda: not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z")


async def test_all_threads_of_a_worker_move_to_other_processors() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    script = """
for _ in range(3):
    threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
ready()
while True:
    channel.receive()
"""
    async with started(SANDBOXED + script) as worker:
        await until(lambda: bool(worker.frames))
        worker.process.send(Share((cpus[0],), 1))
        threads = entries(f"/proc/{worker.process.pid}/task")
        assert len(threads) == 4
        assert {frozenset(os.sched_getaffinity(int(each))) for each in threads} == {frozenset(cpus[:1])}


@pytest.mark.skipif(len(cores_of(os.sched_getaffinity(0))) < 2, reason="there is one core")
async def test_threads_that_help_with_kernels_have_a_core_each() -> None:
    cores = cores_of(os.sched_getaffinity(0))[:2]
    cpus = tuple(sorted(cores[0] + cores[1]))
    script = """
def kernel_thread(named):
    ctypes.CDLL(None).prctl(15, b"edge-kernel")
    named.set()
    time.sleep(1000)
def add():
    named = threading.Event()
    threading.Thread(target=kernel_thread, args=(named,), daemon=True).start()
    named.wait()
add()
ready()
while (frame := channel.receive()) is not None:
    if hasattr(frame.header, "seq"):
        add()
        channel.send(Answer(frame.header.seq, 200))
"""

    def placed() -> list[frozenset[int]]:
        threads = sorted(int(each) for each in entries(f"/proc/{worker.process.pid}/task"))
        return [frozenset(os.sched_getaffinity(thread)) for thread in threads]

    async with started(script, Load(("mod.so",), cpus=cpus)) as worker:
        await until(lambda: bool(worker.frames))
        whole, first, second = frozenset(cpus), frozenset(cores[0]), frozenset(cores[1])
        assert placed()[1:] == [second]
        assert whole <= placed()[0]
        # A change of threads replaces them at the next request.
        worker.process.send(Share(cpus, 2))
        worker.process.send(Request(1))
        await until(lambda: len(worker.frames) > 1)
        assert placed() == [whole, second, first]
        worker.process.send(Share(cores[0], 1))
        assert placed() == [first] * 3


async def test_a_processor_that_is_switched_off_costs_a_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with started("ready(); channel.receive(); channel.receive()") as worker:
        worker.process.send(Share((1023,), 1))
        assert [record.getMessage() for record in caplog.records] == [
            "echo: processors [1023]: Invalid argument"
        ]


async def test_the_kernels_limit_is_renewed_by_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "CHECK_INTERVAL_S", 0.01)
    async with started("ready(); channel.receive()", Load(("mod.so",), cpu_s=77)) as worker:
        pid = worker.process.pid
        assert pid is not None
        await until(lambda: 77 < resource.prlimit(pid, resource.RLIMIT_CPU)[0] < 80)


async def test_a_worker_that_computes_without_a_request_is_ended(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_process, "CHECK_INTERVAL_S", 0.02)
    monkeypatch.setattr(worker_process, "_UNEXPLAINED_LIMIT_S", 0.1)
    # It blocks the kernel's signal, which it can.
    script = """
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGXCPU})
threading.Thread(target=spin, daemon=True).start()
ready()
channel.receive()
time.sleep(100)
"""
    async with started(SANDBOXED + script) as worker:
        await until(lambda: bool(worker.ends))
        assert worker.ends == ["killed by SIGKILL"]
        assert "computed for 0.1 s without a request" in caplog.text


@pytest.mark.slow
async def test_a_worker_that_computes_for_a_request_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "CHECK_INTERVAL_S", 0.02)
    monkeypatch.setattr(worker_process, "_UNEXPLAINED_LIMIT_S", 0.1)
    script = """
ready()
seq = channel.receive().header.seq
end_s = time.process_time() + 0.25
while time.process_time() < end_s: pass
channel.send(Answer(seq, 200))
channel.receive()
"""
    async with started(script) as worker:
        await until(lambda: bool(worker.frames))
        worker.process.send(Request(1))
        await until(lambda: len(worker.frames) == 2)
        assert isinstance(worker.frames[0].header, Ready)
        assert isinstance(worker.frames[1].header, Answer)
        assert not worker.ends


@pytest.mark.slow
async def test_real_worker_has_the_complete_sandbox_and_starts_threads(kernel_library: Path) -> None:
    files = {
        "mod.so": kernel_library.read_bytes(),
        "mod.json": one_kernel("threaded").to_json(),
        "mod.params": params(),
    }
    spec = TensorSpec("x", "FP32", (4,)), TensorSpec("y", "FP32", (4,))
    described = manifest(files, spec[:1], spec[1:]).to_bytes()
    descriptors = [sealed(each) for each in files.values()]
    frames: list[Frame] = []
    ends: list[str] = []
    template = Template()
    process = WorkerProcess("probe", launch=template.fork, on_frame=frames.append, on_end=ends.append)
    try:
        await process.start(Load(tuple(files), require_sandbox=True), described, descriptors)
        await until(lambda: bool(frames))
        ready = frames[0].header
        assert isinstance(ready, Ready), ready
        assert ready.threads_bounded
        assert sandbox_of(ready).complete
        process.send(Request(1, "application/octet-stream"), struct.pack("=4f", 1, 2, 3, 4))
        await until(lambda: len(frames) == 2)
        assert struct.unpack("=4f", bytes(frames[1].payload)) == (2, 4, 6, 8)
    finally:
        await process.stop(5)
        template.close()
        for descriptor in descriptors:
            os.close(descriptor)


# -- the arithmetic


def test_time_of_requests_is_explained_and_time_without_them_is_not() -> None:
    meter = ProcessorMeter(100.0, 5.0)
    # Four processors for 10 s of requests.
    assert meter.feed(110.0, 45.0, busy_s=10.0, requests=3, processors=4) == 0.0
    # A thread that goes on: 10 s, of which half a second is forgiven.
    assert meter.feed(120.0, 55.0, busy_s=0.0, requests=0, processors=4) == pytest.approx(9.5)
    assert meter.feed(130.0, 65.0, busy_s=0.0, requests=0, processors=4) == pytest.approx(19.0)


def test_threads_that_stay_awake_after_each_request_are_forgiven() -> None:
    meter = ProcessorMeter(0.0, 0.0)
    for second in range(1, 1000):
        # 500 short requests a second on four processors, with 60 us of each thread after each.
        unexplained_s = meter.feed(
            float(second), second * (0.2 + 500 * 4 * 60e-6), busy_s=0.05, requests=500, processors=4
        )
        assert unexplained_s == 0.0


def test_unexplained_time_is_forgiven_slowly() -> None:
    meter = ProcessorMeter(0.0, 0.0)
    assert meter.feed(10.0, 10.0, busy_s=0.0, requests=0, processors=1) == pytest.approx(9.5)
    assert meter.feed(110.0, 10.0, busy_s=0.0, requests=0, processors=1) == pytest.approx(4.5)
    assert meter.feed(1010.0, 10.0, busy_s=0.0, requests=0, processors=1) == 0.0


@pytest.mark.skipif(len(cores_of(os.sched_getaffinity(0))) < 2, reason="there is one core")
async def test_a_thread_may_have_any_name() -> None:
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    script = """
ctypes.CDLL(None).prctl(15, b"\\xff\\xfe")
ready()
time.sleep(60)
"""
    async with started(script, Load(("mod.so",), cpus=cpus)) as worker:
        await until(lambda: bool(worker.frames))
        assert Path(f"/proc/{worker.process.pid}/comm").read_bytes() == b"\xff\xfe\n"
        assert not worker.ends
