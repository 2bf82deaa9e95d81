"""Probabilities of classes from those of pairs, as one kernel.

Source: Wu, Lin and Weng, "Probability estimates for multi-class classification by pairwise coupling", 2004,
algorithm 2, with the limits of ONNX Runtime: at most 100 rounds, until no error is above 0.005 / classes.
"""

from __future__ import annotations

from typing import Any, Final

from tvm import relax, te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as ir

from builder.kernels.spaces.epilogue import emit_kernel

# The kernel is written out, not scheduled: this names where its loops come from.
KIND: Final = "coupling"
ROUNDS: Final = 100


def emit(bb: relax.BlockBuilder, pairs: relax.Expr) -> relax.Expr:
    """Emit the coupling of `pairs`, `[samples, classes, classes]`; it returns `[samples, classes]`."""
    samples, classes, _ = (int(dim) for dim in pairs.ty.shape)

    def compute(argument: te.Tensor) -> te.Tensor:
        return te.extern(
            [(samples, classes)],
            [argument],
            lambda ins, outs: _write(samples, classes, ins[0], outs[0]),
            name=KIND,
            dtype=["float32"],
            in_buffers=[tirx.decl_buffer(argument.shape, "float32")],
            out_buffers=[tirx.decl_buffer((samples, classes), "float32")],
        )

    return emit_kernel(bb, KIND, compute, pairs, attrs={"edge.written": KIND})


def _write(samples: int, classes: int, pairs: tirx.Buffer, out: tirx.Buffer) -> tirx.Stmt:
    with IRBuilder() as builder:
        with ir.seq_scope(), ir.serial(0, samples) as sample:
            _sample(classes, ir.buffer_proxy(pairs), ir.buffer_proxy(out), sample)
        return builder.get()


def _sample(classes: int, r: Any, out: Any, sample: tirx.Expr) -> None:  # noqa: ANN401 - TVM's proxies
    """Write one sample: Q from the pairs, then rounds over p until Q p is the same for all classes."""
    k = classes
    q, qp, p = _local(k * k), _local(k), _local(k)
    total, error = _local(1), _local(1)
    left = ir.buffer_proxy(ir.alloc_buffer((1,), "int32", scope="local"))
    zero, one = tirx.const(0.0, "float32"), tirx.const(1.0, "float32")
    first = sample * (k * k)
    with ir.serial(0, k) as i:
        p[i] = tirx.const(1.0 / k, "float32")
        q[i * k + i] = zero
        with ir.serial(0, k) as j, ir.If(i != j), ir.Then():
            theirs = r[first + j * k + i]
            q[i * k + i] = q[i * k + i] + theirs * theirs
            q[i * k + j] = zero - theirs * r[first + i * k + j]
    left[0] = ROUNDS
    with ir.While(left[0] != 0):
        total[0] = zero
        with ir.serial(0, k) as i:
            qp[i] = zero
            with ir.serial(0, k) as j:
                qp[i] = qp[i] + q[i * k + j] * p[j]
            total[0] = total[0] + p[i] * qp[i]
        error[0] = zero
        with ir.serial(0, k) as i:
            error[0] = tirx.max(error[0], tirx.abs(qp[i] - total[0]))
        left[0] = left[0] - 1
        with ir.If(error[0] < tirx.const(0.005 / k, "float32")):
            with ir.Then():
                left[0] = 0
            with ir.Else(), ir.serial(0, k) as i:
                step = _local(1)
                step[0] = (total[0] - qp[i]) / q[i * k + i]
                p[i] = p[i] + step[0]
                more = one + step[0]
                total[0] = (total[0] + step[0] * (step[0] * q[i * k + i] + qp[i] * 2.0)) / more / more
                with ir.serial(0, k) as j:
                    qp[j] = (qp[j] + step[0] * q[i * k + j]) / more
                    p[j] = p[j] / more
    with ir.serial(0, k) as i:
        out[sample * k + i] = p[i]


def _local(count: int) -> Any:  # noqa: ANN401 - TVM's proxies
    return ir.buffer_proxy(ir.alloc_buffer((count,), "float32", scope="local"))
