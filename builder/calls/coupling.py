"""Probabilities of classes from those of pairs (pairwise coupling), as one call in a Relax module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tvm import relax
from tvm.ir import Call

from builder.calls.packed import packed_name

_NAME: Final = "edge.pairwise_coupling"


@dataclass(frozen=True, slots=True)
class CouplingCall:
    """Probabilities of classes from those of pairs, in a module.

    Attributes
    ----------
    pairs
        `[samples, classes, classes]`, float32: the probability of the first class of each pair; the diagonal
        is not read.
    """

    pairs: relax.Expr

    @classmethod
    def of(cls, call: Call) -> CouplingCall | None:
        """Return the coupling that a call stands for, None if it is any other call."""
        return cls(call.args[1].fields[0]) if packed_name(call) == _NAME else None

    def emit(self, bb: relax.BlockBuilder) -> relax.Expr:
        """Emit the call; it returns probabilities, `[samples, classes]`."""
        samples, classes, _ = (int(dim) for dim in self.pairs.ty.shape)
        result = relax.TensorType((samples, classes), "float32")
        return bb.emit(relax.call_dps_packed(_NAME, relax.Tuple([self.pairs]), result))
