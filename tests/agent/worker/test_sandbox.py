"""A hostile mod.so can do nothing: each kernel is compiled C that runs in a real worker."""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from agent.bundle.tensor_spec import TensorSpec
from agent.confinement import architecture as architectures
from agent.confinement import landlock
from agent.confinement.architecture import Architecture
from agent.worker import system_calls
from agent.worker.frames import Failed, Ready, Request
from agent.worker.sandbox import Status, filter_program
from tests.agent.worker.conftest import Spawn, compile_c, processor_s
from tests.fake_module import GraphBuilder
from tests.patience import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow


def test_this_kernel_supports_the_whole_sandbox(spawn: Spawn) -> None:
    loaded = spawn("twice").loaded
    assert isinstance(loaded, Ready)
    assert loaded.landlock >= 1, loaded.sandbox
    assert loaded.seccomp
    # The gate for threads has no server here.
    assert loaded.sandbox == f"landlock {loaded.landlock}, seccomp, unbounded threads"


FORBIDDEN = (
    *("open_socket", "open_unix_socket", "open_pair", "read_file", "write_file", "read_memory_of_agent"),
    *("run_program", "make_process", "kill_agent", "trace", "mount", "make_memory_file", "make_executable"),
    *("make_namespace", "raise_limit"),
)


def test_forbidden_calls_of_a_model_are_refused(spawn: Spawn) -> None:
    trace = Path("/tmp/edgebundle-was-here")
    trace.unlink(missing_ok=True)
    # A model of all these kernels; each writes the result of its call, an errno or 0.
    g = GraphBuilder()
    x = g.input("x", (4,))
    graph = g.graph(*(g.call(kernel, [x], (4,)) for kernel in FORBIDDEN))
    outputs = tuple(TensorSpec(kernel, "FP32", (4,)) for kernel in FORBIDDEN)
    worker = spawn(graph, outputs=outputs)
    # The kernels run once while the model is loaded, too.
    assert isinstance(worker.loaded, Ready), worker.loaded
    for _ in range(2):  # it goes on serving
        results = worker.infer_raw(1, 2, 3, 4).reshape(len(FORBIDDEN), 4)[:, 0]
        assert dict(zip(FORBIDDEN, results, strict=True)) == dict.fromkeys(FORBIDDEN, errno.EPERM)
    assert not trace.exists()


