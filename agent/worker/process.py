"""One worker, from the fork on.

It receives the bundle's members over the channel, closes its sandbox, loads the model, and then answers
requests one by one until the agent stops it or is gone.

Promises: all that a worker ever imports is imported with this module, before the fork.
Leaves to others: how it comes into being (`agent.worker.__main__`).
"""

from __future__ import annotations

import gc
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Iterable

from agent.bundle.manifest import Manifest
from agent.errors import ChannelError, EdgeError, IncompatibleError
from agent.worker import sandbox
from agent.worker.batching import Batching, batching_of
from agent.worker.channel import Channel
from agent.worker.frames import Failed, Load, Ready, Request, Share, Stop
from agent.worker.model import Members, Model, Prepared, load_kernels, load_model

_log = logging.getLogger("agent.worker")


def serve(connection: int, log: int, gate: int | None = None) -> int:
    """Serve one model; return the process's exit status.

    `connection` is its end of the channel, `log` becomes its standard output and error, and `gate` is its end
    of the socket for `sandbox.close_files`.
    """
    # Ctrl-C is for the agent, which ends its workers when they have answered their requests.
    os.setsid()
    for standard in (1, 2):
        os.dup2(log, standard)
    sandbox.name_process("edge-worker")
    sandbox.end_with_parent()
    with socket.socket(fileno=connection) as agent:
        channel = Channel(agent)
        try:
            loaded = _load(channel, agent, None if gate is None else socket.socket(fileno=gate))
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
