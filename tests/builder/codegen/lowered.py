"""Lowered functions for tests of graph code generation."""

from __future__ import annotations

from collections.abc import Collection

import tvm
from tvm import relax

from builder.codegen.graph_codegen import GeneratedGraph, generate

F32 = "float32"


class Lowered:
    """Builds a lowered function with named kernels; the generator uses only their names."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        self.builder = relax.BlockBuilder()
        self.inputs = [relax.Var(f"x{i}", relax.TensorType(s, F32)) for i, s in enumerate(shapes)]
        self.bindings: list[relax.VarBinding] = []

    def bind(self, value: relax.Expr, ty: tvm.ir.Type | None = None) -> relax.Var:
        var = relax.Var(f"v{len(self.bindings)}", ty if ty is not None else value.ty)
        self.bindings.append(relax.VarBinding(var, value))
        return var

    def call(self, kernel: str, args: list[relax.Expr], *shapes: tuple[int, ...]) -> relax.Var:
        types = [relax.TensorType(s, F32) for s in shapes]
        call = relax.call_tir(
            tvm.ir.GlobalVar(kernel), relax.Tuple(args), types if len(types) > 1 else types[0]
        )
        return self.bind(call, tvm.ir.TupleType(types) if len(types) > 1 else types[0])

    def reshape(self, value: relax.Expr, shape: tuple[int, ...]) -> relax.Var:
        return self.bind(relax.op.reshape(value, shape), relax.TensorType(shape, F32))

    def generate(self, result: relax.Expr, *names: str, joins: Collection[str] = ()) -> GeneratedGraph:
        body = relax.SeqExpr([relax.BindingBlock(self.bindings)], result)
        ty = getattr(result, "ty", None)
        main = relax.Function(self.inputs, body, ty)
        inputs = [f"x{i}" for i in range(len(self.inputs))]
        return generate(main, inputs, list(names) or ["y"], joins=joins)
