"""Try many cases in a few processes: a process that dies or is slow costs one case.

Time is that of the processor, of a worker and its own children: on a busy machine a case is no slower.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import psutil

from benchmarks.conformance.case import read
from benchmarks.conformance.verdict import DEAD, SLOW, Verdict

SLOW_S: Final = 60.0
# A worker that waits for something uses no processor.
HUNG_S: Final = 600.0
# What leaks in a worker stays small.
CASES_OF_A_WORKER: Final = 150
_POLL_S: Final = 1.0
COMMAND: Final = (sys.executable, "-m", "benchmarks.conformance.worker")


class Worker:
    """A process that tries cases, one after the other.

    Parameters
    ----------
    command
        The program: it answers a line for each line, after a first line that says that it is ready.

    Attributes
    ----------
    count
        How many cases it was given.
    """

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self.count = 0
        self._pending = b""
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "EDGE_NUM_THREADS": "1"},
        )
        self._line(lambda: False)

    def ask(self, folder: Path) -> Verdict:
        """Let the worker try the case in a folder; it is dead or slow if no verdict comes."""
        self.count += 1
        before = self._seconds()
        waited = 0.0

        def is_late() -> bool:
            nonlocal waited
            waited += _POLL_S
            return self._seconds() - before > SLOW_S or waited > HUNG_S

        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{folder}\n".encode())
            self._process.stdin.flush()
            line = self._line(is_late)
        except BrokenPipeError:
            line = b""
        if line:
            return replace(Verdict(**json.loads(line)), seconds=round(self._seconds() - before, 2))
        case = read(folder)
        status = self.end()
        if status is None:
            return Verdict(case.name, case.operator, SLOW, f"more than {SLOW_S:g} s", SLOW_S)
        return Verdict(case.name, case.operator, DEAD, f"status {status}")

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def end(self) -> int | None:
        """End the process and its children; return its status if it had ended by itself."""
        try:
            status = self._process.wait(0.2)
        except subprocess.TimeoutExpired:
            status = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        return status

    def _line(self, is_late: Callable[[], bool]) -> bytes:
        """Read a line; empty at the end of the stream, or if it is late."""
        assert self._process.stdout is not None
        stream = self._process.stdout.fileno()
        while b"\n" not in self._pending:
            if select.select([stream], [], [], _POLL_S)[0]:
                part = os.read(stream, 65536)
                if not part:
                    return b""
                self._pending += part
            elif is_late():
                return b""
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _seconds(self) -> float:
        """The processor's time of the worker and its children so far."""
        total = 0.0
        try:
            process = psutil.Process(self._process.pid)
            for each in (process, *process.children(recursive=True)):
                used = each.cpu_times()
                total += used.user + used.system + used.children_user + used.children_system
        except psutil.NoSuchProcess:
            pass
        return total


def try_all(
    folders: Sequence[Path],
    report: Callable[[Verdict], None],
    jobs: int,
    command: Sequence[str] = COMMAND,
) -> None:
    """Try the cases in these folders.

    Parameters
    ----------
    folders
        The cases.
    report
        Called with each verdict, in one thread at a time.
    jobs
        How many processes try them.
    command
        As `Worker` has it.
    """
    waiting: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for folder in folders:
        waiting.put(folder)
    lock = threading.Lock()

    def serve() -> None:
        worker: Worker | None = None
        while True:
            try:
                folder = waiting.get_nowait()
            except queue.Empty:
                break
            worker, verdict = _judge(worker, folder, command)
            with lock:
                report(verdict)
        if worker is not None:
            worker.end()

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _judge(worker: Worker | None, folder: Path, command: Sequence[str]) -> tuple[Worker | None, Verdict]:
    """Try a case; a fault that an earlier case of the same process may have caused, once more by itself."""
    if worker is not None and (worker.count >= CASES_OF_A_WORKER or not worker.is_running):
        worker.end()
        worker = None
    worker = worker or Worker(command)
    verdict = worker.ask(folder)
    if verdict.kind in (DEAD, SLOW) and worker.count > 1:
        worker.end()
        worker = Worker(command)
        before, verdict = verdict, worker.ask(folder)
        if verdict.kind not in (DEAD, SLOW):
            reason = f"only after others in the same process: {before.reason}"
            verdict = replace(before, reason=reason)
    return worker if worker.is_running else None, verdict
