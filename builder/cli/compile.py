"""The verb `compile`: a model becomes a bundle."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from builder.cli import SubParsers
from builder.cli.progress import steps

if TYPE_CHECKING:
    from builder.bundles.package import Package

EXAMPLES: Final = """examples:
  edgebundle compile resnet50-v2-7.onnx --target rpi4 --sign-key keys/signing.key -o resnet50.bundle
  edgebundle compile model.onnx --target "llvm -mcpu=cascadelake" --input-shapes "data:[1,3,224,224]"
  edgebundle compile model.onnx --preprocess imagenet --postprocess softmax,top5 --labels synset.txt
"""
TARGETS: Final = "host, rpi3, rpi4, rpi5, rpi-armv7, x86-64-v3, riscv64"


def add_parsers(subparsers: SubParsers) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "compile",
        help="compile a model for a device into a bundle",
        description="Compile a model for a device, check it against ONNX Runtime, and write a bundle.",
        epilog=EXAMPLES,
    )
    parser.add_argument("model", metavar="FILE", help="an ONNX model (.onnx), or a PyTorch export (.pt2)")
    parser.add_argument(
        "--target",
        default="host",
        help=f'{TARGETS}; or "llvm -mcpu=NAME"; or a TVM target as JSON (default: %(default)s)',
    )
    parser.add_argument("-o", "--output", metavar="OUT", help="the bundle (default: the model's name.bundle)")
    parser.add_argument(
        "--input-shapes",
        metavar='"NAME:[1,3,224,224] ..."',
        help="shapes of inputs that have symbolic dimensions",
    )
    parser.add_argument(
        "--input-values", metavar='"NAME=VALUE ..."', help="inputs that become constants, such as sr=16000"
    )
    parser.add_argument(
        "--tuning-records",
        metavar="FOLDER",
        help="what `edgebundle tune -o FOLDER` measured for this target; before those that come with the "
        "compiler, which `none` leaves out too",
    )
    parser.add_argument("-O", "--opt-level", type=int, choices=range(4), default=3, help=argparse.SUPPRESS)
    described = parser.add_argument_group("what the bundle says of itself")
    described.add_argument("--name", help="the model's name on devices (default: from the file's name)")
    described.add_argument("--model-version", default="1.0.0", metavar="SEMVER", help="default: %(default)s")
    described.add_argument(
        "--security-counter",
        type=int,
        default=0,
        metavar="N",
        help="devices refuse a lower counter than they have committed for this name (default: 0)",
    )
    described.add_argument(
        "--compatible",
        action="append",
        metavar="DEVICE",
        help="a device type that takes it, as in the device tree; repeatable (default: any Linux of its CPU)",
    )
    described.add_argument("--labels", metavar="FILE", help="names of the classes, one a line")
    described.add_argument(
        "--preprocess", metavar="PRESET|TOML", help="how a picture becomes the input: imagenet, ... or a file"
    )
    described.add_argument(
        "--postprocess",
        metavar="STEPS|TOML",
        help="what becomes of the outputs: softmax,top5, faces, or a file",
    )
    trusted = parser.add_argument_group("trust")
    trusted.add_argument("--sign-key", metavar="KEY", help="private key; devices take signed bundles alone")
    trusted.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="largest relative error against ONNX Runtime (default: 1e-4)",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress")
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    parser.set_defaults(handler=_compile)


def _compile(args: argparse.Namespace) -> int:
    from builder.bundles.keys import read_private
    from builder.compiling import parity

    # Before minutes of work: is the key there, can the result be written?
    key = read_private(args.sign_key) if args.sign_key else None
    output = _output(args)
    with steps(quiet=args.quiet or args.json) as step:
        step("loading the compiler")
        from builder.compiling.compilation import Identity, compile
        from builder.importer import load, parse_input_shapes, parse_input_values
        from builder.target.device_target import resolve

        target = resolve(args.target)
        identity = Identity(args.name, args.model_version, args.security_counter, args.compatible)
        identity.check()
        step(f"importing {args.model}")
        model = load(
            args.model,
            input_shapes=parse_input_shapes(args.input_shapes) if args.input_shapes else None,
            input_values=parse_input_values(args.input_values) if args.input_values else None,
            notes=step,
        )
        package = compile(
            model,
            target,
            identity=identity,
            preprocess=args.preprocess,
            postprocess=args.postprocess,
            labels=args.labels,
            tolerance=parity.TOLERANCE if args.tolerance is None else args.tolerance,
            tuning_records=args.tuning_records,
            progress=step,
        )
        if key is not None:
            step("signing")
            package = package.sign(key)
        package.save(output)
    _report(package, output, as_json=args.json)
    return 0


def _output(args: argparse.Namespace) -> str:
    from pathlib import Path

    from builder.errors import PackageError

    output = args.output or f"{Path(args.model).stem}.bundle"
    folder = Path(output).parent
    if not folder.is_dir():
        raise PackageError(f"{output}: the folder {folder} does not exist", hint=f"mkdir -p {folder}")
    if Path(output).is_dir():
        raise PackageError(
            f"{output}: expected a file's name, this is a folder", hint=f"-o {output}/NAME.bundle"
        )
    return str(output)


def _report(package: Package, output: str, *, as_json: bool) -> None:
    manifest = package.manifest
    size = sum(len(data) for data in package.members.values())
    if as_json:
        document = {
            "bundle": output,
            "name": manifest.name,
            "version": manifest.version,
            "target": {"triple": manifest.target.triple, "cpu": manifest.target.cpu},
            "parity_error": manifest.provenance.parity_error,
            "arena_bytes": manifest.resources.arena_bytes,
            "params_bytes": manifest.resources.params_bytes,
            "signed": package.signature is not None,
            "tuning": None if manifest.provenance.tuning is None else asdict(manifest.provenance.tuning),
            "shipped_records": None
            if manifest.provenance.shipped_records is None
            else asdict(manifest.provenance.shipped_records),
        }
        print(json.dumps(document))
        return
    print(f"{output}: {manifest.name} {manifest.version} for {manifest.target.triple} {manifest.target.cpu}")
    print(
        f"  {size / 1e6:.1f} MB, of it {manifest.resources.params_bytes / 1e6:.1f} MB weights; "
        f"{manifest.resources.arena_bytes / 1e6:.1f} MB of memory at run time"
    )
    print(f"  agrees with {manifest.provenance.reference} to {manifest.provenance.parity_error:.1e}")
    if tuning := manifest.provenance.tuning:
        print(
            f"  tuned: {tuning.speedup:.2f}x ({tuning.low:.2f} to {tuning.high:.2f}) as fast as untuned on "
            f"{tuning.board}: {tuning.tuned_ms:.3f} ms, was {tuning.untuned_ms:.3f} ms"
        )
    if shipped := manifest.provenance.shipped_records:
        how = "timed" if shipped.board_timed else "by instruction count, no board was timed"
        print(f"  shipped tuning records of {shipped.name} for {shipped.kernels} kernels ({how})")
    if package.signature is None:
        print(
            "  not signed: no device will take it; sign it with `edgebundle sign` or compile with --sign-key"
        )
