"""The flags of the verbs that talk to agents: which agent, which broker, with which credentials."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from builder.cli import Parser
from builder.cli.arguments import seconds

if TYPE_CHECKING:
    from edgebundle.broker import Broker


def add_agent(parser: Parser) -> None:
    """Add `--agent`."""
    parser.add_argument(
        "--agent",
        required=True,
        metavar="NAME",
        help="the agent's name: `device` in its configuration, the first column of `edgebundle agents`",
    )


def add_broker(parser: Parser) -> None:
    """Add the flags for the broker and this client's credentials."""
    group = parser.add_argument_group("broker")
    group.add_argument("--broker", required=True, metavar="URL", help="mqtt[s]://[USER@]HOST[:PORT]")
    group.add_argument("--password-file", type=Path, metavar="FILE", help="file with the password of USER")
    group.add_argument(
        "--cafile", type=Path, metavar="PEM", help="CA certificates for mqtts (default: the system's)"
    )
    group.add_argument("--cert", type=Path, metavar="PEM", help="client certificate")
    group.add_argument("--key", type=Path, metavar="PEM", help="private key of the client certificate")
    group.add_argument(
        "--mqtt-version",
        choices=("auto", "5", "3.1.1"),
        default="auto",
        help="auto tries 5, then 3.1.1 if the broker refuses (default: %(default)s)",
    )


def add_wait(parser: Parser, default_s: float, what: str) -> None:
    """Add `--wait`: how long to wait for `what`."""
    parser.add_argument(
        "--wait",
        type=seconds,
        default=default_s,
        metavar="SECONDS",
        help=f"how long to wait for {what} (default: %(default)g)",
    )


def broker_of(args: argparse.Namespace) -> Broker:
    """Return the broker that the flags of `add_broker` describe."""
    from edgebundle.broker import Broker

    return Broker(
        url=args.broker,
        cafile=args.cafile,
        certificate=args.cert,
        key=args.key,
        password_file=args.password_file,
        protocol=args.mqtt_version,
    )
