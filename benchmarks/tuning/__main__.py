"""`python -m benchmarks.tuning never-slower|recovery|spaces|two-boards`: figures of `docs/tuning.md`."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from benchmarks.tuning.cycle_board import cycle_board
from benchmarks.tuning.recovery import recover
from builder import RunnerOptions, TuneOptions, load, tune
from builder.tuning.views.live import watch


def main() -> None:
    """Run the named comparison, and print its figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tuning", description=__doc__)
    verbs = parser.add_subparsers(dest="what", required=True)
    never = verbs.add_parser("never-slower", help="tune a model, and compare it with the untuned one in turn")
    again = verbs.add_parser(
        "recovery", help="search from the middle of each space, and compare with the best known"
    )
    for verb in (never, again):
        verb.add_argument("model", type=Path, metavar="ONNX")
        verb.add_argument(
            "--minutes", type=float, default=25.0, help="minutes of searching (default: %(default)s)"
        )
        verb.add_argument("--records", type=Path, help="folder that keeps the records")
    again.add_argument("--best-known", type=Path, help="records to compare with (default: none)")
    spaces = verbs.add_parser(
        "spaces", help="compare 60 trials with 1000, and with MetaSchedule's default space"
    )
    spaces.add_argument("--operators", nargs="+", help="names of operators (default: all four)")
    spaces.add_argument(
        "--metaschedule-trials",
        type=int,
        default=500,
        help="trials of MetaSchedule, 0 to leave it out (default: %(default)s)",
    )
    two = verbs.add_parser("two-boards", help="count trials per minute with two RPC servers and with one")
    two.add_argument("model", type=Path, metavar="ONNX")
    two.add_argument("--trials", type=int, default=16, help="trials of each task (default: %(default)s)")
    for verb in (never, again, spaces):
        verb.add_argument(
            "--pairs", type=int, default=21, help="pairs of measurements (default: %(default)s)"
        )
    args = parser.parse_args()
    if args.what == "two-boards":
        from benchmarks.tuning.two_boards import trials_per_minute

        one, both = (trials_per_minute(args.model, boards, args.trials) for boards in (1, 2))
        print(f"{one:.0f} trials per minute with one board, {both:.0f} with two: {both / one:.2f} times")
        return
    runner = RunnerOptions(threads=1)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as work:
        if args.what == "spaces":
            from benchmarks.tuning.spaces import compare_spaces

            compare_spaces(args.operators, args.metaschedule_trials, runner, args.pairs)
        elif args.what == "recovery":
            folder = args.records or Path(work, "records")
            print(recover(args.model, folder, args.minutes, runner, args.best_known, args.pairs).table())
        else:
            _never_slower(args, args.records or Path(work, "records"), runner)
    print(f"{(time.monotonic() - started) / 60:.1f} minutes in all; times are user cycles of one thread")


def _never_slower(args: argparse.Namespace, folder: Path, runner: RunnerOptions) -> None:
    model = load(args.model)
    options = TuneOptions(time_limit_s=args.minutes * 60, trials=1000, pairs=args.pairs)
    with watch(quiet=False, as_json=False) as view:
        records = tune(
            model, "host", folder, options=options, runner=runner, view=view, boards=cycle_board(runner)
        )
    meta = records.meta
    result = meta.models[model.source_sha256]
    used = sum(v.use for key, v in meta.verdicts.items() if key in result.calls)
    print(f"{len(records.all)} points of {len(result.calls)} operators, {used} of them faster beyond doubt")
    if result.ratio is None:
        print("no record is faster: the compiled model stays the same, so there is nothing to compare")
        return
    ratio = result.ratio
    print(
        f"tuned {ratio.tuned_us / 1e3:.3f} ms, untuned {ratio.untuned_us / 1e3:.3f} ms: {ratio.speedup:.3f}x "
        f"({ratio.low:.3f} to {ratio.high:.3f}); " + ("used" if result.use else "not used")
    )


if __name__ == "__main__":
    main()
