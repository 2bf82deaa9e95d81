"""The verbs `rpc-tracker` and `rpc-server`: TVM's own distributed engine, started safely."""

from __future__ import annotations

import argparse
import sys
from typing import Final

from builder.cli import SubParsers
from builder.cli.arguments import positive

TRACKER_PORT: Final = 9190
SERVER_PORT: Final = 9091


def add_parsers(subparsers: SubParsers) -> None:
    """Add the verbs."""
    parser = subparsers.add_parser(
        "rpc-tracker",
        help="start the tracker that boards register with (workstation)",
        description="Start TVM's RPC tracker: boards register with it, tune and run ask it for them.",
        epilog="example:\n  edgebundle rpc-tracker --port 9190",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    parser.add_argument(
        "--port", type=positive, default=TRACKER_PORT, metavar="N", help="default: %(default)s"
    )
    parser.set_defaults(handler=_tracker)

    parser = subparsers.add_parser(
        "rpc-server",
        help="offer a board for tuning (board), or open the tunnel to one (workstation)",
        description="On a board: start TVM's RPC server and register it with a tracker. It needs the rpc\n"
        "extra: pip install 'edgebundle[rpc]'. On the workstation, with --ssh: open the tunnel through\n"
        "which board and workstation reach each other's loopback, and start the server there.",
        epilog="examples:\n"
        "  edgebundle rpc-server --ssh pi@kitchen --key rpi4           # on the workstation: all in one\n"
        "  edgebundle rpc-server --tracker 127.0.0.1:9190 --key rpi4   # on the board, behind a tunnel\n"
        "  edgebundle rpc-server --tracker lab:9190 --key rpi4 --host 0.0.0.0   # in a network of your own",
    )
    parser.add_argument(
        "--tracker", default=f"127.0.0.1:{TRACKER_PORT}", metavar="HOST:PORT", help="default: %(default)s"
    )
    parser.add_argument(
        "--key", required=True, help="what boards of this kind are asked for by, such as rpi4"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    parser.add_argument(
        "--port", type=positive, default=SERVER_PORT, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--custom-address",
        metavar="HOST",
        help="the address that clients reach this board at, where it differs",
    )
    parser.add_argument(
        "--ssh",
        metavar="USER@BOARD",
        help="open a tunnel to a board and start the server there; one --port for each board",
    )
    parser.add_argument(
        "--ssh-command",
        default="edgebundle",
        metavar="PROGRAM",
        help="edgebundle on the board, as its shell takes it (default: %(default)s)",
    )
    parser.add_argument(
        "--ssh-options", default="", metavar="WORDS", help="more of ssh's own, such as '-p 2222 -i board.key'"
    )
    parser.add_argument(
        "--until-eof", action="store_true", help="stop when standard input ends, as --ssh does"
    )
    parser.set_defaults(handler=_server)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _tracker(args: argparse.Namespace) -> int:
    from builder.boards.rpc_servers import WARNING, is_loopback, serve_tracker

    if not is_loopback(args.host):
        _say(f"edgebundle: warning: {WARNING.format(address=f'{args.host}:{args.port}')}")
    return serve_tracker(args.host, args.port, _say)


def _server(args: argparse.Namespace) -> int:
    from builder.boards.rpc_servers import WARNING, ServerOptions, is_loopback, serve_board
    from builder.boards.tracker_client import Tracker

    tracker = Tracker.parse(args.tracker)
    if args.ssh:
        return _over_ssh(args, tracker.port)
    if not is_loopback(args.host):
        _say(f"edgebundle: warning: {WARNING.format(address=f'{args.host}:{args.port}')}")
    elif not is_loopback(tracker.host):
        _say(
            "edgebundle: warning: the tracker is elsewhere, but this server listens to loopback alone: "
            "give --host, or use --ssh"
        )
    options = ServerOptions(args.host, args.port, tracker.host, tracker.port, args.key, args.custom_address)
    return serve_board(options, _say, until_eof=args.until_eof)


def _over_ssh(args: argparse.Namespace, tracker_port: int) -> int:
    import shlex

    from builder.boards.ssh_board import serve_over_ssh, server_command, ssh_tunnel
    from builder.errors import FleetError

    try:
        options = shlex.split(args.ssh_options)
    except ValueError as error:
        raise FleetError(f"--ssh-options: expected words as a shell takes them ({error})") from error
    tunnel = ssh_tunnel(args.ssh, tracker_port, args.port, options)
    command = server_command(args.ssh_command, tracker_port, args.port, args.key)
    _say(shlex.join([*tunnel, command]))
    return serve_over_ssh(tunnel, command, args.ssh, _say)
