"""The launcher inside mod.so: it runs with and without TVM in the process, and leaves nothing behind.

Each case runs in a new process, because it depends on which libraries are loaded.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import tvm

from builder.codegen.kernel_object import compile_object
from builder.codegen.link.linker import link
from builder.target.device_target import resolve
from tests.builder.kernels.tile_machine import environment, processor, require_x86, with_tiles

pytestmark = pytest.mark.slow

PREAMBLE = """
import contextlib, gc, os, sys, threading, time
import numpy as np
from agent.runtime.module import KernelModule
from agent.runtime.storage import allocate, view

def buffer(shape=(64, 64)):
    return view(allocate(4 * 64 * 64), "float32", shape)

def names():
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            yield open(f"/proc/self/task/{task}/comm").read().strip()

def helpers(expected):
    # A thread that was joined is listed for a moment longer.
    for _ in range(500):
        if (count := list(names()).count("edge-kernel")) == expected:
            break
        time.sleep(0.01)
    return count

import tvm_ffi
module = KernelModule.load(sys.argv[1])
x, y = buffer(), buffer()
x[:] = np.arange(4096, dtype="float32").reshape(64, 64)
double = module["double"]
tx, ty = tvm_ffi.from_dlpack(x), tvm_ffi.from_dlpack(y)
def right():
    y[:] = 0
    double(tx, ty)
    return bool(np.array_equal(y, 2 * x[:, ::-1]))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory, doubling: Callable[[], tvm.IRModule]) -> Path:
    target = resolve("host")
    path = tmp_path_factory.mktemp("launcher") / "mod.so"
    path.write_bytes(link(compile_object(doubling(), target), target))
    return path


