"""Tuning over RPC on two boards in an arm64 user space; one dies during the run and comes back."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from builder import RunnerOptions, TrackerBoards, TuneOptions, compile, load, resolve, run, tune
from builder.boards.remote_run import profile_on_board, run_on_board
from builder.boards.rpc_boards import RpcBoards
from builder.boards.tracker_client import Tracker
from builder.errors import FleetError
from tests.packaging.conftest import PROJECT, Root, edgebundle, wait_for
from tests.patience import PATIENCE_S, PROGRAM_PATIENCE_S

pytestmark = pytest.mark.arm

KEY = "rpi4"
# The rpc extra and what the agent needs, for the root's Python. Cached: TVM's wheel has a hundred megabytes.
PACKAGES = (
    "apache-tvm==0.27.0.post1", "apache-tvm-ffi==0.1.14.post1", "psutil", "tornado", "cloudpickle", "numpy",
    "cryptography", "pillow", "paho-mqtt",
)  # fmt: skip
PLATFORMS = (
    "manylinux_2_28_aarch64",
    "manylinux_2_26_aarch64",
    "manylinux_2_17_aarch64",
    "manylinux2014_aarch64",
)
START_S = 240  # to start Python and load TVM, emulated, on two shared cores
# Times under emulation mean nothing; the tests check that everything works.
RUNNER = RunnerOptions(number=1, repeat=1, min_repeat_ms=0, timeout_s=120, threads=1)


def _cached_packages() -> Path:
    cache = Path(os.environ.get("EDGEBUNDLE_CACHE") or Path.home() / ".cache/edgebundle")
    folder = cache / "rpc-arm64-0.27.0.post1"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".rpc-arm64.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            building = cache / ".building-rpc-arm64"
            shutil.rmtree(building, ignore_errors=True)
            platforms = [word for name in PLATFORMS for word in ("--platform", name)]
            subprocess.run(
                [
                    *(sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"),
                    *("--target", str(building), "--only-binary=:all:", "--python-version", "3.11"),
                    *("--implementation", "cp", *platforms, *PACKAGES),
                ],
                check=True,
                timeout=PROGRAM_PATIENCE_S,
            )
            building.rename(folder)
    return folder


@pytest.fixture(scope="module")
def root(make_root: Callable[[str, str], Root]) -> Root:
    """An arm64 root with the rpc extra and this project."""
    made = make_root("arm64", "bookworm")
    shutil.copytree(_cached_packages(), made.path / "opt/rpc", symlinks=True)
    for package in ("agent", "builder", "edgebundle"):
        shutil.copytree(PROJECT / package, made.path / "opt/rpc" / package)
    return made


class Boards:
    """A tracker on this machine, and servers in the root, on the same loopback."""

    def __init__(self, root: Root, port: int) -> None:
        self._root = root
        self.tracker = Tracker("127.0.0.1", port)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._tracker = subprocess.Popen(
            [sys.executable, "-m", "builder", "rpc-tracker", "--port", str(port)], stderr=subprocess.DEVNULL
        )

    def start(self, port: int) -> None:
        command = self._root.command(
            *("PYTHONPATH=/opt/rpc", "python3", "-m", "builder", "rpc-server"),
            *("--tracker", str(self.tracker), "--rpc-key", KEY, "--port", str(port)),
        )
        self._processes[port] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill(self, port: int) -> None:
        """Kill a server, and wait until it is gone: another one would take the next port meanwhile."""
        self._processes.pop(port).kill()
        wait_for("the tracker to miss the board", lambda: not self.has(port), START_S)

    def has(self, *ports: int) -> bool:
        try:
            servers = self.tracker.servers(KEY)
        except FleetError:
            return False
        return all(any(str(port) in server for server in servers) for port in ports)

    def close(self) -> None:
        for process in [*self._processes.values(), self._tracker]:
            process.terminate()
        for process in [*self._processes.values(), self._tracker]:
            process.wait(PATIENCE_S)


PORTS = (19391, 19392)


@pytest.fixture(scope="module")
def boards(root: Root) -> Iterator[Boards]:
    made = Boards(root, 19390)
    try:
        for port in PORTS:
            made.start(port)
        wait_for("two boards at the tracker", lambda: made.has(*PORTS), START_S)
        yield made
    finally:
        made.close()


class Notes:
    """A view that keeps the notes."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def update(self, progress: object) -> None:
        """Ignore the progress."""

    def note(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def small_model(digits_onnx: Path) -> Path:
    """The real mnist if EDGEBUNDLE_MODELS is set, else the digits of the example."""
    folder = os.environ.get("EDGEBUNDLE_MODELS")
    return Path(folder, "mnist.onnx") if folder else digits_onnx


def test_a_model_is_tuned_on_two_boards_and_its_bundle_runs_there(
    boards: Boards, small_model: Path, tmp_path: Path
) -> None:
    # One board dies during the first batches and is restarted.
    def accident() -> None:
        wait_for("records", (tmp_path / "r/database_tuning_record.json").exists, START_S)
        boards.kill(PORTS[0])
        boards.start(PORTS[0])

    thread = threading.Thread(target=accident)
    thread.start()
    notes = Notes()
    model, device = load(small_model), resolve("rpi4")
    records = tune(
        model,
        device,
        tmp_path / "r",
        options=TuneOptions(trials=8, batch=4, pairs=3, tuner="ga"),
        runner=RUNNER,
        boards=TrackerBoards(boards.tracker, KEY),
        view=notes,
    )
    thread.join()
    assert len(records.all) >= 16
    assert not [r for r in records.all if r.seconds is None], notes.lines
    names = {f"127.0.0.1:{port}" for port in PORTS}
    assert set(records.meta.boards) == names
    assert sum(board.measured for board in records.meta.boards.values()) >= len(records.all)

    wait_for("the board that died is back", lambda: boards.has(*PORTS), START_S)
    again = RpcBoards(boards.tracker, KEY, RUNNER)
    again.close()

    package = compile(model, device, tuning_records=records)  # checks parity with the reference, too
    assert package.manifest.provenance.tuning_records_sha256 == records.digest()
    image = np.random.default_rng(0).random(package.manifest.inputs[0].shape, dtype=np.float32)
    inputs = {package.manifest.inputs[0].name: image}
    measured = run_on_board(
        package, inputs, tracker=boards.tracker, key=KEY, benchmark=True, repeat=2, threads=1
    )
    here = run(compile(model, "host"), inputs).get_output("output_0")
    there = measured.get_output("output_0")
    assert there.shape == here.shape
    assert np.allclose(there, here, rtol=1e-4, atol=1e-5)
    assert measured.times is not None
    assert len(measured.times.results) == 2
    report = profile_on_board(package, tracker=boards.tracker, key=KEY, number=1, threads=1)
    assert len(report.rows) >= 4
    assert report.total_us > 0


def test_run_and_profile_of_the_command_line_work_on_a_board(
    boards: Boards, compiled: Callable[..., Path], digits_onnx: Path, tmp_path: Path
) -> None:
    board = ("--rpc-tracker", str(boards.tracker), "--rpc-key", KEY, "--threads", "1")
    bundle = compiled("rpi4")
    shown = edgebundle("run", bundle, "--inputs", digits_onnx.parent / "seven.png", "--print-time", *board)
    assert "seven" in shown.splitlines()[0]
    assert "mean (ms)" in shown
    assert "conv2d" in edgebundle("profile", bundle, "--number", "1", *board)
    refused = edgebundle("run", compiled("host"), *board, ok=False)
    assert "expected a bundle for this aarch64 machine" in refused
