"""The verbs `run` and `profile`: run a bundle on this machine, or on a board over RPC."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from agent.terminal import note, say, say_json, say_text
from builder.cli import SubParsers
from builder.cli.arguments import json_flag, milliseconds, positive
from builder.cli.early_checks import check_folder_of
from builder.cli.flags import argument, flag, flat, part, takes
from builder.cli.input_names import check_named, is_many, named_inputs
from builder.spelling import similar_file

if TYPE_CHECKING:
    from builder.bundles.package import Package
    from builder.bundles.profile_report import Report
    from builder.cli.files import File
    from builder.running.local_run import FillMode, RunResult
    from edgebundle.answer import Answer

# Flags that say what is done with one run of one input.
_ONE_RUN: Final = ("print_time", "print_top", "profile", "show_input", "rpc_tracker")
_FILL_MODE: Final[Mapping[str, Any]] = {
    "choices": ["zeros", "ones", "random"],
    "default": "random",
    "help": "values of inputs that --inputs does not give (default: %(default)s)",
}
MAX_REPORT_BYTES: Final = 64 << 20  # 65536 calls with long names take some 40 MB

RUN_EXAMPLES: Final = """examples:
  edgebundle run resnet50.bundle --inputs cat.npz --outputs out.npz --print-time --repeat 100
  edgebundle run resnet50.bundle --inputs cat.jpg
  edgebundle run yolox.bundle --inputs street.jpg --draw drawn.jpg
  edgebundle run yolox.bundle --inputs photos/ --draw drawn/
  edgebundle run vad.bundle --inputs speech.wav
  edgebundle run sensors.bundle --inputs readings.csv --outputs answers.csv
  edgebundle run resnet50.bundle --accuracy photos/labels.csv
  edgebundle run yolox.bundle --inputs photos/ --accuracy instances.json
  edgebundle run model.bundle --fill-mode ones --print-top 5
  edgebundle run model.bundle --rpc-tracker lab:9190 --rpc-key rpi4 --print-time
"""

PROFILE_EXAMPLES: Final = """examples:
  edgebundle profile resnet50.bundle --number 50
  edgebundle profile resnet50.bundle --inputs cat.jpg --calls
  edgebundle profile resnet50.bundle --json > before.json
  edgebundle profile tuned.bundle --html profile.html --compare before.json
"""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where and how a bundle is run."""

    input_shapes: str | None = flag(
        metavar='"NAME:[1,3,224,224] ..."',
        help="shapes of the inputs that --fill-mode fills, if the model's shapes change (default: largest)",
    )
    threads: int | None = flag(
        type=positive, metavar="N", help="threads that run kernels (default: all CPUs)"
    )
    json: bool = json_flag()
    rpc_tracker: str | None = flag(
        metavar="HOST:PORT", help="use a board that is registered with this tracker"
    )
    rpc_key: str | None = flag(metavar="KEY", help="the key that the board registered with")

    def board(self) -> dict[str, str] | None:
        """Return the tracker and key of a board, or None for this machine."""
        from builder.errors import FleetError

        tracker, key = self.rpc_tracker, self.rpc_key
        if (tracker is None) != (key is None):
            given, missing = ("--rpc-tracker", "--rpc-key") if tracker else ("--rpc-key", "--rpc-tracker")
            raise FleetError(
                f"expected both --rpc-tracker and --rpc-key, got only {given}", hint=f"add {missing}"
            )
        return None if tracker is None or key is None else {"tracker": tracker, "key": key}

    def shapes(self) -> dict[str, tuple[int, ...]] | None:
        """Return the shapes of the inputs that are filled."""
        from builder.errors import ShapeError
        from builder.importer import parse_input_shapes

        if self.input_shapes is None:
            return None
        if self.rpc_tracker is not None:
            raise ShapeError(
                "--input-shapes: expected this machine, got a board", hint="give the inputs instead"
            )
        return parse_input_shapes(self.input_shapes)


