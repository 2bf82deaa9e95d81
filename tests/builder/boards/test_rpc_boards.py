"""Real trackers and servers on loopback, and one server that sends invalid answers."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tvm.rpc import base

from builder.boards.interface import Measurement
from builder.boards.measuring_process import BuiltKernel, RunnerOptions
from builder.boards.rpc_boards import RpcBoards
from builder.boards.tracker_client import Tracker
from builder.errors import FleetError
from tests.ports import free_port

pytestmark = pytest.mark.slow

KEY = "testboard"
OPTIONS = RunnerOptions(number=1, repeat=2, min_repeat_ms=0, timeout_s=20)


def once(board: str, accident: Callable[[], None]) -> Callable[[int, Measurement], None]:
    """Return a `done` that calls `accident` at the first result of `board`."""
    done = False

    def call(_index: int, measurement: Measurement) -> None:
        nonlocal done
        if measurement.board == board and not done:
            done = True
            accident()

    return call


def test_an_unreachable_tracker_is_an_error() -> None:
    with pytest.raises(FleetError, match="cannot be reached"):
        RpcBoards(Tracker("127.0.0.1", free_port()), KEY, OPTIONS)


def test_a_key_without_boards_is_an_error(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builder.boards.rpc_boards.FIRST_BOARD_S", 0.5)
    with pytest.raises(FleetError, match="no board of key 'nobody' is registered"):
        RpcBoards(lab.tracker, "nobody", OPTIONS)


def test_two_boards_measure_more_than_one_while_one_hangs_dies_and_returns(
    lab: Any, kernels: list[BuiltKernel]
) -> None:
    """Cooldown takes no CPU time, so two boards on one machine measure twice as much (less if it is busy)."""
    ports = free_port(), free_port()
    names = [lab.start_board(ports[0])]
    lines: list[str] = []
    options = RunnerOptions(number=1, repeat=1, min_repeat_ms=0, cooldown_ms=200, timeout_s=8)
    boards = RpcBoards(lab.tracker, KEY, options, lines.append)
    stopped: list[int] = []

    def rate(count: int) -> float:
        deadline = time.monotonic() + 90
        while len({m.board for m in boards.measure(kernels * 2)}) < count:  # sessions are opened meanwhile
            assert time.monotonic() < deadline
        start = time.monotonic()
        assert all(m.error is None for m in boards.measure(kernels * 6))
        return 6 * len(kernels) / (time.monotonic() - start)

    def hang() -> None:
        # The server's whole process group stops, as if the board had lost its power supply.
        for pid in _group(lab.processes[names[0]].pid):
            os.kill(pid, signal.SIGSTOP)
            stopped.append(pid)

    def wait_until_back() -> None:
        deadline = time.monotonic() + 60
        while not any(f"{names[0]} is back" in line for line in lines):
            assert time.monotonic() < deadline
            assert all(m.error is None for m in boards.measure(kernels * 5))

    try:
        one = rate(1)
        names.append(lab.start_board(ports[1]))
        rates = [rate(2)]
        while max(rates) < 1.5 * one and len(rates) < 4:
            rates.append(rate(2))
        assert max(rates) >= 1.5 * one, (one, rates)

        # It dies as soon as it has measured its first candidate.
        measurements = boards.measure(kernels * 5, once(names[0], lambda: lab.kill(names[0])))
        assert all(m.error is None for m in measurements)
        assert any(f"{names[0]} is dropped" in line for line in lines)
        assert {s.name: s for s in boards.status()}[names[0]].doing == "dropped"
        assert lab.start_board(ports[0]) == names[0]
        wait_until_back()
        times = boards.take_times()
        assert times[names[0]].dropped == 1
        assert all(times[name].seconds > 0 for name in names)

        # It hangs, and another measures its candidates.
        measurements = boards.measure(kernels * 5, once(names[0], hang))
        assert stopped
        assert all(m.error is None for m in measurements)
        assert boards.take_times()[names[0]].dropped == 1
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        boards.close()


def _group(parent: int) -> list[int]:
    import psutil

    return [p.pid for p in psutil.Process(parent).children(recursive=True)]


def killer(kernel: BuiltKernel) -> BuiltKernel:
    """Return a shared object that crashes while it is loaded."""
    import subprocess
    import sys
    import tempfile

    with tempfile.TemporaryDirectory() as work:
        Path(work, "x.c").write_text(
            "__attribute__((constructor)) static void die(void) { __builtin_trap(); }\n"
        )
        subprocess.run(
            [sys.executable, "-m", "ziglang", "cc", "-shared", "-fPIC", "-o", "x.so", "x.c"],
            cwd=work,
            check=True,
        )
        return BuiltKernel(Path(work, "x.so").read_bytes(), kernel.arguments)


class Liar:
    """A server that registers correctly, but answers every session with bytes that are not TVM's RPC."""

    def __init__(self, tracker: Tracker) -> None:
        self.met = 0
        self._listen = socket.create_server(("127.0.0.1", 0))
        self._port = self._listen.getsockname()[1]
        self.name = f"127.0.0.1:{self._port}"
        self._tracker = socket.create_connection((tracker.host, tracker.port))
        self._tracker.sendall(struct.pack("<i", base.RPC_TRACKER_MAGIC))
        base.recvall(self._tracker, 4)
        base.sendjson(
            self._tracker,
            [base.TrackerCode.UPDATE_INFO, {"key": f"server:{KEY}", "addr": ["127.0.0.1", self._port]}],
        )
        base.recvjson(self._tracker)
        self._stop = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._stop:
            number += 1
            base.sendjson(self._tracker, [base.TrackerCode.PUT, KEY, [self._port, f"{KEY}:{number}"], None])
            base.recvjson(self._tracker)
            while not self._stop:
                if select.select([self._listen], [], [], 0.1)[0]:
                    conn, _ = self._listen.accept()
                    self.met += 1
                    with conn:
                        conn.recv(1 << 16)
                        conn.sendall(json.dumps({"I am": "a board"}).encode() * 100)
                    break

    def close(self) -> None:
        if self._stop:
            return
        self._stop = True
        self._thread.join()
        self._listen.close()
        self._tracker.close()


def test_neither_invalid_answers_nor_a_crash_end_the_boards(lab: Any, kernels: list[BuiltKernel]) -> None:
    """A crash in a constructor kills the server's session; the watchdog restarts the server."""
    liar = Liar(lab.tracker)
    honest = lab.start_board(free_port())
    lines: list[str] = []
    boards = RpcBoards(lab.tracker, KEY, OPTIONS, lines.append)
    try:
        deadline = time.monotonic() + 60
        dropped: list[str] = []
        while not dropped:
            assert time.monotonic() < deadline
            measurements = boards.measure(kernels * 2)
            assert all(m.error is None and m.board == honest for m in measurements)
            dropped = [line for line in lines if line.startswith(f"board {liar.name} is dropped")]
        assert "for 5 s" in dropped[0]
        assert liar.met >= 1
        liar.close()

        crashed, whole = boards.measure([killer(kernels[0]), kernels[0]])
        assert crashed.seconds is None
        assert whole.error is None
        assert whole.board == honest
        assert boards.take_times()[honest].dropped >= 1
    finally:
        boards.close()
        liar.close()
