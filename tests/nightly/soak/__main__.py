"""`make soak`: each fault during a hundred thousand requests, half an hour of steady load, a year in an hour.

Prints tables, and writes `soak.json`, `soak.png`, `year.png` and the logs. Ends with status 1 if a promise
was not kept. The year needs root for its disk; without it, the faults of the disk are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import subprocess
import sys
import time
from collections.abc import Container, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from tests.agent.faults import Trial
from tests.nightly.soak.picture import draw, draw_year
from tests.nightly.soak.steady import SteadyResult, run_steady
from tests.nightly.soak.trials import FAULTS, FULL_REQUESTS, TrialResult, row_of, run_trial
from tests.nightly.soak.year import YearResult, run_year

PROGRESS_EVERY_S: Final = 30.0
STEADY: Final = "steady"
YEAR: Final = "year"
STEADY_MINUTES: Final = 30.0
YEAR_MINUTES: Final = 60.0
EXAMPLE: Final = """example:
  python -m tests.nightly.soak --requests 2000 --minutes 2       # everything, in a quarter of an hour
  python -m tests.nightly.soak agent cuts                        # two faults in full size
  python -m tests.nightly.soak year --minutes 60                 # only the year
"""


def main() -> int:
    """Run the soak; return the exit status."""
    parser = _parser()
    options = parser.parse_args()
    known = {*(fault.name for fault in FAULTS), STEADY, YEAR}
    if unknown := set(options.parts) - known:
        parser.error(f"expected parts among {', '.join(sorted(known))}, got {', '.join(sorted(unknown))}")
    chosen = {*options.parts, *(options.only or ())} or known
    if STEADY in chosen and os.geteuid() != 0:
        parser.error(f"expected root for {STEADY}: a worker's file descriptors are shown to root only")
    options.out.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(filename=options.out / "clients.log", level="INFO", format="%(asctime)s %(message)s")
    # A file or a pipe has no width.
    console = Console() if sys.stdout.isatty() else Console(width=130)
    return asyncio.run(_run(options, chosen, console))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.nightly.soak",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [*(fault.name for fault in FAULTS), STEADY, YEAR]
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"run only these: {', '.join(names)}")
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
        metavar="M",
        help=f"minutes of steady load, and of the year (default: {STEADY_MINUTES:g} and {YEAR_MINUTES:g})",
    )
    parser.add_argument("--only", nargs="+", choices=names, help="the same as PART")
    parser.add_argument(
        "--seed", type=int, metavar="N", help="repeat the year of this seed (default: random)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("build/soak"),
        metavar="DIR",
        help="folder for the report (default: %(default)s)",
    )
    return parser


async def _run(options: argparse.Namespace, chosen: Container[str], console: Console) -> int:
    log = options.out / "agent.log"
    results: list[TrialResult] = []
    aborted: list[str] = []
    steady: SteadyResult | None = None
    year: YearResult | None = None
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
        minutes = options.minutes or STEADY_MINUTES
        console.print(f"{time.strftime('%X')} steady load: {minutes:g} minutes", highlight=False)
        steady = await run_steady(minutes, log, _SteadyProgress(console))
        _write(options.out, results, steady)
        draw(steady, options.out / "soak.png")
    if YEAR in chosen:
        minutes = options.minutes or YEAR_MINUTES
        seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
        console.print(f"{time.strftime('%X')} a year in {minutes:g} minutes, seed {seed}", highlight=False)
        year = await run_year(minutes, options.out / "year.log", _YearProgress(console), number=seed)
        _write(options.out, results, steady, year)
        draw_year(year.timeline, options.out / "year.png")
    _print(console, results, steady)
    if year is not None:
        print_year(console, year)
    pictures = [f"{options.out}/{name}.png" for name, made in (("soak", steady), ("year", year)) if made]
    console.print(f"written: {', '.join([f'{options.out}/soak.json', *pictures])}")
    verdicts = [result.passed for result in results]
    verdicts += [] if steady is None else [steady.passed]
    verdicts += [] if year is None else [year.passed]
    return int(not all(verdicts) or bool(aborted))


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


class _YearProgress:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._reported_s = time.monotonic()

    def __call__(self, result: YearResult) -> None:
        if time.monotonic() - self._reported_s < PROGRESS_EVERY_S:
            return
        self._reported_s = time.monotonic()
        timeline = result.timeline
        line = f"{timeline.seconds / 60:.1f} min, {len(timeline.events)} events, "
        line += f"{timeline.answers.total():,} answers, longest dark time {timeline.longest_dark_s:.1f} s"
        self._console.print(f"{time.strftime('%X')}   {line}", highlight=False)


def print_year(console: Console, year: YearResult) -> None:
    """Print what happened to a device, and what it did meanwhile."""
    timeline = year.timeline
    table = Table("what happened", title=f"{timeline.seconds / 60:.0f} minutes, seed {year.number}")
    for heading in ("times", "longest, s", "longest dark time, s"):
        table.add_column(heading, justify="right")
    darkest = timeline.darkest()
    for kind in sorted(darkest):
        lasted = [event.lasted_s for event in timeline.events if event.kind == kind]
        table.add_row(kind, f"{len(lasted)}", f"{max(lasted):.0f}", f"{darkest[kind]:.1f}")
    console.print(table)
    answers = ", ".join(f"{count:,} of {model}" for model, count in sorted(timeline.answers.items()))
    console.print(f"answers: {answers}; others by status: {dict(sorted(timeline.statuses.items()))}")
    console.print(
        f"deployments: {dict(sorted(year.deployments.items()))}; the agent was started {year.starts} times"
    )
    if not year.has_disk:
        console.print("the disk's faults were left out: they need root and a loop device", style="yellow")
    console.print(
        f"longest time without an answer while the broker was there: {timeline.longest_dark_s:.1f} s"
    )
    end = (
        f"all models served again after {year.converged_s:.1f} s"
        if year.converged_s is not None
        else f"at the end there was no answer from {', '.join(year.missing)}"
    )
    console.print(end, style="" if year.passed else "red")


def _write(
    folder: Path,
    results: Iterable[TrialResult],
    steady: SteadyResult | None,
    year: YearResult | None = None,
) -> None:
    document = {
        "faults": [{**asdict(result), "passed": result.passed} for result in results],
        "steady": None if steady is None else {**steady.to_json(), "passed": steady.passed},
        "year": None if year is None else year.to_json(),
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
