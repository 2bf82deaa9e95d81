"""The template of workers: `python -m agent.worker FD`, a process that forks a worker for each request on FD.

Importing what a worker needs takes most of a small model's memory and start; workers share it with this
process and with each other. FD is a socket of type SOCK_SEQPACKET. The template says 0 when it has imported
everything. A request is one byte with a worker's descriptors, and the answer is its process id (`frames`).

Promises: the template has one thread, opens nothing, and runs no model; a worker has none of its descriptors.
The agent is the parent of each worker, so workers outlive their template, and only the agent reaps them: a
process in between forks the worker and ends, and the kernel gives the worker to the next child subreaper, the
agent (decisions/0075).
Leaves to others: what a worker does (`process`), and when there is one (`agent.service.models.template`).
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Final

from agent.worker import sandbox
from agent.worker.frames import FORK_DESCRIPTORS, FORK_REPLY

_NOT_NEEDED: Final = ("torch", "ml_dtypes")
# The process in between ends within a fraction of it.
_NEW_PARENT_POLL_S: Final = 0.0002


def main(arguments: list[str]) -> int:
    """Fork workers until the agent closes the socket; return the status of the template, or of a worker."""
    if len(arguments) != 1 or not arguments[0].isdigit():
        sys.stderr.write("usage: python -m agent.worker FD (started by edge-agent)\n")
        return 2
    logging.basicConfig(format="worker: %(message)s", level=logging.INFO)
    # A stop by the service manager reaches every process, but the agent decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sandbox.end_with_parent()
    sandbox.be_first_when_memory_runs_out()
    sandbox.name_process("edge-template")
    # numpy's linear algebra would start a thread for each processor; kernels have their own threads.
    os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    # tvm-ffi imports these if they are installed, and needs neither: 250 MB and seconds for the first.
    for name in _NOT_NEEDED:
        sys.modules[name] = None  # type: ignore[assignment]  # None makes the import fail
    from agent.worker.process import serve

    # The garbage collector of a worker would write to each object, and so copy its page.
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(arguments[0])) as agent:
        agent.send(FORK_REPLY.pack(0))
        while True:
            request, descriptors, _, _ = socket.recv_fds(agent, 1, FORK_DESCRIPTORS)
            if not request:
                return 0
            if _fork(agent):
                break
            for descriptor in descriptors:
                os.close(descriptor)
    return serve(*descriptors)


def _fork(agent: socket.socket) -> bool:
    """Fork a worker whose parent is the agent; return whether this is the worker."""
    try:
        between = os.fork()
    except OSError as error:
        agent.send(FORK_REPLY.pack(-(error.errno or errno.EAGAIN)))
        return False
    if between:
        failure = os.waitstatus_to_exitcode(os.waitpid(between, 0)[1])
        if failure < 0:
            # Killed: whether there is a worker, only the worker can say. If not, the agent sees our end.
            sys.exit(1)
        if failure:
            agent.send(FORK_REPLY.pack(-failure))
        return False
    between = os.getpid()
    try:
        worker = os.fork()
    except OSError as error:
        os._exit(error.errno or errno.EAGAIN)
    if worker:
        os._exit(0)
    # Only then the agent is the parent: the end of an earlier one would end the worker (`end_with_parent`).
    # `getppid` already names the agent a moment before.
    while not _has_ended(between):
        time.sleep(_NEW_PARENT_POLL_S)
    try:
        agent.send(FORK_REPLY.pack(os.getpid()))
    except BrokenPipeError:
        os._exit(0)
    return True


def _has_ended(pid: int) -> bool:
    """Return whether all threads of a process (qemu adds one) have ended (proc_pid_stat(5), fields 3, 20)."""
    try:
        state, *numbers = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return state in (b"Z", b"X") and int(numbers[16]) <= 1
    except (FileNotFoundError, ProcessLookupError):
        return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