@dataclass(frozen=True, slots=True)
class _Run:
    bundle: str | None = argument(metavar="FILE", nargs="?", help="the bundle")
    device: str = flag(default="cpu", choices=["cpu"], help=argparse.SUPPRESS)  # scripts for TVMC have it
    inputs: list[list[str]] | None = flag(
        "-i",
        metavar="FILE",
        nargs="+",
        action="append",
        help="an .npz file with the inputs, a JPEG or PNG picture, a WAV recording, or a table of rows "
        "(.csv, .json, .jsonl); or several pictures or recordings, folders, or patterns such as "
        "'photos/*.jpg'",
    )
    fill_mode: FillMode = flag(**_FILL_MODE)
    draw: str | None = flag(
        metavar="OUT.jpg|DIR",
        help="draw the answer on the picture: boxes, labels, key points, masks; a folder for several inputs",
    )
    show_input: str | None = flag(metavar="OUT.png", help="write what the preprocess makes of the picture")
    accuracy: str | None = flag(
        metavar="CSV|JSON",
        help="print how often the answers are right. For a classifier: top-1 and top-5, from a table whose "
        "rows have file and label, or, with a table as --inputs, label, in its order; for a detector: mAP, "
        "from COCO's annotations (JSON). Files are relative to the table or the annotations, unless --inputs "
        "names their folder",
    )
    outputs: str | None = flag(
        "-o",
        "--outputs",
        "--output",
        metavar="NPZ|CSV|JSON",
        help="write output_0, output_1, ... to this .npz file, of a model with states those of all inputs, "
        "one after the other along a new first axis; for a table of rows, write the answers to this .csv, "
        ".json or .jsonl file",
    )
    print_time: bool = flag(action="store_true", help="measure the time and print a summary")
    print_top: int | None = flag(type=positive, metavar="N", help="print the N largest values of output_0")
    profile: bool = flag(action="store_true", help="also time each kernel")
    repeat: int = flag(type=positive, default=1, metavar="N", help="number of measurements (default: 1)")
    number: int = flag(
        type=positive,
        default=1,
        metavar="N",
        help="runs per measurement; the result is their mean (default: 1)",
    )
    min_repeat_ms: float = flag(
        type=milliseconds,
        default=0.0,
        metavar="MS",
        help="shortest duration of a measurement: --number grows to reach it (default: 0)",
    )
    end_to_end: bool = flag(action="store_true", help="include copying the inputs and outputs in the time")
    place: _Place = part(_Place)


@dataclass(frozen=True, slots=True)
class _Profile:
    bundle: str = argument(metavar="FILE", help="the bundle")
    inputs: str | None = flag(
        "-i", metavar="FILE", help="an .npz file with the inputs, or a JPEG or PNG picture"
    )
    fill_mode: FillMode = flag(**_FILL_MODE)
    calls: bool = flag(action="store_true", help="one row per call, instead of one per kernel and shapes")
    number: int = flag(type=positive, default=10, metavar="N", help="number of runs to average (default: 10)")
    html: str | None = flag(metavar="OUT", help="also write a page of the graph with times and charts")
    compare: str | None = flag(
        metavar="JSON", help="what `profile --json` printed before, to show beside it in --html"
    )
    place: _Place = part(_Place)


def add_parsers(subparsers: SubParsers) -> None:
    """Add the verbs."""
    parser = subparsers.add_parser(
        "run",
        help="run a bundle on this machine or on a board",
        description="Run a bundle on this machine, or on a board with --rpc-tracker and --rpc-key.\n"
        "The bundle's signature is not verified.",
        epilog=RUN_EXAMPLES,
    )
    takes(parser, _Run, _run)

    parser = subparsers.add_parser(
        "profile",
        help="time each kernel of a bundle",
        description="Time each kernel of a bundle on this machine or on a board, with the nodes of the\n"
        "model that it computes.",
        epilog=PROFILE_EXAMPLES,
    )
    takes(parser, _Profile, _profile)


def _run_on_board(*args: Any, **kwargs: Any) -> RunResult:  # noqa: ANN401 - the arguments of builder.run
    from builder.boards.remote_run import run_on_board

    return run_on_board(*args, **kwargs)