def python(library: Path, body: str, before: str = "", **environment: str) -> str:
    script = before + PREAMBLE + textwrap.dedent(body)
    done = subprocess.run(
        [sys.executable, "-c", script, str(library)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},  # NumPy has no threads of its own
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_kernels_run_with_only_tvm_ffi(library: Path) -> None:
    assert python(library, "print(right(), 'tvm' in sys.modules)").split() == ["True", "False"]


def test_the_environment_sets_the_number_of_threads(library: Path) -> None:
    body = "right(); print(module.threads(), helpers(2))"
    assert python(library, body, EDGE_NUM_THREADS="3").split() == ["3", "2"]


@pytest.mark.parametrize("nonsense", ["0", "-1", "many", "100000", "2x"])
def test_a_nonsensical_number_of_threads_is_ignored(library: Path, nonsense: str) -> None:
    body = "print(module.threads() == len(os.sched_getaffinity(0)))"
    assert python(library, body, EDGE_NUM_THREADS=nonsense).strip() == "True"


def test_by_default_there_is_a_thread_for_each_core_that_the_quota_pays_for(library: Path) -> None:
    body = """
    from agent.bundle.processors import Processors
    print(module.threads() == Processors.detect().threads)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print(right(), KernelModule.load(sys.argv[1]).threads())
    """
    assert python(library, body, EDGE_NUM_THREADS="").split() == ["True", "True", "1"]


def test_without_the_executor_there_is_a_thread_for_each_cpu_of_the_affinity_mask(library: Path) -> None:
    script = """
import os, sys, tvm_ffi
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
print(tvm_ffi.load_module(sys.argv[1])["edge_threads"]())
"""
    command = [sys.executable, "-c", script, str(library)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "1"


def test_the_number_of_threads_can_change_between_runs(library: Path) -> None:
    body = """
    for count in (4, 1, 2, 3, 3):
        module.set_threads(count)
        print(right(), module.threads(), helpers(count - 1))
    """
    lines = [line.split() for line in python(library, body).splitlines()]
    assert lines == [["True", str(n), str(n - 1)] for n in (4, 1, 2, 3, 3)]


def test_an_impossible_number_of_threads_is_refused(library: Path) -> None:
    body = """
    for count in (0, 257, "2", 2.0):
        try:
            module["edge_set_threads"](count)
        except ValueError as error:
            print(error)
    """
    assert python(library, body).count("1 to 256") == 4


def test_kernels_compute_with_zeros_in_place_of_denormal_numbers(library: Path) -> None:
    body = """
    x[:] = 1e-39
    module.set_threads(3)
    before = module["edge_flush_denormals"](1)
    module["double"](tx, ty)
    inside = set(y.ravel().tolist())
    print(before, module["edge_flush_denormals"](0), inside, float(np.float32(1e-39) + np.float32(1e-39)) > 0)
    """
    assert python(library, body).strip() == "0 1 {0.0} True"


def test_an_impossible_way_of_flushing_is_refused(library: Path) -> None:
    body = """
    for value in (2, -1, "1", 1.0):
        try:
            module["edge_flush_denormals"](value)
        except ValueError as error:
            print(error)
    """
    assert python(library, body).count("0 or 1") == 4


def test_with_tvm_in_the_process_our_launcher_still_runs(library: Path) -> None:
    body = """
    import tvm
    again = KernelModule.load(sys.argv[1])
    again.set_threads(3)
    again["double"](tx, ty)
    print(np.array_equal(y, 2 * x[:, ::-1]), helpers(2))
    """
    assert python(library, body, TVM_NUM_THREADS="2").split() == ["True", "2"]


def test_tvm_loaded_first_changes_nothing(library: Path) -> None:
    body = "module.set_threads(3); print(right(), helpers(2), 'tvm' in sys.modules)"
    assert python(library, body, before="import tvm").split() == ["True", "2", "True"]


def test_launches_from_many_threads_at_once_are_correct(library: Path) -> None:
    body = """
    wrong = []
    def work():
        mine = buffer()
        out = tvm_ffi.from_dlpack(mine)
        for _ in range(2000):
            mine[:] = 0
            double(tx, out)
            if not np.array_equal(mine, 2 * x[:, ::-1]):
                wrong.append(1)
    crowd = [threading.Thread(target=work) for _ in range(4)]
    [t.start() for t in crowd]
    [t.join() for t in crowd]
    print(len(wrong))
    """
    assert python(library, body, EDGE_NUM_THREADS="2").strip() == "0"


def test_a_forked_child_starts_its_own_threads(library: Path) -> None:
    body = """
    right()
    child = os.fork()
    if child == 0:
        os._exit(0 if right() and helpers(1) == 1 else 1)
    print(os.waitpid(child, 0)[1], right())
    """
    assert python(library, body, EDGE_NUM_THREADS="2").split() == ["0", "True"]


def test_unloading_leaves_no_thread_and_no_mapping_behind(library: Path) -> None:
    body = """
    right()
    before = helpers(2)
    del double, module
    gc.collect()
    print(before, helpers(0))
    """
    assert python(library, body, EDGE_NUM_THREADS="3").split() == ["2", "0"]


def test_a_process_can_fork_after_a_library_is_unloaded(library: Path) -> None:
    body = """
    right()
    del double, module
    gc.collect()
    child = os.fork()
    if child == 0:
        os._exit(0)
    print(os.waitpid(child, 0)[1])
    """
    assert python(library, body, EDGE_NUM_THREADS="3").strip() == "0"


def test_repeated_loading_and_unloading_leaks_no_memory(library: Path) -> None:
    body = """
    def resident():
        return int(open("/proc/self/statm").read().split()[1]) * 4096
    del double, module
    def once():
        module = KernelModule.load(sys.argv[1])
        module["double"](tx, ty)
    for _ in range(50):
        once()
    gc.collect()
    before = resident()
    for _ in range(300):
        once()
    gc.collect()
    print(resident() - before)
    """
    assert int(python(library, body, EDGE_NUM_THREADS="2")) < 4 << 20


def test_a_sleeping_pool_costs_no_cpu_time(library: Path) -> None:
    body = """
    import time
    right()
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.5)
    print(time.process_time() - before)
    """
    assert float(python(library, body, EDGE_NUM_THREADS="4")) < 0.05


def test_threads_stay_awake_between_kernels_but_not_for_long(library: Path) -> None:
    # A thread that finds no processor spins for less processor time, so the longest of many is what counts.
    body = """
    import time
    def of_workers():
        return time.process_time() - time.thread_time()
    spun = []
    for _ in range(20):
        before = of_workers()
        right()
        time.sleep(0.02)
        spun.append(of_workers() - before)
    print(max(spun), min(spun))
    """
    longest, shortest = map(float, python(library, body, EDGE_NUM_THREADS="2").split())
    assert longest > 0.0003
    assert shortest < 0.002


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_threads_that_find_themselves_on_one_processor_part(library: Path) -> None:
    body = """
    first, second = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, {first})
    right()  # the worker inherits one processor
    worker = max(int(thread) for thread in os.listdir("/proc/self/task"))
    print(*os.sched_getaffinity(worker))
    end = time.monotonic() + 30
    while os.sched_getaffinity(worker) == {first} and time.monotonic() < end:
        os.sched_setaffinity(0, {first})
        os.sched_setaffinity(0, {first, second})
        right()
        time.sleep(0.001)  # on a busy machine the worker needs a turn on `first`
    print(*os.sched_getaffinity(worker), second)
    """
    before, after = python(library, body, EDGE_NUM_THREADS="2").splitlines()
    assert before == str(min(os.sched_getaffinity(0)))
    assert len(set(after.split())) == 1


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_worker_steps_aside_to_where_the_thread_that_launches_may_run(library: Path) -> None:
    body = """
    first, second = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, {first})
    right()  # the worker inherits one processor
    worker = max(int(thread) for thread in os.listdir("/proc/self/task"))
    def launch():
        os.sched_setaffinity(0, {first, second})
        right()
        time.sleep(0.001)
    end = time.monotonic() + 30
    while os.sched_getaffinity(worker) == {first} and time.monotonic() < end:
        thread = threading.Thread(target=launch)
        thread.start()
        thread.join()
    print(*os.sched_getaffinity(worker), second)
    """
    assert len(set(python(library, body, EDGE_NUM_THREADS="2").split())) == 1


def test_threads_that_share_the_only_processor_compute_and_sleep(library: Path) -> None:
    body = """
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:1]))
    print(all([right() for _ in range(100)]), helpers(3))
    """
    assert python(library, body, EDGE_NUM_THREADS="4") == "True 3\n"


def test_a_quota_bounds_the_default_number_of_threads(library: Path, cpu_group: Path) -> None:
    (cpu_group / "cpu.cfs_quota_us").write_text("50000")
    (cpu_group / "cpu.cfs_period_us").write_text("100000")
    before = f"open('{cpu_group}/cgroup.procs', 'w').write('0')\n"
    body = "print(right(), module.threads(), helpers(0))"
    assert python(library, body, before=before, EDGE_NUM_THREADS="").split() == ["True", "1", "0"]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_a_launch_does_not_wait_for_a_throttled_thread(library: Path, cpu_group: Path) -> None:
    # The worker may compute for 1 ms in each 50 ms, so most launches find it standing still. They do not wait
    # for it, unless it stands still in the middle of a task.
    (cpu_group / "cpu.cfs_period_us").write_text("50000")
    (cpu_group / "cpu.cfs_quota_us").write_text("1000")
    body = f"""
    def launches(seconds):
        count, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            assert right()
            count += 1
        return count / seconds
    module.set_threads(1)
    undisturbed = launches(0.5)
    module.set_threads(2)
    right()
    worker = max(int(thread) for thread in os.listdir("/proc/self/task"))
    open("{cpu_group}/tasks", "w").write(str(worker))
    rate = launches(2)
    throttled = int(open("{cpu_group}/cpu.stat").read().split("nr_throttled ")[1].split()[0])
    print(rate / undisturbed, throttled)
    """
    rate, throttled = map(float, python(library, body, EDGE_NUM_THREADS="2").split())
    assert throttled > 10
    assert rate > 0.25


def test_signals_interrupt_launches_and_never_reach_the_workers(library: Path) -> None:
    body = """
    import signal
    count = 0
    def note(*_):
        global count
        count += 1
    signal.signal(signal.SIGALRM, note)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    good, end = True, time.monotonic() + 0.5
    while time.monotonic() < end:
        good = right() and good
    signal.setitimer(signal.ITIMER_REAL, 0)
    blocked = []
    for thread in sorted(map(int, os.listdir("/proc/self/task")))[1:]:
        status = open(f"/proc/self/task/{thread}/status").read()
        mask = int(status.split("SigBlk:")[1].split()[0], 16)
        blocked.append(all(mask >> number - 1 & 1 for number in (2, 10, 14, 15)))
    print(good, count > 20, blocked)
    """
    assert python(library, body, EDGE_NUM_THREADS="3").strip() == "True True [True, True]"


TILES = """
import sys
from agent.errors import IncompatibleError
from agent.runtime.module import KernelModule
try:
    print(KernelModule.load(sys.argv[1]).threads())
except IncompatibleError as error:
    print(str(error).partition(": ")[2])
"""
REFUSED = "kernels need AMX: expected the system's permission to use tiles, got error 1"


@pytest.fixture(scope="module")
def on_tiles(tmp_path_factory: pytest.TempPathFactory, doubling: Callable[[], tvm.IRModule]) -> Path:
    """A library for a processor with tiles, which this one need not have: its kernel uses none."""
    path = tmp_path_factory.mktemp("tiles") / "mod.so"
    kernels = compile_object(doubling(), resolve("host"))
    path.write_bytes(link(kernels, dataclasses.replace(with_tiles(), features=())))
    return path


@pytest.mark.parametrize(
    ("refused", "told"),
    [
        ({}, "2"),
        ({"TILES_REFUSED": "1"}, REFUSED),
        ({"TILES_REFUSED": "1", "EDGE_NUM_THREADS": ""}, REFUSED),
    ],
)
def test_a_library_asks_for_tiles_and_says_if_they_are_refused(
    refused: dict[str, str],
    told: str,
    on_tiles: Path,
    shared_file: Callable[[str, Callable[[Path], None]], Path],
) -> None:
    require_x86()
    done = subprocess.run(
        [sys.executable, "-c", TILES, str(on_tiles)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**environment(shared_file("tiles.so", processor)), "EDGE_NUM_THREADS": "2", **refused},
        check=True,
    )
    assert done.stdout.strip() == told


def test_only_a_library_with_tiles_asks_for_them(
    tmp_path: Path,
    doubling: Callable[[], tvm.IRModule],
    shared_file: Callable[[str, Callable[[Path], None]], Path],
) -> None:
    require_x86()
    host = resolve("host")
    plain = resolve({"kind": "llvm", "mtriple": host.triple, "mcpu": host.cpu, "mattr": ["-amx-tile"]})
    (tmp_path / "mod.so").write_bytes(link(compile_object(doubling(), plain), plain))
    asked = "import ctypes; print(ctypes.CDLL(None).asked_for_tiles())"
    done = subprocess.run(
        [sys.executable, "-c", TILES + asked, str(tmp_path / "mod.so")],
        capture_output=True,
        text=True,
        timeout=120,
        env={**environment(shared_file("tiles.so", processor)), "EDGE_NUM_THREADS": "2"},
        check=True,
    )
    assert done.stdout.split() == ["2", "0"]
