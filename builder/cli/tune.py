"""The verb `tune`: measure schedules on a board and keep the best."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from agent.terminal import note, say, say_json, say_text
from builder.cli import Parser, SubParsers
from builder.cli.arguments import (
    add_model,
    integer,
    load_model,
    milliseconds,
    not_negative,
    options_of,
    positive,
)
from builder.cli.early_checks import check_model, check_records, read_tensors

if TYPE_CHECKING:
    from builder.boards.measuring_process import RunnerOptions
    from builder.importer import ImportedModel
    from builder.records.folder import Records
    from builder.target.device_target import DeviceTarget
    from builder.tuning.options import TuneOptions

EXAMPLES: Final = """examples:
  edgebundle tune model.onnx -o records/                                     # for this machine
  edgebundle tune model.onnx --target rpi4 --rpc-tracker lab:9190 --rpc-key rpi4 -o records/
  edgebundle tune model.onnx --tasks list                                    # list the operators to tune
  edgebundle compile model.onnx --tuning-records records/ -o tuned.bundle

tuners:
  xgb         an XGBoost cost model ranks all unmeasured points by their decisions (MetaSchedule's model ranks
              only the points that its evolutionary search finds, by loop features)
  ga          MetaSchedule's evolutionary search, with a random model instead of a cost model
  random      MetaSchedule's ReplayTrace: random points
  gridsearch  every point in order

Repeat the command to continue from its records: no recorded point is measured twice, and Ctrl-C or a power
cut loses at most one batch. At the end, the best schedule of each operator and the heuristic's are timed in
alternation; an operator whose tuned schedule is not faster keeps the heuristic's."""


def add_parsers(subparsers: SubParsers) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "tune",
        help="measure schedules on this machine or on boards, and keep the best",
        description="Tune a model: measure many schedules of each operator, on this machine or on boards.\n"
        "A task is an operator to tune; a point is one of its possible schedules.",
        epilog=EXAMPLES,
    )
    add_model(parser)
    parser.add_argument(
        "-o",
        "--output",
        default="records",
        metavar="FOLDER",
        help="folder for the records (default: %(default)s)",
    )
    _add_search(parser)
    _add_measuring(parser)
    boards = parser.add_argument_group("boards")
    boards.add_argument(
        "--rpc-tracker", metavar="HOST:PORT", help="use boards that are registered with this tracker"
    )
    boards.add_argument(
        "--rpc-key", metavar="KEY", help="the key that they registered with; all free boards with it are used"
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="do not show progress")
    parser.add_argument(
        "--json", action="store_true", help="print progress and result as JSON lines, for scripts"
    )
    parser.set_defaults(handler=_tune)


def _add_search(parser: Parser) -> None:
    search = parser.add_argument_group("search")
    search.add_argument(
        "--tuner",
        choices=["xgb", "ga", "random", "gridsearch"],
        default="xgb",
        help="search strategy, see below (default: %(default)s)",
    )
    search.add_argument(
        "--trials",
        type=positive,
        default=64,
        metavar="N",
        help="largest number of points to measure per task (default: 64)",
    )
    search.add_argument(
        "--early-stopping",
        type=positive,
        metavar="N",
        help="end a task after N points without an improvement",
    )
    search.add_argument(
        "--time-limit",
        type=positive,
        metavar="MINUTES",
        help="end the search after this time; the final comparison is not included",
    )
    search.add_argument(
        "--tasks",
        default="all",
        metavar="all|list|0,2|3-5",
        help="numbers of the tasks to tune, or `list` to print the tasks (default: all)",
    )
    search.add_argument(
        "--tuning-records",
        action="append",
        default=[],
        metavar="FOLDER",
        help="start from the best points in the records of another model or target; repeatable",
    )
    search.add_argument(
        "--seed", type=integer, default=0, metavar="N", help="seed of every random choice (default: 0)"
    )
    search.add_argument(
        "--parallel", type=positive, metavar="N", help="points to build at once (default: one per CPU)"
    )
    search.add_argument(
        "--pairs",
        type=not_negative,
        default=21,
        metavar="N",
        help="measurements of each schedule in the final comparison; 0 skips the comparison (default: 21)",
    )


