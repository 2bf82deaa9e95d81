"""A board behind ssh: the tunnel to it, and the server at its other end.

The server lives as long as the connection: it stops when its standard input ends. So it also stops when this
process is killed.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import Final

from builder.boards.rpc_servers import SERVING, stopping
from builder.errors import FleetError

CONNECTION_FAILED: Final = 255  # ssh's own exit status; all others are those of the command
NOT_FOUND: Final = (126, 127)  # a shell's status for a program that is missing or cannot be run
END_S: Final = 10.0  # time for the server to end once its input has ended


def ssh_tunnel(board: str, tracker_port: int, server_port: int, options: Sequence[str] = ()) -> list[str]:
    """Return the command that opens a tunnel from the workstation to a board.

    The board reaches the workstation's tracker on its own loopback (-R), and the workstation reaches the
    board's server on its own (-L), so both listen on loopback only.

    Parameters
    ----------
    board
        `user@host`, as ssh accepts it.
    tracker_port, server_port
        The ports of tracker and server, the same at both ends.
    options
        Further options for ssh.

    Raises
    ------
    FleetError
        If `board` is empty or looks like an option.
    """
    if board.startswith("-") or not board.strip():
        raise FleetError(
            f"--ssh: expected user@host, got {board[:80]!r}", hint="write --ssh pi@kitchen.local"
        )
    return [
        "ssh", "-T",
        "-o", "ExitOnForwardFailure=yes", "-o", "ServerAliveInterval=15",
        "-R", f"127.0.0.1:{tracker_port}:127.0.0.1:{tracker_port}",
        "-L", f"127.0.0.1:{server_port}:127.0.0.1:{server_port}",
        *options, "--", board,
    ]  # fmt: skip


def server_command(program: str, tracker_port: int, server_port: int, key: str) -> str:
    """Return the command for the board's shell; `program` is not quoted, so the shell expands `~`."""
    words = ["rpc-server", "--tracker", f"127.0.0.1:{tracker_port}", "--rpc-key", key, "--host", "127.0.0.1"]
    return f"{program} {shlex.join([*words, '--port', str(server_port), '--until-eof'])}"


def serve_over_ssh(tunnel: Sequence[str], command: str, board: str, progress: Callable[[str], None]) -> int:
    """Keep a tunnel and the server at its other end open until SIGTERM or SIGINT.

    Parameters
    ----------
    tunnel, command
        What `ssh_tunnel` and `server_command` returned.
    board
        The board's name in messages.
    progress
        Called with each line that ssh or the server prints.

    Raises
    ------
    FleetError
        If ssh is missing, the connection fails or breaks, or the server ends.
    """
    if shutil.which(tunnel[0]) is None:
        raise FleetError("ssh is not installed on this machine", hint="apt install openssh-client")
    with stopping() as is_stopping:
        # In our process group: ssh asks for a password at the terminal, and Ctrl-C reaches it too.
        process = subprocess.Popen(  # noqa: S603 - ssh, with what the user asked for
            [*tunnel, command], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
        )
        output = _RemoteOutput(process, progress)
        try:
            while process.poll() is None and not is_stopping():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)
        finally:
            stopped = is_stopping()
            _end(process)
        output.thread.join(END_S)
    if stopped:
        return 0
    raise _failure(process.returncode, output, board)


class _RemoteOutput:
    """Reads what ssh and the server print.

    Lines are held back until the server listens: before that, the last one is the reason for a failure.
    """

    def __init__(self, process: subprocess.Popen[str], progress: Callable[[str], None]) -> None:
        self.lines: list[str] = []
        self.is_serving = False
        self._process, self._progress = process, progress
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        assert self._process.stderr is not None
        for raw in self._process.stderr:
            line = raw.strip()
            if not line:
                continue
            self.lines = [*self.lines[-20:], line]
            if self.is_serving:
                self._progress(line)
            elif line.startswith(SERVING):
                self.is_serving = True
                for held in self.lines:
                    self._progress(held)


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _failure(code: int, output: _RemoteOutput, board: str) -> FleetError:
    last = output.lines[-1][:200] if output.lines else f"exit code {code}"
    if code == CONNECTION_FAILED and output.is_serving:
        return FleetError(f"the connection to {board} broke: {last}", hint="run the same command again")
    if code == CONNECTION_FAILED:
        return FleetError(
            f"no ssh connection to {board}: {last}",
            hint=f"make sure that `ssh {board} true` works (--ssh-options takes ports and keys), and that "
            "the tracker's port and --port are free at both ends",
        )
    if code in NOT_FOUND:
        return FleetError(
            f"edgebundle was not found on {board}: {last}",
            hint="give its path on the board, such as --ssh-command '~/edgebundle/bin/edgebundle'",
        )
    return FleetError(
        f"the server on {board} ended ({code}): {last}",
        hint=f"try `ssh {board}` yourself, and `edgebundle rpc-server --help` there",
    )
