"""The classic graph executor: a graph of kernel calls, set up once and run bare.

Promises the names and the answers of TVM's `GraphModule`. Functions are resolved, memory is allocated and
arguments are bound before the first `GraphModule.run`, which is then a loop over calls and allocates nothing.
Trusts its graph to be whole (`Graph` checks that) and its kernels to keep to their arguments. Not for several
threads at once.

Three things differ from the classic, none of them in an answer:

- **Load-time nodes.** A node that reads nothing but weights (or what such nodes wrote) runs once, in
`load_params`,
  and is left out of `run`; weights that nothing else reads are freed. So are transformed weights expressed: a
  classic executor, which runs these nodes every time, gets the same numbers.
- **Memory.** A storage is allocated once, as in the classic; but inputs, weights and what load-time nodes
write have
  memory of their own, for it must survive a run.
- **Copies.** `get_output` and `get_input` return copies. `output_view` and `input_view` are the memory
itself.
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
from agent.runtime.benchmark import BenchmarkResult, time_calls
from agent.runtime.host_tensor import as_array, check_adoptable, check_fits, copy_of
from agent.runtime.memory import GraphMemory
from agent.runtime.module import KernelModule
from agent.runtime.program import Kernels, Program
from agent.runtime.storage import Array

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def create(
    graph_json: str | bytes | Graph, module: str | os.PathLike[str] | Kernels, device: object = "cpu"
) -> GraphModule:
    """Set a graph up.

    Parameters
    ----------
    graph_json
        The text of mod.json.
    module
        Path of mod.so, or its loaded kernels.
    device
        The CPU: `"cpu"`, or TVM's device object of that name.

    Raises
    ------
    FormatError
        If the graph is none, or calls a kernel that the module lacks.
    IncompatibleError
        If the module cannot be loaded here, or the device is none that this executor runs on.
    """
    return GraphModule(*load(graph_json, module), device)


def load(graph_json: str | bytes | Graph, module: str | os.PathLike[str] | Kernels) -> tuple[Graph, Kernels]:
    """Parse the graph and load the kernels, where they are not yet."""
    graph = graph_json if isinstance(graph_json, Graph) else Graph.from_json(graph_json)
    return graph, KernelModule.load(module) if isinstance(module, str | os.PathLike) else module


class GraphModule:
    """A graph with its kernels and memory; `create` makes one."""

    def __init__(self, graph: Graph, kernels: Kernels, device: object = "cpu") -> None:
        if not str(device).startswith("cpu"):
            raise IncompatibleError(f"this executor runs on the cpu, not on {device}")
        if any(kind != 1 for kind in graph.device_index):
            raise IncompatibleError("mod.json places tensors on another device than the cpu")
        self._graph = graph
        self._kernels = kernels
        # Inputs and weights by index, and their indices and entries by name.
        self._inputs = [graph.spec(graph.node_row_ptr[i], graph.nodes[i].name) for i in graph.arg_nodes]
        self._index = {spec.name: index for index, spec in enumerate(self._inputs)}
        self._entries = {graph.nodes[i].name: graph.node_row_ptr[i] for i in graph.arg_nodes}
        self._heads = [graph.entry_id(entry) for entry in graph.heads]
        self._head_names: dict[str, int] = {}
        for index, entry in enumerate(graph.heads):
            self._head_names.setdefault(graph.nodes[entry.node_id].name, index)
        self._memory = GraphMemory(graph)
        self._params: set[int] = set()
        self._load_time = load_time.find(graph, self._memory, ())
        self._program = Program(graph, self._memory, kernels)

    # -- what the graph takes and gives

    def get_num_inputs(self) -> int:
        """Return how many inputs there are, weights among them."""
        return len(self._inputs)

    def get_num_outputs(self) -> int:
        """Return how many outputs there are."""
        return len(self._heads)

    def get_input_index(self, name: str) -> int:
        """Return the index of an input or weight, -1 if there is none of this name."""
        return self._index.get(name, -1)

    def get_input_info(self) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
        """Return shape and dtype of every input by name, without the weights of `load_params`."""
        specs = [spec for spec in self._inputs if self._entries[spec.name] not in self._params]
        return {spec.name: spec.shape for spec in specs}, {spec.name: spec.dtype for spec in specs}

    @property
    def kernels(self) -> Kernels:
        """The kernels that the graph calls."""
        return self._kernels

    # -- inputs

    def set_input(self, key: str | int | None = None, value: object = None, **params: object) -> None:
        """Copy values into inputs.

        Parameters
        ----------
        key, value
            Name or index of one input, and its value: an array of the input's shape and dtype, or plain
            numbers.
        **params
            Further inputs by name.

        Raises
        ------
        InputError
            If there is no such input, or the value does not fit it.
        """
        if key is not None:
            self._set(key, value)
        for name, each in params.items():
            self._set(name, each)

    def set_input_zero_copy(self, key: str | int, value: Array) -> None:
        """Have the graph read an input from the caller's memory, which must stay what it is while it runs.

        Raises
        ------
        InputError
            If there is no such input, or the array is not of its shape and dtype, contiguous and on a 64-byte
            line.
        """
        spec = self._changeable(key)
        check_adoptable(f"input {spec.name!r}", value, spec)
        self._adopt(self._entries[spec.name], value)

    def get_input(self, key: str | int, out: Array | None = None) -> Array:
        """Return a copy of an input or weight, into `out` if given.

        Raises
        ------
        InputError
            If there is no such input, or it was freed because only load-time nodes read it.
        """
        return copy_of(self.input_view(key), out)

    def input_view(self, key: str | int) -> Array:
        """Return the memory of an input or weight itself."""
        spec = self._argument(key)
        entry = self._entries[spec.name]
        if entry in self._memory.freed:
            raise InputError(f"weight {spec.name!r} was freed after load-time nodes had read it")
        return self._memory.array(entry)

    def load_params(self, params: ReadableBuffer) -> None:
        """Take the weights, and run what depends on nothing else.

        Weights that the graph does not know are skipped, as in the classic.

        Parameters
        ----------
        params
            The bytes of mod.params, or a view of them; they are not kept.

        Raises
        ------
        FormatError
            If these are no parameters, or a weight is not of the graph's shape and dtype.
        InputError
            If a load-time node needs a weight that is not given and was freed before: give all of them at
            once.
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
                    f"mod.params does not fit mod.json: expected {self._inputs[index]}, came {param.spec}"
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
            )

    # -- running

    def run(self, **inputs: object) -> None:
        """Run the graph, on inputs that may be given by name.

        Raises
        ------
        InputError
            If an input does not fit.
        ExecutionError
            If a kernel fails.
        """
        for name, value in inputs.items():
            self._set(name, value)
        if not self._program.bound:
            self._program.bind(self._load_time.nodes)
        self._program.run()

    # -- outputs

    def get_output(self, key: str | int, out: Array | None = None) -> Array:
        """Return a copy of an output, into `out` if given.

        Parameters
        ----------
        key
            Index of the output, or name of the node that computes it.
        out
            Array of the output's shape and dtype.

        Raises
        ------
        InputError
            If there is no such output, or `out` does not fit it.
        """
        entry = self._output(key)
        if out is not None:
            check_fits("out", out, self._graph.spec(entry))
        return copy_of(self._memory.array(entry), out)

    def output_view(self, key: str | int) -> Array:
        """Return the memory of an output itself; it changes with the next run."""
        return self._memory.array(self._output(key))

    def set_output_zero_copy(self, key: str | int, value: Array) -> None:
        """Have the graph write an output into the caller's memory.

        Raises
        ------
        InputError
            If there is no such output, if no kernel writes it (it is an input or weight), or the array is not
            of its shape and dtype, contiguous, writable and on a 64-byte line.
        """
        entry = self._output(key)
        root = self._memory.root[entry]
        if root in self._load_time.constant or root in self._entries.values():
            raise InputError(f"output {key} is an input or weight: no kernel writes it")
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
        repeat, number, min_repeat_ms, limit_zero_time_iterations, cooldown_interval_ms, repeats_to_cooldown
            As in `agent.runtime.benchmark.time_calls`.
        end_to_end
            Time copying inputs and outputs too.
        **inputs
            Set before; what is not given keeps its value.
        """
        if func_name != "run":
            raise InputError(f"a graph has one function, run, not {func_name!r}")
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
        self._program.rebind(self._memory.root[entry])

    # -- names

    def _argument(self, key: str | int) -> TensorSpec:
        index = self._index.get(key, -1) if isinstance(key, str) else key
        if not 0 <= index < len(self._inputs):
            expected = ", ".join(repr(name) for name in self.get_input_info()[0]) or "none"
            raise InputError(f"there is no input {key!r:.80}; the inputs are {expected}")
        return self._inputs[index]

    def _output(self, key: str | int) -> int:
        index = self._head_names.get(key, -1) if isinstance(key, str) else key
        if not 0 <= index < len(self._heads):
            raise InputError(f"there is no output {key!r:.80}; there are {len(self._heads)}, from 0")
        return self._heads[index]

    def _changeable(self, key: str | int) -> TensorSpec:
        spec = self._argument(key)
        if self._entries[spec.name] in self._load_time.consumed:
            raise InputError(
                f"weight {spec.name!r} went into load-time nodes: give all weights to load_params again"
            )
        return spec

    def _set(self, key: str | int, value: object) -> None:
        spec = self._changeable(key)
        array = as_array(value, spec)
        check_fits(f"input {spec.name!r}", array, spec)
        np.copyto(self._memory.array(self._entries[spec.name]), array)
