"""LSTM, GRU and RNN as one kernel for each layer: a loop over the steps.

A step multiplies the state by the recurrent weights, `[hidden, gates * hidden]`, and applies the gates. The
products with the inputs do not depend on the state: they are one ordinary product for all steps, before.

The kernel goes through the hidden units in panels, as wide as a vector or two. A panel's weights for all
gates are adjacent, and its sums stay in registers while `k` runs over the state; then its gates, its cell and
its state are computed at once. So nothing goes through memory but the weights and the state. The state of
the previous step is read from the output.

Formulas and the order of the gates: ONNX operator specification, LSTM-14, GRU-14 and RNN-14.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import numpy as np
from tvm import relax, te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as ir

from builder.calls.recurrent import GATES
from builder.kernels.spaces.epilogue import emit_kernel
from builder.target.device_target import DeviceTarget

# The kernel is written out, not scheduled: this names where its loops come from.
KIND: Final = "recurrent"
# A launch for each step must be worth it: multiply-adds of a step, for all panels.
_WORTH_A_LAUNCH: Final = 400_000
_LEAST_SUMS: Final = 8

Index: TypeAlias = "tirx.Expr | int"


class Flat(Protocol):
    """A buffer, addressed by the place of an element in row-major order."""

    def __getitem__(self, place: Index) -> tirx.Expr:
        """Return the load of an element."""

    def __setitem__(self, place: Index, value: tirx.Expr) -> None:
        """Write the store of an element into the current loop."""


Function: TypeAlias = Callable[[tirx.Expr], tirx.Expr]
# The functions of the gates; a GRU's candidate needs the reset gate first.
_FUNCTIONS: Final[Mapping[str, tuple[Function, ...]]] = {
    "LSTM": (tirx.sigmoid, tirx.sigmoid, tirx.sigmoid, tirx.tanh),
    "GRU": (tirx.sigmoid, tirx.sigmoid),
    "RNN": (tirx.tanh,),
}


@dataclass(frozen=True, slots=True)
class Layer:
    """A recurrent layer.

    `kind`: `LSTM`, `GRU` with `linear_before_reset`, or `RNN`, with the activations that ONNX specifies.
    `backwards`: whether each direction begins with the last step.
    """

    kind: str
    steps: int
    directions: int
    batch: int
    hidden: int
    backwards: tuple[bool, ...]

    @property
    def gates(self) -> int:
        """How many products with the state each hidden unit has."""
        return GATES[self.kind]


@dataclass(frozen=True, slots=True)
class Panels:
    """How the kernel divides the hidden units.

    `width`: hidden units in a panel.
    `rows`: sequences of the batch that are computed together.
    `parts`: sums for each gate, over every n-th value of the state; added at the end.
    """

    width: int
    rows: int
    parts: int

    @classmethod
    def of(cls, layer: Layer, target: DeviceTarget) -> Panels:
        """Choose panels for a device: enough sums to hide the latency of a multiply-add, in its registers."""
        lanes, registers = target.simd.lanes, target.simd.registers
        width = lanes * (2 if lanes == 4 and registers >= 32 else 1)
        each = layer.gates * (width // lanes)
        rows = max(r for r in range(1, layer.batch + 1) if r == 1 or r * each <= registers // 2)
        parts = 2 if rows * each < _LEAST_SUMS and layer.hidden % 2 == 0 else 1
        return cls(width, rows, parts)


def pack(weights: np.ndarray, layer: Layer, panels: Panels) -> np.ndarray:
    """Pack `[directions, gates * hidden, hidden]` as `[directions, panels, hidden, gates, width]`.

    The last panel ends in zeros.
    """
    directions, gates, hidden = layer.directions, layer.gates, layer.hidden
    count = -(-hidden // panels.width)
    full = np.zeros((directions, gates, count * panels.width, hidden), weights.dtype)
    full[:, :, :hidden] = weights.reshape(directions, gates, hidden, hidden)
    full = full.reshape(directions, gates, count, panels.width, hidden)
    return np.ascontiguousarray(full.transpose(0, 2, 4, 1, 3))


def emit(
    bb: relax.BlockBuilder,
    layer: Layer,
    inputs: Sequence[relax.Expr],
    weights: np.ndarray,
    target: DeviceTarget,
) -> relax.Expr:
    """Emit a layer.

    `inputs`, `weights`: as in `builder.calls.recurrent.RecurrentCall`.
    Result: as `RecurrentCall.emit` returns it.
    """
    panels = Panels.of(layer, target)
    packed = relax.const(pack(weights, layer, panels))
    states = (layer.steps, layer.directions, layer.batch, layer.hidden)
    outputs = [states, states[1:]] if layer.kind == "LSTM" else [states]

    def compute(*arguments: te.Tensor) -> te.Tensor | list[te.Tensor]:
        return te.extern(
            outputs,
            list(arguments),
            lambda ins, outs: _Writer(layer, panels, target, ins, outs).write(),
            name=KIND,
            dtype=["float32"] * len(outputs),
            in_buffers=[tirx.decl_buffer(a.shape, "float32") for a in arguments],
            out_buffers=[tirx.decl_buffer(shape, "float32") for shape in outputs],
        )

    return emit_kernel(bb, layer.kind.lower(), compute, *inputs, packed, attrs={"edge.written": KIND})


@dataclass(frozen=True, slots=True)
class _Step:
    """A step of one direction.

    `time`: the place of its inputs and outputs among all steps.
    `before`: the buffer with the state before it.
    `state`: the place of that state in the buffer.
    """

    direction: Index
    time: Index
    before: Flat
    state: Index


class _Writer:
    """Writes a layer's loops into the current builder."""

    def __init__(
        self,
        layer: Layer,
        panels: Panels,
        target: DeviceTarget,
        ins: Sequence[tirx.Buffer],
        outs: Sequence[tirx.Buffer],
    ) -> None:
        self._layer = layer
        self._panels = panels
        self._many_cores = target.cores > 1
        self._products, self._first, *rest, self._weights = (_flat(buffer) for buffer in ins)
        # An LSTM's first cell, or the bias of a GRU's candidate.
        self._extra = rest[0] if rest else self._first
        self._states, self._cells = _flat(outs[0]), _flat(outs[-1])

    def write(self) -> tirx.Stmt:
        """Return all loops."""
        layer = self._layer
        with IRBuilder() as builder:
            with ir.seq_scope():
                if layer.directions == 2:
                    with (ir.parallel if self._many_cores else ir.serial)(0, 2) as direction:
                        self._direction(direction, spread=False)
                else:
                    self._direction(0, spread=self._many_cores)
            return builder.get()

    def _direction(self, direction: Index, *, spread: bool) -> None:
        """Write all steps of a direction; if `spread`, the cores share each of them."""
        layer = self._layer
        size = layer.batch * layer.hidden
        if layer.kind == "LSTM":
            with ir.serial(0, size) as i:
                self._cells[direction * size + i] = self._extra[direction * size + i]
        first = _Step(direction, self._time(direction, 0), self._first, direction * size)
        self._step(first, spread=spread)
        if layer.steps > 1:
            with ir.serial(0, layer.steps - 1) as earlier:
                before = (self._time(direction, earlier) * layer.directions + direction) * size
                step = _Step(direction, self._time(direction, earlier + 1), self._states, before)
                self._step(step, spread=spread)

    def _time(self, direction: Index, step: Index) -> Index:
        """Return the place in time of a direction's n-th step."""
        last, backwards = self._layer.steps - 1, self._layer.backwards
        if len(backwards) == 2:
            return step + direction * (last - 2 * step)  # the second one runs backwards
        return last - step if backwards[0] else step

    def _step(self, step: _Step, *, spread: bool) -> None:
        layer, width = self._layer, self._panels.width
        whole, rest = divmod(layer.hidden, width)
        products = layer.gates * layer.hidden * layer.hidden * layer.batch
        shared = spread and products >= _WORTH_A_LAUNCH and whole > 1
        if whole:
            with (ir.parallel if shared else ir.serial)(0, whole) as panel:
                self._panel(step, panel, width)
        if rest:
            self._panel(step, whole, rest)

    def _panel(self, step: _Step, panel: Index, lanes: int) -> None:
        """Write a panel, of which the last one may have fewer lanes."""
        whole, rest = divmod(self._layer.batch, self._panels.rows)
        if whole:
            with ir.serial(0, whole) as tile:
                self._tile(step, panel, lanes, range(self._panels.rows), tile * self._panels.rows)
        if rest:
            self._tile(step, panel, lanes, range(rest), whole * self._panels.rows)

    def _tile(self, step: _Step, panel: Index, lanes: int, rows: range, first: Index) -> None:
        """Write a panel for some sequences of the batch: the products, and then the gates."""
        layer, width, parts = self._layer, self._panels.width, self._panels.parts
        gates, hidden = layer.gates, layer.hidden
        sums = _registers(parts * len(rows) * gates * width)

        def place(part: int, row: int, gate: int) -> int:
            return ((part * len(rows) + row) * gates + gate) * width

        def inward(row: int, gate: int) -> Index:
            sequence = (step.time * layer.batch + first + row) * layer.directions + step.direction
            return sequence * (gates * hidden) + gate * hidden + panel * width

        for part in range(parts):
            for row in rows:
                for gate in range(gates):
                    # A GRU's candidate takes its input after the reset gate.
                    zero = part > 0 or (layer.kind == "GRU" and gate == 2)
                    with ir.vectorized(0, lanes) as v:
                        value = tirx.const(0.0, "float32") if zero else self._products[inward(row, gate) + v]
                        sums[place(part, row, gate) + v] = value
        panel_weights = (step.direction * -(-hidden // width) + panel) * (hidden * gates * width)
        with ir.serial(0, hidden // parts) as k:
            for part in range(parts):
                for row in rows:
                    state = step.before[step.state + (first + row) * hidden + k * parts + part]
                    for gate in range(gates):
                        weights = panel_weights + ((k * parts + part) * gates + gate) * width
                        with ir.vectorized(0, lanes) as v:
                            at = place(part, row, gate) + v
                            sums[at] = sums[at] + state * self._weights[weights + v]
        for row in rows:
            for gate in range(gates if parts == 2 else 0):
                with ir.vectorized(0, lanes) as v:
                    at = place(0, row, gate) + v
                    sums[at] = sums[at] + sums[place(1, row, gate) + v]
            totals = [place(0, row, gate) for gate in range(gates)]
            unit = (first + row) * hidden + panel * width
            self._gates(step, sums, totals, lanes, unit, inward(row, 2), panel * width)

    def _gates(
        self,
        step: _Step,
        sums: Flat,
        totals: Sequence[int],
        lanes: int,
        unit: Index,
        candidate: Index,
        bias: Index,
    ) -> None:
        """Write the gates of a sequence's panel, its cell and its state.

        `sums`, `totals`: the products, and the place of each gate's among them; the gates take their place.
        `unit`, `candidate`, `bias`: the places of the panel in a state, of a GRU's candidate in the products
            of the inputs, and of its bias.
        """
        layer = self._layer
        size = layer.batch * layer.hidden
        own = step.direction * size + unit
        after = (step.time * layer.directions + step.direction) * size + unit
        for total, function in zip(totals, _FUNCTIONS[layer.kind], strict=False):
            _apply(function, sums, total, lanes)
        if layer.kind == "LSTM":
            inward, outward, forget, memory = totals
            with ir.vectorized(0, lanes) as v:
                cell = sums[forget + v] * self._cells[own + v] + sums[inward + v] * sums[memory + v]
                self._cells[own + v] = cell
                sums[memory + v] = self._cells[own + v]
            _apply(tirx.tanh, sums, memory, lanes)
            with ir.vectorized(0, lanes) as v:
                self._states[after + v] = sums[outward + v] * sums[memory + v]
        elif layer.kind == "GRU":
            update, reset, new = totals
            with ir.vectorized(0, lanes) as v:
                recurring = sums[new + v] + self._extra[step.direction * layer.hidden + bias + v]
                sums[new + v] = self._products[candidate + v] + sums[reset + v] * recurring
            _apply(tirx.tanh, sums, new, lanes)
            with ir.vectorized(0, lanes) as v:
                difference = step.before[step.state + unit + v] - sums[new + v]
                self._states[after + v] = sums[new + v] + sums[update + v] * difference
        else:
            with ir.vectorized(0, lanes) as v:
                self._states[after + v] = sums[totals[0] + v]


def _apply(function: Function, sums: Flat, place: int, lanes: int) -> None:
    """Apply a function to a vector in place."""
    with ir.vectorized(0, lanes) as v:
        sums[place + v] = function(sums[place + v])


def _flat(buffer: tirx.Buffer) -> Flat:
    flat: Flat = ir.buffer_proxy(buffer)
    return flat


def _registers(count: int) -> Flat:
    return _flat(ir.alloc_buffer((count,), "float32", scope="local"))
