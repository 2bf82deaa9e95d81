"""The verbs `rpc-tracker` and `rpc-server`: start TVM's RPC tracker and server with safe defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from agent.terminal import note
from builder.cli import SubParsers
from builder.cli.arguments import positive
from builder.cli.flags import flag, takes

TRACKER_PORT: Final = 9190
SERVER_PORT: Final = 9091


@dataclass(frozen=True, slots=True)
class _Tracker:
    host: str = flag(default="127.0.0.1", help="address to listen on (default: %(default)s)")
    port: int = flag(
        type=positive, default=TRACKER_PORT, metavar="N", help="port to listen on (default: %(default)s)"
    )


@dataclass(frozen=True, slots=True)
class _Server:
    tracker: str = flag(
        default=f"127.0.0.1:{TRACKER_PORT}",
        metavar="HOST:PORT",
        help="address of the tracker (default: %(default)s)",
    )
    rpc_key: str = flag(
        required=True,
        metavar="KEY",
        help="name for boards of this kind, such as rpi4; `tune --rpc-key` asks for it",
    )
    host: str = flag(default="127.0.0.1", help="address to listen on (default: %(default)s)")
    port: int = flag(
        type=positive, default=SERVER_PORT, metavar="N", help="port to listen on (default: %(default)s)"
    )
    custom_address: str | None = flag(
        metavar="HOST", help="address at which clients reach this board, if it is not --host"
    )
    ssh: str | None = flag(
        metavar="USER@BOARD",
        help="open a tunnel to this board and start the server there; give each board a different --port",
    )
    ssh_command: str = flag(
        default="edgebundle",
        metavar="PROGRAM",
        help="how to call edgebundle in the board's shell (default: %(default)s)",
    )
    ssh_options: str = flag(
        default="", metavar="WORDS", help="options for ssh, such as '-p 2222 -i board.key'"
    )
    until_eof: bool = flag(action="store_true", help="stop when standard input ends (--ssh uses this)")


def add_parsers(subparsers: SubParsers) -> None:
    """Add the verbs."""
    parser = subparsers.add_parser(
        "rpc-tracker",
        help="start the tracker that boards register with (workstation)",
        description="Start TVM's RPC tracker. Boards register with it; tune, run and profile use them.",
        epilog="example:\n  edgebundle rpc-tracker --port 9190",
    )
    takes(parser, _Tracker, _tracker)

    parser = subparsers.add_parser(
        "rpc-server",
        help="make a board available for tuning (on the board, or from the workstation over SSH)",
        description="On a board: start TVM's RPC server and register it with a tracker. This needs the rpc\n"
        "extra: pip install 'edgebundle[rpc]'.\n"
        "On the workstation, with --ssh: open an SSH tunnel between the loopback addresses of workstation\n"
        "and board, and start the server on the board.",
        epilog="examples:\n"
        "  edgebundle rpc-server --ssh pi@kitchen --rpc-key rpi4           # on the workstation: all in one\n"
        "  edgebundle rpc-server --tracker 127.0.0.1:9190 --rpc-key rpi4   # on the board, behind a tunnel\n"
        "  edgebundle rpc-server --tracker lab:9190 --rpc-key rpi4 --host 0.0.0.0   # on a trusted network",
    )
    takes(parser, _Server, _server)


def _tracker(args: _Tracker) -> int:
    from builder.boards.rpc_servers import WARNING, serve_tracker
    from builder.loopback import is_loopback

    if not is_loopback(args.host):
        note(f"edgebundle: warning: {WARNING.format(address=f'{args.host}:{args.port}')}")
    return serve_tracker(args.host, args.port, note)


def _server(args: _Server) -> int:
    from builder.boards.rpc_servers import WARNING, ServerOptions, serve_board
    from builder.boards.tracker_client import Tracker
    from builder.loopback import is_loopback

    tracker = Tracker.parse(args.tracker)
    if args.ssh:
        return _over_ssh(args, args.ssh, tracker.port)
    if not is_loopback(args.host):
        note(f"edgebundle: warning: {WARNING.format(address=f'{args.host}:{args.port}')}")
    elif not is_loopback(tracker.host):
        note(
            "edgebundle: warning: the tracker is on another machine, but this server listens only on "
            "loopback: set --host, or use --ssh"
        )
    options = ServerOptions(
        args.host, args.port, tracker.host, tracker.port, args.rpc_key, args.custom_address
    )
    return serve_board(options, note, until_eof=args.until_eof)


def _over_ssh(args: _Server, board: str, tracker_port: int) -> int:
    import shlex

    from builder.boards.ssh_board import serve_over_ssh, server_command, ssh_tunnel
    from builder.errors import FleetError

    try:
        options = shlex.split(args.ssh_options)
    except ValueError as error:
        raise FleetError(
            f"--ssh-options: expected words in shell syntax, got {args.ssh_options!r} ({error})",
            hint="close each quote: --ssh-options '-p 2222 -i key'",
        ) from error
    tunnel = ssh_tunnel(board, tracker_port, args.port, options)
    command = server_command(args.ssh_command, tracker_port, args.port, args.rpc_key)
    note(shlex.join([*tunnel, command]))
    return serve_over_ssh(tunnel, command, board, note)
