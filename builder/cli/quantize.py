"""The verb `quantize`: turn a float model into a model in int8."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.terminal import say, say_json
from builder.cli import SubParsers
from builder.cli.arguments import TargetFlags, json_flag, load_model, options_of, real
from builder.cli.early_checks import check_model, read_tensors
from builder.cli.flags import flag, part, takes
from builder.cli.progress import show_steps
from builder.compiling.options import PRECISIONS

EXAMPLES: Final = """examples:
  edgebundle quantize model.onnx --calibration pictures/ --preprocess imagenet -o model-int8.onnx
  edgebundle quantize model.onnx --calibration samples.npz --max-drop 1 --report model-int8.html
  edgebundle quantize model.onnx --calibration pictures/ --calibration-labels classes.csv
  edgebundle quantize model.onnx --precision weights-int4
"""


def _percent(text: str) -> float:
    value = real(text)
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 100, got {text[:40]!r}")
    return value


def _decibels(text: str) -> float:
    value = real(text)
    if not -200 <= value <= 200:
        raise argparse.ArgumentTypeError(f"expected decibels from -200 to 200, got {text[:40]!r}")
    return value


@dataclass(frozen=True, slots=True)
class QuantisingFlags:
    """The flags that say how to quantise, which `compile` has too."""

    calibration: str | None = flag(
        metavar="FOLDER|NPZ",
        help="samples of what the model will see: a folder of JPEG and PNG pictures, an .npz file with an "
        "array for each input (samples along its first axis), or a folder of such files",
    )
    calibration_labels: str | None = flag(
        metavar="CSV",
        help="classes of the samples: lines such as seven.png,7; --max-drop is then about accuracy",
    )
    max_drop: float | None = flag(
        type=_percent,
        metavar="POINTS",
        help="percentage points of samples whose best class may differ from the float model's, or of "
        "accuracy that may be lost (default: 0.5); sensitive blocks stay in float until that is met",
    )
    min_sqnr: float | None = flag(
        type=_decibels,
        metavar="DB",
        help="least signal to noise of a model without class scores, such as a detector (default: 20 is "
        "aimed at, and a warning says if it is not reached)",
    )
    max_float: float | None = flag(
        type=_percent,
        metavar="PERCENT",
        help="largest share of the multiply-adds to leave in float for that (default: 5)",
    )
    metric: str | None = flag(
        choices=["auto", "top1", "sqnr"],
        help="what to compare: best classes, or signal to noise (default: best classes if the only output "
        "looks like class scores)",
    )
    activations: str | None = flag(
        choices=["uint8", "int8"],
        help="type of activations (default: uint8 for x86 targets, int8 for others)",
    )


@dataclass(frozen=True, slots=True)
class _Quantize(TargetFlags):
    output: str | None = flag(
        "-o",
        metavar="OUT",
        help="the model to write (default: MODEL-int8.onnx in this folder, for a file MODEL.onnx and int8)",
    )
    precision: str = flag(
        choices=PRECISIONS, default="int8", help="what to quantise to (default: %(default)s)"
    )
    preprocess: str | None = flag(
        metavar="PRESET|TOML",
        help="how to turn a picture into the input: a preset (such as imagenet) or a TOML file",
    )
    quantising: QuantisingFlags = part(QuantisingFlags, "quantising")
    report: str | None = flag(metavar="HTML", help="also write a page with a picture of each block's noise")
    quiet: bool = flag("-q", action="store_true", help="do not show progress")
    json: bool = json_flag()


def add_parsers(subparsers: SubParsers) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "quantize",
        help="turn a float model into an int8 model, or store only its weights in few bits",
        description="Turn a float model into a model in int8 (ONNX with QuantizeLinear and\n"
        "DequantizeLinear), which `edgebundle compile` takes like any other model. Calibration data are\n"
        "samples of what the model will see; nothing is trained. The precisions weights-int8,\n"
        "weights-int4 and weights-fp16 only store the weights in few bits: they need no calibration\n"
        "data, and the arithmetic stays float32.",
        epilog=EXAMPLES,
    )
    takes(parser, _Quantize, _quantize)


def _quantize(args: _Quantize) -> int:
    from builder.errors import ModelError

    # Check the paths first: quantising takes minutes.
    output = Path(args.output or f"{Path(args.model).stem}-{args.precision}.onnx")
    for path in [output] if args.report is None else [output, Path(args.report)]:
        if path.is_dir():
            raise ModelError(f"{path}: expected a file, got a folder", hint=f"name the file: {path}/NAME")
        if not path.parent.is_dir():
            raise ModelError(
                f"{path}: the folder {path.parent} does not exist", hint=f"create it: mkdir -p {path.parent}"
            )
    if output.resolve() == Path(args.model).resolve():
        raise ModelError(
            f"{output}: expected another file than the model itself", hint="name another with -o"
        )
    check_model(args.model, args.target)
    options = options_of(args)
    options.check()
    read_tensors(args.model, options)
    if args.report is not None and args.precision != "int8":
        raise ModelError(
            f"--report: expected --precision int8 beside it, got {args.precision}",
            hint="weights-only quantisation has no blocks to show",
        )
    with show_steps(quiet=args.quiet or args.json) as progress:
        progress("loading the compiler")
        from builder.quantising.precisions import Quantiser
        from builder.target.device_target import resolve

        target = resolve(args.target)
        progress(f"importing {args.model}")
        model = load_model(args.model, options, progress)
        result = Quantiser(target, options, progress).quantised(model)
        from builder.quantising.picture import write_picture
        from builder.quantising.report import QuantisationReport

        result.save(output)
        if isinstance(result.report, QuantisationReport) and args.report is not None:
            write_picture(result.report, args.report)
    if args.json:
        say_json({"model": str(output), "report": result.report.document()})
        return 0
    if isinstance(result.report, QuantisationReport):
        say(f"{output}: {result.name} in int8, activations in {result.report.activations}")
    else:
        say(f"{output}: {result.name} with {args.precision}, arithmetic in float32")
    say(*result.report.lines())
    return 0
