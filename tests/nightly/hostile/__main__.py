"""`make hostile`: hostile MQTT packets for an agent with models, while an honest client asks.

Every honest request must be answered with 200 or 503 within five seconds, by the same agent process; its
memory may grow by 10 %, and nothing may be left unacknowledged. Then a hostile worker sends frames to an
agent, and clients flood another one on all of its connections. Prints a table; ends with status 1 if a
promise was not kept, and saves the last packets for --replay.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from tests.nightly.hostile.campaign import Result, drawn, replayed, run
from tests.nightly.hostile.flood import FloodResult, run_flood
from tests.nightly.hostile.frames import FramesResult, run_frames
from tests.nightly.hostile.pauses import VICTIMS, run_pauses

FULL_MESSAGES: Final = 100_000
FULL_FRAMES: Final = 20_000
FULL_FLOOD_S: Final = 600.0
# A hostile answer often costs a worker, which takes a tenth of a second to start.
FRAMES_PER_ANSWER: Final = 100
PROGRESS_EVERY_S: Final = 30.0
EXAMPLE: Final = """example:
  python -m tests.nightly.hostile --messages 2000                 # in a minute
  python -m tests.nightly.hostile --only control --share 0.1 --flood-s 600
  python -m tests.nightly.hostile --replay build/hostile/packets.jsonl
"""


def main() -> int:
    """Run the campaign; return the exit status."""
    options = _parser().parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=options.json, width=None if sys.stdout.isatty() else 130)
    return asyncio.run(_run(options, console))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.nightly.hostile",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--messages",
        type=int,
        default=FULL_MESSAGES,
        metavar="N",
        help="hostile packets (default: %(default)s)",
    )
    parser.add_argument(
        "--frames", type=int, default=FULL_FRAMES, metavar="N", help="hostile frames (default: %(default)s)"
    )
    parser.add_argument(
        "--flood-s",
        type=float,
        default=FULL_FLOOD_S,
        metavar="SECONDS",
        help="how long to flood an agent (default: %(default)g)",
    )
    parser.add_argument(
        "--only",
        choices=VICTIMS,
        action="append",
        default=[],
        help="flood only this connection of the agent (deaf: whose broker does not read), the client or the "
        "dashboard, and measure the pauses of its event loop; repeatable",
    )
    parser.add_argument(
        "--share",
        type=float,
        default=1.0,
        metavar="PART",
        help="of a processor, for --only; below 1 as root (default: %(default)g)",
    )
    parser.add_argument(
        "--seed", type=int, metavar="N", help="repeat the campaign of this seed (default: random)"
    )
    parser.add_argument("--replay", type=Path, metavar="FILE", help="send the packets that a campaign saved")
    parser.add_argument("--json", action="store_true", help="print one JSON object in place of the table")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("build/hostile"),
        metavar="DIR",
        help="folder for the agent's log and saved packets (default: %(default)s)",
    )
    return parser


async def _floods(options: argparse.Namespace, console: Console) -> int:
    """Flood what is named, one after the other, and print a JSON object for each."""
    passed = True
    for name in options.only:
        with tempfile.TemporaryDirectory(prefix="edgebundle-flood-") as folder:
            log = options.out / f"{name}.log"
            result = await run_pauses(name, options.share, options.flood_s, Path(folder), log=log)
        console.print_json(json.dumps(result.to_json()))
        passed = passed and result.passed
    return int(not passed)


async def _run(options: argparse.Namespace, console: Console) -> int:
    if options.only:
        return await _floods(options, console)
    number = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    console.print(f"seed {number}: {options.messages:,} packets, {options.frames:,} frames", highlight=False)
    batches = drawn(number, options.messages) if options.replay is None else replayed(options.replay)
    packets = options.out / "packets.jsonl"
    with tempfile.TemporaryDirectory(prefix="edgebundle-hostile-") as name:
        log = options.out / "agent.log"
        progress = _Progress(console, options.messages)
        result = await run(number, batches, Path(name), log=log, save=packets, progress=progress)
    frames = await run_frames(number, options.frames, max(1, options.frames // FRAMES_PER_ANSWER))
    with tempfile.TemporaryDirectory(prefix="edgebundle-flood-") as name:
        flood = await run_flood(options.flood_s, Path(name), log=options.out / "flood.log")
    report = {"packets": result.to_json(), "frames": frames.to_json(), "flood": flood.to_json()}
    (options.out / "hostile.json").write_text(json.dumps(report, indent=1) + "\n")
    if options.json:
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        _print(console, result, frames, flood)
    for complaint in result.complaints + frames.complaints + flood.complaints:
        console.print(complaint, style="red", highlight=False)
    if not result.passed:
        console.print(f"the last packets: {packets}; send them again with --replay", highlight=False)
    return int(not (result.passed and frames.passed and flood.passed))


class _Progress:
    def __init__(self, console: Console, messages: int) -> None:
        self._console = console
        self._messages = messages
        self._reported_s = time.monotonic()

    def __call__(self, result: Result) -> None:
        if time.monotonic() - self._reported_s < PROGRESS_EVERY_S:
            return
        self._reported_s = time.monotonic()
        answers = ", ".join(f"{count:,} x {status}" for status, count in sorted(result.statuses.items()))
        line = f"{time.strftime('%X')} {result.messages:,} of {self._messages:,} packets; honest: {answers}"
        self._console.print(line, highlight=False)


def _print(console: Console, result: Result, frames: FramesResult, flood: FloodResult) -> None:
    answers = ", ".join(f"{count:,} x {status}" for status, count in sorted(result.statuses.items()))
    before, after = (size / (1 << 20) for size in result.memory_bytes)
    table = Table("what", "measured", title=f"hostile campaign, seed {result.number}")
    rows = {
        "hostile packets": f"{result.messages:,} in {result.seconds:.0f} s, {result.refused:,} not passed on",
        "honest requests": f"{result.asked:,}: {answers}",
        "honest latency": f"median {result.median_s * 1000:.1f} ms, slowest {result.slowest_s * 1000:.0f} ms",
        "agent's memory": f"{before:.1f} MiB after the warm-up, {after:.1f} MiB at the end",
        "workers that died": f"{result.worker_restarts:,}",
        "hostile frames": f"{frames.frames:,} read, {frames.refused:,} refused",
        "hostile worker": f"{frames.answers:,} requests; {frames.honest:,} honest ones to another worker",
        "flood": f"{flood.sent:,} messages in {flood.seconds:.0f} s, {flood.dropped:,} dropped unread",
        "honest in the flood": f"{flood.asked:,} requests, {flood.lost:,} lost, "
        f"median {flood.median_s * 1000:.0f} ms, slowest {flood.slowest_s * 1000:.0f} ms",
        "memory in the flood": " -> ".join(f"{size / (1 << 20):.1f}" for size in flood.memory_bytes) + " MiB",
        "verdict": "kept" if result.passed and frames.passed and flood.passed else "NOT KEPT",
    }
    for what, measured in rows.items():
        table.add_row(what, measured)
    console.print(table)


if __name__ == "__main__":
    raise SystemExit(main())