def test_the_same_calls_succeed_without_a_sandbox(kernel_library: Path) -> None:
    # Otherwise the test above could pass because its kernels do nothing.
    script = """if True:
        import sys, numpy as np
        from agent.runtime.module import KernelModule
        module = KernelModule.load(sys.argv[1])
        x, y = np.ones(4, np.float32), np.ones(4, np.float32)
        for name in sys.argv[2:]:
            module[name](x, y)
            print(name, int(y[0]))
    """
    names = ["open_socket", "open_pair", "read_file", "make_process", "make_memory_file", "make_executable"]
    done = subprocess.run(
        [sys.executable, "-c", script, str(kernel_library), *names],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [word for name in names for word in (name, "0")]


def test_kernels_may_start_threads(spawn: Spawn) -> None:
    worker = spawn("threaded")
    np.testing.assert_array_equal(worker.infer_raw(1, 2, 3, 4), [2, 4, 6, 8])


@pytest.mark.parametrize(("kernel", "death"), [("segfault", signal.SIGSEGV), ("abort", signal.SIGABRT)])
def test_a_crash_ends_the_worker_and_leaves_no_core(
    spawn: Spawn, tmp_path: Path, kernel: str, death: signal.Signals
) -> None:
    worker = spawn(kernel)
    np.testing.assert_array_equal(worker.infer_raw(1, 2, 3, 4), [2, 4, 6, 8])
    worker.channel.send(Request(2, "application/octet-stream"), np.full(4, 13, np.float32).tobytes())
    assert worker.channel.receive() is None
    assert worker.process.wait(PATIENCE_S) == -death


@pytest.mark.slow
def test_an_endless_kernel_is_ended_by_its_processor_time(spawn: Spawn) -> None:
    worker = spawn("loop", load={"cpu_s": 1})
    np.testing.assert_array_equal(worker.infer_raw(1, 2, 3, 4), [2, 4, 6, 8])
    before_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    worker.channel.send(Request(2, "application/octet-stream"), np.full(4, 13, np.float32).tobytes())
    assert worker.channel.receive() is None
    assert worker.process.wait(PATIENCE_S) == -signal.SIGXCPU
    # Processor seconds, however long they took: two requests' worth, the one begun, and the start.
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before_s < 6


def test_an_endless_kernel_does_not_outlive_its_agent(spawn: Spawn) -> None:
    worker = spawn("loop")
    before_s = processor_s(worker.process.pid)
    worker.channel.send(Request(2, "application/octet-stream"), np.full(4, 13, np.float32).tobytes())
    wait_until(lambda: processor_s(worker.process.pid) >= before_s + 0.1)
    worker.connection.close()
    assert worker.process.wait(PATIENCE_S) == 0


def test_memory_is_bounded(spawn: Spawn) -> None:
    worker = spawn("devour", load={"memory_bytes": 256 << 20})
    assert int(worker.infer_raw(13, 0, 0, 0)[0]) == errno.ENOMEM
    np.testing.assert_array_equal(worker.infer_raw(1, 2, 3, 4), [2, 4, 6, 8])


def test_a_model_larger_than_its_memory_is_refused_in_one_line(spawn: Spawn) -> None:
    loaded = spawn(
        "twice", weights={"unknown": np.zeros(1 << 22, np.float32)}, load={"memory_bytes": 1 << 23}
    ).loaded
    assert isinstance(loaded, Failed)
    assert "memory" in loaded.message


def test_a_library_that_needs_another_library_is_refused_in_one_line(spawn: Spawn, tmp_path: Path) -> None:
    source = tmp_path / "other.c"
    source.write_text("int other(void) { return 1; }\n")
    compile_c(source, tmp_path / "libother.so")
    source.write_text("int other(void); int __tvm_ffi_twice(void) { return other(); }\n")
    library = compile_c(source, tmp_path / "mod.so", "-L", str(tmp_path), "-lother", f"-Wl,-rpath,{tmp_path}")
    loaded = spawn("twice", library=library).loaded
    assert isinstance(loaded, Failed)
    assert loaded.code == "ERR_INCOMPATIBLE"
    assert "libother.so" in loaded.message
    assert "\n" not in loaded.message


def test_constructors_of_the_library_run_in_the_sandbox(spawn: Spawn, tmp_path: Path) -> None:
    source = tmp_path / "early.c"
    source.write_text(
        """
        #include <fcntl.h>
        #include <stdlib.h>
        #include <sys/socket.h>
        __attribute__((constructor)) static void early(void) {
          if (open("/etc/passwd", O_RDONLY) >= 0 || socket(AF_INET, SOCK_STREAM, 0) >= 0) abort();
        }
        int __tvm_ffi_noop(void *s, const void *a, int n, void *r) { return 0; }
        """
    )
    loaded = spawn("noop", library=compile_c(source, tmp_path / "mod.so")).loaded
    assert isinstance(loaded, Ready), loaded


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="only x86-64 has the calls of 32-bit x86")
def test_a_call_of_another_architecture_ends_the_worker(spawn: Spawn) -> None:
    worker = spawn("old_call")
    np.testing.assert_array_equal(worker.infer_raw(1, 2, 3, 4), [2, 4, 6, 8])
    worker.channel.send(Request(2, "application/octet-stream"), np.full(4, 13, np.float32).tobytes())
    assert worker.channel.receive() is None
    # SIGSEGV where the kernel has no such calls at all.
    assert worker.process.wait(PATIENCE_S) in (-signal.SIGSYS, -signal.SIGSEGV)


