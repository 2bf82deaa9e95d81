"""The verb `repack`: change what a bundle declares, without compiling."""

from __future__ import annotations

import argparse
from typing import Final

from agent.terminal import say, say_json
from builder.cli import SubParsers
from builder.cli.arguments import add_declarations, add_json, integer
from builder.cli.refused_bundle import naming_file

EXAMPLES: Final = """examples:
  edgebundle repack yolox.bundle --preprocess yolox --postprocess yolox --labels coco
  edgebundle repack yolox.bundle --postprocess yolox,score_threshold=0.5,class_agnostic=true -o strict.bundle
  edgebundle repack sensors.bundle --columns temperature,humidity,light
  edgebundle repack yolox.bundle --model-version 1.1.0 --sign-key keys/signing.key -o new.bundle
"""


def add_parsers(subparsers: SubParsers) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "repack",
        help="change a bundle's processing, labels or name without compiling",
        description="Change a bundle's preprocess, postprocess, labels, name, version or counter. Kernels,\n"
        "weights and recorded samples stay as they are. What is not given is kept, except the signature,\n"
        "which is not checked: `edgebundle verify` does that.",
        epilog=EXAMPLES,
    )
    parser.add_argument("bundle", metavar="FILE", help="the bundle")
    parser.add_argument("-o", "--output", metavar="OUT", help="the new bundle (default: replace FILE)")
    add_declarations(parser)
    parser.add_argument("--name", help="the model's name on devices")
    parser.add_argument("--model-version", metavar="SEMVER", help="the model's version")
    parser.add_argument(
        "--security-counter",
        type=integer,
        metavar="N",
        help="a device refuses a lower counter than the last one it accepted for this name (default: the "
        "time in seconds since 1970, or SOURCE_DATE_EPOCH)",
    )
    parser.add_argument(
        "--counter-ahead-of-time",
        action="store_true",
        help="allow a counter that is more than two days ahead of the time: devices never go back below it",
    )
    parser.add_argument(
        "--sign-key", metavar="KEY", help="private key to sign with; devices accept only signed bundles"
    )
    add_json(parser)
    parser.set_defaults(handler=_repack)


def _repack(args: argparse.Namespace) -> int:
    from builder.bundles.key_files import read_private
    from builder.bundles.package import Package
    from builder.compiling.identity import Identity
    from builder.compiling.repack import repack

    key = read_private(args.sign_key) if args.sign_key else None
    with naming_file(args.bundle):
        package = Package.load(args.bundle)
        version = args.model_version or package.manifest.version
        package = repack(
            package,
            identity=Identity(
                args.name,
                version,
                args.security_counter,
                counter_ahead_of_time=args.counter_ahead_of_time,
            ),
            preprocess=args.preprocess,
            postprocess=args.postprocess,
            labels=args.labels,
            columns=args.columns,
        )
    if key is not None:
        package = package.sign(key)
    output = args.output or args.bundle
    package.save(output)
    manifest = package.manifest
    if args.json:
        document = {
            "bundle": output,
            "name": manifest.name,
            "version": manifest.version,
            "security_counter": manifest.security_counter,
            "signed": key is not None,
        }
        say_json(document)
        return 0
    say(f"{output}: {manifest.name} {manifest.version}, counter {manifest.security_counter}")
    if key is None:
        say("  not signed: devices will refuse it; use `edgebundle sign`, or repack with --sign-key")
    return 0
