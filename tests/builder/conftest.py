"""A small model's tasks, and a tracker with boards on loopback."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from builder import load, resolve
from builder.boards.tracker_client import Tracker
from builder.importer import ImportedModel
from builder.records.task import Task
from builder.target.device_target import DeviceTarget
from builder.tuning.tasks.extraction import extract_tasks
from tests.patience import PATIENCE_S
from tests.ports import free_port

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits" / "digits.onnx"
KEY = "testboard"


@pytest.fixture(scope="session")
def device() -> DeviceTarget:
    return resolve("host")


@pytest.fixture(scope="session")
def digits() -> ImportedModel:
    return load(DIGITS)


@pytest.fixture(scope="session")
def tasks(digits: ImportedModel, device: DeviceTarget) -> tuple[Task, ...]:
    return extract_tasks(digits, device)


def edgebundle(*words: str) -> list[str]:
    return [sys.executable, "-m", "builder", *words]


@dataclass
class Lab:
    """A tracker and its boards, each in its own process."""

    port: int
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def tracker(self) -> Tracker:
        return Tracker("127.0.0.1", self.port)

    def start_tracker(self) -> None:
        self._start("tracker", "rpc-tracker", "--port", str(self.port))
        self.wait(lambda: self.tracker.servers(KEY) == ())

    def start_board(self, port: int) -> str:
        name = f"127.0.0.1:{port}"
        self._start(name, "rpc-server", "--tracker", str(self.tracker), "--rpc-key", KEY, "--port", str(port))
        self.wait(lambda: any(str(port) in server for server in self.tracker.servers(KEY)))
        return name

    def kill(self, name: str) -> None:
        self.processes.pop(name).kill()
        port = name.rpartition(":")[2]
        self.wait(lambda: not any(port in server for server in self.tracker.servers(KEY)))

    def stop(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            process.wait(PATIENCE_S)

    def _start(self, name: str, *words: str) -> None:
        self.processes[name] = subprocess.Popen(
            edgebundle(*words), stderr=subprocess.DEVNULL, env=dict(os.environ)
        )

    @staticmethod
    def wait(condition: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
        from builder.errors import FleetError

        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(FleetError):
                if condition():
                    return
            assert time.monotonic() < deadline, "the lab did not come up"
            time.sleep(0.1)


@pytest.fixture(scope="module")
def tracker() -> Iterator[Lab]:
    made = Lab(free_port())
    made.start_tracker()
    yield made
    made.stop()


@pytest.fixture
def lab(tracker: Lab) -> Iterator[Lab]:
    """A tracker without boards; those that a test starts are stopped after it."""
    made = Lab(tracker.port)
    yield made
    made.stop()
    made.wait(lambda: made.tracker.servers(KEY) == ())