def test_error_in_a_kernel_is_answered_and_does_not_end_the_worker(spawn: Spawn) -> None:
    worker = spawn("refuse_13")
    answer, _ = worker.infer(np.full(4, 13, np.float32))
    assert (answer.status, answer.message) == (
        500,
        "node 'refuse_13_1', kernel refuse_13: this kernel refuses",
    )
    np.testing.assert_array_equal(worker.infer_raw(1, 2, 3, 4), [2, 4, 6, 8])


def test_a_worker_holds_no_descriptor_of_its_parents(spawn: Spawn) -> None:
    read, write = os.pipe()
    os.set_inheritable(write, True)
    worker = spawn("twice")
    held = {str(each.readlink()) for each in Path(f"/proc/{worker.process.pid}/fd").iterdir()}
    own = {str(Path(f"/proc/self/fd/{each}").readlink()) for each in (1, 2)}
    os.close(read)
    os.close(write)
    assert not any("pipe" in each for each in held - own)
    # Of the bundle only the library is still held, under its own name.
    assert sum("memfd" in each for each in held) == 1


def test_required_sandbox_is_complete_here_and_otherwise_says_what_is_missing(spawn: Spawn) -> None:
    refused = spawn("twice", load={"require_sandbox": True}).loaded
    assert isinstance(refused, Failed)
    assert "unbounded threads" in refused.message
    status = Status(0, True, True, ("landlock: Function not implemented",))
    assert not status.complete
    assert str(status) == "no landlock, seccomp, bounded threads, landlock: Function not implemented"
    assert Status(1, True, True, ()).complete


# -- the filter, on every architecture


def run_filter(program: bytes, arch: int, number: int, *arguments: int) -> int:
    """Interpret classic BPF over a struct seccomp_data, as the kernel does."""
    data = struct.pack("=iIQ6Q", number, arch, 0, *(arguments + (0,) * 6)[:6])
    code = [struct.unpack_from("=HBBI", program, at) for at in range(0, len(program), 8)]
    accumulator = at = 0
    while True:
        operation, jump_true, jump_false, k = code[at]
        at += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, k)
        elif operation == 0x06:
            return k
        else:
            test = {0x15: accumulator == k, 0x35: accumulator >= k, 0x45: bool(accumulator & k)}[operation]
            at += jump_true if test else jump_false


ALLOW, KILL = 0x7FFF0000, 0x80000000
EPERM, ENOSYS = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
ARCHITECTURES = sorted(set(architectures._ARCHITECTURES.values()), key=lambda each: each.name)


def header_numbers(name: str) -> dict[str, int]:
    """System call numbers from the kernel headers that zig brings along for each architecture."""
    ziglang = pytest.importorskip("ziglang", reason="the kernel's headers come with the builder's linker")
    folder = {
        "x86_64": "x86-linux-any/asm/unistd_64.h",
        "aarch64": "aarch64-linux-any/asm/unistd_64.h",
        "riscv64": "riscv-linux-any/asm/unistd_64.h",
        "arm": "arm-linux-any/asm/unistd-eabi.h",
    }[name]
    text = (Path(ziglang.__file__).parent / "lib/libc/include" / folder).read_text()
    found = re.findall(r"#define\s+__NR_(\w+)\s+\(?(?:__NR_SYSCALL_BASE\s*\+\s*)?(\d+)\)?", text)
    return {name: int(number) for name, number in found}


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda each: each.name)
def test_numbers_are_those_of_the_kernels_headers(architecture: Architecture) -> None:
    numbers = header_numbers(architecture.name)
    checked = {**system_calls.CHECKED, **system_calls.LOADING, **system_calls.SERVING}
    table = dict(system_calls.ALLOWED) | {name: call.numbers for name, call in checked.items()}
    table |= {"clone": system_calls.CLONE.numbers, "clone3": system_calls.CLONE3}
    if architecture.name == "arm":
        table["mmap2"] = table.pop("mmap")
    for name, each in table.items():
        number = architecture.number(each)
        assert number == numbers.get(name), name
    assert numbers["landlock_create_ruleset"] == landlock.CREATE_RULESET
    assert numbers["landlock_restrict_self"] == landlock.RESTRICT_SELF


