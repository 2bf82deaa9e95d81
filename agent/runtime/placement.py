"""Where an image is in a model's input.

A module without imports: `preprocess` loads image readers, which postprocessing does not need.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a sent image is in the model's input: `input = sent * scale + offset`, in pixels.

    Attributes
    ----------
    width, height
        Size of the image as sent, upright, in pixels.
    scale_x, scale_y, offset_x, offset_y
        The terms of the formula above.
    input_width, input_height
        Size of the model's input in pixels.
    """

    width: int
    height: int
    scale_x: float
    scale_y: float
    offset_x: float
    offset_y: float
    input_width: int
    input_height: int
