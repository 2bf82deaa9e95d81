"""Non-maximum suppression with a fixed number of places, as one call in a Relax module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tvm import relax
from tvm.ir import Call

from builder.calls.packed import packed_name

_NAME: Final = "edge.non_max_suppression"


@dataclass(frozen=True, slots=True)
class SuppressionCall:
    """A non-maximum suppression in a module.

    Attributes
    ----------
    inputs
        Boxes `[batch, n, 4]` and scores `[batch, classes, n]`, float32; the largest number of boxes of a
        class, int64 `[1]`; the largest overlap and the lowest score, float32 `[1]`; how many boxes are real,
        int64 `[1]`.
    capacity
        Places for chosen boxes.
    centred
        Whether boxes are centres with sizes.
    """

    inputs: tuple[relax.Expr, ...]
    capacity: int
    centred: bool

    @classmethod
    def of(cls, call: Call) -> SuppressionCall | None:
        """Return the suppression that a call stands for, None if it is any other call."""
        name = packed_name(call)
        if not name.startswith(_NAME):
            return None
        capacity = int(call.ty_args[0].fields[0].shape[0])
        return cls(tuple(call.args[1].fields), capacity, name.endswith(".centred"))

    def emit(self, bb: relax.BlockBuilder) -> relax.Expr:
        """Emit the call; it returns a tuple: chosen boxes, their count, and the kernel's scratch space."""
        boxes = int(self.inputs[1].ty.shape[2])
        results = [
            relax.TensorType((self.capacity, 3), "int64"),
            relax.TensorType((1,), "int64"),
            relax.TensorType((2 * boxes,), "int32"),
        ]
        name = f"{_NAME}.centred" if self.centred else _NAME
        return bb.emit(relax.call_dps_packed(name, relax.Tuple(list(self.inputs)), results))
