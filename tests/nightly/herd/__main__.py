"""`make herd`: a thousand agents after a restart of their broker.

Starts a mosquitto and the MQTT side of the agents, with three connections each, kills the broker, starts it
again, and counts connects. Ends with status 1 if more than 150 came in any second, or if an agent was not
back and subscribed within 30 s.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
from pathlib import Path
from typing import Final

from agent.config.settings import RECONNECT_SPREAD_S
from tests.nightly.herd.restart import BACK_WITHIN_S, MOST_CONNECTS, Result, processor, restart_under
from tests.nightly.herd.steady_loop import SteadyLoop

EXAMPLE: Final = """example:
  python -m tests.nightly.herd --away 10       # the broker is away for ten seconds
  python -m tests.nightly.herd --spread 0      # without slots: everybody comes back at once, and this fails
"""
_BAR: Final = 3


def main() -> int:
    """Run one restart; return the exit status."""
    options = _parser().parse_args()
    logging.basicConfig(level="ERROR")
    folder = tempfile.TemporaryDirectory(prefix="edgebundle-herd-")
    with folder, asyncio.Runner(loop_factory=SteadyLoop) as runner:
        result = runner.run(
            restart_under(
                options.agents,
                Path(folder.name),
                spread_s=options.spread,
                away_s=options.away,
                has_groups=not options.no_groups,
            )
        )
    _print(result)
    return 0 if result.passed() else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.nightly.herd",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--agents", type=int, default=1000, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--spread",
        type=float,
        default=RECONNECT_SPREAD_S,
        metavar="SECONDS",
        help="broker.reconnect_spread_s of the agents (default: theirs, %(default)s)",
    )
    parser.add_argument(
        "--away",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="how long the broker is away (default: %(default)s)",
    )
    parser.add_argument("--no-groups", action="store_true", help="two connections an agent, not three")
    return parser


def _print(result: Result) -> None:
    print(
        f"{result.agents} agents, {result.connections} connections, broker killed and away for "
        f"{result.away_s:g} s; {processor()}"
    )
    print("connects in each second, from the broker's log:")
    for second, count in enumerate(result.accepted):
        print(f"  {second:3d} s  {count:5d}  {'#' * (count // _BAR)}")
    back = (
        "not all are back"
        if result.back_s is None
        else f"all back and subscribed after {result.back_s:.1f} s"
    )
    print(f"busiest second: {result.busiest} connects (at most {MOST_CONNECTS})")
    print(f"{back} (at most {BACK_WITHIN_S:g} s)")
    print(f"all agents together took {result.cpu_s:.1f} s of processor time for it")
    print(f"their process did not get a processor for {result.lost_s:.1f} s, which their clocks leave out")
    print("passed" if result.passed() else "FAILED")


if __name__ == "__main__":
    sys.exit(main())
