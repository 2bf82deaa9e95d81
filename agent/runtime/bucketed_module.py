"""A model whose dimensions change: one graph for each bucket, padded inputs, outputs cut to size.

Promises that a request is computed by the smallest bucket that holds it, that what is added to its inputs are
the manifest's padding values and nothing of an earlier request, and that its outputs have the shapes that the
model itself would give. The graphs share kernels, weights and memory. Leaves it to the compiler that padding
does not change an answer. A module must be used by one thread at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from agent.bundle.buckets import CONSTANT, Buckets, InputAxis
from agent.bundle.graph import Graph
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import FormatError, InputError
from agent.runtime.graph_executor import GraphModule
from agent.runtime.host_tensor import check_fits
from agent.runtime.program import Kernels
from agent.runtime.shared_memory import SharedMemory
from agent.runtime.storage import ALIGNMENT, Array, Block, allocate, view

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# Of all plans that are kept: with about 200 bytes for each view, a megabyte.
_MOST_VIEWS: Final = 4096


@dataclass(frozen=True, slots=True)
class _Plan:
    """What computes a request of some sizes: views of its bucket's memory, made once.

    `inputs` are the memory of each, contiguous and in its exact shape; `outputs` are cut to the request's
    sizes. `pads` are written in order before a run, each with the view or number that it gets.
    """

    module: GraphModule
    specs: Mapping[str, TensorSpec]
    inputs: Mapping[str, Array]
    pads: Sequence[tuple[Array, Array | float]]
    outputs: Mapping[str, Array]


class BucketedModule:
    """The graphs of a model, set up once.

    Parameters
    ----------
    buckets
        The manifest's.
    inputs, outputs
        The manifest's tensors, whose shapes are those of the largest bucket.
    graphs
        The graph of each bucket, in order.
    kernels
        The kernels that all of them call.
    make
        Makes the module of one graph: `GraphModule`, or `GraphModuleDebug`.

    Raises
    ------
    FormatError
        If a graph is not that of its bucket.
    """

    def __init__(
        self,
        buckets: Buckets,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        graphs: Iterable[Graph],
        kernels: Kernels,
        make: type[GraphModule] = GraphModule,
    ) -> None:
        self.buckets = buckets
        self._inputs = {spec.name: spec for spec in inputs}
        self._outputs = {spec.name: spec for spec in outputs}
        shared = SharedMemory()
        self.modules = [make(graph, kernels, "cpu", shared) for graph in graphs]
        self._rules: dict[str, list[InputAxis]] = {name: [] for name in self._inputs}
        for each in buckets.inputs:
            self._rules[each.tensor].append(each)
        # Memory for an input whose exact form is not the beginning of its padded one.
        self._staging: dict[str, Block] = {}
        self._sizes = tuple(dimension.high for dimension in buckets.dimensions)
        self._bucket_sizes = list(buckets.sizes())
        # By sizes. The same ones come again and again, and a plan takes longer than a small network.
        self._plans: dict[tuple[int, ...], _Plan] = {}
        self._most_plans = max(1, _MOST_VIEWS // (len(self._inputs) + len(self._outputs)))

    @property
    def kernels(self) -> Kernels:
        """The kernels that the graphs call."""
        return self.modules[-1].kernels

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the request that a bucket was chosen for."""
        return self._sizes

    @property
    def bucket(self) -> tuple[int, ...]:
        """The sizes of the bucket that was chosen last."""
        return tuple(self._bucket_sizes[self.buckets.smallest_for(self._sizes)])

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The inputs of the request that a bucket was chosen for, by name."""
        return self._plan.specs

    @property
    def module(self) -> GraphModule:
        """The graph that was chosen last; at first the largest."""
        return self.modules[self.buckets.smallest_for(self._sizes)]

    def load_params(self, params: ReadableBuffer) -> None:
        """Load the weights of all graphs, each once; errors are those of `GraphModule.load_params`.

        Raises
        ------
        FormatError
            If a graph's inputs or outputs are not those of its bucket.
        """
        for module, sizes in zip(reversed(self.modules), reversed(self._bucket_sizes), strict=True):
            module.load_params(params)
            self._check(module, sizes)

    def fit(self, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, TensorSpec]:
        """Choose the bucket for a request.

        Parameters
        ----------
        shapes
            The shapes of its inputs by name; a dimension of which it has no input takes its lowest size.

        Returns
        -------
        Mapping
            The tensors that the request must have, by name.

        Raises
        ------
        InputError
            If a size is out of its bounds, or two inputs disagree.
        """
        self.use(self.buckets.sizes_of(shapes, self._inputs))
        return self.specs

    def use(self, sizes: tuple[int, ...]) -> None:
        """Choose the smallest bucket that holds these sizes, which are within the bounds."""
        self._sizes = sizes

    def input_view(self, name: str) -> Array:
        """Return the memory for an input of the request, contiguous and in its exact shape."""
        return self._plan.inputs[name]

    def run(self) -> None:
        """Pad the inputs and run the chosen graph.

        Raises
        ------
        ExecutionError
            If a kernel fails.
        """
        plan = self._plan
        for view_, value in plan.pads:
            view_[...] = value
        plan.module.run()

    def compute(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Fit, set all inputs, run, and return `outputs`.

        Raises
        ------
        InputError
            If an input is missing, or its shape or dtype does not fit.
        ExecutionError
            If a kernel fails.
        """
        specs = self.fit({name: value.shape for name, value in inputs.items()})
        for name in specs:
            if name not in inputs:
                raise InputError(f"expected an input {name!r}, got {', '.join(map(repr, inputs)) or 'none'}")
            self.set_input(name, inputs[name])
        self.run()
        return self.outputs()

    def set_input(self, name: str, value: Array) -> None:
        """Copy values into an input of the request that a bucket was chosen for.

        Raises
        ------
        InputError
            If its shape or dtype does not fit.
        """
        check_fits(f"input {name!r}", value, self.specs[name])
        self.input_view(name)[...] = value

    def get_input_info(self) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
        """Return the shapes, in the largest bucket, and the dtypes of the inputs by name."""
        return self.modules[-1].get_input_info()

    def outputs(self) -> dict[str, Array]:
        """Return views of the outputs by name, cut to the request's sizes; the next run overwrites them."""
        return dict(self._plan.outputs)

    @property
    def _plan(self) -> _Plan:
        """The plan for the request that a bucket was chosen for."""
        plan = self._plans.get(self._sizes)
        if plan is None:
            if len(self._plans) == self._most_plans:
                del self._plans[next(iter(self._plans))]
            plan = self._plans[self._sizes] = self._made_plan(self._sizes)
        return plan

    def _made_plan(self, sizes: tuple[int, ...]) -> _Plan:
        module, buckets = self.module, self.buckets
        shapes = {name: buckets.input_shape(spec, sizes) for name, spec in self._inputs.items()}
        inputs = {name: self._exact_input(module, name, shape) for name, shape in shapes.items()}
        return _Plan(
            module,
            {name: TensorSpec(name, self._inputs[name].datatype, shape) for name, shape in shapes.items()},
            inputs,
            [pad for name in inputs for pad in self._pads(name, inputs[name], module.input_view(name))],
            {
                name: module.output_view(index)[tuple(map(slice, buckets.output_shape(spec, sizes)))]
                for index, (name, spec) in enumerate(self._outputs.items())
            },
        )

    def _exact_input(self, module: GraphModule, name: str, shape: tuple[int, ...]) -> Array:
        padded = module.input_view(name)
        if _is_beginning(shape, padded.shape):
            return padded.reshape(-1)[: math.prod(shape)].reshape(shape)
        if name not in self._staging:
            self._staging[name] = allocate(self._inputs[name].nbytes)
        return view(self._staging[name], self._inputs[name].dtype, shape)

    def _pads(self, name: str, exact: Array, padded: Array) -> Iterator[tuple[Array, Array | float]]:
        """Yield what is written to complete an input: first the exact one, if it is not in its place yet."""
        if exact.shape == padded.shape:
            return
        if not _is_beginning(exact.shape, padded.shape):
            yield padded[tuple(map(slice, exact.shape))], exact
        filled = list(exact.shape)
        for rule in self._rules[name]:
            size, wanted = filled[rule.axis], padded.shape[rule.axis]
            if size == wanted:
                continue
            # Axes that were padded already are whole; those to come are as large as the request's.
            before = [slice(each) for each in filled]
            before[rule.axis] = slice(size, wanted)
            last = list(before)
            last[rule.axis] = slice(size - 1, size)
            yield padded[tuple(before)], rule.value if rule.pad == CONSTANT else padded[tuple(last)]
            filled[rule.axis] = wanted

    def _check(self, module: GraphModule, sizes: tuple[int, ...]) -> None:
        shapes, dtypes = module.get_input_info()
        got: list[object] = [(name, dtypes[name], shapes[name]) for name in sorted(shapes)]
        expected: list[object] = [
            (name, spec.dtype, self.buckets.input_shape(spec, sizes))
            for name, spec in sorted(self._inputs.items())
        ]
        if module.get_num_outputs() != len(self._outputs):
            raise FormatError(f"expected {len(self._outputs)} outputs, got {module.get_num_outputs()}")
        for index, spec in enumerate(self._outputs.values()):
            output = module.output_spec(index)
            got.append((output.dtype, output.shape))
            expected.append((spec.dtype, self.buckets.output_shape(spec, sizes)))
        if got != expected:
            raise FormatError(
                f"the graph of bucket {list(sizes)} does not match the manifest: "
                f"expected {expected!s:.200}, got {got!s:.200}"
            )


def staged_bytes(buckets: Buckets, inputs: Sequence[TensorSpec]) -> int:
    """Return the memory for inputs whose exact form is not always the beginning of their padded one.

    Parameters
    ----------
    buckets, inputs
        As for `BucketedModule`.
    """
    total = 0
    for spec in inputs:
        axes = [each.axis for each in buckets.inputs if each.tensor == spec.name]
        if len(axes) > 1 or any(size > 1 for axis in axes for size in spec.shape[:axis]):
            total += spec.nbytes + ALIGNMENT
    return total


def _is_beginning(exact: Sequence[int], padded: Sequence[int]) -> bool:
    """Whether an array of shape `exact` is the beginning of the memory of one of shape `padded`.

    It is if only one axis grows, and all axes before it have one element.
    """
    grown = [axis for axis, (a, b) in enumerate(zip(exact, padded, strict=True)) if a != b]
    return not grown or (len(grown) == 1 and all(size == 1 for size in padded[: grown[0]]))