def _add_measuring(parser: Parser) -> None:
    measuring = parser.add_argument_group("measuring")
    measuring.add_argument(
        "--number", type=positive, default=4, metavar="N", help="calls per measurement (default: 4)"
    )
    measuring.add_argument(
        "--repeat", type=positive, default=3, metavar="N", help="measurements per point (default: 3)"
    )
    measuring.add_argument(
        "--min-repeat-ms",
        type=milliseconds,
        default=5.0,
        metavar="MS",
        help="shortest duration of a measurement: --number grows to reach it (default: 5)",
    )
    measuring.add_argument(
        "--cooldown-ms",
        type=milliseconds,
        default=0.0,
        metavar="MS",
        help="pause after each measurement (default: 0)",
    )
    measuring.add_argument(
        "--timeout",
        type=positive,
        default=20,
        metavar="S",
        help="time limit for one point, in seconds (default: 20)",
    )
    measuring.add_argument(
        "--cache-flush", action="store_true", help="flush the CPU caches before each measurement"
    )
    measuring.add_argument(
        "--threads", type=positive, metavar="N", help="threads that run kernels (default: all CPUs)"
    )


def _tune(args: argparse.Namespace) -> int:
    options = options_of(args)
    check_model(args.model, args.target)
    for folder in args.tuning_records:
        check_records(folder)
    read_tensors(args.model, options)
    from builder.target.device_target import resolve
    from builder.tuning.search.strategies import TUNERS
    from builder.tuning.tuner import tune
    from builder.tuning.views.html_report import write_report
    from builder.tuning.views.live import watch

    assert args.tuner in TUNERS
    device = resolve(args.target)
    model = load_model(args.model, options)
    if args.tasks == "list":
        return _list(model, device, as_json=args.json)
    searching, runner = _options(args)
    try:
        with watch(quiet=args.quiet, as_json=args.json) as view:
            records = tune(
                model,
                device,
                args.output,
                options=searching,
                runner=runner,
                tracker=args.rpc_tracker,
                key=args.rpc_key,
                prior_records=args.tuning_records,
                view=view,
            )
    except KeyboardInterrupt:
        note(f"stopped; {args.output} has the results so far: repeat the command to continue")
        raise
    report = write_report(records, model.source_sha256)
    _summary(records, model, str(report), as_json=args.json)
    return 0


def _options(args: argparse.Namespace) -> tuple[TuneOptions, RunnerOptions]:
    from builder.boards.measuring_process import RunnerOptions
    from builder.tuning.options import TuneOptions

    return (
        TuneOptions(
            tuner=args.tuner,
            trials=args.trials,
            early_stopping=args.early_stopping,
            tasks=args.tasks,
            parallel=args.parallel,
            seed=args.seed,
            time_limit_s=args.time_limit * 60.0 if args.time_limit else None,
            pairs=args.pairs,
        ),
        RunnerOptions(
            number=args.number,
            repeat=args.repeat,
            min_repeat_ms=args.min_repeat_ms,
            cooldown_ms=args.cooldown_ms,
            timeout_s=float(args.timeout),
            cache_flush=args.cache_flush,
            threads=args.threads,
        ),
    )


def _list(model: ImportedModel, device: DeviceTarget, *, as_json: bool) -> int:
    from builder.tuning.tasks.extraction import extract_tasks, table

    tasks = extract_tasks(model, device)
    if as_json:
        rows = [
            {
                "task": t.index,
                "name": t.name,
                "kind": t.kind,
                "calls": t.calls,
                "flops": t.flops,
                "points": t.space.size,
            }
            for t in tasks
        ]
        say_json(rows)
    else:
        say_text(table(tasks))
    return 0


def _summary(records: Records, model: ImportedModel, report: str, *, as_json: bool) -> None:
    from dataclasses import asdict

    result = records.meta.models[model.source_sha256]
    used = sum(1 for key in result.calls if (v := records.meta.verdicts.get(key)) is not None and v.use)
    if as_json:
        compared = None if result.ratio is None else asdict(result.ratio)
        document = {
            "records": str(records.path),
            "report": report,
            "operators": used,
            "use": result.use,
            "ratio": compared,
        }
        say_json({"result": document})
        return
    say(
        f"{records.path}: {len(records.all)} points of {len(records.keys)} operators; "
        f"{used} are faster when tuned"
    )
    if result.ratio is not None:
        ratio = result.ratio
        say(
            f"  the model on {result.board}: {ratio.tuned_us / 1e3:.3f} ms; tuned against untuned, timed in "
            f"turn: {ratio.describe()}"
        )
        if not result.use:
            say("  slower: compile ignores these records for this model")
    say(f"  report: {report}")
    if used and result.use:
        say(f"  next: edgebundle compile {model.name}.onnx --tuning-records {records.path}")
    else:
        say("  nothing to gain: compile already uses the fastest schedules that were found")
