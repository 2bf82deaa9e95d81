"""The verbs for signing and trust: `keygen`, `sign`, `verify`, `inspect`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from agent.terminal import say, say_json
from builder.cli import SubParsers
from builder.cli.arguments import json_flag, sign_key_flag
from builder.cli.flags import argument, flag, takes
from builder.cli.input_names import check_named
from builder.cli.refused_bundle import naming_file

if TYPE_CHECKING:
    from agent.bundle.keyring import Keyring


_TRUST: Final[Mapping[str, Any]] = {
    "action": "append",
    "metavar": "KEY.pub|DIR",
    "help": "a trusted public key, or a folder of them; repeatable",
}


@dataclass(frozen=True, slots=True)
class _Keygen:
    folder: str = argument(metavar="DIR", help="folder for signing.key and signing.pub")
    json: bool = json_flag()


@dataclass(frozen=True, slots=True)
class _Sign:
    bundle: str = argument(metavar="FILE", help="the bundle")
    sign_key: str = sign_key_flag(
        "the private key that `edgebundle keygen` wrote, or exec:PROGRAM", required=True
    )
    output: str | None = flag("-o", metavar="OUT", help="the signed bundle (default: replace FILE)")
    json: bool = json_flag()


@dataclass(frozen=True, slots=True)
class _Verify:
    bundle: str = argument(metavar="FILE", help="the bundle")
    trust: list[str] = flag(required=True, **_TRUST)
    json: bool = json_flag()


@dataclass(frozen=True, slots=True)
class _Inspect:
    bundle: str = argument(metavar="FILE", help="the bundle")
    trust: list[str] | None = flag(**_TRUST)
    html: str | None = flag(metavar="OUT", help="also write a page of the graph and its memory")
    json: bool = json_flag()


def add_parsers(subparsers: SubParsers) -> None:
    """Add the verbs."""
    parser = subparsers.add_parser(
        "keygen",
        help="make a key pair for signing bundles",
        description="Make an EC P-256 private key that signs bundles, and the public key that devices trust.",
        epilog="example:\n  edgebundle keygen keys/",
    )
    takes(parser, _Keygen, _keygen)

    parser = subparsers.add_parser(
        "sign",
        help="sign a bundle, or replace its signature",
        description="Sign a bundle that was compiled without --sign-key, or sign it again with another key.",
        epilog="example:\n  edgebundle sign model.bundle --sign-key keys/signing.key -o signed.bundle",
    )
    takes(parser, _Sign, _sign)

    parser = subparsers.add_parser(
        "verify",
        help="check a bundle's signature and contents",
        description="Check a bundle as a device does before loading it: signature, manifest, every byte.",
        epilog="examples:\n"
        "  edgebundle verify model.bundle --trust keys/signing.pub\n"
        "  edgebundle verify model.bundle --trust /etc/edge-agent/keyring/",
    )
    takes(parser, _Verify, _verify)

    parser = subparsers.add_parser(
        "inspect",
        help="show the contents of a bundle",
        description="Show a bundle's manifest and members. Without --trust nothing is verified.",
        epilog="examples:\n"
        "  edgebundle inspect model.bundle --trust keys/signing.pub\n"
        "  edgebundle inspect model.bundle --json\n"
        "  edgebundle inspect model.bundle --html graph.html",
    )
    takes(parser, _Inspect, _inspect)


def _keygen(args: _Keygen) -> int:
    from builder.bundles.key_files import generate

    pair = generate(args.folder)
    if args.json:
        say_json({"private": str(pair.private), "public": str(pair.public), "key_id": pair.key_id}, indent=2)
        return 0
    say(f"private key  {pair.private}  (keep it secret: it decides what your devices run)")
    say(f"public key   {pair.public}")
    say(f"key id       {pair.key_id}")
    say("next:")
    say(f"  edgebundle compile MODEL.onnx --target rpi4 --sign-key {pair.private} -o MODEL.bundle")
    say(f"  copy {pair.public} into each device's keyring (/etc/edge-agent/keyring/)")
    return 0


def _sign(args: _Sign) -> int:
    from agent.bundle.keyring import key_id
    from builder.bundles.package import Package
    from builder.bundles.signers import open_signer
    from builder.compiling.identity import check_counter_time

    key = open_signer(args.sign_key)
    output = args.output or args.bundle
    with naming_file(args.bundle):
        package = Package.load(args.bundle)
        manifest = package.manifest
        check_counter_time(manifest.security_counter, meant=bool(manifest.counter_ahead_of_time))
        signed = package.sign(key)
        signed.save(output)
    signer = key_id(key.public_key())
    if args.json:
        say_json(
            {"name": manifest.name, "version": manifest.version, "key_id": signer, "output": output}, indent=2
        )
        return 0
    say(f"signed {manifest.name} {manifest.version}: {output}")
    say(f"key id {signer}")
    return 0


def _verify(args: _Verify) -> int:
    from agent.bundle.verify import verify

    keyring = _keyring(args.trust)
    check_named([args.bundle])
    with naming_file(args.bundle), verify(args.bundle, keyring) as bundle:
        manifest, digest, key = bundle.manifest, bundle.digest, bundle.key_id
    if args.json:
        say_json(
            {"name": manifest.name, "version": manifest.version, "digest": digest, "key_id": key}, indent=2
        )
        return 0
    say(f"verified {manifest.name} {manifest.version}")
    say(f"digest   {digest}")
    say(f"key id   {key}")
    return 0


def _keyring(trusted: list[str]) -> Keyring:
    from pathlib import Path

    from agent.bundle.keyring import Keyring
    from builder.errors import KeyFileError
    from builder.spelling import similar_file

    for path in trusted:
        if not Path(path).exists():
            raise KeyFileError(
                f"--trust: no such file: {path}",
                hint=similar_file(path, otherwise="name a public key, such as keys/signing.pub"),
            )
    folders = [Keyring.from_dir(path) for path in trusted if Path(path).is_dir()]
    files = Keyring.from_files(path for path in trusted if not Path(path).is_dir())
    keys = [key.public_key for keyring in (files, *folders) for key in keyring.keys.values()]
    return Keyring.of(keys, frozenset[str]().union(*(folder.revoked for folder in folders)))


def _inspect(args: _Inspect) -> int:
    from builder.bundles.bundle_report import inspect_bundle

    keyring = _keyring(args.trust) if args.trust else None
    check_named([args.bundle])
    with naming_file(args.bundle):
        report = inspect_bundle(args.bundle, keyring)
        if args.json:
            say_json(report.to_json(), indent=2)
        else:
            say(*report.lines())
        if args.html:
            from builder.bundles.graph_page import write_page
            from builder.bundles.package import Package

            write_page(Package.load(args.bundle), args.html)
        if report.refusal is not None:
            raise report.refusal
    return 0
