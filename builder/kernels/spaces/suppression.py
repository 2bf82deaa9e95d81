"""Non-maximum suppression as one kernel: a heap of the boxes by score, and a greedy choice from its top.

The order is ONNX Runtime's: the highest score first, of equal scores the lowest index; an overlap is the
intersection over the union, and a box is dropped if it is above the limit. Only as many boxes are taken from
the heap as it takes to fill the places of a class, so most boxes are never sorted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tvm import relax, te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as ir

from builder.kernels.rewriter import shape_of
from builder.kernels.spaces.epilogue import emit_kernel

# The kernel is written out, not scheduled: this names where its loops come from.
KIND: Final = "non_max_suppression"


def emit(bb: relax.BlockBuilder, inputs: Sequence[relax.Expr], capacity: int, *, centred: bool) -> relax.Expr:
    """Emit a suppression.

    `inputs`: as `builder.calls.suppression.SuppressionCall` has them.
    `centred`: whether boxes are centres with sizes.
    Result: a tuple: chosen boxes, int64 [capacity, 3]; how many there are, int64 [1]; scratch, int32 [2 n].
    """
    batches, classes, count = shape_of(inputs[1])
    shapes = [(capacity, 3), (1,), (2 * count,)]
    dtypes = ["int64", "int64", "int32"]

    def write(ins: Sequence[tirx.Buffer], outs: Sequence[tirx.Buffer]) -> tirx.Stmt:
        with IRBuilder() as builder:
            with ir.seq_scope():
                tensors = map(ir.buffer_proxy, (*ins, *outs))
                _Suppression(classes, count, capacity, centred, *tensors).write(batches)
            return builder.get()

    def compute(*arguments: te.Tensor) -> list[te.Tensor]:
        made: list[te.Tensor] = te.extern(
            shapes,
            list(arguments),
            write,
            name=KIND,
            dtype=dtypes,
            in_buffers=[tirx.decl_buffer(a.shape, a.dtype) for a in arguments],
            out_buffers=[tirx.decl_buffer(s, d) for s, d in zip(shapes, dtypes, strict=True)],
        )
        return made

    return emit_kernel(bb, KIND, compute, *inputs, attrs={"edge.written": KIND})


@dataclass(frozen=True, slots=True)
class _Suppression:
    """Writes one suppression, of which it has the extents, and TVM's proxies of inputs and outputs.

    `heap`: scratch; of `n` boxes, `heap[0:n]` is the heap, and `heap[n:2n]` holds what is chosen of a class.
    """

    classes: int
    count: int
    capacity: int
    centred: bool
    boxes: Any
    scores: Any
    most: Any
    overlap: Any
    lowest: Any
    valid: Any
    chosen: Any
    number: Any
    heap: Any

    def write(self, batches: int) -> None:
        """Write the whole kernel."""
        self.number[0] = tirx.const(0, "int64")
        with ir.serial(0, self.capacity * 3) as i:
            self.chosen[i] = tirx.const(0, "int64")
        real = _local(1, "int32")
        real[0] = tirx.max(tirx.min(self.valid[0], tirx.const(self.count, "int64")).astype("int32"), 0)
        with ir.serial(0, batches) as batch, ir.serial(0, self.classes) as kind:
            self._class(real, batch, kind)

    def _class(self, real: Any, batch: tirx.Expr, kind: tirx.Expr) -> None:  # noqa: ANN401 - TVM's proxy
        """Choose the boxes of one class, of the first `real[0]`."""
        heap, scores, n = self.heap, self.scores, self.count
        first = (batch * self.classes + kind) * n
        size, kept, left = _local(1, "int32"), _local(1, "int32"), _local(1, "int32")
        size[0], kept[0] = 0, 0
        left[0] = tirx.min(self.most[0], tirx.const(n, "int64")).astype("int32")
        with (
            ir.serial(0, n) as i,
            ir.If(tirx.all(i < real[0], scores[first + i] > self.lowest[0])),
            ir.Then(),
        ):
            heap[size[0]] = i
            size[0] = size[0] + 1
        with ir.serial(0, n // 2) as i, ir.If(i < size[0] // 2), ir.Then():
            _sift(heap, scores, first, size[0], size[0] // 2 - 1 - i)
        with ir.While(tirx.all(size[0] > 0, left[0] > 0)):
            top = _local(1, "int32")
            top[0] = heap[0]
            size[0] = size[0] - 1
            heap[0] = heap[size[0]]
            with ir.If(size[0] > 1), ir.Then():
                _sift(heap, scores, first, size[0], tirx.const(0, "int32"))
            mine = self._corners(batch, top[0])
            free, j = _local(1, "int32"), _local(1, "int32")
            free[0], j[0] = 1, 0
            with ir.While(tirx.all(free[0] != 0, j[0] < kept[0])):
                other = self._corners(batch, heap[n + j[0]])
                with ir.If(_overlaps(mine, other, self.overlap[0])), ir.Then():
                    free[0] = 0
                j[0] = j[0] + 1
            with ir.If(free[0] != 0), ir.Then():
                heap[n + kept[0]] = top[0]
                kept[0] = kept[0] + 1
                left[0] = left[0] - 1
                place = self.number[0] * 3
                with ir.If(self.number[0] < tirx.const(self.capacity, "int64")), ir.Then():
                    self.chosen[place] = batch.astype("int64")
                    self.chosen[place + 1] = kind.astype("int64")
                    self.chosen[place + 2] = top[0].astype("int64")
                    self.number[0] = self.number[0] + tirx.const(1, "int64")

    def _corners(self, batch: tirx.Expr, index: tirx.Expr) -> Any:  # noqa: ANN401
        """The lower and upper corner and the area of a box, in this order: y0, x0, y1, x1, area."""
        at = (batch * self.count + index) * 4
        box = _local(5, "float32")
        a, b, c, d = (self.boxes[at + k] for k in range(4))
        half = tirx.const(0.5, "float32")
        if self.centred:
            box[0], box[1] = b - d * half, a - c * half
            box[2], box[3] = b + d * half, a + c * half
        else:
            box[0], box[1] = tirx.min(a, c), tirx.min(b, d)
            box[2], box[3] = tirx.max(a, c), tirx.max(b, d)
        box[4] = (box[2] - box[0]) * (box[3] - box[1])
        return box


def _sift(heap: Any, scores: Any, first: tirx.Expr, size: tirx.Expr, start: tirx.Expr) -> None:  # noqa: ANN401
    """Let an element sink below all that precede it."""
    at, child, going = _local(1, "int32"), _local(1, "int32"), _local(1, "int32")
    item = _local(1, "int32")
    at[0], going[0] = start, 1
    item[0] = heap[at[0]]
    with ir.While(tirx.all(going[0] != 0, at[0] * 2 + 1 < size)):
        child[0] = at[0] * 2 + 1
        right = child[0] + 1
        with ir.If(right < size), ir.Then():
            closer = _precedes(scores, first, heap[right], heap[child[0]])
            with ir.If(closer), ir.Then():
                child[0] = child[0] + 1
        with ir.If(_precedes(scores, first, heap[child[0]], item[0])):
            with ir.Then():
                heap[at[0]] = heap[child[0]]
                at[0] = child[0]
            with ir.Else():
                going[0] = 0
    heap[at[0]] = item[0]


def _precedes(scores: Any, first: tirx.Expr, a: tirx.Expr, b: tirx.Expr) -> tirx.Expr:  # noqa: ANN401
    ours, theirs = scores[first + a], scores[first + b]
    return tirx.any(ours > theirs, tirx.all(ours == theirs, a < b))


def _overlaps(a: Any, b: Any, limit: tirx.Expr) -> tirx.Expr:  # noqa: ANN401
    """Whether two boxes overlap by more than the limit; boxes without an area never do."""
    zero = tirx.const(0, "float32")
    high = tirx.max(tirx.min(a[2], b[2]) - tirx.max(a[0], b[0]), zero)
    wide = tirx.max(tirx.min(a[3], b[3]) - tirx.max(a[1], b[1]), zero)
    shared = high * wide
    union = a[4] + b[4] - shared
    return tirx.all(shared > zero, a[4] > zero, b[4] > zero, union > zero, shared / union > limit)


def _local(count: int, dtype: str) -> Any:  # noqa: ANN401 - TVM's proxies
    return ir.buffer_proxy(ir.alloc_buffer((count,), dtype, scope="local"))
