"""Flags and argument types that several verbs share. A value that a type rejects is a usage error."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Final

from builder.cli import Parser

if TYPE_CHECKING:
    from collections.abc import Callable

    from builder.importer import ImportedModel

TARGETS: Final = "host, rpi3, rpi4, rpi5, rpi-armv7, x86-64-v3, riscv64"
_LONGEST_MS: Final = 3_600_000  # one hour: nothing that is measured here takes longer


def add_model(parser: Parser) -> None:
    """Add the model, its target, and the shapes and values of its inputs."""
    parser.add_argument(
        "model",
        metavar="FILE",
        help="a model: ONNX (.onnx), PyTorch (.pt2), XGBoost (.json, .ubj) or LightGBM (.txt)",
    )
    parser.add_argument(
        "--target",
        default="host",
        help=f'device to compile for: {TARGETS}; or "llvm -mcpu=NAME", or a TVM target as JSON '
        "(default: %(default)s, this machine)",
    )
    parser.add_argument(
        "--input-shapes",
        metavar='"NAME:[1,3,224,224] ..."',
        help="shapes of inputs that have symbolic dimensions",
    )
    parser.add_argument(
        "--input-values", metavar='"NAME=VALUE ..."', help="inputs to turn into constants, such as sr=16000"
    )


def load_model(args: argparse.Namespace, progress: Callable[[str], None] | None = None) -> ImportedModel:
    """Import the model that the flags of `add_model` describe."""
    from builder.importer import load, parse_input_shapes, parse_input_values

    return load(
        args.model,
        input_shapes=parse_input_shapes(args.input_shapes) if args.input_shapes else None,
        input_values=parse_input_values(args.input_values) if args.input_values else None,
        progress=progress,
    )


def add_json(parser: Parser) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")


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
    value = _real(text)
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, got {text[:40]!r}")
    return value


def milliseconds(text: str) -> float:
    """Read a number of milliseconds from 0 to one hour."""
    value = _real(text)
    if not 0 <= value <= _LONGEST_MS:
        raise argparse.ArgumentTypeError(f"expected milliseconds from 0 to {_LONGEST_MS}, got {text[:40]!r}")
    return value


def tolerance(text: str) -> float:
    """Read a relative error of 0 or more."""
    value = _real(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of 0 or more, got {text[:40]!r}")
    return value


def _integer(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _real(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
