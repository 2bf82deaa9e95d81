"""The scales of a model's quantised inputs and outputs, as a manifest declares them.

Promises scales and zero points within range, for tensors of integers. Leaves the arithmetic to
`agent.runtime.quantisation`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from agent.bundle.tensor_spec import TensorSpec
from agent.bundle.values import within


@dataclass(frozen=True, slots=True)
class Quantised:
    """How the integers of a tensor stand for real numbers: `(integer - zero) * scale`.

    Attributes
    ----------
    name
        The tensor's name.
    scale
        Above 0.
    zero
        The integer that stands for 0.
    """

    name: str
    scale: float
    zero: int

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"quantisation: expected a finite scale above 0, got {self.scale}")
        within("quantisation: zero", self.zero, -(1 << 31), (1 << 31) - 1)


@dataclass(frozen=True, slots=True)
class Quantisation:
    """The quantised inputs and outputs of a model."""

    inputs: tuple[Quantised, ...] = ()
    outputs: tuple[Quantised, ...] = ()

    def check(self, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
        """Check that each is a tensor of integers, named once.

        Raises
        ------
        ValueError
            If one is not.
        """
        for kind, each, specs in (("input", self.inputs, inputs), ("output", self.outputs, outputs)):
            datatypes = {spec.name: spec.datatype for spec in specs}
            for quantised in each:
                datatype = datatypes.get(quantised.name, "no such tensor")
                if "INT" not in datatype:
                    raise ValueError(
                        f"quantisation: expected an {kind} of integers as {quantised.name!r:.80}, "
                        f"got {datatype}"
                    )
            if len({quantised.name for quantised in each}) != len(each):
                raise ValueError(f"quantisation: an {kind} is named twice")


NO_QUANTISATION: Final = Quantisation()


def by_name(quantised: Sequence[Quantised]) -> Mapping[str, Quantised]:
    """Return quantised tensors by their names."""
    return {each.name: each for each in quantised}
