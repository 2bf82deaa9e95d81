"""`make soak`: each fault during a hundred thousand requests, then half an hour of steady load.

Prints a table, and writes `soak.json`, `soak.png` and the logs. Ends with status 1 if a promise was not kept.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from benchmarks.soak.picture import draw
from benchmarks.soak.steady import SteadyResult, run_steady
from benchmarks.soak.trials import FAULTS, FULL_REQUESTS, TrialResult, row_of, run_trial
from tests.agent.faults import Trial

PROGRESS_EVERY_S: Final = 30.0
STEADY: Final = "steady"
EXAMPLE: Final = """example:
  python -m benchmarks.soak --requests 2000 --minutes 2       # everything, in ten minutes
  python -m benchmarks.soak --only agent cuts                 # two faults in full size
"""


def main() -> int:
    """Run the soak; return the exit status."""
    options = _parser().parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(filename=options.out / "clients.log", level="INFO", format="%(asctime)s %(message)s")
    # A file or a pipe has no width.
    console = Console() if sys.stdout.isatty() else Console(width=130)
    return asyncio.run(_run(options, console))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [fault.name for fault in FAULTS]
    parser.add_argument(
        "--requests",
        type=int,
        default=FULL_REQUESTS,
        metavar="N",
        help="requests during each fault (default: %(default)s)",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=30.0,
        metavar="M",
        help="minutes of steady load (default: %(default)s)",
    )
    parser.add_argument("--only", nargs="+", choices=[*names, STEADY], help="run only these")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("build/soak"),
        metavar="DIR",
        help="folder for the report (default: %(default)s)",
    )
    return parser


async def _run(options: argparse.Namespace, console: Console) -> int:
    chosen = options.only or [*(fault.name for fault in FAULTS), STEADY]
    log = options.out / "agent.log"
    results: list[TrialResult] = []
    aborted: list[str] = []
    steady: SteadyResult | None = None
    for fault in FAULTS:
        if fault.name not in chosen:
            continue
        reporting = None

        def begin(trial: Trial, name: str = fault.name) -> None:
            nonlocal reporting
            reporting = asyncio.create_task(_report_trial(console, name, trial))

        console.print(f"{time.strftime('%X')} {fault.what}: {options.requests:,} requests", highlight=False)
        try:
            results.append(await run_trial(fault, options.requests, log, begin))
        except (OSError, subprocess.SubprocessError) as error:  # TimeoutError is one
            aborted.append(fault.name)
            console.print(f"  aborted: {error}", style="red", highlight=False)
            continue
        finally:
            if reporting is not None:
                reporting.cancel()
        for complaint in results[-1].wrong[:10]:
            console.print(f"  {complaint}", style="red", highlight=False)
        _write(options.out, results, steady)
    if STEADY in chosen:
        console.print(f"{time.strftime('%X')} steady load: {options.minutes:g} minutes", highlight=False)
        steady = await run_steady(options.minutes, log, _SteadyProgress(console))
        _write(options.out, results, steady)
        draw(steady, options.out / "soak.png")
    _print(console, results, steady)
    console.print(f"written: {options.out}/soak.json" + (f", {options.out}/soak.png" if steady else ""))
    failed = any(not result.passed for result in results) or (steady is not None and not steady.passed)
    return int(failed or bool(aborted))


async def _report_trial(console: Console, name: str, trial: Trial) -> None:
    while True:
        await asyncio.sleep(PROGRESS_EVERY_S)
        line = f"{name}: {trial.load.done:,} of {trial.load.requests:,} requests, {trial.happened} of"
        console.print(
            f"{time.strftime('%X')}   {line} {trial.times} faults, {len(trial.load.wrong)} wrong",
            highlight=False,
        )


class _SteadyProgress:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._reported_s = time.monotonic()

    def __call__(self, result: SteadyResult) -> None:
        if time.monotonic() - self._reported_s < PROGRESS_EVERY_S:
            return
        self._reported_s = time.monotonic()
        rss = {sample.process: sample.rss_bytes / (1 << 20) for sample in result.samples[-2:]}
        line = f"{result.seconds / 60:.1f} min, {result.requests:,} requests, MiB: "
        line += ", ".join(f"{process} {size:.1f}" for process, size in rss.items())
        self._console.print(f"{time.strftime('%X')}   {line}", highlight=False)


def _write(folder: Path, results: Iterable[TrialResult], steady: SteadyResult | None) -> None:
    document = {
        "faults": [{**asdict(result), "passed": result.passed} for result in results],
        "steady": None if steady is None else {**steady.to_json(), "passed": steady.passed},
    }
    (folder / "soak.json").write_text(json.dumps(document, indent=1) + "\n")


def _print(console: Console, results: list[TrialResult], steady: SteadyResult | None) -> None:
    if results:
        table = Table("fault", title="exactly one answer to each request, despite faults")
        for heading in ("requests", "faults", "s", "sent again", "seen again"):
            table.add_column(heading, justify="right")
        for heading in ("answers", "wrong", "kept"):
            table.add_column(heading)
        for result in results:
            table.add_row(*row_of(result))
        console.print(table)
    if steady is not None:
        answers = ", ".join(f"{count:,} x {status}" for status, count in sorted(steady.statuses.items()))
        title = f"{steady.seconds / 60:.1f} minutes of steady load: {answers}; {steady.unanswered} unanswered"
        table = Table("process", "what", title=title)
        for heading in ("first third", "last third", "highest"):
            table.add_column(heading, justify="right")
        table.add_column("flat")
        for verdict in steady.verdicts():
            scale, digits = (1 << 20, 2) if verdict.what == "rss_bytes" else (1, 0)
            numbers = (
                f"{value / scale:.{digits}f}" for value in (verdict.first, verdict.last, verdict.highest)
            )
            what = "resident MiB" if verdict.what == "rss_bytes" else verdict.what
            table.add_row(verdict.process, what, *numbers, "yes" if verdict.flat else "NO")
        console.print(table)


if __name__ == "__main__":
    raise SystemExit(main())
