"""The verb `repack`: change what a bundle declares, without compiling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from agent.terminal import note, say, say_json
from builder.cli import SubParsers
from builder.cli.arguments import DeclarationFlags, integer, json_flag
from builder.cli.flags import argument, flag, part, takes
from builder.cli.refused_bundle import naming_file

EXAMPLES: Final = """examples:
  edgebundle repack yolox.bundle --preprocess yolox --postprocess yolox --labels coco
  edgebundle repack yolox.bundle --postprocess yolox,score_threshold=0.5,class_agnostic=true -o strict.bundle
  edgebundle repack sensors.bundle --columns temperature,humidity,light
  edgebundle repack yolox.bundle --model-version 1.1.0 --sign-key keys/signing.key -o new.bundle
"""


@dataclass(frozen=True, slots=True)
class _Repack:
    bundle: str = argument(metavar="FILE", help="the bundle")
    output: str | None = flag("-o", metavar="OUT", help="the new bundle (default: replace FILE)")
    declared: DeclarationFlags = part(DeclarationFlags)
    name: str | None = flag(help="the model's name on devices")
    model_version: str | None = flag(metavar="SEMVER", help="the model's version")
    security_counter: int | None = flag(
        type=integer,
        metavar="N",
        help="a device refuses a lower counter than the last one it accepted for this name (default: the "
        "time in seconds since 1970, or SOURCE_DATE_EPOCH)",
    )
    counter_ahead_of_time: bool = flag(
        action="store_true",
        help="allow a counter that is more than two days ahead of the time: devices never go back below it",
    )
    sign_key: str | None = flag(
        metavar="KEY", help="private key to sign with, or exec:PROGRAM; devices accept only signed bundles"
    )
    json: bool = json_flag()


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
    takes(parser, _Repack, _repack)


def _repack(args: _Repack) -> int:
    from builder.bundles.package import Package
    from builder.bundles.signers import open_signer
    from builder.compiling.identity import Identity
    from builder.compiling.repack import repack

    key = open_signer(args.sign_key) if args.sign_key else None
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
            preprocess=args.declared.preprocess,
            postprocess=args.declared.postprocess,
            labels=args.declared.labels,
            columns=args.declared.columns,
            progress=note,
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
