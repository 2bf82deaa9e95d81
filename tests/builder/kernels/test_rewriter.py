"""`main` is rebuilt binding by binding: calls are replaced or copied, and passes can look up definitions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.ir import Call

from builder.kernels.rewriter import (
    Values,
    constant_of,
    definition,
    emit_weights,
    legalise_as_tvm,
    op_name,
    rewrite_main,
    shape_of,
    users_of,
)

op = relax.op


def module(build: Callable[[relax.BlockBuilder, relax.Var], relax.Expr]) -> tvm.IRModule:
    """Return a module whose `main` computes what `build` emits for `x`, [2, 3] float32."""
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 3), "float32"))
    with bb.function("main", [x], attrs={"edge.test": 7}):
        with bb.dataflow():
            out = bb.emit_output(build(bb, x))
        bb.emit_func_output(out)
    return bb.get()


def calls(mod: tvm.IRModule) -> list[Call]:
    """Return the calls of `main`, in order."""
    bindings = [binding for block in mod["main"].body.blocks for binding in block.bindings]
    return [binding.value for binding in bindings if isinstance(binding.value, Call)]


def copy(_table: Values, _var: relax.Var, _call: Call) -> bool:
    return False


def test_what_is_not_replaced_is_copied() -> None:
    def build(bb: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        y = bb.emit(op.nn.relu(x))
        parts = bb.emit(op.split(bb.emit(op.add(y, relax.const(np.ones((2, 3), "f4")))), 3, axis=1))
        return relax.Tuple([bb.emit(relax.TupleGetItem(parts, 1)), y])

    mod = module(build)
    tvm.ir.assert_structural_equal(rewrite_main(mod, copy, Values), mod)
    assert rewrite_main(mod, copy, Values)["main"].attrs["edge.test"] == 7


def test_other_functions_are_kept() -> None:
    mod = module(
        lambda bb, x: bb.emit(bb.call_te(lambda a: tvm.topi.add(a, a), x, primfunc_name_hint="twice"))
    )
    assert isinstance(rewrite_main(mod, copy, Values)["twice"], tirx.PrimFunc)


def test_a_call_is_replaced_and_its_readers_read_the_replacement() -> None:
    def emit(table: Values, var: relax.Var, call: Call) -> bool:
        if op_name(call) != "relax.nn.relu":
            return False
        table.define(var, table.bb.emit(op.tanh(table.plain(call.args[0]))))
        return True

    mod = rewrite_main(module(lambda bb, x: bb.emit(op.abs(bb.emit(op.nn.relu(x))))), emit, Values)
    tanh, absolute = calls(mod)
    assert (op_name(tanh), op_name(absolute)) == ("relax.tanh", "relax.abs")
    assert absolute.args[0].same_as(mod["main"].body.blocks[0].bindings[0].var)


def test_a_value_in_another_form_is_converted_once() -> None:
    class Negated(Values):
        """Keeps the results of `relu` negated."""

        def __init__(self, bb: relax.BlockBuilder) -> None:
            super().__init__(bb)
            self.negated: dict[relax.Var, relax.Expr] = {}

        def plain(self, expr: relax.Expr) -> relax.Expr:
            if isinstance(expr, relax.Var) and expr not in self._plain:
                self.define(expr, self.bb.emit(op.negative(self.negated[expr])))
            return super().plain(expr)

    def emit(table: Negated, var: relax.Var, call: Call) -> bool:
        if op_name(call) != "relax.nn.relu":
            return False
        table.negated[var] = table.bb.emit(op.minimum(table.plain(call.args[0]), relax.const(0.0)))
        return True

    def build(bb: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        y = bb.emit(op.nn.relu(x))
        return bb.emit(op.multiply(bb.emit(op.exp(y)), y))

    names = [op_name(call) for call in calls(rewrite_main(module(build), emit, Negated))]
    assert names == ["relax.minimum", "relax.negative", "relax.exp", "relax.multiply"]


def test_reads_of_a_variable_are_counted_with_its_return() -> None:
    def build(bb: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        y = bb.emit(op.multiply(x, x))
        return relax.Tuple([bb.emit(op.add(y, x)), y])

    main = module(build)["main"]
    y = main.body.blocks[0].bindings[0].var
    counts = users_of(main)
    assert counts[main.params[0]] == 3
    assert counts[y] == 2
    assert counts[main.body.body] == 1


def test_definition_of_a_new_variable() -> None:
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 3), "float32"))
    with bb.function("main", [x]):
        with bb.dataflow():
            table = Values(bb)
            y = bb.emit(op.exp(x))
            found = definition(table, y, "relax.tanh", "relax.exp")
            assert found is not None
            assert op_name(found) == "relax.exp"
            assert definition(table, y, "relax.tanh") is None
            assert definition(table, x, "relax.exp") is None
            assert definition(table, relax.const(1.0), "relax.exp") is None
            out = bb.emit_output(y)
        bb.emit_func_output(out)


def test_only_operators_have_a_name() -> None:
    x = relax.Var("x", relax.TensorType((2, 3), "float32"))
    assert op_name(op.exp(x)) == "relax.exp"
    assert op_name(relax.Call(relax.ExternFunc("exp"), [x], ty_args=[x.ty])) == ""


def test_values_and_shapes_of_constants() -> None:
    numbers = np.arange(6, dtype="f4").reshape(2, 3)
    constant = relax.const(numbers)
    found = constant_of(constant)
    assert found is not None
    assert np.array_equal(found, numbers)
    assert shape_of(constant) == (2, 3)
    assert constant_of(relax.Var("x", relax.TensorType((2, 3), "float32"))) is None


@pytest.mark.parametrize("operator", [op.nn.relu, op.sum])
def test_tvms_own_legalisation_calls_a_kernel(operator: Callable[[relax.Expr], relax.Expr]) -> None:
    mod = module(lambda bb, x: bb.emit(legalise_as_tvm(bb, bb.normalize(operator(x)))))
    (call,) = calls(mod)
    assert op_name(call) == "relax.call_tir"
    assert isinstance(mod[call.args[0]], tirx.PrimFunc)


@pytest.mark.parametrize(
    ("weights", "dtype"),
    [([-128.0, 127.0, 0.0], "int8"), ([128.0], "float32"), ([0.5], "float32"), ([np.nan, np.inf], "float32")],
)
def test_weights_that_are_small_integers_are_kept_as_bytes(weights: list[float], dtype: str) -> None:
    kept: list[np.ndarray] = []

    def build(bb: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        value = emit_weights(bb, np.array(weights, "f4"))
        assert str(value.ty.dtype) == "float32"
        source = bb.lookup_binding(value).args[0] if isinstance(value, relax.Var) else value
        numbers = constant_of(source)
        assert numbers is not None
        kept.append(numbers)
        return bb.emit(op.nn.relu(x))

    module(build)
    assert str(kept[0].dtype) == dtype
    assert np.array_equal(kept[0].astype("f4"), np.array(weights, "f4"), equal_nan=True)


def test_a_part_is_counted_without_its_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(bb: relax.BlockBuilder, x: relax.Var) -> relax.Expr:
        parts = bb.emit(op.split(x, 3, 1))
        chosen = [bb.emit(parts[i]) for i in range(3)]
        return bb.emit(op.concat([chosen[0], chosen[1], chosen[1]], 1))

    main = module(build)["main"]
    monkeypatch.setattr(relax.analysis, "post_order_visit", None)  # visits all parts of each part's type
    counts = {var.name: count for var, count in users_of(main).items()}
    assert sorted(counts.values()) == [1, 1, 1, 1, 2, 3]  # the second part is joined twice
