"""Starts the processes of a measurement: the broker, the agent, the echo, and a bare executor.

The broker is mosquitto, configured as on Debian: with persistence, without `set_tcp_nodelay`,
all else default.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Final

from tests.agent.launching import workers_of

DEVICE: Final = "bench"
_START_LIMIT_S: Final = 30.0
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class StageError(Exception):
    """A process of a measurement could not be started, or ended."""


class Stage:
    """A context manager that runs a broker and an agent.

    Parameters
    ----------
    folder
        The folder for state, configuration and logs.
    trust
        The folder with the public key.
    config
        More lines for the agent's configuration.
    """

    def __init__(self, folder: Path, trust: Path, config: str = "") -> None:
        self._folder = folder
        self._trust = trust
        self._config = config
        self._processes: list[subprocess.Popen[bytes]] = []
        self.port = _free_port()
        self.ready_s = 0.0

    def __enter__(self) -> Stage:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._start_broker()
        self.agent_pid = self._start_agent()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @property
    def url(self) -> str:
        """The broker's address."""
        return f"mqtt://127.0.0.1:{self.port}"

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the agent's workers."""
        return workers_of(self.agent_pid)

    def log(self) -> str:
        """Return the agent's log."""
        return (self._folder / "agent.log").read_text()

    def start_echo(self) -> None:
        """Start the bare responder."""
        command = [sys.executable, "-m", "benchmarks.agent.echo", str(self.port)]
        echo = self._start(command, stdout=subprocess.PIPE)
        assert echo.stdout is not None
        if not select.select([echo.stdout], [], [], _START_LIMIT_S)[0] or not echo.stdout.readline():
            raise StageError("the echo did not start")

    def install(self, bundle: Path) -> None:
        """Install a bundle with `edge-agent install`, as on a device."""
        command = [*_AGENT, "install", str(bundle), "--config", str(self._folder / "agent.toml")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            raise StageError(f"edge-agent install: {done.stderr}")

    def _start_broker(self) -> None:
        program = shutil.which("mosquitto", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
        if program is None:
            raise StageError("mosquitto not found: apt-get install mosquitto")
        path = self._folder / "mosquitto.conf"
        user = "user root\n" if os.geteuid() == 0 else ""
        path.write_text(
            f"listener {self.port} 127.0.0.1\nallow_anonymous true\npersistence true\n"
            f"persistence_location {self._folder}/\nlog_dest none\n{user}"
        )
        self._start([program, "-c", str(path)], stderr=subprocess.DEVNULL)
        end_s = time.monotonic() + _START_LIMIT_S
        while time.monotonic() < end_s:
            with socket.socket() as sock:
                if sock.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.02)
        raise StageError("mosquitto did not open its port")

    def _start_agent(self) -> int:
        config = self._folder / "agent.toml"
        config.write_text(
            f'device = "{DEVICE}"\nstate_dir = "{self._folder}/state"\n'
            f'[broker]\nurl = "{self.url}"\n[trust]\ndir = "{self._trust}"\n{self._config}'
        )
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            path = str(self._folder / "notify")
            notify.bind(path)
            notify.settimeout(_START_LIMIT_S)
            start_s = time.perf_counter()
            with (self._folder / "agent.log").open("wb") as log:
                agent = self._start(
                    [*_AGENT, "run", "--config", str(config)],
                    env={**os.environ, "NOTIFY_SOCKET": path},
                    stderr=log,
                )
            try:
                while b"READY=1" not in notify.recv(4096):
                    pass
            except TimeoutError:
                raise StageError(f"the agent did not become ready: {self.log()}") from None
            self.ready_s = time.perf_counter() - start_s
        return agent.pid

    def _start(self, command: list[str], **options: object) -> subprocess.Popen[bytes]:
        process: subprocess.Popen[bytes] = subprocess.Popen(command, **options)  # type: ignore[call-overload]
        self._processes.append(process)
        return process


_AGENT: Final = (sys.executable, "-m", "agent")


class BareExecutor:
    """A model in an executor without agent, broker or channel, in a separate process.

    Parameters
    ----------
    bundle
        The model's bundle.
    threads
        Threads of its kernels.
    """

    def __init__(self, bundle: Path, threads: int = 1) -> None:
        command = [sys.executable, "-m", "benchmarks.agent.bare_executor", str(bundle), str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._read()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def times_s(self, seconds: float) -> list[float]:
        """Run the model for `seconds`; return the seconds of each run."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n".encode())
        self._process.stdin.flush()
        times: list[float] = json.loads(self._read())
        return times

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _read(self) -> bytes:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise StageError("the bare executor ended")
        return line


def cpu_s(pid: int) -> float:
    """Return the processor seconds that the threads of a process have used, to the nanosecond."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            total += int((task / "schedstat").read_text().split()[0])
        except OSError:
            continue
    return total / 1e9


def rss_bytes(pid: int) -> int:
    """Return the resident memory of a process in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
