"""A board behind ssh: the tunnel that it is reached through, and the server at its other end.

The server lives as long as the connection: it stops when its standard input ends, whatever becomes of us.
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

CONNECTION_FAILED: Final = 255  # ssh's exit code; others are the command's
NOT_FOUND: Final = (126, 127)  # a shell's, for a program that is not there or cannot be run
END_S: Final = 10.0  # for the server to end after its input did


def ssh_tunnel(board: str, tracker_port: int, server_port: int, options: Sequence[str] = ()) -> list[str]:
    """The command of a tunnel from the workstation to a board.

    The board reaches the workstation's tracker at its own loopback (-R), and the workstation reaches the
    board's server at its own (-L), so that neither listens to anything but loopback.

    Parameters
    ----------
    board
        `user@host`, as ssh takes it.
    tracker_port, server_port
        The same at both ends.
    options
        More of ssh's own.

    Raises
    ------
    FleetError
        If `board` is none.
    """
    if board.startswith("-") or not board.strip():
        raise FleetError(f"--ssh: expected user@host, got {board[:80]!r}")
    return [
        "ssh", "-T",
        "-o", "ExitOnForwardFailure=yes", "-o", "ServerAliveInterval=15",
        "-R", f"127.0.0.1:{tracker_port}:127.0.0.1:{tracker_port}",
        "-L", f"127.0.0.1:{server_port}:127.0.0.1:{server_port}",
        *options, "--", board,
    ]  # fmt: skip


def server_command(program: str, tracker_port: int, server_port: int, key: str) -> str:
    """What the board's shell runs; `program` is as that shell takes it, so that `~` means home there."""
    words = ["rpc-server", "--tracker", f"127.0.0.1:{tracker_port}", "--key", key, "--host", "127.0.0.1"]
    return f"{program} {shlex.join([*words, '--port', str(server_port), '--until-eof'])}"


def serve_over_ssh(tunnel: Sequence[str], command: str, board: str, say: Callable[[str], None]) -> int:
    """Keep a tunnel and the server at its other end, until told to stop.

    Parameters
    ----------
    tunnel, command
        From `ssh_tunnel` and `server_command`.
    board
        What to call it.
    say
        Told what the other end says.

    Raises
    ------
    FleetError
        If the connection failed or broke, or the server did.
    """
    if shutil.which(tunnel[0]) is None:
        raise FleetError("ssh is not installed here", hint="apt install openssh-client")
    with stopping() as is_stopping:
        # In our process group: ssh asks for a password at the terminal, and Ctrl-C reaches it too.
        process = subprocess.Popen(  # noqa: S603 - ssh, with what the user asked for
            [*tunnel, command], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
        )
        heard = _Heard(process, say)
        try:
            while process.poll() is None and not is_stopping():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.1)
        finally:
            stopped = is_stopping()
            _end(process)
        heard.thread.join(END_S)
    if stopped:
        return 0
    raise _failure(process.returncode, heard, board)


class _Heard:
    """Reads what ssh and the other end say: held back until the server is there, for it may be the reason."""

    def __init__(self, process: subprocess.Popen[str], say: Callable[[str], None]) -> None:
        self.lines: list[str] = []
        self.is_serving = False
        self._process, self._say = process, say
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
                self._say(line)
            elif line.startswith(SERVING):
                self.is_serving = True
                for held in self.lines:
                    self._say(held)


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _failure(code: int, heard: _Heard, board: str) -> FleetError:
    last = heard.lines[-1][:200] if heard.lines else f"exit code {code}"
    if code == CONNECTION_FAILED and heard.is_serving:
        return FleetError(f"the connection to {board} broke: {last}", hint="the same command starts it again")
    if code == CONNECTION_FAILED:
        return FleetError(
            f"no ssh connection to {board}: {last}",
            hint=f"`ssh {board} true` must work (--ssh-options takes ports and keys), and the tracker's port "
            "and --port must be free at both ends",
        )
    if code in NOT_FOUND:
        return FleetError(
            f"edgebundle was not found on {board}: {last}",
            hint="--ssh-command says where it is, such as '~/edgebundle/bin/edgebundle'",
        )
    return FleetError(f"the server on {board} ended ({code}): {last}")
