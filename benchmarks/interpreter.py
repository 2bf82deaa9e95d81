"""Runs a lowered module node by node on this machine, for tests of kernels and for the kernel profile.

The executor that ships is in `agent.runtime`. This interpreter needs neither a linked library nor a graph,
and times every kernel.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call

from builder.codegen.lowering import build_kernels
from builder.compiling.lower import LoweredModule, is_reshape
from builder.kernels.rewriter import op_name, shape_of


@dataclass(frozen=True, slots=True)
class Step:
    """One call of a kernel.

    Attributes
    ----------
    kernel
        Its name.
    arguments, results
        Positions in the interpreter's table of tensors.
    """

    kernel: str
    arguments: tuple[int, ...]
    results: tuple[int, ...]


class Interpreter:
    """A lowered module with its kernels compiled.

    Parameters
    ----------
    lowered
        The module to run.
    target
        The target to compile for; its code must run on this machine.
    """

    def __init__(self, lowered: LoweredModule, target: tvm.target.Target) -> None:
        self.library = build_kernels(lowered.kernels, target)
        self.steps: list[Step] = []
        self.tensors: list[tvm.runtime.Tensor] = []
        self._index: dict[relax.Var, tuple[int, ...]] = {}
        self.inputs = tuple(p.name for p in lowered.main.params)
        for param in lowered.main.params:
            self._index[param] = (self._new(param.ty),)
        for block in lowered.main.body.blocks:
            for binding in block.bindings:
                self._bind(binding)
        self.outputs = self._of(lowered.main.body.body)
        self.load_steps = self._split_load_steps()
        for step in self.load_steps:
            self._call(step)

    def _new(self, ty: relax.TensorType) -> int:
        shape = tuple(int(d) for d in ty.shape)
        # What no kernel writes must not look like a result.
        poison = np.nan if str(ty.dtype).startswith("float") else 0x55
        self.tensors.append(tvm.runtime.tensor(np.full(shape, poison, str(ty.dtype))))
        return len(self.tensors) - 1

    def _of(self, expr: relax.Expr) -> tuple[int, ...]:
        if isinstance(expr, relax.Var):
            return self._index[expr]
        if isinstance(expr, relax.Tuple):
            return tuple(i for f in expr.fields for i in self._of(f))
        self.tensors.append(expr.value)
        return (len(self.tensors) - 1,)

    def _bind(self, binding: relax.Binding) -> None:
        value = binding.value
        if is_reshape(value):
            (source,) = self._of(value.args[0])
            self.tensors.append(self.tensors[source]._create_view(shape_of(value)))
            self._index[binding.var] = (len(self.tensors) - 1,)
        elif isinstance(value, Call):
            if op_name(value) != "relax.call_tir":
                raise ValueError(f"expected a call of a kernel or a reshape, got {op_name(value)}")
            ty = value.ty_args[0]
            types = list(ty.fields) if isinstance(ty, tvm.ir.TupleType) else [ty]
            results = tuple(self._new(t) for t in types)
            self.steps.append(Step(value.args[0].name_hint, self._of(value.args[1]), results))
            self._index[binding.var] = results
        elif isinstance(value, relax.TupleGetItem):
            self._index[binding.var] = (self._of(value.tuple_value)[value.index],)
        else:
            self._index[binding.var] = self._of(value)

    def run(self, inputs: Mapping[str, np.ndarray]) -> Sequence[np.ndarray]:
        """Return the outputs, in order, for `inputs` by name."""
        for index, name in enumerate(self.inputs):
            self.tensors[index].copyfrom(inputs[name])
        for step in self.steps:
            self._call(step)
        return [self.tensors[i].numpy() for i in self.outputs]

    def _call(self, step: Step) -> None:
        self.library[step.kernel](*(self.tensors[i] for i in step.arguments + step.results))

    def _split_load_steps(self) -> list[Step]:
        """Remove the steps that read only constants from `steps`, and return them: they run once."""
        computed = {i for indices in self._index.values() for i in indices}
        load = [step for step in self.steps if not computed.intersection(step.arguments)]
        self.steps = [step for step in self.steps if step not in load]
        return load

    def times_us(self, repeat: int = 20) -> list[float]:
        """Return the least time of each step, in microseconds, over `repeat` runs of the whole model.

        Steps run in the model's order, so that each finds the caches as in normal use: a kernel that is
        measured by itself would find its weights in a cache that normally holds those of other layers.
        """
        functions = [self.library[step.kernel] for step in self.steps]
        arguments = [[self.tensors[i] for i in step.arguments + step.results] for step in self.steps]
        best = [float("inf")] * len(self.steps)
        for _ in range(repeat):
            for index, (function, tensors) in enumerate(zip(functions, arguments, strict=True)):
                start = time.perf_counter()
                function(*tensors)
                best[index] = min(best[index], (time.perf_counter() - start) * 1e6)
        return best
