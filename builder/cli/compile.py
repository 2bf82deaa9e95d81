"""The verb `compile`: turn a model into a bundle."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Final

from agent.terminal import say, say_json
from builder.cli import SubParsers
from builder.cli.arguments import (
    DeclarationFlags,
    TargetFlags,
    integer,
    json_flag,
    options_of,
    sign_key_flag,
    tolerance,
)
from builder.cli.early_checks import (
    check_folder_of,
    check_model,
    check_records,
    read_tensors,
    sound_note,
)
from builder.cli.flags import flag, part, takes
from builder.cli.progress import show_steps
from builder.cli.quantize import QuantisingFlags
from builder.compiling import tolerances
from builder.compiling.options import HALVES, PRECISIONS, Options

if TYPE_CHECKING:
    from agent.bundle.buckets import Buckets
    from builder.bundles.package import Package
    from builder.compiling.identity import Identity
    from builder.compiling.recognition import Proposal

_BOUNDS: Final = (
    "shapes that change\n"  # its title
    'with bounds in --input-shapes, such as "ids:[1,s=1..512] mask:[1,s]"'
)
_NAMED: Final = 3  # kernels without a design space, or layers in float32, that the summary names

EXAMPLES: Final = """examples:
  edgebundle compile resnet50-v2-7.onnx --target rpi4 --sign-key keys/signing.key -o resnet50.bundle
  edgebundle compile model.onnx --target "llvm -mcpu=cascadelake" --input-shapes "data:[1,3,224,224]"
  edgebundle compile model.onnx --preprocess imagenet --postprocess softmax,top5 --labels synset.txt
  edgebundle compile yolox_nano.onnx --preprocess yolox --postprocess yolox,score_threshold=0.4 --labels coco
  edgebundle compile silero_vad_16k_op15.onnx --preprocess silero -o vad.bundle
  edgebundle compile forest.onnx --columns temperature,humidity,light --postprocess top1
  edgebundle compile rnn.onnx --state "h:hn c:cn"
  edgebundle compile gpt2.onnx --state "past_key_values.*:present.*" --input-values attention_mask=1 \
      --input-shapes "input_ids:[1,1] past_key_values.0.key:[1,12,0..255,64]"
  edgebundle compile model.onnx --report nodes.html
  edgebundle compile bert.onnx --input-shapes "input_ids:[1,s=1..512] attention_mask:[1,s]"
  edgebundle compile model.onnx --preprocess imagenet --precision int8 --calibration pictures/
  edgebundle compile model.onnx --target rpi5 --precision fp16
