"""Where an image lies in a model's input. Apart from the preprocessing, which loads image readers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Placement:
    """A sent image in the model's input: `input = sent * scale + offset`, in pixels.

    Attributes
    ----------
    width, height
        Of the image as sent, upright.
    scale_x, scale_y, offset_x, offset_y
        Of the formula above.
    input_width, input_height
        Of the model's input.
    """

    width: int
    height: int
    scale_x: float
    scale_y: float
    offset_x: float
    offset_y: float
    input_width: int
    input_height: int
