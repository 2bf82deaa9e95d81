"""Show what a declared preprocessing makes of a picture: the model's input, turned back into a picture.

Promises what the model gets, not what was sent: size, crop, padding and, for floating-point inputs, rounding
to grey levels. Colours are those that the picture has if the declared order of channels is right.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from agent.bundle.processing import Preprocess
from agent.bundle.quantisation import Quantised
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import EdgeError
from agent.runtime.preprocess import Preprocessor
from agent.runtime.quantisation import to_real
from builder.errors import ModelError
from builder.running.inputs import Picture, read_inputs


def show_input(
    declared: Preprocess | None,
    inputs: Sequence[TensorSpec],
    picture: str | Path,
    output: str | Path,
    quantised: Quantised | None = None,
) -> None:
    """Write what a model gets of a picture, as a picture.

    Parameters
    ----------
    declared
        The preprocess; None, which is an error, if the model has none.
    inputs
        The model's inputs.
    picture
        A JPEG or PNG file.
    output
        The file to write; its suffix decides the format.
    quantised
        How the input is quantised, or None.

    Raises
    ------
    ModelError
        If there is no preprocess, the picture cannot be read or does not suit it, or the output cannot be
        written.
    """
    value = prepared(declared, inputs, picture, quantised)
    assert declared is not None
    try:
        Image.fromarray(as_pixels(declared, to_real(value, quantised))).save(output)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{output}: cannot be written ({error})", hint="for example input.png") from error


def prepared(
    declared: Preprocess | None,
    inputs: Sequence[TensorSpec],
    picture: str | os.PathLike[str],
    quantised: Quantised | None = None,
) -> npt.NDArray[Any]:
    """Return the input that a picture becomes; parameters and errors are those of `show_input`."""
    if declared is None:
        raise ModelError(
            "expected a model that declares how a picture becomes its input", hint="add --preprocess"
        )
    given = read_inputs(picture, inputs)
    if not isinstance(given, Picture):
        raise ModelError(
            f"{picture}: expected a JPEG or PNG picture", hint="give --picture a JPEG or PNG file"
        )
    spec = next(spec for spec in inputs if spec.name == declared.input)
    value = np.empty(spec.shape, spec.dtype)
    try:
        prepare = Preprocessor(declared, spec, quantised=quantised)
        prepare(prepare.decode(given.content, given.content_type), value)
    except EdgeError as error:
        raise ModelError(
            f"{picture}: {error}", hint=error.hint or "give --picture another JPEG or PNG file"
        ) from error
    return value


def as_pixels(declared: Preprocess, value: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Return the pixels that an input was made of: uint8, shape (height, width) or (height, width, 3)."""
    planes = value[0].astype(np.float64)
    if declared.layout == "NCHW":
        planes = planes.transpose(1, 2, 0)
    pixels = (planes * np.array(declared.std) + np.array(declared.mean)) / declared.scale
    if declared.invert:
        pixels = 255 - pixels
    if declared.colour == "BGR":
        pixels = pixels[:, :, ::-1]
    rounded: npt.NDArray[np.uint8] = np.rint(pixels).clip(0, 255).astype(np.uint8)
    return rounded[:, :, 0] if declared.colour == "GRAY" else rounded
