"""The classic graph executor: a graph of kernel calls, set up once and run in a plain loop.

Promises the names and the results of TVM's `GraphModule`. Functions are resolved, memory is allocated and
arguments are bound before the loop of the first `GraphModule.run`; every run is a loop over calls and
allocates nothing. Trusts the graph to be valid (`Graph` checks it) and the kernels to stay within their
arguments. A module must be used by one thread at a time.

It differs from the classic executor in four ways, none of which changes a result:

- **Load-time nodes.** A node that reads only weights, or outputs of such nodes, runs once, in `load_params`,
  and is left out of `run`; weights that no other node reads are freed. Bundles express transformed weights
  this way. A classic executor, which runs these nodes every time, computes the same numbers.
- **Memory.** As in the classic executor, a storage is allocated once. But inputs, weights and outputs of
  load-time nodes have their own memory, since they must survive a run.
- **Joins.** A call whose output is its inputs, one after another, is left out: the inputs are made in their
  places in the output (`agent.bundle.joins`).
- **Copies.** `get_output` and `get_input` return copies, `output_view` and `input_view` the memory itself.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from agent.bundle.graph import Graph
from agent.bundle.params import ParamEntry, index_params
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import FormatError, IncompatibleError, InputError
from agent.runtime import load_time
from agent.runtime.host_tensor import as_array, check_adoptable, check_fits, copy_of
from agent.runtime.memory import GraphMemory
from agent.runtime.module import KernelModule
from agent.runtime.program import Kernels, Program
from agent.runtime.shared_memory import SharedMemory
from agent.runtime.storage import Array

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from agent.runtime.benchmark import BenchmarkResult


def create(
    graph_json: str | bytes | Graph, module: str | os.PathLike[str] | Kernels, device: object = "cpu"
) -> GraphModule:
    """Set up a graph: parse it, load its kernels and look each of them up.

    Parameters
    ----------
    graph_json
        The text of mod.json, or the parsed graph.
    module
        Path of mod.so, or its loaded kernels.
    device
        `"cpu"`, or TVM's device object of that name.

    Raises
    ------
    FormatError
        If the graph is not valid, or calls a kernel that the module does not have.
    EndlessDataError
        If the graph is over a limit.
    IncompatibleError
        If the module cannot be loaded on this machine, or `device` or a tensor's device is not the CPU.
    """
    return GraphModule(*load(graph_json, module), device)


def load(graph_json: str | bytes | Graph, module: str | os.PathLike[str] | Kernels) -> tuple[Graph, Kernels]:
    """Parse the graph and load the kernels, unless that is already done; errors are those of `create`."""
    graph = graph_json if isinstance(graph_json, Graph) else Graph.from_json(graph_json)
    return graph, KernelModule.load(module) if isinstance(module, str | os.PathLike) else module


class GraphModule:
    """A graph with its kernels and memory; `create` makes one, or `BucketedModule` several that share."""

    def __init__(
        self, graph: Graph, kernels: Kernels, device: object = "cpu", shared: SharedMemory | None = None
    ) -> None:
        if not str(device).startswith("cpu"):
            raise IncompatibleError(f"device: expected cpu, got {device}")
        if any(kind != 1 for kind in graph.device_index):
            raise IncompatibleError("mod.json: expected all tensors on the cpu, got another device")
        self._graph = graph
        self._kernels = kernels
        # Specs of inputs and weights by index; their indices and entries by name.
        self._inputs = [graph.spec(graph.node_row_ptr[i], graph.nodes[i].name) for i in graph.arg_nodes]
        self._index = {spec.name: index for index, spec in enumerate(self._inputs)}
        self._entries = {graph.nodes[i].name: graph.node_row_ptr[i] for i in graph.arg_nodes}
        self._heads = [graph.entry_id(entry) for entry in graph.heads]
        self._head_names: dict[str, int] = {}
        for index, entry in enumerate(graph.heads):
            self._head_names.setdefault(graph.nodes[entry.node_id].name, index)
        self._shared = shared
        self._memory = GraphMemory(graph, shared)
        self._params: set[int] = set()
        self._load_time = load_time.find(graph, self._memory, ())
        self._program = Program(graph, self._memory, kernels)

    def get_num_inputs(self) -> int:
        """Return the number of inputs, including weights."""
        return len(self._inputs)

    def get_num_outputs(self) -> int:
        """Return the number of outputs."""
        return len(self._heads)

    def get_input_index(self, name: str) -> int:
        """Return the index of an input or weight by its name, or -1 if there is none."""
        return self._index.get(name, -1)

    def get_input_info(self) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
        """Return the shapes and the dtypes of the inputs by name, without the weights that were loaded."""
        specs = [spec for spec in self._inputs if self._entries[spec.name] not in self._params]
        return {spec.name: spec.shape for spec in specs}, {spec.name: spec.dtype for spec in specs}

    @property
    def kernels(self) -> Kernels:
        """The kernels that the graph calls."""
        return self._kernels

    def set_input(self, key: str | int | None = None, value: object = None, **params: object) -> None:
        """Copy values into inputs.

        Parameters
        ----------
        key, value
            Name or index of one input, and its value: an array of the input's shape and dtype, anything that
            supports DLPack, or nested lists of numbers.
        **params
            Further inputs by name.

        Raises
        ------
        InputError
            If there is no such input, a value does not fit it, or it is a weight that load-time nodes read.
        """
        if key is not None:
            self._set(key, value)
        for name, each in params.items():
            self._set(name, each)

    def set_input_zero_copy(self, key: str | int, value: Array) -> None:
        """Let the graph read an input from the caller's memory, which must not change during a run.

        Parameters
        ----------
        key
            Name or index of the input.
        value
            Array of the input's shape and dtype; contiguous, writable and aligned to 64 bytes.

        Raises
        ------
        InputError
            If there is no such input, the array does not have these properties, or the input is a weight that
            load-time nodes read.
        """
        spec = self._changeable(key)
        check_adoptable(f"input {spec.name!r}", value, spec)
        self._adopt(self._entries[spec.name], value)

    def get_input(self, key: str | int, out: Array | None = None) -> Array:
        """Return a copy of an input or weight, made in `out` if it is given.

        Raises
        ------
        InputError
            If there is no such input, or it was freed because only load-time nodes read it.
        """
        return copy_of(self.input_view(key), out)

    def input_view(self, key: str | int) -> Array:
        """Return the memory of an input or weight; errors are those of `get_input`."""
        spec = self._argument(key)
        entry = self._entries[spec.name]
        if entry in self._memory.freed:
            raise InputError(f"weight {spec.name!r} was freed after load-time nodes had read it")
        return self._memory.array(entry).view()

    def load_params(self, params: ReadableBuffer) -> None:
        """Load the weights, and run the nodes that depend only on them.

        As in the classic executor, weights that the graph does not have are skipped.

        Parameters
        ----------
        params
            The content of mod.params, or a view of it, which is not kept.

        Raises
        ------
        FormatError
            If this is not a parameter file, or a weight does not have the graph's shape and dtype.
        EndlessDataError
            If it has too many tensors.
        InputError
            If a load-time node needs a weight that an earlier call loaded and freed. Load all weights with
            one call.
        ExecutionError
            If a load-time node fails.
        """
        given: dict[int, ParamEntry] = {}
        for param in index_params(params):
            index = self._index.get(param.spec.name)
            if index is None:
                continue
            if param.spec != self._inputs[index]:
                raise FormatError(
                    f"mod.params does not fit mod.json: expected {self._inputs[index]}, got {param.spec}"
                )
            given[self._entries[param.spec.name]] = param
        self._program.bound = False
        self._params |= given.keys()
        self._load_time = load_time.find(self._graph, self._memory, self._params)
        self._memory.set_constant(self._load_time.constant)
        with memoryview(params) as data:
            load_time.fold(
                self._graph,
                self._memory,
                self._load_time,
                given=given,
                data=data,
                execute=self._program.execute,
                shared=self._shared,
            )
        if self._shared is not None:
            self._shared.reserve(self._memory.input_bytes(), self._memory.storage_bytes().values())

    def run(self, **inputs: object) -> None:
        """Run the graph.

        Parameters
        ----------
        **inputs
            Inputs by name, set as by `set_input`; the others keep their values.

        Raises
        ------
        InputError
            If there is no such input, or a value does not fit it.
        ExecutionError
            If a kernel fails.
        """
        for name, value in inputs.items():
            self._set(name, value)
        if not self._program.bound:
            self._program.bind(self._load_time.nodes)
        self._program.run()

    def get_output(self, key: str | int, out: Array | None = None) -> Array:
        """Return a copy of an output, made in `out` if it is given.

        Parameters
        ----------
        key
            Index of the output, or name of the node that computes it.
        out
            Array of the output's shape and dtype, or None for a new one.

        Raises
        ------
        InputError
            If there is no such output, or `out` does not fit it.
        """
        entry = self._output(key)
        if out is not None:
            check_fits("out", out, self._graph.spec(entry))
        return copy_of(self._memory.array(entry), out)

    def output_spec(self, key: str | int) -> TensorSpec:
        """Return the datatype and shape of an output, without a name; errors are those of `output_view`."""
        return self._graph.spec(self._output(key))

    def output_view(self, key: str | int) -> Array:
        """Return the memory of an output, which the next run overwrites.

        Raises
        ------
        InputError
            If there is no such output.
        """
        return self._memory.array(self._output(key)).view()

    def set_output_zero_copy(self, key: str | int, value: Array) -> None:
        """Let the graph write an output to the caller's memory.

        Parameters
        ----------
        key
            Index of the output, or name of the node that computes it.
        value
            Array of the output's shape and dtype; contiguous, writable and aligned to 64 bytes.

        Raises
        ------
        InputError
            If there is no such output, it is an input or weight (which no kernel writes), or the array does
            not have these properties.
        """
        entry = self._output(key)
        root = self._memory.root[entry]
        if root in self._load_time.constant or root in self._entries.values():
            raise InputError(f"output {key} is an input or a weight: no kernel writes it")
        check_adoptable(f"output {key}", value, self._graph.spec(entry))
        self._adopt(entry, value)

    def benchmark(
        self,
        device: object = "cpu",  # noqa: ARG002 - the classic's signature
        func_name: str = "run",
        *,
        repeat: int = 5,
        number: int = 5,
        min_repeat_ms: float | None = None,
        limit_zero_time_iterations: int = 100,
        end_to_end: bool = False,
        cooldown_interval_ms: float = 0,
        repeats_to_cooldown: int = 1,
        **inputs: object,
    ) -> BenchmarkResult:
        """Time the graph: one run to warm up, then `repeat` results of `number` runs each.

        Parameters
        ----------
        device
            Ignored; the classic executor has it.
        func_name
            `run`, the only function of a graph.
        repeat, number, min_repeat_ms, limit_zero_time_iterations, cooldown_interval_ms, repeats_to_cooldown
            As in `agent.runtime.benchmark.time_calls`.
        end_to_end
            Whether to time copying the inputs and outputs as well.
        **inputs
            Inputs to set first, by name; the others keep their values.

        Returns
        -------
        BenchmarkResult
            Seconds per run.

        Raises
        ------
        InputError
            If `func_name` is not `run`, there is no such input, or a value does not fit it.
        ExecutionError
            If a kernel fails.
        """
        # Imported late: a worker times nothing, and does without 300 KiB of statistics.
        from agent.runtime.benchmark import time_calls

        if func_name != "run":
            raise InputError(f"func_name: expected run, got {func_name!r:.80}")
        for name, value in inputs.items():
            self._set(name, value)
        outputs = [np.empty_like(self.output_view(index)) for index in range(self.get_num_outputs())]

        def call() -> None:
            self.run(**inputs)
            for index, out in enumerate(outputs):
                self.get_output(index, out)

        return time_calls(
            call if end_to_end else self.run,
            number=number,
            repeat=repeat,
            min_repeat_ms=min_repeat_ms or 0,
            limit_zero_time_iterations=limit_zero_time_iterations,
            cooldown_interval_ms=cooldown_interval_ms,
            repeats_to_cooldown=repeats_to_cooldown,
        )

    def _adopt(self, entry: int, value: Array) -> None:
        self._memory.adopt(entry, value)
        self._program.rebind(self._memory.owner(entry))

    def _argument(self, key: str | int) -> TensorSpec:
        index = self._index.get(key, -1) if isinstance(key, str) else key
        if not 0 <= index < len(self._inputs):
            expected = ", ".join(repr(name) for name in self.get_input_info()[0]) or "none"
            raise InputError(f"expected one of the inputs {expected}, got {key!r:.80}")
        return self._inputs[index]

    def _output(self, key: str | int) -> int:
        index = self._head_names.get(key, -1) if isinstance(key, str) else key
        if not 0 <= index < len(self._heads):
            raise InputError(f"expected an output from 0 to {len(self._heads) - 1}, got {key!r:.80}")
        return self._heads[index]

    def _changeable(self, key: str | int) -> TensorSpec:
        spec = self._argument(key)
        if self._entries[spec.name] in self._load_time.consumed:
            raise InputError(
                f"weight {spec.name!r} was read by load-time nodes and cannot be set",
                hint="load all weights again with load_params",
            )
        return spec

    def _set(self, key: str | int, value: object) -> None:
        spec = self._changeable(key)
        target = self._memory.array(self._entries[spec.name])
        if isinstance(value, np.ndarray) and value.shape == target.shape and value.dtype == target.dtype:
            target[...] = value
            return
        array = as_array(value, spec)
        check_fits(f"input {spec.name!r}", array, spec)
        np.copyto(target, array)
