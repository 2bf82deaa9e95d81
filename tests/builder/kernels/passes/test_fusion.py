from __future__ import annotations

import numpy as np
import tvm
from tvm import relax, te
from tvm.ir import Call

from builder.calls.spans import TracingBuilder, bindings_of, carry, names_of, span_of
from builder.kernels.passes.fusion import fuse_operators


def fused(build: object, names: list[str]) -> list[tuple[str, tuple[str, ...]]]:
    """Return the kernel and the nodes of each call of a chain of operators, which are built in turn."""
    x = relax.Var("x", relax.TensorType((8, 8), "float32"))
    bb = TracingBuilder()
    with bb.function("main", [x]):
        with bb.dataflow():
            value: relax.Expr = x
            for name, step in zip(names, build, strict=True):  # type: ignore[call-overload]
                bb.current = span_of([name])
                value = bb.emit(step(value))
            result = bb.emit_output(value)
        bb.emit_func_output(result)
    before = bb.get()
    mod = carry(before, relax.transform.LegalizeOps()(before))
    mod = tvm.transform.Sequential([relax.transform.AnnotateTIROpPattern()])(mod)
    calls = [b.value for b in bindings_of(fuse_operators(mod)) if isinstance(b.value, Call)]
    return [(str(call.args[0].name_hint), names_of(call)) for call in calls]


def weight(seed: int) -> relax.Expr:
    return relax.const(np.random.RandomState(seed).rand(8, 8).astype("f4"))


def test_each_call_of_a_shared_kernel_has_its_own_nodes() -> None:
    steps = []
    for seed in range(3):
        w = weight(seed)
        steps += [lambda v, w=w: relax.op.matmul(v, w), relax.op.nn.relu]
    found = fused(steps, [f"{kind}{i}" for i in range(3) for kind in ("mm", "relu")])
    assert len({kernel for kernel, _ in found}) == 1
    assert [names for _, names in found] == [("mm0", "relu0"), ("mm1", "relu1"), ("mm2", "relu2")]


def test_products_of_one_value_are_told_apart_by_their_weights() -> None:
    # Like the query and the key of attention: the same kernel, the same input, other weights.
    x = relax.Var("x", relax.TensorType((8, 8), "float32"))
    bb = TracingBuilder()
    with bb.function("main", [x]):
        with bb.dataflow():
            parts = []
            for i in range(2):
                bb.current = span_of([f"mm{i}"])
                product = bb.emit(relax.op.matmul(x, weight(i)))
                bb.current = span_of([f"relu{i}"])
                parts.append(bb.emit(relax.op.nn.relu(product)))
            result = bb.emit_output(relax.Tuple(parts))
        bb.emit_func_output(result)
    before = bb.get()
    mod = carry(before, relax.transform.LegalizeOps()(before))
    kernels = fuse_operators(relax.transform.AnnotateTIROpPattern()(mod))
    found = [names_of(b.value) for b in bindings_of(kernels) if isinstance(b.value, Call)]
    assert found == [("mm0", "relu0"), ("mm1", "relu1")]


def test_a_chain_that_reads_each_value_twice_is_divided() -> None:
    """As one kernel, it would compute its first call 2^40 times."""
    names = [f"double{step}" for step in range(40)]
    found = fused([lambda v: relax.op.add(v, v)] * len(names), names)
    assert sorted(name for _, nodes in found for name in nodes) == sorted(names)
    assert max(len(nodes) for _, nodes in found) <= 10
    assert 4 <= len(found) <= 10


def test_a_chain_that_reads_each_value_once_is_one_kernel() -> None:
    names = [f"step{step}" for step in range(100)]
    found = fused([relax.op.nn.relu, relax.op.negative] * 50, names)
    assert len(found) == 1


def test_a_chain_of_calls_that_read_their_number_three_times_is_divided() -> None:
    """So does each quantisation of a chain: as one kernel, it took minutes to compile."""

    def cubed(value: relax.Expr) -> relax.Expr:
        bb = relax.BlockBuilder.current()
        return bb.call_te(lambda t: te.compute(t.shape, lambda *i: t(*i) * t(*i) * t(*i)), value)

    names = [f"cube{step}" for step in range(12)]
    found = fused([cubed] * len(names), names)
    assert sorted(name for _, nodes in found for name in nodes) == sorted(names)
    assert 2 <= len(found) <= 4
