"""LSTM, GRU and RNN in a Relax module: one call of a function that runs all steps.

TVM's front end has no recurrent operators. Unrolled, a layer is a dozen nodes for each step; a call stays one
node until `builder.kernels.passes.recurrent` writes its loop. Only what common exporters write is kept as a
call, see `builder.importer.rewrites.recurrent`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from tvm import relax
from tvm.ir import Call

from builder.calls.packed import packed_name

GATES: Final[Mapping[str, int]] = {"LSTM": 4, "GRU": 3, "RNN": 1}
DIRECTIONS: Final[Mapping[str, tuple[bool, ...]]] = {
    "forward": (False,),
    "reverse": (True,),
    "bidirectional": (False, True),
}
_PREFIX: Final = "edge.recurrent"


@dataclass(frozen=True, slots=True)
class RecurrentCall:
    """A layer in a module.

    Attributes
    ----------
    kind
        `LSTM`, `GRU` (with `linear_before_reset`) or `RNN`, with ONNX's usual activations.
    direction
        As in ONNX: a key of `DIRECTIONS`.
    inputs
        The inputs' products with the biases, `[steps, batch, directions * gates * hidden]`; the first state,
        `[directions, batch, hidden]`; for an LSTM the first cell, of the same shape; for a GRU the bias of
        the candidate's recurrent product, `[directions, hidden]`.
    weights
        `[directions, gates * hidden, hidden]`, a constant.
    """

    kind: str
    direction: str
    inputs: tuple[relax.Expr, ...]
    weights: relax.Expr

    NAMES: ClassVar[tuple[str, ...]] = tuple(f"{_PREFIX}.{k}.{d}" for k in GATES for d in DIRECTIONS)

    @classmethod
    def of(cls, call: Call) -> RecurrentCall | None:
        """Return the layer that a call stands for, None if it is any other call."""
        name = packed_name(call)
        if name not in cls.NAMES:
            return None
        _, _, kind, direction = name.split(".")
        *inputs, weights = call.args[1].fields
        return cls(kind, direction, tuple(inputs), weights)

    def emit(self, bb: relax.BlockBuilder) -> relax.Expr:
        """Emit the call.

        Returns
        -------
        relax.Expr
            The states of all steps, `[steps, directions, batch, hidden]`; for an LSTM a tuple of them and the
            last cells, `[directions, batch, hidden]`.
        """
        steps = _shape(self.inputs[0])[0]
        last = _shape(self.inputs[1])
        types = [relax.TensorType((steps, *last), "float32")]
        if self.kind == "LSTM":
            types.append(relax.TensorType(last, "float32"))
        arguments = relax.Tuple([*self.inputs, self.weights])
        name = f"{_PREFIX}.{self.kind}.{self.direction}"
        return bb.emit(relax.call_dps_packed(name, arguments, types if len(types) > 1 else types[0]))


def _shape(tensor: relax.Expr) -> tuple[int, ...]:
    return tuple(int(dim) for dim in tensor.ty.shape)
