"""A model whose dimensions change: one graph for each bucket, padded inputs, outputs cut to size.

Promises that a request is computed by the smallest bucket that holds it, that what is added to its inputs are
the manifest's padding values and nothing of an earlier request, and that its outputs have the shapes that the
model itself would give. The graphs share kernels, weights and memory. Leaves it to the compiler that padding
does not change an answer. A module must be used by one thread at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from agent.bundle.buckets import CONSTANT, Buckets, InputAxis
from agent.bundle.graph import Graph
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import FormatError, InputError
from agent.runtime.graph_executor import GraphModule
from agent.runtime.host_tensor import check_fits
from agent.runtime.program import Kernels
from agent.runtime.shared_memory import SharedMemory
from agent.runtime.storage import Array, Block, allocate, view

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


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
        self._specs = dict(self._inputs)
        self._sizes = tuple(dimension.high for dimension in buckets.dimensions)
        self._chosen = len(self.modules) - 1
        self._bucket_sizes = list(buckets.sizes())

    @property
    def kernels(self) -> Kernels:
        """The kernels that the graphs call."""
        return self.modules[-1].kernels

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the request that a bucket was chosen for."""
        return self._sizes

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The inputs of the request that a bucket was chosen for, by name."""
        return self._specs

    @property
    def module(self) -> GraphModule:
        """The graph that was chosen last; at first the largest."""
        return self.modules[self._chosen]

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
        return self._specs

    def use(self, sizes: tuple[int, ...]) -> None:
        """Choose the smallest bucket that holds these sizes, which are within the bounds."""
        self._sizes = sizes
        self._chosen = self.buckets.smallest_for(sizes)
        self._specs = {
            name: TensorSpec(name, spec.datatype, self.buckets.input_shape(spec, sizes))
            for name, spec in self._inputs.items()
        }

    def input_view(self, name: str) -> Array:
        """Return the memory for an input of the request, contiguous and in its exact shape."""
        spec = self._specs[name]
        padded = self.module.input_view(name)
        if _is_beginning(spec.shape, padded.shape):
            return padded.reshape(-1)[: math.prod(spec.shape)].reshape(spec.shape)
        if name not in self._staging:
            self._staging[name] = allocate(self._inputs[name].nbytes)
        return view(self._staging[name], spec.dtype, spec.shape)

    def run(self) -> None:
        """Pad the inputs and run the chosen graph.

        Raises
        ------
        ExecutionError
            If a kernel fails.
        """
        for name in self._inputs:
            self._pad(name)
        self.module.run()

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
        check_fits(f"input {name!r}", value, self._specs[name])
        self.input_view(name)[...] = value

    def get_input_info(self) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
        """Return the shapes, in the largest bucket, and the dtypes of the inputs by name."""
        return self.modules[-1].get_input_info()

    def outputs(self) -> dict[str, Array]:
        """Return views of the outputs by name, cut to the request's sizes; the next run overwrites them."""
        module, cut = self.module, {}
        for index, (name, spec) in enumerate(self._outputs.items()):
            shape = self.buckets.output_shape(spec, self._sizes)
            cut[name] = module.output_view(index)[tuple(map(slice, shape))]
        return cut

    def _pad(self, name: str) -> None:
        exact = self.input_view(name)
        padded = self.module.input_view(name)
        if exact.shape == padded.shape:
            return
        if not _is_beginning(exact.shape, padded.shape):
            padded[tuple(map(slice, exact.shape))] = exact
        filled = list(exact.shape)
        for rule in self._rules[name]:
            size, wanted = filled[rule.axis], padded.shape[rule.axis]
            if size == wanted:
                continue
            # Axes that were padded already are whole; those to come are as large as the request's.
            before = [slice(each) for each in filled]
            before[rule.axis] = slice(size, wanted)
            if rule.pad == CONSTANT:
                padded[tuple(before)] = rule.value
            else:
                last = list(before)
                last[rule.axis] = slice(size - 1, size)
                padded[tuple(before)] = padded[tuple(last)]
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


def _is_beginning(exact: Sequence[int], padded: Sequence[int]) -> bool:
    """Whether an array of shape `exact` is the beginning of the memory of one of shape `padded`.

    It is if only one axis grows, and all axes before it have one element.
    """
    grown = [axis for axis, (a, b) in enumerate(zip(exact, padded, strict=True)) if a != b]
    return not grown or (len(grown) == 1 and all(size == 1 for size in padded[: grown[0]]))