PID, OTHER, ALL = 4711, 4712, 0xFFFFFFFFFFFFFFFF
THREAD = 0x3D0F00
# Arguments that pass, and some that do not; the upper half of a C int's register may hold anything.
ARGUMENTS: list[tuple[str, tuple[int, ...], tuple[int, ...] | None]] = [
    ("read", (0,), (1,)),
    ("read", (3,), (2,)),
    ("read", (3,), (2 | 1 << 32,)),
    ("readv", (3,), (1,)),
    ("lseek", (3,), (2,)),
    ("_llseek", (3,), (0,)),
    *((name, (3, command), None) for name in ("fcntl", "fcntl64") for command in (1, 2, 3, 1030, 1034)),
    # F_DUPFD, F_SETFL, locks, F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY,
    # F_SETPIPE_SZ, F_ADD_SEALS; armhf has locks of its own.
    *(
        (name, (3, 3), (3, command))
        for name in ("fcntl", "fcntl64")
        for command in (0, 4, 5, 6, 7, 8, 9, 10, 12, 13, 14, 15, 36, 37, 38, 1024, 1026, 1031, 1033)
    ),
    ("fcntl", (3, 3), (3, 8 | 1 << 32)),
    # A copy of the standard output would be a way around the other checks.
    ("fcntl", (3, 1030), (2, 1030)),
    ("madvise", (0, 4096, 4), (0, 4096, 12)),
    ("madvise", (0, 4096, 8), (0, 4096, 21)),
    ("membarrier", (8,), (1,)),
    ("membarrier", (16,), (2,)),
    ("recvfrom", (3, 0, 1, 0), (3, 0, 1, 1)),
    ("recv", (3, 0, 1, 0x40), (3, 0, 1, 0x41)),
    ("sendmsg", (3, 0, 0x4000), (3, 0, 0x4001)),
    ("kill", (PID, 6), (OTHER, 6)),
    # Every process, the own group.
    ("kill", (PID, 6), (ALL, 9)),
    ("kill", (PID, 6), (0, 9)),
    ("tgkill", (PID, PID, 6), (OTHER, OTHER, 6)),
    ("rt_sigaction", (11, 0, 0, 8), (24, 0, 0, 8)),
    ("prlimit64", (0, 7, 0, 1), (OTHER, 7, 0, 1)),
    ("prlimit64", (0, 7, 0, 1), (0, 0, 1, 0)),
    ("prlimit64", (0, 7, 0, 1), (0, 0, 1 << 32, 0)),
    ("prctl", (15,), (22,)),
    ("prctl", (0x53564D41,), (0x59616D61,)),
    # ARCH_REQ_XCOMP_PERM of XTILEDATA; ARCH_SET_FS, another component.
    ("arch_prctl", (0x1023, 18), (0x1002, 18)),
    ("arch_prctl", (0x1023, 18), (0x1023, 19)),
    ("mmap", (0, 4096, 3, 0x22), (0, 4096, 3, 0x40022)),
    ("mmap", (0, 4096, 3, 0x22), (0, 4096, 3, 0x2022)),
    ("mprotect", (0, 4096, 3), None),
    # O_RDONLY | O_CLOEXEC; O_RDWR, O_WRONLY | O_CREAT, O_TRUNC.
    ("open", (0, 0o2000000), (0, 2)),
    ("openat", (0, 0, 0o2000000), (0, 0, 2)),
    ("openat", (0, 0, 0o2000000), (0, 0, 0o101)),
    ("openat", (0, 0, 0o2000000), (0, 0, 0o1000)),
    ("clone", (THREAD,), (17,)),
    ("clone", (THREAD | 0x400000,), (THREAD & ~0x10000,)),
    # Without the descriptors, traced, in a new name space.
    ("clone", (THREAD,), (THREAD & ~0x400,)),
    ("clone", (THREAD,), (THREAD | 0x2000,)),
    ("clone", (THREAD,), (THREAD | 0x10000000,)),
]


