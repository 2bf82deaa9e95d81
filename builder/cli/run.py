"""The verbs `run` and `profile`: run a bundle on this machine, or on a board over RPC."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from builder.cli import Parser, SubParsers
from builder.cli.arguments import add_json, milliseconds, positive
from builder.cli.early_checks import check_folder_of

if TYPE_CHECKING:
    from agent.runtime.report import Report
    from builder.bundles.package import Package
    from builder.running.local_run import RunResult

MAX_REPORT_BYTES: Final = 64 << 20  # 65536 calls with long names take some 40 MB

RUN_EXAMPLES: Final = """examples:
  edgebundle run resnet50.bundle --inputs cat.npz --outputs out.npz --print-time --repeat 100
  edgebundle run resnet50.bundle --inputs cat.jpg
  edgebundle run model.bundle --fill-mode ones --print-top 5
  edgebundle run model.bundle --rpc-tracker lab:9190 --rpc-key rpi4 --print-time
"""

PROFILE_EXAMPLES: Final = """examples:
  edgebundle profile resnet50.bundle --number 50
  edgebundle profile resnet50.bundle --inputs cat.jpg --calls
  edgebundle profile resnet50.bundle --json > before.json
  edgebundle profile tuned.bundle --html profile.html --compare before.json
"""


def add_parsers(subparsers: SubParsers) -> None:
    """Add the verbs."""
    parser = subparsers.add_parser(
        "run",
        help="run a bundle on this machine or on a board",
        description="Run a bundle on this machine, or on a board with --rpc-tracker and --rpc-key.\n"
        "The bundle's signature is not verified.",
        epilog=RUN_EXAMPLES,
    )
    parser.add_argument("bundle", metavar="FILE", help="the bundle")
    parser.add_argument(
        "--device", default="cpu", choices=["cpu"], help="device to run on (default: %(default)s)"
    )
    _add_inputs(parser)
    parser.add_argument(
        "-o", "--outputs", "--output", metavar="NPZ", help="write output_0, output_1, ... to this .npz file"
    )
    parser.add_argument("--print-time", action="store_true", help="measure the time and print a summary")
    parser.add_argument(
        "--print-top", type=positive, metavar="N", help="print the N largest values of output_0"
    )
    parser.add_argument("--profile", action="store_true", help="also time each kernel")
    parser.add_argument(
        "--repeat", type=positive, default=1, metavar="N", help="number of measurements (default: 1)"
    )
    parser.add_argument(
        "--number",
        type=positive,
        default=1,
        metavar="N",
        help="runs per measurement; the result is their mean (default: 1)",
    )
    parser.add_argument(
        "--min-repeat-ms",
        type=milliseconds,
        default=0.0,
        metavar="MS",
        help="shortest duration of a measurement: --number grows to reach it (default: 0)",
    )
    parser.add_argument(
        "--end-to-end", action="store_true", help="include copying the inputs and outputs in the time"
    )
    _add_common(parser)
    parser.set_defaults(handler=_run)

    parser = subparsers.add_parser(
        "profile",
        help="time each kernel of a bundle",
        description="Time each kernel of a bundle on this machine or on a board, with the nodes of the\n"
        "model that it computes.",
        epilog=PROFILE_EXAMPLES,
    )
    parser.add_argument("bundle", metavar="FILE", help="the bundle")
    _add_inputs(parser)
    parser.add_argument(
        "--calls", action="store_true", help="one row per call, instead of one per kernel and shapes"
    )
    parser.add_argument(
        "--number", type=positive, default=10, metavar="N", help="number of runs to average (default: 10)"
    )
    parser.add_argument("--html", metavar="OUT", help="also write a page of the graph with times and charts")
    parser.add_argument(
        "--compare", metavar="JSON", help="what `profile --json` printed before, to show beside it in --html"
    )
    _add_common(parser)
    parser.set_defaults(handler=_profile)


def _add_inputs(parser: Parser) -> None:
    parser.add_argument(
        "-i", "--inputs", metavar="FILE", help="an .npz file with the inputs, or a JPEG or PNG picture"
    )
    parser.add_argument(
        "--fill-mode",
        choices=["zeros", "ones", "random"],
        default="random",
        help="values of inputs that --inputs does not give (default: %(default)s)",
    )


def _add_common(parser: Parser) -> None:
    parser.add_argument(
        "--threads", type=positive, metavar="N", help="threads that run kernels (default: all CPUs)"
    )
    add_json(parser)
    parser.add_argument(
        "--rpc-tracker", metavar="HOST:PORT", help="use a board that is registered with this tracker"
    )
    parser.add_argument("--rpc-key", metavar="KEY", help="the key that the board registered with")


def _board(args: argparse.Namespace) -> dict[str, str] | None:
    """Return the tracker and key of a board, or None for this machine."""
    from builder.errors import FleetError

    if (args.rpc_tracker is None) != (args.rpc_key is None):
        given, missing = (
            ("--rpc-tracker", "--rpc-key") if args.rpc_tracker else ("--rpc-key", "--rpc-tracker")
        )
        raise FleetError(
            f"expected both --rpc-tracker and --rpc-key, got only {given}", hint=f"add {missing}"
        )
    return None if args.rpc_tracker is None else {"tracker": args.rpc_tracker, "key": args.rpc_key}


def _run_on_board(*args: Any, **kwargs: Any) -> RunResult:  # noqa: ANN401 - the arguments of builder.run
    from builder.boards.remote_run import run_on_board

    return run_on_board(*args, **kwargs)


def _profile_report(package: Package, args: argparse.Namespace, number: int) -> Report:
    board = _board(args)
    if board is None:
        from builder.running.local_run import profile

        return profile(package, args.inputs, fill_mode=args.fill_mode, number=number, threads=args.threads)
    from builder.boards.remote_run import profile_on_board

    return profile_on_board(
        package, args.inputs, fill_mode=args.fill_mode, number=number, threads=args.threads, **board
    )


def _warn_unverified(bundle: str) -> None:
    """Tell an interactive user that the bundle's signature is not checked."""
    if sys.stderr.isatty():
        print(f"running {bundle} unverified: `edgebundle verify` checks its signature", file=sys.stderr)


