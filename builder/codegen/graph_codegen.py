"""Graph code generation: a lowered Relax function becomes `mod.json` and the tensors of `mod.params`.

Takes the `main` of `builder.compiling.lower`: a straight line of `call_tir` (with one output or several),
reshapes, tuples and constants. A reshape becomes `__nop` on its input's storage. A constant becomes a
parameter `p0`, `p1`, ...; equal constants share one. Computes lifetimes for `builder.codegen.memory_plan`;
does not inspect kernels.

A call that only puts its inputs one after another is marked as a join, if the inputs can be made in their
places (`agent.bundle.joins`). Then the storage of its output is reserved from its first part on. The parts
have storages too, which only readers use that do not know joins.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import tvm
from tvm import relax

from agent.bundle.graph import Graph
from agent.bundle.joins import ALIGNMENT
from agent.bundle.layer import Layer, shorten
from agent.bundle.node import JOINS, NOP, Node, NodeEntry
from agent.bundle.tensor_spec import TensorSpec
from builder.calls.spans import Names, names_of
from builder.codegen.memory_plan import Lifetime, plan
from builder.errors import FAULT, UnsupportedOperatorError
from builder.kernels.rewriter import RESHAPES
from builder.kernels.spaces import sorting

_NODES_CHARS: Final = 160  # of the model's nodes in a message
# What the user can do about an operator without a kernel.
_SORTS: Final = (
    f"at most {sorting.MAX_EXTENT} elements can be sorted: "
    "filter them first, or use --postprocess softmax,top5"
)
_HINTS: Final = {f"relax.{name}": _SORTS for name in ("topk", "sort", "argsort")}


@dataclass(frozen=True, slots=True)
class GeneratedGraph:
    """A graph for the executor.

    `graph`: the graph, with planned storages.
    `params`: spec and data of each parameter, in the order in which the graph first uses them.
    `inputs`, `outputs`: in the function's order, with the model's names.
    `arena_bytes`: total size of the storages, without those of inputs, parameters, values computed at load,
        and parts of joins.
    `sources`: for each node of the graph, the names of the model's nodes that it computes.
    """

    graph: Graph
    params: tuple[tuple[TensorSpec, npt.NDArray[np.generic]], ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    arena_bytes: int
    sources: tuple[Names, ...]


def generate(
    main: relax.Function,
    input_names: Sequence[str],
    output_names: Sequence[str],
    flops: Mapping[str, float] | None = None,
    layers: Mapping[relax.Var, Layer] | None = None,
    joins: Collection[str] = (),
) -> GeneratedGraph:
    """Generate the graph of a lowered function.

    Parameters
    ----------
    main
        The function that `builder.compiling.lower.lower` returns.
    input_names, output_names
        The model's names, in order.
    flops
        Kernel's name -> floating-point operations of one call, written into each call's node for profiles.
    layers
        Variable of a call's result -> the part of the model that it computes, written there too.
    joins
        The kernels that only put their inputs one after another.

    Raises
    ------
    UnsupportedOperatorError
        If the function contains control flow, dynamic shapes or calls of anything but kernels.
    """
    walk = _Walk(flops or {}, layers or {}, joins)
    for param, name in zip(main.params, input_names, strict=True):
        walk.add_input(param, name)
    body = main.body
    if not isinstance(body, relax.SeqExpr):
        raise UnsupportedOperatorError("expected a graph of kernels, got another function", hint=FAULT)
    for block in body.blocks:
        for binding in block.bindings:
            if not isinstance(binding, relax.VarBinding):
                raise UnsupportedOperatorError(
                    "expected only values in a graph, got a check of shapes", hint=FAULT
                )
            walk.bind(binding.var, binding.value)
    return walk.finish(body.body, output_names)


@dataclass
class _Walk:
    """State of one walk over a function; entries are numbered as in the graph."""

    flops: Mapping[str, float]
    layers: Mapping[relax.Var, Layer]
    joins: Collection[str]
    nodes: list[Node] = field(default_factory=list)
    specs: list[TensorSpec] = field(default_factory=list)
    first_entry: list[int] = field(default_factory=list)
    values: dict[relax.Expr, tuple[NodeEntry, ...]] = field(default_factory=dict)
    params: list[tuple[TensorSpec, npt.NDArray[np.generic]]] = field(default_factory=list)
    param_by_content: dict[tuple[str, tuple[int, ...], bytes], NodeEntry] = field(default_factory=dict)
    sources: dict[int, Names] = field(default_factory=dict)
    num_inputs: int = 0  # inputs are the first entries
    aliases: dict[int, int] = field(default_factory=dict)  # entry of a reshape -> entry that owns the storage

    def add_input(self, var: relax.Var, name: str) -> None:
        self.values[var] = self._append(Node.null(name), (_spec(var.ty, name),))
        self.num_inputs += 1

    def bind(self, var: relax.Var, value: relax.Expr) -> None:
        self.values[var] = self._call(value, var) if isinstance(value, relax.Call) else self._value(value)

    def finish(self, result: relax.Expr, output_names: Sequence[str]) -> GeneratedGraph:
        heads = self._value(result)
        if len(heads) != len(output_names):
            raise UnsupportedOperatorError(
                f"expected {len(output_names)} outputs, got a function with {len(heads)}", hint=FAULT
            )
        lifetimes = self._lifetimes(heads)
        whole, parts = self._join(heads, lifetimes)
        planned = plan(list(whole.values()))
        others = plan(list(parts.values()))
        storage_of_root = dict(zip(whole, planned.storage_id, strict=True))
        count = len(planned.storage_bytes)
        storage_of_root |= {
            root: count + number for root, number in zip(parts, others.storage_id, strict=True)
        }
        storage_id = [storage_of_root[self._root(entry)] for entry in range(len(self.specs))]
        graph = Graph.build(
            self.nodes, heads, [s.dtype for s in self.specs], storage_id, [s.shape for s in self.specs]
        )
        inputs = tuple(self.specs[: self.num_inputs])
        outputs = tuple(
            TensorSpec(name, self._spec_of(head).datatype, self._spec_of(head).shape)
            for head, name in zip(heads, output_names, strict=True)
        )
        sources = tuple(self.sources.get(step, ()) for step in range(len(self.nodes)))
        return GeneratedGraph(graph, tuple(self.params), inputs, outputs, planned.arena_bytes, sources)

    def _join(
        self, heads: Sequence[NodeEntry], lifetimes: Mapping[int, Lifetime]
    ) -> tuple[dict[int, Lifetime], dict[int, Lifetime]]:
        """Mark the calls that are joins, and return the lifetimes of all other values and of their parts.

        The output of a join that is no part itself lives from the first of all parts in it to the last use.
        """
        inside: dict[int, int] = {}  # a part -> the output of its join
        fixed = {self._root(self._entry_id(head)) for head in heads}
        candidates = [i for i, node in enumerate(self.nodes) if node.func_name in self.joins]
        # A value can be part of one join only: of the one that copies most.
        for i in sorted(candidates, key=lambda i: (-self.specs[self.first_entry[i]].nbytes, i)):
            parts = [self._root(self._entry_id(entry)) for entry in self.nodes[i].inputs]
            begins = itertools.accumulate((self.specs[part].nbytes for part in parts), initial=0)
            if (
                any(lifetimes[part].pinned or part in fixed or part in inside for part in parts)
                or any(begin % ALIGNMENT for begin in list(begins)[:-1])
                or len(set(parts)) < len(parts)
            ):
                continue
            inside |= dict.fromkeys(parts, self.first_entry[i])
            self.nodes[i] = replace(self.nodes[i], attrs={**self.nodes[i].attrs, JOINS: "1"})
        whole = {root: lifetimes[root] for root in sorted(lifetimes) if root not in inside}
        for part in inside:
            owner = part
            while owner in inside:
                owner = inside[owner]
            first = min(whole[owner].start, lifetimes[part].start)
            last = max(whole[owner].end, lifetimes[part].end)
            whole[owner] = replace(whole[owner], start=first, end=last)
        return whole, {root: lifetimes[root] for root in sorted(inside)}

    def _value(self, value: relax.Expr) -> tuple[NodeEntry, ...]:
        if isinstance(value, relax.Var):
            return self.values[value]
        if isinstance(value, tvm.ir.GenericConst):
            return (self._param(value),)
        if isinstance(value, relax.Tuple):
            return tuple(entry for member in value.fields for entry in self._value(member))
        if isinstance(value, relax.TupleGetItem):
            return (self._value(value.tuple_value)[value.index],)
        raise UnsupportedOperatorError("expected calls of kernels in a graph, got something else", hint=FAULT)

    def _call(self, call: relax.Call, var: relax.Var) -> tuple[NodeEntry, ...]:
        ty = var.ty
        op = getattr(call.op, "name", str(call.op))
        if op in RESHAPES:
            (source,) = self._value(call.args[0])
            spec = _spec(ty, f"reshape{len(self.nodes)}")
            entries = self._append(Node.call(spec.name, NOP, (source,)), (spec,))
            self.aliases[self._entry_id(entries[0])] = self._root(self._entry_id(source))
            return entries
        if op != "relax.call_tir":
            nodes = ", ".join(names_of(call))
            of = f" (node {shorten(nodes, _NODES_CHARS)})" if nodes else ""
            raise UnsupportedOperatorError(
                f"operator {op.removeprefix('relax.')} has no kernel{of}",
                hint=_HINTS.get(op, "remove it from the model and apply it to the output yourself"),
            )
        kernel = call.args[0].name_hint
        inputs = tuple(entry for argument in call.args[1].fields for entry in self._value(argument))
        name = f"{kernel}_{len(self.nodes)}"
        types = ty.fields if isinstance(ty, tvm.ir.TupleType) else [ty]
        specs = tuple(_spec(output, f"{name}:{i}") for i, output in enumerate(types))
        attrs = {"flops": f"{self.flops[kernel]:.0f}"} if kernel in self.flops else {}
        if var in self.layers:
            attrs |= self.layers[var].to_attrs()
        self.sources[len(self.nodes)] = names_of(call)
        return self._append(Node.call(name, kernel, inputs, len(specs), **attrs), specs)

    def _param(self, constant: tvm.ir.GenericConst) -> NodeEntry:
        data = np.array(constant.value.numpy(), order="C")  # ascontiguousarray would give a scalar an axis
        key = (str(data.dtype), data.shape, hashlib.sha256(data.tobytes()).digest())
        if key not in self.param_by_content:
            name = f"p{len(self.params)}"
            while any(name == spec.name for spec in self.specs[: self.num_inputs]):
                name += "_"
            spec = TensorSpec.from_dtype(name, str(data.dtype), data.shape)
            self.params.append((spec, data))
            (self.param_by_content[key],) = self._append(Node.null(name), (spec,))
        return self.param_by_content[key]

    def _append(self, node: Node, specs: Sequence[TensorSpec]) -> tuple[NodeEntry, ...]:
        self.first_entry.append(len(self.specs))
        self.nodes.append(node)
        self.specs.extend(specs)
        return tuple(NodeEntry(len(self.nodes) - 1, i) for i in range(len(specs)))

    def _entry_id(self, entry: NodeEntry) -> int:
        return self.first_entry[entry.node_id] + entry.index

    def _spec_of(self, entry: NodeEntry) -> TensorSpec:
        return self.specs[self._entry_id(entry)]

    def _root(self, entry_id: int) -> int:
        return self.aliases.get(entry_id, entry_id)

    def _lifetimes(self, heads: Sequence[NodeEntry]) -> dict[int, Lifetime]:
        """Lifetimes by the entry that owns the storage; a step is a node's index."""
        last_step = len(self.nodes)
        start: dict[int, int] = {}
        end: dict[int, int] = {}
        pinned: set[int] = set()
        for step, (node, first) in enumerate(zip(self.nodes, self.first_entry, strict=True)):
            sources = [self._root(self._entry_id(entry)) for entry in node.inputs]
            for source in sources:
                end[source] = step
            # Inputs keep the value that was set; what depends only on parameters is computed at load.
            keeps = node.is_null or all(s in pinned and s >= self.num_inputs for s in sources)
            for entry in range(first, first + node.num_outputs):
                if self._root(entry) == entry:
                    start[entry] = step
                    end.setdefault(entry, step)
                    if keeps:
                        pinned.add(entry)
        for head in heads:
            end[self._root(self._entry_id(head))] = last_step
        return {
            entry: Lifetime(self.specs[entry].nbytes, start[entry], end[entry], entry in pinned)
            for entry in start
        }


def _spec(ty: tvm.ir.Type, name: str) -> TensorSpec:
    shape = getattr(ty, "shape", None)
    if shape is None or not all(isinstance(dim, tvm.tirx.IntImm) for dim in shape):
        raise UnsupportedOperatorError(
            f"expected a static shape, got {shape}",
            hint="shapes that depend on an input's values are not supported: fix them with --input-values",
        )
    return TensorSpec.from_dtype(name, str(ty.dtype), tuple(int(dim) for dim in shape))