def _profile_report(
    package: Package, inputs: str | None, fill_mode: FillMode, place: _Place, number: int
) -> Report:
    board = place.board()
    if board is None:
        from builder.running.local_run import profile

        return profile(
            package,
            inputs,
            fill_mode=fill_mode,
            number=number,
            threads=place.threads,
            input_shapes=place.shapes(),
        )
    from builder.boards.remote_run import profile_on_board

    return profile_on_board(
        package, inputs, fill_mode=fill_mode, number=number, threads=place.threads, **board
    )


def _warn_unverified(bundle: str) -> None:
    """Tell an interactive user that the bundle's signature is not checked."""
    if sys.stderr.isatty():
        note(f"running {bundle} unverified: `edgebundle verify` checks its signature")


def _run(args: _Run) -> int:
    from builder.bundles.package import Package
    from builder.cli.rows import ONE_TABLE, Table, run_rows
    from builder.errors import ModelError
    from builder.running.row_file import is_row_file

    bundle, names = _bundle_and_inputs(args.bundle, named_inputs(args.inputs))
    package = Package.load(bundle)
    args.place.board()
    check_named(names)
    _warn_unverified(bundle)
    if any(is_row_file(name) for name in names):
        if len(names) > 1:
            raise ModelError(f"--inputs: expected one table, got {len(names)} files", hint=ONE_TABLE)
        _refuse(args, "other inputs, got a table", "", *_ONE_RUN, "draw")
        return run_rows(
            Table(names[0], args.outputs, args.accuracy, args.place.json), package, args.place.threads
        )
    if args.accuracy or len(names) > 1 or any(is_many(name) for name in names):
        return _run_many(args, package, names)
    return _run_one(args, package, names[0] if names else None)


def _refuse(args: _Run, expected: str, otherwise: str, *flags: str) -> None:
    """Refuse flags that do not go with the inputs."""
    from builder.errors import ModelError

    given = flat(args)
    for name in flags:
        if given[name]:
            flag = f"--{name.replace('_', '-')}"
            raise ModelError(f"{flag}: expected {expected}", hint=f"leave out {flag}{otherwise}")


def _bundle_and_inputs(bundle: str | None, names: list[str]) -> tuple[str, list[str]]:
    """Return the bundle and the inputs; the bundle may come last, after several inputs."""
    from builder.errors import ModelError

    # The command line comes first: a bundle that it does not name may be that of the folder's project.
    if len(names) > 1 and names[-1].endswith(".bundle"):
        return names.pop(), names
    if bundle is not None:
        return bundle, names
    raise ModelError(
        "expected a bundle, got none", hint="for example edgebundle run model.bundle --inputs cat.jpg"
    )


def _run_one(args: _Run, package: Package, given: str | None) -> int:
    from pathlib import Path

    from builder.cli.answers import Computed, document, draw_answer, drawn_names, lines_of
    from builder.errors import ModelError
    from builder.running.local_run import run

    if args.draw and given is None:
        raise ModelError("--draw: expected a picture to draw on", hint="name it with --inputs")
    if args.show_input:
        _show_input(package, given, args.show_input)
    drawn = drawn_names([Path(given)], args.draw)[0] if args.draw and given else None
    board = args.place.board()
    shaped = partial(run, input_shapes=args.place.shapes())
    run_it = shaped if board is None else partial(_run_on_board, **board)
    result = run_it(
        package,
        given,
        fill_mode=args.fill_mode,
        benchmark=args.print_time,
        repeat=args.repeat,
        number=args.number,
        min_repeat_ms=args.min_repeat_ms,
        end_to_end=args.end_to_end,
        threads=args.place.threads,
    )
    answer = Computed.of(package, result)
    if args.outputs:
        result.save(args.outputs)
    if drawn is not None and given is not None:
        draw_answer(Path(given), answer, drawn)
    if args.place.json:
        say_json(document(answer), indent=2)
        return 0
    if result.answers is not None or given is not None:
        say(*lines_of(answer))
    if result.answers is None and given is not None:
        _propose(package)
    if args.print_top:
        import numpy as np

        flat = np.ravel(result.get_output("output_0"))
        best = np.argsort(flat, kind="stable")[::-1][: args.print_top]
        say_text(np.array([best, flat[best]]))
    if args.profile:
        say_text(_profile_report(package, given, args.fill_mode, args.place, number=10))
    if result.times is not None:
        say_text(result.times)
    return 0