def _run(args: argparse.Namespace) -> int:
    from builder.bundles.package import Package

    package = Package.load(args.bundle)
    _check_inputs(args)
    from builder.running.local_run import run

    _warn_unverified(args.bundle)
    board = _board(args)
    run_it = run if board is None else partial(_run_on_board, **board)
    result = run_it(
        package,
        args.inputs,
        fill_mode=args.fill_mode,
        benchmark=args.print_time,
        repeat=args.repeat,
        number=args.number,
        min_repeat_ms=args.min_repeat_ms,
        end_to_end=args.end_to_end,
        threads=args.threads,
    )
    if args.outputs:
        result.save(args.outputs)
    if args.json:
        print(json.dumps(_document(result)))
        return 0
    if result.answers is not None:
        _print_answers(result)
    if args.print_top:
        import numpy as np

        flat = np.ravel(result.get_output("output_0"))
        best = np.argsort(flat, kind="stable")[::-1][: args.print_top]
        print(np.array([best, flat[best]]))
    if args.profile:
        print(_profile_report(package, args, number=10))
    if result.times is not None:
        print(result.times)
    return 0


def _check_inputs(args: argparse.Namespace) -> None:
    """Check that the file of inputs exists, before numpy is loaded."""
    from pathlib import Path

    from builder.errors import ModelError

    _board(args)
    if args.inputs is not None and not Path(args.inputs).exists():
        raise ModelError(f"{args.inputs}: cannot be read (No such file or directory)")


def _print_answers(result: RunResult) -> None:
    answers = result.answers or {}
    labels, scores = answers.get("labels"), answers.get("scores")
    for i, score in enumerate(scores if scores is not None else ()):
        if labels is not None:
            print(f"{float(score):8.4f}  {bytes(labels[i]).decode()}")
        elif "boxes" in answers:
            box = ", ".join(f"{v:.0f}" for v in answers["boxes"][i])
            print(f"{float(score):8.4f}  [{box}]")
        elif "indices" in answers:
            print(f"{float(score):8.4f}  class {int(answers['indices'][i])}")


def _document(result: RunResult) -> dict[str, object]:
    document: dict[str, object] = {
        "outputs": {
            name: {"shape": list(a.shape), "dtype": str(a.dtype)} for name, a in result.outputs.items()
        }
    }
    if result.answers is not None:
        document["answers"] = {
            name: [bytes(v).decode() for v in value] if isinstance(value, tuple) else value.tolist()
            for name, value in result.answers.items()
        }
    if result.times is not None:
        document["times_s"] = {k: getattr(result.times, k) for k in ("mean", "median", "max", "min", "std")}
    return document


def _profile(args: argparse.Namespace) -> int:
    from builder.bundles.package import Package

    other = _read_report(args)
    package = Package.load(args.bundle)
    _check_inputs(args)
    report = _profile_report(package, args, number=args.number)
    if args.html:
        from builder.bundles.graph_page import write_page

        write_page(package, args.html, report, other)
    print(report.json() if args.json else report.table(aggregate=not args.calls))
    return 0


def _read_report(args: argparse.Namespace) -> Report | None:
    """Read the profile to compare with; check the page's path, too, before anything is run."""
    from pathlib import Path

    from agent.runtime.report import Report
    from builder.errors import PackageError

    if args.html:
        check_folder_of(args.html)
    if args.compare is None:
        return None
    if not args.html:
        raise PackageError("expected --html with --compare", hint="add --html profile.html")
    path = Path(args.compare)
    try:
        if path.stat().st_size > MAX_REPORT_BYTES:
            raise PackageError(f"{path}: expected at most {MAX_REPORT_BYTES} bytes")
        return Report.from_dict(json.loads(path.read_text("utf-8")))
    except OSError as error:
        raise PackageError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise PackageError(
            f"{path}: expected a report of `edgebundle profile --json`, got something else",
            hint="edgebundle profile model.bundle --json > before.json",
        ) from error
