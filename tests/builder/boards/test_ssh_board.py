"""A board behind a real ssh: sshd in its own network namespace, reached over its standard input."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from builder.boards.measuring_process import BuiltKernel, RunnerOptions
from builder.boards.rpc_boards import RpcBoards
from builder.boards.ssh_board import server_command, ssh_tunnel
from builder.cli import main
from builder.errors import FleetError
from builder.records.task import Task
from builder.tuning.candidates.candidate_builder import CandidateBuilder
from tests.needs import needed
from tests.patience import PATIENCE_S
from tests.ports import free_port

PROJECT = Path(__file__).resolve().parents[3]
KEY = "testboard"
SSHD = "/usr/sbin/sshd"
# It has its own loopback, as a board has: a port that is in use here is free there. The kernel removes the
# namespace with its last process.
BOARD = """
import ctypes, fcntl, os, socket, struct, sys
CLONE_NEWNET, SIOCSIFFLAGS, IFF_UP = 0x40000000, 0x8914, 1
if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
    sys.exit("no network namespace")
with socket.socket() as sock:
    fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))
os.makedirs("/run/sshd", exist_ok=True)
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_the_tunnel_works_both_ways_and_listens_on_loopback_only() -> None:
    command = ssh_tunnel("pi@kitchen", 9190, 9091, ["-p", "2222"])
    assert command[0] == "ssh"
    assert command[command.index("-R") + 1] == "127.0.0.1:9190:127.0.0.1:9190"
    assert command[command.index("-L") + 1] == "127.0.0.1:9091:127.0.0.1:9091"
    assert command[-4:] == ["-p", "2222", "--", "pi@kitchen"]
    assert "ExitOnForwardFailure=yes" in command


@pytest.mark.parametrize("board", ["", " ", "-oProxyCommand=evil"])
def test_an_option_is_refused_as_a_board(board: str) -> None:
    with pytest.raises(FleetError, match="user@host"):
        ssh_tunnel(board, 9190, 9091)


def test_the_boards_shell_expands_the_home_folder() -> None:
    command = server_command("~/edgebundle/bin/edgebundle", 9190, 9091, "rpi 4")
    assert command.startswith("~/edgebundle/bin/edgebundle rpc-server ")
    assert shlex.split(command)[5] == "rpi 4"


