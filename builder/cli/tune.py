"""The verb `tune`: measure schedules on a board, keep the best."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Final

from builder.cli import Parser, SubParsers
from builder.cli.arguments import positive

if TYPE_CHECKING:
    from builder.boards.measuring_process import RunnerOptions
    from builder.importer import ImportedModel
    from builder.records.folder import Records
    from builder.target.device_target import DeviceTarget
    from builder.tuning.options import TuneOptions

EXAMPLES: Final = """examples:
  edgebundle tune model.onnx -o records/                                     # for this machine
  edgebundle tune model.onnx --target rpi4 --rpc-tracker lab:9190 --rpc-key rpi4 -o records/
  edgebundle tune model.onnx --tasks list                                    # what there is to tune
  edgebundle compile model.onnx --tuning-records records/ -o tuned.bundle

tuners:
  xgb         an XGBoost cost model of the decisions ranks every point that is left (MetaSchedule's ranks
              the few that its evolutionary search comes upon, by features of their loops)
  ga          MetaSchedule's evolutionary search, with a random model in place of the cost model
  random      MetaSchedule's ReplayTrace: points at random
  gridsearch  every point in turn

The same command again goes on from its records: no recorded point is measured twice, and Ctrl-C or a power
cut loses one batch at most. An operator whose tuned schedule does not beat the heuristic's, both measured in
turn at the end, keeps the heuristic's."""


def add_parsers(subparsers: SubParsers) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "tune",
        help="measure schedules on real boards and keep the best",
        description="Tune a model: measure many schedules of each operator on this machine or on boards.",
        epilog=EXAMPLES,
    )
    parser.add_argument("model", metavar="FILE", help="an ONNX model")
    parser.add_argument("--target", default="host", help="as for compile (default: %(default)s)")
    parser.add_argument(
        "-o", "--output", default="records", metavar="FOLDER", help="the records (default: %(default)s)"
    )
    parser.add_argument(
        "--input-shapes", metavar='"NAME:[1,3,224,224] ..."', help="of inputs that have symbolic dimensions"
    )
    parser.add_argument(
        "--input-values", metavar='"NAME=VALUE ..."', help="inputs that become constants, such as sr=16000"
    )
    _add_search(parser)
    _add_measuring(parser)
    boards = parser.add_argument_group("boards")
    boards.add_argument("--rpc-tracker", metavar="HOST:PORT", help="where boards register")
    boards.add_argument("--rpc-key", metavar="KEY", help="what they register as; all that are there are used")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress")
    parser.add_argument("--json", action="store_true", help="progress and result as JSON lines, for scripts")
    parser.set_defaults(handler=_tune)


def _add_search(parser: Parser) -> None:
    search = parser.add_argument_group("search")
    search.add_argument(
        "--tuner",
        choices=["xgb", "ga", "random", "gridsearch"],
        default="xgb",
        help="see below (default: %(default)s)",
    )
    search.add_argument(
        "--trials", type=positive, default=64, metavar="N", help="most points of one task (default: 64)"
    )
    search.add_argument(
        "--early-stopping",
        type=positive,
        metavar="N",
        help="leave a task after N points without a better one",
    )
    search.add_argument(
        "--time-limit",
        type=positive,
        metavar="MINUTES",
        help="stop searching then; the comparison comes after",
    )
    search.add_argument(
        "--tasks", default="all", metavar="all|list|0,2|3-5", help="which operators (default: all)"
    )
    search.add_argument(
        "--tuning-records",
        action="append",
        default=[],
        metavar="FOLDER",
        help="start from the best points of other records, of another model or target; repeatable",
    )
    search.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of every random choice (default: 0)"
    )
    search.add_argument(
        "--parallel", type=positive, metavar="N", help="candidates built at once (default: one a CPU)"
    )
    search.add_argument(
        "--pairs",
        type=int,
        default=21,
        metavar="N",
        help="measurements of each side in the comparison at the end, 0 for none (default: 21)",
    )


def _add_measuring(parser: Parser) -> None:
    measuring = parser.add_argument_group("measuring")
    measuring.add_argument(
        "--number", type=positive, default=4, metavar="N", help="calls a measurement (default: 4)"
    )
    measuring.add_argument(
        "--repeat", type=positive, default=3, metavar="N", help="measurements a candidate (default: 3)"
    )
    measuring.add_argument(
        "--min-repeat-ms",
        type=_milliseconds,
        default=5.0,
        metavar="MS",
        help="least duration of one, for which --number grows (default: 5)",
    )
    measuring.add_argument(
        "--cooldown-ms", type=_milliseconds, default=0.0, metavar="MS", help="pause after each (default: 0)"
    )
    measuring.add_argument(
        "--timeout", type=positive, default=20, metavar="S", help="seconds for one candidate (default: 20)"
    )
    measuring.add_argument(
        "--cache-flush", action="store_true", help="have arguments out of the caches before each measurement"
    )
    measuring.add_argument("--threads", type=positive, metavar="N", help="kernel threads (default: all CPUs)")


def _milliseconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 3_600_000:
        raise argparse.ArgumentTypeError(f"expected milliseconds, got {text[:40]!r}")
    return value


def _tune(args: argparse.Namespace) -> int:
    from builder.importer import load, parse_input_shapes, parse_input_values
    from builder.target.device_target import resolve
    from builder.tuning.search.strategies import TUNERS
    from builder.tuning.tuner import tune
    from builder.tuning.views.html_report import write_report
    from builder.tuning.views.live import watch

    assert args.tuner in TUNERS
    device = resolve(args.target)
    model = load(
        args.model,
        input_shapes=parse_input_shapes(args.input_shapes) if args.input_shapes else None,
        input_values=parse_input_values(args.input_values) if args.input_values else None,
    )
    if args.tasks == "list":
        return _list(model, device, as_json=args.json)
    options, runner = _options(args)
    try:
        with watch(quiet=args.quiet, as_json=args.json) as view:
            records = tune(
                model,
                device,
                args.output,
                options=options,
                runner=runner,
                tracker=args.rpc_tracker,
                key=args.rpc_key,
                prior_records=args.tuning_records,
                view=view,
            )
    except KeyboardInterrupt:
        print(f"stopped; {args.output} keeps what was measured, the same command goes on", file=sys.stderr)
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
        print(json.dumps(rows))
    else:
        print(table(tasks))
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
        print(json.dumps({"result": document}))
        return
    print(
        f"{records.path}: {len(records.all)} points of {len(records.keys)} operators; {used} are faster tuned"
    )
    if result.ratio is not None:
        ratio = result.ratio
        print(
            f"  the model takes {ratio.tuned_us / 1e3:.3f} ms, untuned {ratio.untuned_us / 1e3:.3f} ms, "
            f"in turn on {result.board}: {ratio.speedup:.2f}x ({ratio.low:.2f} to {ratio.high:.2f})"
        )
        if not result.use:
            print("  that is no gain: with these records it is compiled as without")
    print(f"  report: {report}")
    if used and result.use:
        print(f"  next: edgebundle compile {model.name}.onnx --tuning-records {records.path}")
    else:
        print("  compile has nothing to gain from them: what it does without is the fastest that was found")
