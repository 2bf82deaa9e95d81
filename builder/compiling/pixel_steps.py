"""What a declared preprocess makes of a picture's pixels, in the numbers that the model's input holds.

Promises a preprocess whose numbers the input can tell apart, or an error that says which it holds; and the
preset that makes the numbers of an input. Leaves the arithmetic to the device's own code (`agent.runtime`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from agent.bundle.processing import Preprocess
from agent.bundle.quantisation import Quantised, by_name
from agent.bundle.tensor_spec import TensorSpec
from agent.runtime.preprocess import channel_values
from agent.runtime.quantisation import to_input
from builder.compiling.input_presets import PICTURES
from builder.errors import ModelError
from builder.importer.edge_scales import EdgeScales

# Of the 256 grey levels of a picture; a preprocess that leaves fewer was made for another input.
_FEWEST_LEVELS: Final = 16
# More levels than this at the ends of the input's range are cut off, not only rounded.
_MOST_CUT_OFF: Final = 0.25
_BYTES: Final = ("UINT8", "INT8")
# Of a quantised input: ends this near are those of a picture's bytes, whatever a preset's last decimal.
_SAME_STEPS: Final = 2
_PLAIN: Final = Preprocess("", "RGB", None, "stretch", "bilinear", None, 1.0, (0.0,), (1.0,), "NCHW")


def on_scale(declared: Preprocess, spec: TensorSpec, scales: EdgeScales, text: str) -> Preprocess:
    """Return a preprocess for an input, in real numbers if the input is quantised.

    A preprocess that changes no pixel (`raw`) means the pixels' bytes for an input of bytes, whatever its
    scale: in a signed one, a pixel of 0 is -128.

    `text`: what the user wrote, for messages.
    Raises `ModelError` if the input has no scale for the whole tensor, or holds hardly any of the numbers.
    """
    if spec.name in scales.obstacles:
        raise ModelError(
            f"preprocess {text[:80]}: expected one scale for input {spec.name!r:.80}, "
            f"got {scales.obstacles[spec.name]}",
            hint="leave out --preprocess, and send tensors of integers",
        )
    quantised = by_name(scales.quantisation.inputs).get(spec.name)
    if spec.datatype in _BYTES and _changes_nothing(declared):
        first = float(np.iinfo(spec.dtype).min)
        if quantised is None:
            return declared if first == 0 else replace(declared, mean=(-first,))
        return replace(declared, mean=(quantised.zero - first,), std=(1 / quantised.scale,))
    if "INT" in spec.datatype:
        _check_levels(declared, spec, quantised, text)
    return declared


def cut_off_note(declared: Preprocess, spec: TensorSpec, quantised: Quantised | None) -> str | None:
    """Return a line if much of what a preprocess makes is out of a quantised input's range, else None."""
    if quantised is None:
        return None
    limits = np.iinfo(spec.dtype)
    steps = np.concatenate(
        [np.rint(real / quantised.scale) + quantised.zero for real in channel_values(declared)]
    )
    share = float(((steps < limits.min) | (steps > limits.max)).mean())
    if share <= _MOST_CUT_OFF:
        return None
    return (
        f"{share:.0%} of a picture's levels are out of the range of input {spec.name}: "
        f"{_ranges(declared, spec, quantised)}; the model was rather trained with another preprocess"
    )


def preset_for(spec: TensorSpec, quantised: Quantised | None, usual: str) -> str:
    """Return the preset whose numbers are nearest to those that an input of bytes holds; else the usual one.

    It is `raw` where that gives the same numbers: the scale is then made for the bytes of a picture.
    """
    if spec.datatype not in _BYTES:
        return usual
    if quantised is None:
        return "raw"
    low, high = _held(spec, quantised)

    def apart(name: str) -> float:
        """How far the ends of what a preset makes are from those of what the input holds."""
        least, greatest = _ends(_arithmetic(name))
        return max(abs(least - low), abs(greatest - high)) / (greatest - least)

    nearest = min(filter(None, (usual, "symmetric", "unit", "raw", "imagenet")), key=apart)
    declared = _arithmetic(nearest)
    least, greatest = _ends(declared)
    is_same = apart(nearest) * (greatest - least) <= _SAME_STEPS * quantised.scale
    return "raw" if is_same and len(declared.mean) == 1 else nearest


def _arithmetic(name: str) -> Preprocess:
    """Return what a preset makes of pixels, without the rest of it."""
    fields = PICTURES[name.partition(",")[0]]
    mean, std = (
        tuple(fields.get(key, default)) for key, default in (("mean", _PLAIN.mean), ("std", _PLAIN.std))
    )
    return replace(_PLAIN, scale=fields.get("scale", 1.0), mean=mean, std=std)


def _ends(declared: Preprocess) -> tuple[float, float]:
    """Return the least and the greatest number that a preprocess makes of a pixel."""
    made = np.concatenate(channel_values(declared))
    return float(made.min()), float(made.max())


def _held(spec: TensorSpec, quantised: Quantised) -> tuple[float, float]:
    """Return the least and the greatest real number that a quantised tensor holds."""
    limits = np.iinfo(spec.dtype)
    low, high = (float(each - quantised.zero) * quantised.scale for each in (limits.min, limits.max))
    return low, high


def _changes_nothing(declared: Preprocess) -> bool:
    plain = declared.scale == 1 and set(declared.mean) == {0.0} and set(declared.std) == {1.0}
    return plain and not declared.invert


def _check_levels(declared: Preprocess, spec: TensorSpec, quantised: Quantised | None, text: str) -> None:
    levels = min(len(np.unique(to_input(real, spec.dtype, quantised))) for real in channel_values(declared))
    if levels < _FEWEST_LEVELS:
        raise ModelError(
            f"preprocess {text[:80]}: expected most of a picture's 256 levels to differ in {spec}, "
            f"got {levels} different: {_ranges(declared, spec, quantised)}",
            hint="--preprocess raw gives the model the bytes of the picture",
        )


def _ranges(declared: Preprocess, spec: TensorSpec, quantised: Quantised | None) -> str:
    least, greatest = _ends(declared)
    low, high = _held(spec, quantised or Quantised(spec.name, 1.0, 0))
    what = "whole numbers from " if quantised is None else ""
    return (
        f"the preprocess makes {least:.3g} to {greatest:.3g}, the input holds {what}{low:.3g} to {high:.3g}"
    )