@pytest.mark.parametrize(
    ("script", "message", "hint"),
    [
        ("echo 'ssh: connect to host kitchen port 22: Connection refused' >&2; exit 255", "no ssh connection "
         "to pi@kitchen: ssh: connect to host kitchen port 22: Connection refused", "`ssh pi@kitchen true`"),
        ("echo 'bash: edgebundle: command not found' >&2; exit 127", "edgebundle was not found on pi@kitchen",
         "--ssh-command"),
        ("echo 'server at 127.0.0.1:1' >&2; sleep 0.2; echo 'Broken pipe' >&2; exit 255", "the connection to "
         "pi@kitchen broke: Broken pipe", "the same command"),
        ("echo 'edgebundle: error: no tracker' >&2; exit 4", "the server on pi@kitchen ended (4): "
         "edgebundle: error: no tracker", "`ssh pi@kitchen`"),
    ],
)  # fmt: skip
def test_a_failed_connection_is_explained_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    script: str,
    message: str,
    hint: str,
) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(f"#!/bin/sh\n{script}\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert main(["rpc-server", "--ssh", "pi@kitchen", "--rpc-key", "rpi4", "--port", "9095"]) == 4
    error = capsys.readouterr().err
    assert f"edgebundle: error: {message}" in error
    assert "hint: " in error
    assert hint in error
    assert "Traceback" not in error


@dataclass(frozen=True)
class Board:
    """The ssh options and the command that reach the board, and the processes running there."""

    options: str
    command: str
    mark: str

    def arguments(self, tracker: str, port: int) -> list[str]:
        words = [
            "rpc-server",
            "--ssh",
            "root@board",
            "--rpc-key",
            KEY,
            "--tracker",
            tracker,
            "--port",
            str(port),
        ]
        return [*words, "--ssh-options", self.options, "--ssh-command", self.command]

    def processes(self) -> list[int]:
        """Return the ids of the processes that were started over ssh."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if self.mark.encode() in path.read_bytes():
                    found.append(int(path.parent.name))
            except OSError:
                continue
        return found


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Board]:
    needed("sshd")
    if os.geteuid() != 0:
        pytest.skip("sshd needs root to create a network namespace")
    for name in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True
        )
    shutil.copy(tmp_path / "user.pub", tmp_path / "authorized")
    (tmp_path / "sshd_config").write_text(
        f"HostKey {tmp_path}/host\nAuthorizedKeysFile {tmp_path}/authorized\nStrictModes no\nUsePAM no\n"
        "PasswordAuthentication no\nPermitRootLogin prohibit-password\nPidFile none\nLogLevel ERROR\n"
    )
    (tmp_path / "board.py").write_text(BOARD)
    proxy = [
        sys.executable,
        str(tmp_path / "board.py"),
        SSHD,
        "-i",
        "-e",
        "-f",
        str(tmp_path / "sshd_config"),
    ]
    options = ["-F", "none", "-i", str(tmp_path / "user"), "-o", f"ProxyCommand={shlex.join(proxy)}"]
    options += ["-o", "StrictHostKeyChecking=no", "-o", f"UserKnownHostsFile={tmp_path}/known"]
    options += ["-o", "BatchMode=yes"]
    mark = f"EDGEBUNDLE_TEST={tmp_path}"
    command = f"env {mark} PYTHONPATH={PROJECT} {sys.executable} -m builder"
    made = Board(shlex.join(options), command, mark)
    yield made
    for pid in made.processes():
        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_board_behind_ssh_measures_and_leaves_no_process(
    lab: Any, board: Board, tasks: tuple[Task, ...], device: Any
) -> None:
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "builder", *board.arguments(str(lab.tracker), port)],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    try:
        lab.wait(lambda: process.poll() is not None or lab.tracker.servers(KEY) != ())
        assert process.poll() is None, process.stderr.read()
        assert board.processes()
        builder = CandidateBuilder(device, 1)
        task = tasks[0]
        point = task.space.point(task.space.default)
        assert point is not None
        (kernel,) = builder.build([(task, point)])
        builder.close()
        assert isinstance(kernel, BuiltKernel)
        boards = RpcBoards(lab.tracker, KEY, RunnerOptions(number=1, repeat=2, min_repeat_ms=0, timeout_s=60))
        (measurement,) = boards.measure([kernel])
        boards.close()
        assert measurement.error is None
        assert measurement.board == f"127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does at Ctrl-C, to ssh too
        process.wait(PATIENCE_S)
    assert process.returncode == 0, process.stderr.read()
    deadline = time.monotonic() + 30
    while left := board.processes():
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    assert lab.tracker.servers(KEY) == ()


@pytest.mark.slow
def test_a_key_that_the_board_does_not_accept_is_explained(
    board: Board, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "authorized").write_text("")
    assert main(board.arguments("127.0.0.1:1", 9095)) == 4
    error = capsys.readouterr().err
    assert "edgebundle: error: no ssh connection to root@board: root@board: Permission denied" in error
    assert "hint: make sure that `ssh root@board true` works" in error


def test_a_missing_program_on_the_board_is_explained(
    board: Board, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = board.arguments(f"127.0.0.1:{free_port()}", free_port())
    arguments[-1] = "~/nowhere/edgebundle"
    assert main(arguments) == 4
    error = capsys.readouterr().err
    assert "edgebundle: error: edgebundle was not found on root@board: " in error
    assert "/nowhere/edgebundle" in error
    assert "hint: give its path on the board, such as --ssh-command" in error
