"""Flags and argument types that several verbs share. A value that a type rejects is a usage error."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from builder.cli.flags import argument, flag, flat
from builder.compiling.options import Options
from builder.target.presets import PRESETS

if TYPE_CHECKING:
    from collections.abc import Callable

    from _typeshed import DataclassInstance

    from builder.importer import ImportedModel

TARGETS: Final = ", ".join(PRESETS)
_LONGEST_MS: Final = 3_600_000  # one hour: nothing that is measured here takes longer


def integer(text: str) -> int:
    """Read an integer."""
    number = _integer(text)
    if number is None:
        raise argparse.ArgumentTypeError(f"expected an integer, got {text[:40]!r}")
    return number


def positive(text: str) -> int:
    """Read an integer of 1 or more."""
    number = _integer(text)
    if number is None or number < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of 1 or more, got {text[:40]!r}")
    return number


def not_negative(text: str) -> int:
    """Read an integer of 0 or more."""
    number = _integer(text)
    if number is None or number < 0:
        raise argparse.ArgumentTypeError(f"expected an integer of 0 or more, got {text[:40]!r}")
    return number


def seconds(text: str) -> float:
    """Read a positive number of seconds."""
    value = real(text)
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, got {text[:40]!r}")
    return value


def milliseconds(text: str) -> float:
    """Read a number of milliseconds from 0 to one hour."""
    value = real(text)
    if not 0 <= value <= _LONGEST_MS:
        raise argparse.ArgumentTypeError(f"expected milliseconds from 0 to {_LONGEST_MS}, got {text[:40]!r}")
    return value


def tolerance(text: str) -> float:
    """Read a relative error of 0 or more."""
    value = real(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of 0 or more, got {text[:40]!r}")
    return value


def _integer(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def real(text: str) -> float:
    """Return a number, or NaN, which is in no range, for any other text."""
    try:
        return float(text)
    except ValueError:
        return math.nan


@dataclass(frozen=True, slots=True)
class ModelFlags:
    """The model, and the shapes and values of its inputs."""

    model: str = argument(
        metavar="FILE",
        help="a model: ONNX (.onnx), TensorFlow Lite (.tflite), PyTorch (.pt2), Keras (.keras, .h5), the "
        "folder of a SavedModel, XGBoost (.json, .ubj) or LightGBM (.txt)",
    )
    input_shapes: str | None = flag(
        metavar='"NAME:[1,3,224,224] ..."',
        help="shapes of inputs that have symbolic dimensions; `compile` also takes bounds: ids:[1,1..512]",
    )
    input_values: str | None = flag(
        metavar='"NAME=VALUE ..."', help="inputs to turn into constants, such as sr=16000"
    )
    max_iterations: int | None = flag(
        type=positive,
        metavar="N",
        help="the largest number of steps of a loop whose number of steps is only known at run time; floats "
        "that need more steps become NaN",
    )
    python: str | None = flag(
        metavar="PATH",
        help="a Python that has PyTorch or Keras, for their models (default: $EDGEBUNDLE_PYTHON, or the "
        "first that has it: this Python, the active virtual environment's, or python3 of the PATH)",
    )
    trusted: bool = flag(
        "--trust-model",
        action="store_true",
        help="let PyTorch or Keras use all of your files and the network for this model; without it they see "
        "their own installation and a copy of the model only",
    )


@dataclass(frozen=True, slots=True)
class TargetFlags(ModelFlags):
    """The model, and the device that it is for."""

    target: str = flag(
        completer=lambda **_: list(PRESETS),
        default="host",
        help=f'device to compile for: {TARGETS}; or "llvm -mcpu=NAME", or a TVM target as JSON '
        "(default: %(default)s, this machine)",
    )


@dataclass(frozen=True, slots=True)
class DeclarationFlags:
    """What a device does before and after the model."""

    preprocess: str | None = flag(
        metavar="PRESET|TOML",
        help="how to turn a picture or a recording into the input: a preset for pictures (such as imagenet, "
        "yolox, yolov8, nanodet) or for recordings (silero, kws, samples, whisper, librosa, torchaudio), "
        "with or without options (yolox,pad=0), or a TOML file",
    )
    postprocess: str | None = flag(
        metavar="STEPS|TOML",
        help="how to turn the outputs into an answer: softmax,top5, or a preset (such as yolox, yolov8, "
        "yolov8-seg, yolov8-pose, nanodet, ssd, yunet, detr, segmentation, embedding, ctc, speech, "
        "keywords), with options (yolox,score_threshold=0.5) or without, or a TOML file",
    )
    labels: str | None = flag(
        metavar="FILE",
        help="class names, a line each, or `coco`; FILE,first=1 begins at class 1 (default: the model's own)",
    )
    columns: str | None = flag(
        metavar="NAMES|CSV",
        help="the columns of a table that the model takes, in the order of its features: a,b,c, or a CSV "
        "file whose first line has them (default: the model's own names)",
    )


def options_of(flags: DataclassInstance) -> Options:
    """Return the options of a compilation that a verb's flags give; the others keep their defaults."""
    given = flat(flags)
    names = [each.name for each in fields(Options) if given.get(each.name) is not None]
    return Options(**{name: given[name] for name in names})


def load_model(path: str, options: Options, progress: Callable[[str], None] | None = None) -> ImportedModel:
    """Import a model."""
    from builder.importer import native

    native.start()  # it is ready when the compiler has been loaded, which takes longer
    from builder.importer import load

    return load(path, **options.fixed_inputs(path), **options.import_options(), progress=progress)


def json_flag() -> Any:  # noqa: ANN401 - a field of any type
    """Declare `--json`."""
    return flag("--json", action="store_true", help="print JSON, for scripts")


def sign_key_flag(about: str, *, required: bool = False, group: str = "") -> Any:  # noqa: ANN401 - as above
    """Declare `--sign-key`; `--key` is that of a certificate, everywhere."""
    return flag("--sign-key", group=group, metavar="KEY", required=required, help=about)
