"""One set of inputs, and what a model's own framework makes of them.

The framework computes it while the model is imported; `builder.compiling.framework_parity` compares with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class FrameworkSample:
    """One set of inputs, and what the framework makes of them.

    Attributes
    ----------
    framework
        The framework's name and version, such as "PyTorch 2.14.1".
    inputs
        Input name -> array, of the shape and datatype that the imported model has.
    outputs
        Arrays, in the order of the model's outputs.
    steps
        What quantising nodes made, in the program's order.
    rounding
        How far, relative to the largest number, the framework's rounding may take an output: it computes a
        model in half precision as such, and the importer in float32. 0 for other models.
    """

    framework: str
    inputs: Mapping[str, NDArray[Any]]
    outputs: tuple[NDArray[Any], ...]
    steps: tuple[NDArray[Any], ...] = ()
    rounding: float = 0.0
