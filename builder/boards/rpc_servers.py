"""A board's RPC server and the workstation's tracker: TVM's own, with safe defaults and a watchdog.

TVM's server does not recover if a kernel crashes its process, or if the tracker is away for a minute; here a
supervising process restarts it. The server offers `remote_functions` in addition to TVM's own functions.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from agent.terminal import note

SERVER_PORT: Final = 9091
SERVING: Final = "server at"  # beginning of the line that a server prints once it listens
RESTART_S: Final = 1.0
WARNING: Final = (
    "TVM RPC is remote code execution in clear text: anyone who can reach {address} controls this machine; "
    "use it only in your own network, or through `--ssh`"
)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where a board's server listens and registers.

    Attributes
    ----------
    host, port
        The address that it listens on: the first free port from `port` on.
    tracker_host, tracker_port, key
        The tracker that it registers with, and the key that it registers under.
    custom_address
        The address that the tracker gives to clients, if it is not the one that the server listens on.
    """

    host: str
    port: int
    tracker_host: str
    tracker_port: int
    key: str
    custom_address: str | None = None


def serve_board(options: ServerOptions, progress: Callable[[str], None], *, until_eof: bool = False) -> int:
    """Run a server, and restart it whenever it ends, until SIGTERM or SIGINT.

    Parameters
    ----------
    options
        Where it listens and registers.
    progress
        Called with a line when the server has ended.
    until_eof
        Also stop when standard input ends.
    """
    command = [
        sys.executable, "-m", "builder.boards.rpc_servers", options.host, str(options.port),
        options.tracker_host, str(options.tracker_port), options.key, options.custom_address or "",
    ]  # fmt: skip
    with stopping() as is_stopping:
        if until_eof:
            threading.Thread(target=_stop_at_eof, daemon=True).start()
        while not is_stopping():
            started = time.monotonic()
            child = subprocess.Popen(  # noqa: S603 - our own module
                command, stdin=subprocess.PIPE, start_new_session=True
            )
            try:
                while child.poll() is None and not is_stopping():
                    time.sleep(0.1)
            finally:
                # The whole group: one of the sessions that it forked may hang in a kernel.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            if is_stopping():
                break
            progress(
                f"the server ended ({child.returncode}) after {time.monotonic() - started:.0f} s, restarting"
            )
            time.sleep(RESTART_S)
    return 0


def serve_tracker(host: str, port: int, progress: Callable[[str], None]) -> int:
    """Run TVM's tracker until SIGTERM or SIGINT; `progress` is called with its address."""
    from tvm.rpc.tracker import Tracker

    require_free(host, port)
    with stopping() as is_stopping:
        tracker = Tracker(host=host, port=port, port_end=port + 1, silent=True)
        progress(f"tracker at {host}:{tracker.port}")
        try:
            while not is_stopping():
                time.sleep(0.1)
        finally:
            tracker.terminate()
    return 0


def require_free(host: str, port: int) -> None:
    """Check that this process can listen on an address.

    Raises `OSError` if the address is in use, or does not belong to this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))


def _stop_at_eof() -> None:
    while os.read(0, 1 << 12):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def stopping() -> Iterator[Callable[[], bool]]:
    """Catch SIGTERM and SIGINT; yield a function that returns whether one of them has arrived."""
    stopped = False

    def stop(_signal: int, _frame: object) -> None:
        nonlocal stopped
        stopped = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _serve(options: ServerOptions) -> None:
    """Run TVM's server in the supervised process until it ends or standard input closes."""
    from tvm.rpc.server import PopenRPCServerState

    from builder.boards.remote_functions import register

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    register()
    state = PopenRPCServerState(
        options.host,
        options.port,
        options.port + 100,
        tracker_addr=(options.tracker_host, options.tracker_port),
        key=options.key,
        custom_addr=options.custom_address,
        silent=True,
    )
    note(f"{SERVING} {options.host}:{state.port}, key {options.key}")

    def leave_with_parent() -> None:
        while os.read(0, 1):
            pass
        os.killpg(0, signal.SIGKILL)  # this process leads its own session

    threading.Thread(target=leave_with_parent, daemon=True).start()
    state.thread.join()


def _main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("host", "port", "tracker_host", "tracker_port", "key", "custom_address"):
        parser.add_argument(name)
    args = parser.parse_args()
    _serve(
        ServerOptions(
            args.host,
            int(args.port),
            args.tracker_host,
            int(args.tracker_port),
            args.key,
            args.custom_address or None,
        )
    )
    os._exit(1)


if __name__ == "__main__":
    _main()
