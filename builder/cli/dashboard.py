"""The verb `dashboard`: serve a page of the fleet on this machine."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Final

from agent.terminal import note, say
from builder.cli import SubParsers
from builder.cli.broker_flags import BrokerFlags
from builder.cli.flags import flag, part, takes

_DEFAULT: Final = "127.0.0.1:8700"


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not port.isascii() or not port.isdecimal() or int(port) > 65535 or (":" in host and host[0] != "["):
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, [IPV6]:PORT or PORT, got {text!r:.80}")
    return host.strip("[]") or "127.0.0.1", int(port)


@dataclass(frozen=True, slots=True)
class _Dashboard:
    at: BrokerFlags = part(BrokerFlags, "broker")
    listen: tuple[str, int] = flag(
        type=_address,
        default=_DEFAULT,
        metavar="[HOST:]PORT",
        help="where to serve the page; port 0 takes a free one (default: %(default)s)",
    )
    allow_host: list[str] = flag(
        action="append",
        default=[],
        metavar="NAME",
        help="another name by which browsers reach this machine, if --listen opens the page to the network; "
        "may be repeated",
    )


def add_parsers(subparsers: SubParsers) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "dashboard",
        help="serve a local page of the agents: models, pictures, deployments",
        description="Serve a page for a browser on this machine. It shows the agents, what they run and\n"
        "their latencies, live; it tries models on pictures and a camera's frames; it deploys and rolls\n"
        "back. Ctrl-C ends it.",
        epilog="examples:\n"
        "  edgebundle dashboard --broker mqtt://localhost\n"
        "  edgebundle dashboard --broker mqtts://broker --cafile ca.pem --listen 127.0.0.1:9000\n"
        "  ssh -L 8700:localhost:8700 workstation    # then open the printed address here",
    )
    takes(parser, _Dashboard, _dashboard)


def _dashboard(args: _Dashboard) -> int:
    import asyncio

    return asyncio.run(_serve(args))


async def _serve(args: _Dashboard) -> int:
    import asyncio
    import signal

    from builder.loopback import is_loopback
    from dashboard.server import Dashboard

    host, port = args.listen
    names = frozenset(name.lower() for name in args.allow_host)
    dashboard = Dashboard(args.at.made(), host=host, port=port, names=names)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    await dashboard.start()
    try:
        if not is_loopback(host):
            note(
                "warning: other machines can reach this page, without encryption: anybody who reads the "
                "traffic or the address\ncan deploy with your rights. Prefer --listen 127.0.0.1:8700 and "
                "ssh -L 8700:localhost:8700"
            )
        say(f"open {dashboard.url}", flush=True)
        note("Ctrl-C ends it; the address is secret and valid until then")
        await ended.wait()
    finally:
        await dashboard.close()
    return 0
