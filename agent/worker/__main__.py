"""One worker process: `python -m agent.worker FD [GATE]`.

FD is its end of the channel, GATE its end of the socket for `sandbox.close_files`. Only the agent starts it.
It receives the bundle's members over the channel, imports what it needs, closes its sandbox, loads the model,
and then answers requests one by one until the agent stops it or is gone.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from agent.bundle.manifest import Manifest
from agent.errors import ChannelError, EdgeError, IncompatibleError
from agent.worker import sandbox
from agent.worker.channel import Channel
from agent.worker.frames import Failed, Load, Ready, Request, Share, Stop

if TYPE_CHECKING:
    from agent.worker.batching import Batching
    from agent.worker.model import Model

_NOT_NEEDED: Final = ("torch", "ml_dtypes")

_log = logging.getLogger("agent.worker")


def main(arguments: list[str]) -> int:
    """Serve one model; return the process's exit status."""
    if len(arguments) not in (1, 2) or not all(each.isdigit() for each in arguments):
        sys.stderr.write("usage: python -m agent.worker FD [GATE] (started by edge-agent)\n")
        return 2
    logging.basicConfig(format="worker: %(message)s", level=logging.INFO)
    # Ctrl-C in a terminal and a stop by the service manager reach every process, but the agent decides when
    # this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sandbox.end_with_parent()
    sandbox.be_first_when_memory_runs_out()
    with socket.socket(fileno=int(arguments[0])) as connection:
        channel = Channel(connection)
        try:
            gate = socket.socket(fileno=int(arguments[1])) if arguments[1:] else None
            loaded = _load(channel, connection, gate)
            if loaded is not None:
                _serve(channel, *loaded)
        except ChannelError:
            _log.exception("the agent sent an invalid frame")
            return 1
        except (BrokenPipeError, ConnectionResetError):
            # The agent is gone, so no one waits for an answer.
            return 0
        except Exception:  # noqa: BLE001 - the process's outermost loop
            _log.exception("the worker failed")
            return 1
    return 0


def _load(
    channel: Channel, connection: socket.socket, gate: socket.socket | None
) -> tuple[Model, Batching | None] | None:
    received = channel.receive_load()
    if received is None:
        return None
    frame, descriptors = received
    start_s = time.monotonic()
    load = frame.header
    assert isinstance(load, Load)
    _close_others({0, 1, 2, connection.fileno(), *descriptors, *(() if gate is None else (gate.fileno(),))})
    if load.cpus:
        os.sched_setaffinity(0, load.cpus)
    if load.cpu_s:
        sandbox.limit_cpu(load.cpu_s)
    try:
        # numpy's linear algebra would start a thread for each processor; kernels have their own threads.
        os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
        # tvm-ffi imports these if they are installed, and needs neither: 250 MB and seconds for the first.
        for name in _NOT_NEEDED:
            sys.modules[name] = None  # type: ignore[assignment]  # None makes the import fail
        from agent.worker.batching import batching_of
        from agent.worker.model import Members, Prepared, load_kernels, load_model

        members = Members(dict(zip(load.files, descriptors, strict=True)))
        prepared = Prepared(Manifest.from_bytes(bytes(frame.payload)), load, members)
        # Opened before the sandbox forbids it, read when the model is loaded.
        statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        status = sandbox.close_files(sandbox.Limits(load.memory_bytes), gate)
        if gate is not None:
            gate.close()
        if load.require_sandbox and not status.complete:
            raise IncompatibleError(
                f"expected a complete sandbox, got: {status}",
                hint="`edge-agent check` says what is missing; or set worker.require_sandbox = false",
            )
        _watch(connection)
        kernels = load_kernels(members, load.threads)
        sandbox.close_loading(status)
        model = load_model(prepared, members, kernels)
        batching = batching_of(model, prepared.manifest, load)
    except EdgeError as error:
        channel.send(Failed(error.code, str(error), error.hint))
        return None
    except MemoryError:
        channel.send(Failed("ERR_INTERNAL", "loading the model needs more memory than its limit"))
        return None
    # Freeze what is loaded, so that the garbage collector skips it.
    gc.collect()
    gc.freeze()
    channel.send(
        Ready(
            load_s=time.monotonic() - start_s,
            self_test_error=model.self_test_error,
            rss_bytes=_resident_bytes(statm),
            threads=model.threads,
            landlock=status.landlock,
            seccomp=status.seccomp,
            threads_bounded=status.threads,
            sandbox=str(status),
        )
    )
    return model, batching


def _serve(channel: Channel, model: Model, batching: Batching | None) -> None:
    while (frame := channel.receive()) is not None:
        if isinstance(frame.header, Stop):
            return
        if isinstance(frame.header, Share):
            # The agent has moved the threads; those that the model starts from now on inherit it.
            model.use_threads(frame.header.threads)
            continue
        if not isinstance(frame.header, Request):
            raise ChannelError(f"expected request, share or stop, got {type(frame.header).__name__.lower()}")
        if batching is None:
            channel.send(*model.answer(frame.header, memoryview(frame.payload)))
            continue
        for answer, payload in batching.answers(batching.gather(channel, frame)):
            channel.send(answer, payload)


def _close_others(kept: Iterable[int]) -> None:
    highest = max(kept)
    for descriptor in set(range(highest)) - set(kept):
        try:
            os.close(descriptor)
        except OSError:
            continue
    os.closerange(highest + 1, os.sysconf("SC_OPEN_MAX"))


def _watch(connection: socket.socket) -> None:
    """End the process when the agent is gone, even in the middle of a kernel that never returns."""
    poll = select.poll()
    # poll always reports a hang-up; arriving bytes only on request.
    poll.register(connection.fileno(), 0)

    def wait() -> None:
        poll.poll()
        os._exit(0)

    # The smallest stack that is safe for Python: address space is limited.
    default = threading.stack_size(256 * 1024)
    threading.Thread(target=wait, name="watch", daemon=True).start()
    threading.stack_size(default)


def _resident_bytes(statm: int) -> int:
    pages = int(os.pread(statm, 256, 0).split()[1])
    os.close(statm)
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
