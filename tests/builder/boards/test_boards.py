"""Real trackers and servers on loopback, and one server that lies."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tvm.rpc import base

from builder.boards.ledger import Ledger
from builder.boards.local_board import LocalBoard
from builder.boards.measuring_process import BuiltKernel, RunnerOptions, check_plausible
from builder.boards.remote_functions import BoardState
from builder.boards.rpc_boards import RpcBoards
from builder.boards.tracker_client import Tracker
from builder.errors import BoardError, FleetError
from builder.records.task import Task
from builder.target.device_target import DeviceTarget
from builder.tuning.candidates.candidate_builder import CandidateBuilder
from tests.ports import free_port

KEY = "testboard"
OPTIONS = RunnerOptions(number=1, repeat=2, min_repeat_ms=0, timeout_s=20)


@pytest.fixture(scope="session")
def codes(tasks: tuple[Task, ...], device: DeviceTarget) -> list[BuiltKernel]:
    task = max(tasks, key=lambda t: t.space.size)
    builder = CandidateBuilder(device, 2)
    points = [task.space.point(d) for d in list(task.space.all_decisions())[:4]]
    built = builder.build([(task, point) for point in points])
    builder.close()
    assert all(isinstance(code, BuiltKernel) for code in built)
    return built


def test_this_machine_measures(codes: list[BuiltKernel]) -> None:
    board = LocalBoard(OPTIONS)
    outcomes = board.measure(codes)
    assert [o.error for o in outcomes] == [None] * len(codes)
    assert all(len(o.seconds) == 2 and min(o.seconds) > 0 for o in outcomes)
    assert board.take_times()["local"].measured == len(codes)
    board.close()


def test_a_candidate_that_does_not_load_is_its_own_fault(codes: list[BuiltKernel]) -> None:
    board = LocalBoard(OPTIONS)
    outcomes = board.measure([BuiltKernel(b"no shared object", codes[0].arguments), codes[0]])
    assert outcomes[0].seconds is None
    assert "shared library" in outcomes[0].error
    assert outcomes[1].error is None
    board.close()


def test_a_candidate_over_its_time_is_killed_and_the_next_measured(codes: list[BuiltKernel]) -> None:
    board = LocalBoard(RunnerOptions(number=1, repeat=3, min_repeat_ms=0, cooldown_ms=60_000, timeout_s=1))
    start = time.monotonic()
    outcomes = board.measure(codes[:2])
    assert ["no answer within 1 s" in o.error for o in outcomes] == [True, True]
    # They would take 360 s; loading TVM twice takes a minute where the machine is busy.
    assert time.monotonic() - start < 300
    board.close()


@pytest.mark.parametrize("seconds", [(), (-1e-6,), (0.0,), (float("nan"),), (float("inf"),), (1e-6, 1e5)])
def test_times_that_no_kernel_has_are_nonsense(seconds: Any) -> None:
    with pytest.raises(BoardError, match="expected a kernel's time"):
        check_plausible(seconds)


def test_a_board_that_throttles_or_slows_down_is_noticed() -> None:
    ledger = Ledger()
    assert ledger.is_valid("pi", BoardState((1500000, 600000), throttled=False))
    assert ledger.is_valid("pi", BoardState((600000, 1490000)))
    assert not ledger.is_valid("pi", BoardState((600000, 600000)))
    assert not ledger.is_valid("pi", BoardState((1500000, 1500000), throttled=True))
    assert ledger.is_valid("silent", BoardState())


def test_a_tracker_that_is_not_there_is_said() -> None:
    with pytest.raises(FleetError, match="cannot be reached"):
        RpcBoards(Tracker("127.0.0.1", free_port()), KEY, OPTIONS)


def test_a_key_that_nobody_has_is_said(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builder.boards.rpc_boards.FIRST_BOARD_S", 0.5)
    with pytest.raises(FleetError, match="no board of key 'nobody' is registered"):
        RpcBoards(lab.tracker, "nobody", OPTIONS)


def test_two_boards_share_the_work_and_one_may_die_and_return(lab: Any, codes: list[BuiltKernel]) -> None:
    ports = free_port(), free_port()
    names = [lab.start_board(port) for port in ports]
    notes = []
    options = RunnerOptions(number=1, repeat=1, min_repeat_ms=0, cooldown_ms=200, timeout_s=20)
    boards = RpcBoards(lab.tracker, KEY, options, notes.append)
    try:
        work = codes * 5
        outcomes = boards.measure(work)
        assert all(o.error is None for o in outcomes)
        assert {o.board for o in outcomes} == set(names)

        killer = threading.Timer(0.5, lab.kill, [names[0]])
        killer.start()
        outcomes = boards.measure(work)
        killer.join()
        assert all(o.error is None for o in outcomes)
        assert any(f"{names[0]} is dropped" in note for note in notes)
        status = {s.name: s for s in boards.status()}
        assert status[names[0]].doing == "dropped"

        assert lab.start_board(ports[0]) == names[0]
        deadline = time.monotonic() + 60
        while not any(f"{names[0]} is back" in note for note in notes):
            assert time.monotonic() < deadline
            assert all(o.error is None for o in boards.measure(work))
        times = boards.take_times()
        assert times[names[0]].dropped == 1
        assert all(times[name].seconds > 0 for name in names)
    finally:
        boards.close()


def test_two_boards_measure_more_than_one(lab: Any, codes: list[BuiltKernel]) -> None:
    """Cooldown takes no CPU, so that two boards of one machine do twice as much; less where it is busy."""
    lab.start_board(free_port())
    options = RunnerOptions(number=1, repeat=1, min_repeat_ms=0, cooldown_ms=200, timeout_s=60)
    boards = RpcBoards(lab.tracker, KEY, options)

    def rate(count: int) -> float:
        deadline = time.monotonic() + 90
        while len({o.board for o in boards.measure(codes * 2)}) < count:  # sessions are opened meanwhile
            assert time.monotonic() < deadline
        start = time.monotonic()
        assert all(o.error is None for o in boards.measure(codes * 6))
        return 6 * len(codes) / (time.monotonic() - start)

    try:
        one = rate(1)
        lab.start_board(free_port())
        rates = [rate(2)]
        while max(rates) < 1.5 * one and len(rates) < 4:
            rates.append(rate(2))
        assert max(rates) >= 1.5 * one, (one, rates)
    finally:
        boards.close()


def test_a_board_that_hangs_loses_its_candidates_to_another(lab: Any, codes: list[BuiltKernel]) -> None:
    names = [lab.start_board(free_port()) for _ in range(2)]
    options = RunnerOptions(number=1, repeat=1, min_repeat_ms=0, cooldown_ms=300, timeout_s=3)
    boards = RpcBoards(lab.tracker, KEY, options)
    stopped = []

    def hang() -> None:
        # The server's whole group stops: as if the board's power supply had given in.
        for pid in _group(lab.processes[names[0]].pid):
            os.kill(pid, signal.SIGSTOP)
            stopped.append(pid)

    timer = threading.Timer(1.0, hang)
    try:
        boards.measure(codes)
        timer.start()
        outcomes = boards.measure(codes * 5)
        assert all(o.error is None for o in outcomes)
        assert boards.take_times()[names[0]].dropped == 1
    finally:
        timer.join()
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        boards.close()


def _group(parent: int) -> list[int]:
    import psutil

    return [p.pid for p in psutil.Process(parent).children(recursive=True)]


def test_a_kernel_that_crashes_the_server_does_not_end_the_board(lab: Any, codes: list[BuiltKernel]) -> None:
    """A constructor that dies takes the session along; the watchdog starts the server again."""
    import subprocess
    import sys
    import tempfile

    name = lab.start_board(free_port())
    with tempfile.TemporaryDirectory() as work:
        Path(work, "x.c").write_text(
            "__attribute__((constructor)) static void die(void) { __builtin_trap(); }\n"
        )
        subprocess.run(
            [sys.executable, "-m", "ziglang", "cc", "-shared", "-fPIC", "-o", "x.so", "x.c"],
            cwd=work,
            check=True,
        )
        killer = BuiltKernel(Path(work, "x.so").read_bytes(), codes[0].arguments)
    boards = RpcBoards(lab.tracker, KEY, OPTIONS)
    try:
        outcomes = boards.measure([killer, codes[0]])
        assert outcomes[0].seconds is None
        assert outcomes[1].error is None
        assert outcomes[1].board == name
        assert boards.take_times()[name].dropped >= 1
    finally:
        boards.close()


class Liar:
    """A server that registers properly, and then answers no session as TVM would."""

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
        self._stop = True
        self._thread.join()
        self._listen.close()
        self._tracker.close()


def test_a_board_that_answers_nonsense_is_dropped_for_longer_each_time(
    lab: Any, codes: list[BuiltKernel]
) -> None:
    liar = Liar(lab.tracker)
    honest = lab.start_board(free_port())
    notes = []
    boards = RpcBoards(lab.tracker, KEY, OPTIONS, notes.append)
    try:
        deadline = time.monotonic() + 60
        dropped = []
        while not dropped:
            assert time.monotonic() < deadline
            outcomes = boards.measure(codes * 2)
            assert all(o.error is None and o.board == honest for o in outcomes)
            dropped = [note for note in notes if note.startswith(f"board {liar.name} is dropped")]
        assert "for 5 s" in dropped[0]
        assert liar.met >= 1
    finally:
        boards.close()
        liar.close()
