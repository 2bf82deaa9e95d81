"""The verb `new`: write a project, a folder whose `edgebundle.toml` the other verbs read."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agent.terminal import say
from builder.cli import SubParsers
from builder.cli.arguments import TARGETS, DeclarationFlags
from builder.cli.early_checks import check_model
from builder.cli.flags import argument, flag, flat, part, takes

if TYPE_CHECKING:
    from builder.compiling.recognition import Proposal

EXAMPLES: Final = """examples:
  edgebundle new faces yunet.onnx --target rpi4 --broker mqtt://localhost --agent kitchen
  cd faces
  edgebundle compile
  edgebundle run --inputs cat.jpg
  edgebundle deploy
  edgebundle infer --inputs cat.jpg
"""
_IGNORED: Final = "keys/*.key\n*.bundle\n"


@dataclass(frozen=True, slots=True)
class _New:
    folder: str = argument(metavar="NAME", help="the folder to make; also the model's name on devices")
    model: str | None = argument(
        metavar="MODEL",
        nargs="?",
        help="the model's file; presets are filled in if its outputs leave no doubt",
    )
    target: str = flag(default="host", help=f"device to compile for: {TARGETS} (default: host)")
    declared: DeclarationFlags = part(DeclarationFlags)
    sign_key: str | None = flag(
        metavar="KEY", help="private key to sign with (default: a new pair in NAME/keys)"
    )
    broker: str = flag(
        metavar="URL", default="mqtt://localhost", help="mqtt[s]://[USER@]HOST[:PORT] (default: %(default)s)"
    )
    agent: list[str] | None = flag(
        action="append", metavar="NAME", help="an agent to deploy to; repeatable (default: none yet)"
    )


def add_parsers(subparsers: SubParsers) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "new",
        help="write a project: a folder whose settings the other verbs read",
        description="Write a project: a folder with keys and edgebundle.toml, which compile, quantize, run,\n"
        "deploy, infer and others read in that folder. Flags override the file.",
        epilog=EXAMPLES,
    )
    takes(parser, _New, _new)


def _new(args: _New) -> int:
    from builder.errors import ProjectError

    folder = Path(args.folder)
    if os.path.lexists(folder):
        raise ProjectError(
            f"{folder}: expected a new folder, got one that exists", hint="choose another name"
        )
    if not folder.parent.is_dir():
        raise ProjectError(
            f"{folder}: the folder {folder.parent} does not exist", hint=f"make it: mkdir -p {folder.parent}"
        )
    if args.model:
        check_model(args.model, args.target)
    proposal = _proposal(args.model) if args.model and not args.declared.postprocess else None
    text = _toml(args, folder, proposal)
    try:
        unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise ProjectError(
            f"{folder}: cannot be made ({error.strerror})",
            hint="name a folder below one that you may write to",
        ) from error
    try:
        unfinished.chmod(0o755)
        (unfinished / "edgebundle.toml").write_text(text)
        (unfinished / ".gitignore").write_text(_IGNORED)
        if not args.sign_key:
            from builder.bundles import key_files

            key_files.generate(unfinished / "keys")
        unfinished.rename(folder)
        from builder.cli.project_trust import trust_outside

        trust_outside(folder, _files(args, folder))
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    say(f"{folder}: edgebundle.toml{'' if args.sign_key else ', and a pair of keys in keys/'}")
    if proposal is not None:
        say(f"  {proposal}{'' if proposal.sure else ' (not filled in, as it is not sure)'}")
    say(
        "next:",
        f"  cd {folder}",
        *(f"  edgebundle {verb}" for verb in ("compile", "run --inputs PICTURE", "deploy")),
    )
    return 0


def _proposal(model: str) -> Proposal | None:
    from builder.compiling.outline import read_outline
    from builder.compiling.recognition import recognise

    outline = read_outline(model)
    return None if outline is None else recognise(outline.inputs, outline.outputs, outline.hints)


def _toml(args: _New, folder: Path, proposal: Proposal | None) -> str:
    """Return the project's file; what is not known yet is a comment."""
    from builder.compiling.identity import bundle_name

    name = bundle_name(folder.name)
    sure = proposal if proposal is not None and proposal.sure else None
    before = _preset(args.declared.preprocess, folder) or (sure.preprocess or None if sure else None)
    after = _preset(args.declared.postprocess, folder) or (sure.postprocess if sure else None)
    labels = args.declared.labels
    labels = labels if labels == "coco" else _relative(labels, folder)
    lines = [
        "# What edgebundle's verbs use in this folder if no flag says otherwise (docs/project.md).",
        "",
        "[model]",
        _line("file", _relative(args.model, folder), "model.onnx"),
        _line("target", args.target),
        _line("name", name),
        _line("version", "1.0.0"),
        _line("preprocess", before, "imagenet"),
        _line("postprocess", after, "softmax,top5"),
        _line("labels", labels, "labels.txt"),
        _line("calibration", None, "pictures/"),
        _line("bundle", f"{name}.bundle"),
        "",
        "[sign]",
        _line("key", _relative(args.sign_key, folder) or "keys/signing.key"),
        "",
        "[fleet]",
        _line("broker", args.broker),
        f"agents = {json.dumps(args.agent)}" if args.agent else '# agents = ["kitchen"]',
        "",
    ]
    return "\n".join(lines)


def _files(args: _New, folder: Path) -> dict[str, str | None]:
    """Return the files that this command line names, as the verbs will find them in the folder."""
    given = flat(args)
    named = {name: given[name] for name in ("model", "preprocess", "postprocess", "labels", "sign_key")}
    return {
        name: _relative(value, folder)
        for name, value in named.items()
        if value and (Path(value).exists() or _is_program(value))
    }


def _line(key: str, value: str | None, example: str = "") -> str:
    # A string of JSON is one of TOML.
    return f"# {key} = {json.dumps(example)}" if value is None else f"{key} = {json.dumps(value)}"


def _relative(path: str | None, folder: Path) -> str | None:
    """Return a path from the folder, an absolute one if it leads far away from it; a program as it is."""
    if path is None or _is_program(path):
        return path
    relative = os.path.relpath(path, folder)
    return str(Path(path).absolute()) if relative.startswith("../../../") else relative


def _preset(text: str | None, folder: Path) -> str | None:
    """Return a preset as it is, and the path of a TOML file from the folder."""
    return _relative(text, folder) if text is not None and text.endswith(".toml") else text


def _is_program(path: str | None) -> bool:
    from builder.bundles.signers import EXEC

    return path is not None and path.startswith(EXEC)
