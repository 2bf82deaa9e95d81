"""Compares one RPC server with two, all on this machine, with a fixed cooldown after each candidate."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from builder import RunnerOptions, TuneOptions, load, tune
from builder.boards.tracker_client import Tracker
from builder.errors import FleetError
from builder.tuning.views.progress import Progress

KEY: Final = "bench"
START_S: Final = 120.0
COOLDOWN_MS: Final = 200.0
TASKS: Final = "0-3"  # enough tasks to build one's batch while another's is measured


def trials_per_minute(model: Path, boards: int, trials: int) -> float:
    """Return the trials per minute of a search, not counting the opening of sessions and the first points."""
    with _lab(boards) as tracker, tempfile.TemporaryDirectory() as work:
        watch = _Watch()
        options = TuneOptions(trials=trials, pairs=0, tasks=TASKS)
        runner = RunnerOptions(number=1, repeat=1, min_repeat_ms=0, cooldown_ms=COOLDOWN_MS, threads=1)
        tune(
            load(model), "host", Path(work, "records"),
            options=options, runner=runner, tracker=tracker, key=KEY, view=watch,
        )  # fmt: skip
    (start, first), (end, last) = watch.searching[0], watch.searching[-1]
    return 60 * (last - first) / (end - start)


class _Watch:
    def __init__(self) -> None:
        self.searching: list[tuple[float, int]] = []

    def update(self, progress: Progress) -> None:
        if progress.phase == "searching":
            self.searching.append((time.monotonic(), progress.trials))

    def note(self, text: str) -> None:
        print(text, file=sys.stderr)


@contextlib.contextmanager
def _lab(boards: int) -> Iterator[Tracker]:
    tracker = Tracker("127.0.0.1", _free_port())
    processes = [_edgebundle("rpc-tracker", "--port", str(tracker.port))]
    try:
        for _ in range(boards):
            port = str(_free_port())
            words = ("rpc-server", "--tracker", str(tracker), "--rpc-key", KEY, "--port", port)
            processes.append(_edgebundle(*words))
        deadline = time.monotonic() + START_S
        while _servers(tracker) < boards:
            if time.monotonic() > deadline:
                raise FleetError(f"expected {boards} servers within {START_S:.0f} s", hint="give more boards")
            time.sleep(0.2)
        yield tracker
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait(30)


def _servers(tracker: Tracker) -> int:
    try:
        return len(tracker.servers(KEY))
    except FleetError:
        return 0


def _edgebundle(*words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "builder", *words]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL, env=dict(os.environ))


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