@pytest.mark.parametrize("loading", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda each: each.name)
def test_the_filter_allows_its_list_and_nothing_else(architecture: Architecture, loading: bool) -> None:
    program = filter_program(architecture, 4711, loading=loading)
    # BPF_MAXINSNS
    assert len(program) // 8 <= 4096
    checked = {
        **system_calls.CHECKED,
        **(system_calls.LOADING if loading else system_calls.SERVING),
        "clone": system_calls.CLONE,
    }
    number = {name: architecture.number(call.numbers) for name, call in checked.items()}
    allowed = {architecture.number(each) for each in system_calls.ALLOWED.values()}
    clone3 = architecture.number(system_calls.CLONE3)

    def verdict(call: int | None, *arguments: int) -> int:
        assert call is not None
        return run_filter(program, architecture.audit, call, *arguments)

    for call in set(range(600)) - set(number.values()) - {clone3}:
        assert verdict(call) == (ALLOW if call in allowed else EPERM), call
    assert verdict(clone3) == ENOSYS
    for name, good, bad in ARGUMENTS:
        # Not every architecture has each call.
        if number.get(name) is not None:
            assert verdict(number[name], *good) == ALLOW, (name, good)
            if bad is not None:
                assert verdict(number[name], *bad) == EPERM, (name, bad)
    for name in ("mmap", "mprotect"):
        assert verdict(number[name], 0, 4096, 7) == (ALLOW if loading else EPERM)
    assert run_filter(program, 0x12345678, 0) == KILL
    # x32, which has x86-64's architecture.
    assert verdict(0x40000000) == EPERM
    assert {name for name, *_ in ARGUMENTS} == {*checked, "open", "openat", "arch_prctl"} - {"seccomp"}


def test_proc_shows_the_sandbox_in_force(spawn: Spawn) -> None:
    worker = spawn("threaded", load={"memory_bytes": 1 << 30})
    worker.infer_raw(1, 2, 3, 4)
    process = Path(f"/proc/{worker.process.pid}")
    limits = {
        line[:26].strip(): line[26:].split()[:2] for line in (process / "limits").read_text().splitlines()
    }
    assert limits["Max core file size"] == ["0", "0"]
    assert limits["Max open files"] == ["64", "64"]
    assert limits["Max locked memory"] == limits["Max msgqueue size"] == ["0", "0"]
    assert limits["Max nice priority"] == limits["Max realtime priority"] == ["0", "0"]
    assert limits["Max pending signals"] == ["64", "64"]
    assert limits["Max file size"] == [f"{64 << 20}"] * 2
    assert limits["Max stack size"] == [f"{8 << 20}"] * 2
    # It ends before the agent when memory runs out.
    assert (process / "oom_score_adj").read_text() == "500\n"
    assert 1 << 30 < int(limits["Max address space"][1]) < 3 << 30
    # Every thread, including those that were started later.
    for task in (process / "task").iterdir():
        status = dict(
            line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line
        )
        assert (status["NoNewPrivs"], status["Seccomp"], status["Seccomp_filters"]) == ("1", "2", "2")


def test_every_allowed_call_is_explained() -> None:
    page = (Path(__file__).parents[3] / "docs/sandbox.md").read_text()
    explained = page.partition("## System calls")[2].partition("`clone3` fails")[0]
    checked = {**system_calls.CHECKED, **system_calls.LOADING, **system_calls.SERVING, "clone": None}
    assert set(re.findall(r"`([a-z0-9_]+)`", explained)) - {"system_calls"} == {
        *system_calls.ALLOWED,
        *checked,
    }
