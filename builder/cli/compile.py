"""The verb `compile`: turn a model into a bundle."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from agent.terminal import say, say_json
from builder.cli import SubParsers
from builder.cli.arguments import (
    add_declarations,
    add_json,
    add_model,
    add_sign_key,
    integer,
    load_model,
    tolerance,
)
from builder.cli.bounded import add_bounds, bucket_lines, check_bounds, compile_bounded, load_with_states
from builder.cli.early_checks import (
    check_folder_of,
    check_inputs,
    check_model,
    check_records,
    read_tensors,
    sound_note,
)
from builder.cli.progress import show_steps
from builder.cli.quantize import HALVES, PRECISIONS, add_quantising, check_flags, quantise
from builder.compiling import tolerances

if TYPE_CHECKING:
    from agent.bundle.state import State
    from builder.bundles.package import Package
    from builder.compiling.audio_presets import AudioPreset
    from builder.compiling.outline import Outline
    from builder.compiling.recognition import Proposal
    from builder.quantising.halves import HalvesReport
    from builder.quantising.report import QuantisationReport
    from builder.quantising.weights_only import WeightsReport

    Quantisation = QuantisationReport | WeightsReport | HalvesReport

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


def add_parsers(subparsers: SubParsers) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "compile",
        help="compile a model for a device and write a bundle",
        description="Compile a model for a device, compare it with ONNX Runtime, and write a bundle.",
        epilog=EXAMPLES,
    )
    add_model(parser)
    parser.add_argument(
        "-o",
        "--output",
        metavar="OUT",
        help="the bundle to write (default: MODEL.bundle in this folder, for a file MODEL.onnx)",
    )
    parser.add_argument(
        "--tuning-records",
        metavar="FOLDER",
        help="records that `edgebundle tune -o FOLDER` measured for this target",
    )
    parser.add_argument("-O", "--opt-level", type=int, choices=range(4), default=3, help=argparse.SUPPRESS)
    parser.add_argument(
        "--precision",
        choices=(*PRECISIONS, HALVES),
        help="quantise the model first, as `edgebundle quantize` does (default: compile the model as it is); "
        "int8 needs --calibration, the weights-only ones do not; fp16 computes in float16, where the "
        "target can, as rpi5 does",
    )
    add_quantising(parser)
    add_bounds(parser)
    manifest = parser.add_argument_group("manifest")
    manifest.add_argument("--name", help="the model's name on devices (default: from the file's name)")
    manifest.add_argument(
        "--model-version",
        default="1.0.0",
        metavar="SEMVER",
        help="the model's version (default: %(default)s)",
    )
    manifest.add_argument(
        "--security-counter",
        type=integer,
        metavar="N",
        help="a device refuses a lower counter than the last one it accepted for this name (default: the "
        "time of the build in seconds since 1970, or SOURCE_DATE_EPOCH)",
    )
    manifest.add_argument(
        "--counter-ahead-of-time",
        action="store_true",
        help="allow a counter that is more than two days ahead of the time: devices never go back below it",
    )
    manifest.add_argument(
        "--compatible",
        action="append",
        metavar="TYPE",
        help="a device type that may run the bundle, as in the device tree, such as raspberrypi,4-model-b; "
        "repeatable (default: any Linux on this CPU architecture)",
    )
    add_declarations(manifest)
    manifest.add_argument(
        "--state",
        action="append",
        metavar='"IN:OUT ..."',
        help="outputs that are inputs of the next run, such as h:hn c:cn; devices keep them for each session "
        "of a client (h:hn=0.5 sets the initial value; default: 0)",
    )
    manifest.add_argument("--picture", metavar="FILE", help="a JPEG or PNG picture for --show-input")
    manifest.add_argument(
        "--show-input",
        metavar="OUT.png",
        help="write what --preprocess makes of --picture, before anything is compiled",
    )
    parser.add_argument(
        "--report",
        metavar="JSON|HTML",
        help="write what became of each node of the model: the kernels that compute it, or why none does",
    )
    trust = parser.add_argument_group("trust")
    add_sign_key(trust, "private key to sign with; devices accept only signed bundles")
    trust.add_argument(
        "--tolerance",
        type=tolerance,
        metavar="X",
        help="largest relative error that is allowed against ONNX Runtime "
        f"(default: {tolerances.PARITY:g}, or more if the model amplifies rounding)",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="do not show progress")
    add_json(parser)
    parser.set_defaults(handler=_compile)


def _compile(args: argparse.Namespace) -> int:
    from builder.bundles.key_files import read_private
    from builder.compiling.identity import Identity

    # Loading the compiler takes seconds, and compiling minutes.
    identity = Identity(
        args.name, args.model_version, args.security_counter, args.compatible, args.counter_ahead_of_time
    )
    identity.check()
    check_model(args)
    check_inputs(args)
    check_records(args.tuning_records)
    key = read_private(args.sign_key) if args.sign_key else None
    check_flags(args)
    is_bounded = check_bounds(args)
    output = _output(args)
    if args.report:
        _check_report(args.report)
    with show_steps(quiet=args.quiet or args.json) as progress:
        proposal, labels, notes = _check_declarations(args, is_bounded=is_bounded)
        for note in notes:
            progress(note)
        if labels is not None:
            progress(f"labels: the {len(labels)} names in the model file")
        progress("loading the compiler")
        from agent.bundle.output_length import answered
        from builder.compiling.audio_presets import is_audio
        from builder.compiling.compilation import compile
        from builder.compiling.first_look import confirmed
        from builder.compiling.recognition import recognise
        from builder.target.device_target import resolve

        target = resolve(args.target)
        if args.precision == HALVES:
            from builder.target.half_arithmetic import require_half_arithmetic

            require_half_arithmetic(target)
        progress(f"importing {args.model}")
        model, states = None, tuple(args.state or ())
        if is_bounded and args.state:
            model, states = load_with_states(args, progress)
        elif not is_bounded:
            model = load_model(args, progress)
        quantisation: Quantisation | None = None
        if model is not None and args.precision == HALVES:
            from builder.quantising.halves import to_halves

            halves = to_halves(
                model, target, calibration=args.calibration, preprocess=args.preprocess, progress=progress
            )
            model, quantisation = halves.model, halves.report
        elif model is not None and args.precision is not None:
            quantised = quantise(args, model, target, progress)
            model, quantisation = quantised.imported(progress), quantised.report
        declares = args.postprocess or args.state or is_audio(args.preprocess or "")
        if model is not None and proposal is None and not declares:  # the file does not give its shapes
            proposal = recognise(model.inputs, answered(model.outputs, model.lengths))
        if model is None:
            package, quantisation = compile_bounded(args, target, identity, labels, progress)
        else:
            package = compile(
                model,
                target,
                identity=identity,
                preprocess=args.preprocess,
                postprocess=args.postprocess,
                labels=args.labels or labels,
                states=states,
                columns=args.columns,
                tolerance=args.tolerance,
                tuning_records=args.tuning_records,
                progress=progress,
            )
        if proposal is not None:
            proposal = confirmed(proposal, package)
        if key is not None:
            progress("signing")
            package = package.sign(key)
        package.save(output)
    if args.report:
        from builder.bundles.node_report import write_report

        write_report(package, args.report)
    _report(package, output, proposal, quantisation, as_json=args.json)
    return 0


def _check_declarations(
    args: argparse.Namespace, *, is_bounded: bool
) -> tuple[Proposal | None, Sequence[str] | None, Sequence[str]]:
    """Refuse what cannot work before the compiler is loaded, and show what the model gets of a picture.

    Returns
    -------
    Proposal or None
        The presets that fit the outputs, if the user declares no postprocess, or one that surely fits less.
    sequence or None
        The labels in the model file, if the user gives none and the postprocess has a use for them.
    sequence
        Lines about states and labels that the user may want to declare.
    """
    from builder.compiling import audio_presets, declarations
    from builder.compiling.columns import declare_columns, read_names
    from builder.errors import ModelError

    if (args.show_input is None) != (args.picture is None):
        raise ModelError(
            "expected both --show-input and --picture, or neither",
            hint="give --picture IN.jpg --show-input OUT.png",
        )
    declarations.check_names(args.preprocess, args.postprocess)

    from builder.compiling.labels import read_labels, read_named_labels, usable_labels

    preset = audio_presets.preset_of(args.preprocess)
    if args.labels:
        read_labels(args.labels)
        if postprocess := args.postprocess or (preset.postprocess if preset is not None else None):
            declarations.check_labels_are_used(args.labels, postprocess)
    names = read_names(args.columns) if args.columns else None
    # From here on, the model's file is read.
    from agent.bundle.quantisation import by_name
    from agent.bundle.state import requested
    from builder.compiling.name_recognition import label_hint, recognise_states
    from builder.compiling.outline import read_outline
    from builder.compiling.recognition import check_hints, contradicts, hint_note, recognise
    from builder.compiling.states import states as declare_states
    from builder.running.shown_input import show_input

    if preset is not None and args.show_input:
        raise ModelError(
            "--show-input: expected a preprocess for pictures, got one for recordings",
            hint="leave out --show-input and --picture: nothing of a recording can be shown",
        )
    outline = read_outline(args.model) if is_bounded else read_tensors(args)
    if preset is not None:
        if outline is not None and not is_bounded:
            _check_sound(args, preset, outline)
        return None, None, ()
    proposal = None
    if outline is not None:
        proposal = recognise(outline.inputs, outline.outputs, outline.hints)
    if args.labels and not args.postprocess:
        raise ModelError(
            "--labels: expected a --postprocess that names classes, got none",
            hint=str(proposal) if proposal else "for example --postprocess softmax,top5",
        )
    if outline is None:
        if args.show_input is not None:
            raise ModelError(
                f"--show-input: expected an ONNX model whose shapes are fixed, got {args.model}",
                hint="compile it, then: edgebundle run BUNDLE --inputs PICTURE --show-input OUT.png",
            )
        return None, None, [note for note in (sound_note(args),) if note]
    kept: Sequence[State] = ()
    if args.state and not is_bounded:
        kept = declare_states(args.state, outline.inputs, outline.outputs) or ()
    inputs = requested(outline.inputs, [state.input for state in kept])
    outputs = requested(outline.outputs, [state.output for state in kept])
    before = declarations.preprocess(args.preprocess, inputs, outline.scales) if args.preprocess else None
    if names is not None:
        declare_columns(names, inputs)
    if args.show_input is not None:
        quantised = by_name(outline.scales.quantisation.inputs)
        show_input(
            before, inputs, args.picture, args.show_input, quantised.get(before.input) if before else None
        )
    after = None
    if args.postprocess:
        after = declarations.postprocess(args.postprocess, outputs, inputs, outline.scales)
    is_explicit = "normalised" in (args.postprocess or "") or (args.postprocess or "").endswith(".toml")
    check_hints(outline.hints, after, is_explicit=is_explicit)
    counts = outline.class_counts
    labels = None if args.labels else usable_labels(outline.labels, outputs, after, counts)
    read_named_labels(args.labels or labels, outputs, after, counts)
    if proposal is not None and after is not None:
        is_preset = not args.postprocess.endswith(".toml")
        if not (is_preset and contradicts(proposal, after, inputs, outputs)):
            proposal = None
    notes = [sound_note(args), hint_note(outline.hints, after)]
    if labels is None and not args.labels:
        notes.append(label_hint(after, inputs, outputs))
    states = None if args.state else recognise_states(outline.inputs, outline.outputs)
    if states is not None:
        notes.append(f'some outputs may be inputs of the next run: --state "{states}"')
    return proposal, labels, [note for note in notes if note]


def _check_sound(args: argparse.Namespace, preset: AudioPreset, outline: Outline) -> None:
    """Refuse what does not fit a model that takes recordings, before the compiler is loaded."""
    from agent.bundle.state import requested
    from builder.compiling import audio_presets, declarations
    from builder.compiling.labels import read_named_labels, usable_labels
    from builder.compiling.states import states as declare_states

    kept = declare_states([*preset.states, *(args.state or ())], outline.inputs, outline.outputs) or ()
    inputs = requested(outline.inputs, [state.input for state in kept])
    outputs = requested(outline.outputs, [state.output for state in kept])
    audio_presets.audio(args.preprocess, inputs)
    postprocess = args.postprocess or preset.postprocess
    after = declarations.postprocess(postprocess, outputs, inputs) if postprocess else None
    own = audio_presets.labels_for(preset, outputs) or usable_labels(outline.labels, outputs, after)
    if after is not None or args.labels:
        read_named_labels(args.labels or own, outputs, after)


def _output(args: argparse.Namespace) -> str:
    from pathlib import Path

    output = args.output or f"{Path(args.model).stem}.bundle"
    check_folder_of(output)
    return str(output)


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


def _report(
    package: Package,
    output: str,
    proposal: Proposal | None,
    quantisation: Quantisation | None,
    *,
    as_json: bool,
) -> None:
    manifest = package.manifest
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
            "proposal": None if proposal is None else asdict(proposal),
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
    for line in bucket_lines(manifest.buckets):
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
