"""The verb `tune`: measure schedules on a board and keep the best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from agent.terminal import note, say, say_json, say_text
from builder.cli import SubParsers
from builder.cli.arguments import (
    TargetFlags,
    integer,
    load_model,
    milliseconds,
    not_negative,
    options_of,
    positive,
)
from builder.cli.early_checks import check_model, check_records, read_tensors
from builder.cli.flags import flag, part, takes

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


@dataclass(frozen=True, slots=True)
class _Search:
    tuner: str = flag(
        choices=["xgb", "ga", "random", "gridsearch"],
        default="xgb",
        help="search strategy, see below (default: %(default)s)",
    )
    trials: int = flag(
        type=positive,
        default=64,
        metavar="N",
        help="largest number of points to measure per task (default: 64)",
    )
    early_stopping: int | None = flag(
        type=positive, metavar="N", help="end a task after N points without an improvement"
    )
    time_limit: int | None = flag(
        type=positive,
        metavar="MINUTES",
        help="end the search after this time; the final comparison is not included",
    )
    tasks: str = flag(
        default="all",
        metavar="all|list|0,2|3-5",
        help="numbers of the tasks to tune, or `list` to print the tasks (default: all)",
    )
    tuning_records: list[str] = flag(
        action="append",
        default=[],
        metavar="FOLDER",
        help="start from the best points in the records of another model or target; repeatable",
    )
    seed: int = flag(type=integer, default=0, metavar="N", help="seed of every random choice (default: 0)")
    parallel: int | None = flag(
        type=positive, metavar="N", help="points to build at once (default: one per CPU)"
    )
    pairs: int = flag(
        type=not_negative,
        default=21,
        metavar="N",
        help="measurements of each schedule in the final comparison; 0 skips the comparison (default: 21)",
    )

    def options(self) -> TuneOptions:
        from builder.tuning.options import TuneOptions

        return TuneOptions(
            tuner=self.tuner,
            trials=self.trials,
            early_stopping=self.early_stopping,
            tasks=self.tasks,
            parallel=self.parallel,
            seed=self.seed,
            time_limit_s=self.time_limit * 60.0 if self.time_limit else None,
            pairs=self.pairs,
            prior_records=self.tuning_records,
        )


@dataclass(frozen=True, slots=True)
class _Measuring:
    number: int = flag(type=positive, default=4, metavar="N", help="calls per measurement (default: 4)")
    repeat: int = flag(type=positive, default=3, metavar="N", help="measurements per point (default: 3)")
    min_repeat_ms: float = flag(
        type=milliseconds,
        default=5.0,
        metavar="MS",
        help="shortest duration of a measurement: --number grows to reach it (default: 5)",
    )
    cooldown_ms: float = flag(
        type=milliseconds, default=0.0, metavar="MS", help="pause after each measurement (default: 0)"
    )
    timeout: int = flag(
        type=positive, default=20, metavar="S", help="time limit for one point, in seconds (default: 20)"
    )
    cache_flush: bool = flag(action="store_true", help="flush the CPU caches before each measurement")
    threads: int | None = flag(
        type=positive, metavar="N", help="threads that run kernels (default: all CPUs)"
    )

    def options(self) -> RunnerOptions:
        from builder.boards.measuring_process import RunnerOptions

        return RunnerOptions(
            number=self.number,
            repeat=self.repeat,
            min_repeat_ms=self.min_repeat_ms,
            cooldown_ms=self.cooldown_ms,
            timeout_s=float(self.timeout),
            cache_flush=self.cache_flush,
            threads=self.threads,
        )


@dataclass(frozen=True, slots=True)
class _Tune(TargetFlags):
    output: str = flag(
        "-o", default="records", metavar="FOLDER", help="folder for the records (default: %(default)s)"
    )
    search: _Search = part(_Search, "search")
    measuring: _Measuring = part(_Measuring, "measuring")
    rpc_tracker: str | None = flag(
        group="boards", metavar="HOST:PORT", help="use boards that are registered with this tracker"
    )
    rpc_key: str | None = flag(
        group="boards",
        metavar="KEY",
        help="the key that they registered with; all free boards with it are used",
    )
    quiet: bool = flag("-q", action="store_true", help="do not show progress")
    json: bool = flag(action="store_true", help="print progress and result as JSON lines, for scripts")


def add_parsers(subparsers: SubParsers) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "tune",
        help="measure schedules on this machine or on boards, and keep the best",
        description="Tune a model: measure many schedules of each operator, on this machine or on boards.\n"
        "A task is an operator to tune; a point is one of its possible schedules.",
        epilog=EXAMPLES,
    )
    takes(parser, _Tune, _tune)


def _tune(args: _Tune) -> int:
    options = options_of(args)
    check_model(args.model, args.target)
    for folder in args.search.tuning_records:
        check_records(folder)
    read_tensors(args.model, options)
    from builder.errors import FleetError
    from builder.target.device_target import resolve
    from builder.tuning.options import TrackerBoards
    from builder.tuning.search.strategies import TUNERS
    from builder.tuning.tuner import tune
    from builder.tuning.views.html_report import write_report
    from builder.tuning.views.live import watch

    assert args.search.tuner in TUNERS
    tracker, key = args.rpc_tracker, args.rpc_key
    if (tracker is None) != (key is None):
        raise FleetError(
            "an RPC tracker and a key belong together",
            hint="give both: --rpc-tracker HOST:PORT --rpc-key KEY",
        )
    boards = None if tracker is None or key is None else TrackerBoards(tracker, key)
    device = resolve(args.target)
    model = load_model(args.model, options)
    if args.search.tasks == "list":
        return _list(model, device, as_json=args.json)
    try:
        with watch(quiet=args.quiet, as_json=args.json) as view:
            records = tune(
                model,
                device,
                args.output,
                options=args.search.options(),
                runner=args.measuring.options(),
                boards=boards,
                view=view,
            )
    except KeyboardInterrupt:
        note(f"stopped; {args.output} has the results so far: repeat the command to continue")
        raise
    report = write_report(records, model.source_sha256)
    _summary(records, model, str(report), as_json=args.json)
    return 0


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