def _propose(package: Package) -> None:
    """Say which presets fit a model that declares no postprocess."""
    from builder.compiling.first_look import proposed

    if (proposal := proposed(package)) is not None:
        note(f"{proposal} (edgebundle repack adds them)")


def _run_many(args: _Run, package: Package, names: list[str]) -> int:
    """Run the model on each of many inputs."""
    import asyncio

    from builder.cli.answers import Computed
    from builder.cli.asking import ask_each
    from builder.cli.files import Files
    from builder.running.local_run import Runner, save_steps

    flags = _ONE_RUN if package.manifest.states else ("outputs", *_ONE_RUN)
    _refuse(args, "one input, got several or --accuracy", ", or give one input", *flags)
    labels = [line.decode() for line in package.members.get("labels.txt", b"").splitlines()]
    files = Files(names, accuracy=args.accuracy, labels=labels, draw=args.draw, as_json=args.place.json)
    runner = Runner(package, args.place.threads)
    steps: list[RunResult] = []

    async def ask(file: File) -> Answer:
        result = runner(file.path, args.fill_mode)
        if args.outputs:
            steps.append(result)
        return Computed.of(package, result)

    asyncio.run(ask_each(files, ask))
    if args.outputs and steps:
        save_steps(args.outputs, steps)
    return files.finish()


def _show_input(package: Package, given: str | None, output: str) -> None:
    from builder.errors import ModelError
    from builder.running.shown_input import show_input

    if given is None:
        raise ModelError("--show-input: expected a picture", hint="name it with --inputs")
    manifest = package.manifest
    quantised = manifest.quantised_inputs.get(manifest.preprocess.input) if manifest.preprocess else None
    show_input(manifest.preprocess, manifest.inputs, given, output, quantised)


def _profile(args: _Profile) -> int:
    from builder.bundles.package import Package

    other = _read_report(args.compare, args.html)
    package = Package.load(args.bundle)
    args.place.board()
    check_named([args.inputs] if args.inputs else [])
    report = _profile_report(package, args.inputs, args.fill_mode, args.place, args.number)
    if args.html:
        from builder.bundles.graph_page import write_page
        from builder.running.inputs import Picture, Sound, read_inputs
        from builder.running.sizes import timed_bucket

        given = read_inputs(args.inputs, package.manifest.inputs)
        values = {} if isinstance(given, Picture | Sound) else given
        shapes = {s.name: s.shape for s in package.manifest.smallest_inputs}
        shapes = shapes if isinstance(given, Picture) else args.place.shapes() or {}
        write_page(timed_bucket(package, values, shapes), args.html, report, other)
    if args.place.json:
        say_json(report.to_dict())
    else:
        say_text(report.table(aggregate=not args.calls))
    return 0


def _read_report(compare: str | None, html: str | None) -> Report | None:
    """Read the profile to compare with; check the page's path, too, before anything is run."""
    from pathlib import Path

    from builder.bundles.profile_report import Report
    from builder.errors import PackageError

    if html:
        check_folder_of(html)
    if compare is None:
        return None
    if not html:
        raise PackageError("expected --html with --compare", hint="add --html profile.html")
    path = Path(compare)
    try:
        if path.stat().st_size > MAX_REPORT_BYTES:
            raise PackageError(
                f"{path}: expected at most {MAX_REPORT_BYTES} bytes",
                hint="give what `edgebundle profile BUNDLE --json` wrote",
            )
        return Report.from_dict(json.loads(path.read_text("utf-8")))
    except OSError as error:
        raise PackageError(
            f"{path}: cannot be read ({error.strerror})",
            hint=similar_file(path, otherwise="give what `edgebundle profile BUNDLE --json` wrote"),
        ) from error
    except (ValueError, RecursionError) as error:
        raise PackageError(
            f"{path}: expected a report of `edgebundle profile --json`, got something else",
            hint="edgebundle profile model.bundle --json > before.json",
        ) from error