"""


@dataclass(frozen=True, slots=True)
class _Manifest:
    name: str | None = flag(help="the model's name on devices (default: from the file's name)")
    model_version: str = flag(
        default="1.0.0", metavar="SEMVER", help="the model's version (default: %(default)s)"
    )
    security_counter: int | None = flag(
        type=integer,
        metavar="N",
        help="a device refuses a lower counter than the last one it accepted for this name (default: the "
        "time of the build in seconds since 1970, or SOURCE_DATE_EPOCH)",
    )
    counter_ahead_of_time: bool = flag(
        action="store_true",
        help="allow a counter that is more than two days ahead of the time: devices never go back below it",
    )
    compatible: list[str] | None = flag(
        action="append",
        metavar="TYPE",
        help="a device type that may run the bundle, as in the device tree, such as raspberrypi,4-model-b; "
        "repeatable (default: any Linux on this CPU architecture)",
    )
    declared: DeclarationFlags = part(DeclarationFlags)
    states: list[str] | None = flag(
        "--state",
        action="append",
        metavar='"IN:OUT ..."',
        help="outputs that are inputs of the next run, such as h:hn c:cn; devices keep them for each session "
        "of a client (h:hn=0.5 sets the initial value; default: 0)",
    )
    picture: str | None = flag(
        metavar="FILE",
        help="a JPEG or PNG picture that --postprocess, or the proposed one, is tried on; without it, random "
        "pixels are (the bundle does not contain it)",
    )
    show_input: str | None = flag(
        metavar="OUT.png", help="write what --preprocess makes of --picture, before anything is compiled"
    )

    def identity(self) -> Identity:
        from builder.compiling.identity import Identity

        return Identity(
            self.name, self.model_version, self.security_counter, self.compatible, self.counter_ahead_of_time
        )


@dataclass(frozen=True, slots=True)
class _Compile(TargetFlags):
    output: str | None = flag(
        "-o",
        metavar="OUT",
        help="the bundle to write (default: MODEL.bundle in this folder, for a file MODEL.onnx)",
    )
    tuning_records: str | None = flag(
        metavar="FOLDER", help="records that `edgebundle tune -o FOLDER` measured for this target"
    )
    opt_level: int = flag("-O", type=int, choices=range(4), default=3, help=argparse.SUPPRESS)
    precision: str | None = flag(
        choices=(*PRECISIONS, HALVES),
        help="quantise the model first, as `edgebundle quantize` does (default: compile the model as it is); "
        "int8 needs --calibration, the weights-only ones do not; fp16 computes in float16, where the "
        "target can, as rpi5 does",
    )
    quantising: QuantisingFlags = part(QuantisingFlags, "quantising")
    buckets: str | None = flag(
        group=_BOUNDS,
        metavar="SIZES",
        help="the sizes to compile, such as 16,64,128, or s=16,64 for one of several dimensions (default: "
        "powers of two and 1.5 times these, at most 8)",
    )
    pad: str | None = flag(
        group=_BOUNDS,
        metavar='"NAME=VALUE ..."',
        help="what inputs are padded with: a number, or `edge` for their last element (default: 0)",
    )
    manifest: _Manifest = part(_Manifest, "manifest")
    report: str | None = flag(
        metavar="JSON|HTML",
        help="write what became of each node of the model: the kernels that compute it, or why none does",
    )
    sign_key: str | None = sign_key_flag(
        "private key to sign with, or exec:PROGRAM; devices accept only signed bundles", group="trust"
    )
    tolerance: float | None = flag(
        group="trust",
        type=tolerance,
        metavar="X",
        help="largest relative error that is allowed against ONNX Runtime "
        f"(default: {tolerances.PARITY:g}, or more if the model amplifies rounding)",
    )
    quiet: bool = flag("-q", action="store_true", help="do not show progress")
    json: bool = json_flag()


def add_parsers(subparsers: SubParsers) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "compile",
        help="compile a model for a device and write a bundle",
        description="Compile a model for a device, compare it with ONNX Runtime, and write a bundle.",
        epilog=EXAMPLES,
    )
    takes(parser, _Compile, _compile)


def _compile(args: _Compile) -> int:
    from builder.bundles.signers import open_signer

    # Loading the compiler takes seconds, and compiling minutes.
    identity = args.manifest.identity()
    identity.check()
    check_model(args.model, args.target)
    check_records(args.tuning_records)
    key = open_signer(args.sign_key) if args.sign_key else None
    options = options_of(args)
    options.check()
    output = _output(args.model, args.output)
    if args.report:
        _check_report(args.report)
    with show_steps(quiet=args.quiet or args.json) as progress:
        proposal, notes = _first_look(args.model, options, args.manifest.picture, args.manifest.show_input)
        for note in notes:
            progress(note)
        progress("loading the compiler")
        from builder.compiler import compile
        from builder.compiling.first_look import confirmed, proposed
        from builder.importer import native

        native.start()  # it is ready when the model is read
        package = compile(
            args.model,
            args.target,
            options,
            identity=identity,
            tuning_records=args.tuning_records,
            progress=progress,
        )
        proposal = proposed(package) if proposal is None else confirmed(proposal, package)
        if key is not None:
            progress("signing")
            package = package.sign(key)
        package.save(output)
    if args.report:
        from builder.bundles.node_report import write_report

        write_report(package, args.report)
    _report(package, output, proposal, as_json=args.json)
    return 0


def _first_look(
    path: str, options: Options, picture: str | None, shown: str | None
) -> tuple[Proposal | None, Sequence[str]]:
    """Refuse what cannot work before the compiler is loaded, and show what the model gets of a picture.

    Returns
    -------
    Proposal or None
        The presets that fit the outputs, if the user declares no postprocess or one that clearly fits worse.
    sequence
        Lines about states, labels and presets that the user may want to declare.
    """
    from agent.bundle.quantisation import by_name
    from builder.compiling.audio_presets import is_audio
    from builder.compiling.declared import declare
    from builder.compiling.name_recognition import label_hint, recognise_states
    from builder.compiling.outline import read_outline
    from builder.compiling.recognition import contradicts, hint_note, recognise
    from builder.errors import ModelError
    from builder.importer.bounded_shapes import declared_dims, resolve_bounds
    from builder.running.shown_input import prepared, show_input

    hears = is_audio(options.preprocess or "")
    if shown is not None and picture is None:
        raise ModelError(
            "--show-input: expected --picture beside it, got none",
            hint="give --picture IN.jpg --show-input OUT.png",
        )
    if picture is not None and hears:
        raise ModelError(
            "--picture: expected a preprocess for pictures, got one for recordings",
            hint="leave out --show-input and --picture: nothing of a recording can be shown",
        )
    if options.has_bounds:
        if not options.states:
            resolve_bounds(options.shapes(), declared_dims(path))
        # Shapes of states are only known when the model is imported.
        outline, options = read_outline(path), replace(options, states=())
    else:
        outline = read_tensors(path, options)
    notes = [sound_note(path, options.preprocess)]
    if outline is None:
        if shown is not None:
            raise ModelError(
                f"--show-input: expected an ONNX model whose shapes are fixed, got {path}",
                hint="compile it, then: edgebundle run BUNDLE --inputs PICTURE --show-input OUT.png",
            )
        return None, [note for note in notes if note]
    declared = declare(outline, options)
    before, after = declared.preprocess, declared.postprocess
    proposal = None if hears else recognise(outline.inputs, outline.outputs, outline.hints)
    if picture is not None:
        if before is None and proposal is not None and proposal.preprocess:
            raise ModelError("--picture: expected --preprocess beside it, got none", hint=str(proposal))
        scale = by_name(outline.scales.quantisation.inputs).get(before.input) if before else None
        if shown is None:
            prepared(before, declared.inputs, picture, scale)
        else:
            show_input(before, declared.inputs, picture, shown, scale)
    if hears:
        return None, ()
    if proposal is not None and after is not None:
        is_preset = not (options.postprocess or "").endswith(".toml")
        if not (is_preset and contradicts(proposal, after)):
            proposal = None
    notes.append(hint_note(outline.hints, after))
    if declared.labels is None:
        notes.append(label_hint(after, declared.inputs, declared.outputs))
    states = None if options.states else recognise_states(outline.inputs, outline.outputs)
    if states is not None:
        notes.append(f'some outputs may be inputs of the next run: --state "{states}"')
    return proposal, [note for note in notes if note]


def _output(model: str, output: str | None) -> str:
    from pathlib import Path

    output = output or f"{Path(model).stem}.bundle"
    check_folder_of(output)
    return output


def _check_report(path: str) -> None:
    from pathlib import Path

    from builder.bundles.node_report import SUFFIXES
    from builder.errors import PackageError

    if Path(path).suffix not in SUFFIXES:
        raise PackageError(
            f"{path}: expected a name that ends in {' or '.join(SUFFIXES)}",
            hint=f"name it {Path(path).stem or 'nodes'}{SUFFIXES[0]}",
        )
    check_folder_of(path)


def _report(package: Package, output: str, proposal: Proposal | None, *, as_json: bool) -> None:
    manifest, quantisation = package.manifest, package.quantisation
    size = sum(len(data) for data in package.members.values())
    if as_json:
        document = {
            "bundle": output,
            "name": manifest.name,
            "version": manifest.version,
            "target": {"triple": manifest.target.triple, "cpu": manifest.target.cpu},
            "parity_error": manifest.provenance.parity_error,
            "reference": manifest.provenance.reference,
            "arena_bytes": manifest.resources.arena_bytes,
            "params_bytes": manifest.resources.params_bytes,
            "thread_bytes": manifest.resources.thread_bytes,
            "signed": package.signature is not None,
            "tuning": None if manifest.provenance.tuning is None else asdict(manifest.provenance.tuning),
            "buckets": None if manifest.buckets is None else asdict(manifest.buckets),
            "no_design_space": [
                {**asdict(kernel), "nodes": package.nodes_of(kernel.name)} for kernel in package.uncovered
            ],
            "fallbacks": list(package.fallbacks),
            "integers": None
            if package.integers is None
            else {"share": package.integers.share, **asdict(package.integers)},
            "proposal": None if proposal is None else proposal.document(),
            "quantisation": None if quantisation is None else quantisation.document(),
        }
        say_json(document)
        return
    say(f"{output}: {manifest.name} {manifest.version} for {manifest.target.triple} {manifest.target.cpu}")
    say(
        f"  {size / 1e6:.1f} MB, including {len(package.members['mod.params']) / 1e6:.1f} MB of weights; "
        f"needs {manifest.resources.needed_bytes(1) / 1e6:.1f} MB of memory to run"
    )
    say(f"  agrees to {manifest.provenance.parity_error:.1e} with {manifest.provenance.reference}")
    for line in _bucket_lines(manifest.buckets):
        say(f"  {line}")
    if quantisation is not None:
        say(*quantisation.lines())
    if package.integers is not None:
        say(f"  {package.integers.summary(_NAMED)}")
    if tuning := manifest.provenance.tuning:
        say(
            f"  tuned on {tuning.board}: {tuning.tuned_ms:.3f} ms instead of {tuning.untuned_ms:.3f} ms, "
            f"{tuning.speedup:.2f}x as fast ({tuning.low:.2f} to {tuning.high:.2f})"
        )
    if package.uncovered:
        say(f"  {_uncovered(package)}")
    if package.fallbacks:
        faults = "1 fault" if len(package.fallbacks) == 1 else f"{len(package.fallbacks)} faults"
        say(f"  {faults} of the compiler cost speed, not accuracy: {'; '.join(package.fallbacks[:_NAMED])}")
    if proposal is not None:
        say(f"  {proposal} (`edgebundle repack {output}` adds them without compiling)")
    if package.signature is None:
        say("  not signed: devices will refuse it; use `edgebundle sign`, or compile with --sign-key")


def _uncovered(package: Package) -> str:
    """Return a line such as `1 kernel has no design space (4.1 % of the work): mean (ReduceMean /norm)`."""
    kernels = package.uncovered
    share = 100 * sum(kernel.share for kernel in kernels)
    names = ", ".join(_named(package, kernel.name) for kernel in kernels[:_NAMED])
    more = f" and {len(kernels) - _NAMED} more" if len(kernels) > _NAMED else ""
    have = "1 kernel has" if len(kernels) == 1 else f"{len(kernels)} kernels have"
    return f"{have} no design space ({share:.1f} % of the work): {names}{more}"


def _named(package: Package, kernel: str) -> str:
    """Return a kernel's name with the first of the model's nodes that it computes."""
    nodes = package.nodes_of(kernel)
    more = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
    return f"{kernel[:40]} ({nodes[0][:60]}{more})" if nodes else kernel[:40]


def _bucket_lines(buckets: Buckets | None) -> list[str]:
    """Return what the summary says: each dimension, its sizes, and how its inputs are padded."""
    if buckets is None:
        return []
    lines = []
    for dimension in buckets.dimensions:
        pads = ", ".join(
            f"{axis.tensor} {'repeats its edge' if axis.pad == 'edge' else f'with {axis.value:g}'}"
            for axis in buckets.inputs
            if axis.dimension == dimension.name
        )
        every = list(dimension.sizes) == list(range(dimension.low, dimension.high + 1))
        padded = "no padding" if every else f"padded: {pads}"
        sizes = ", ".join(map(str, dimension.sizes))
        lines.append(f"{dimension}: compiled for {sizes} ({padded})")
    return lines
