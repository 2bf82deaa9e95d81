"""The debug executor: a graph executor that can time and inspect single nodes.

Promises the names of TVM's debug executor, and the results of `GraphModule`. Reports list only what `run`
executes: the time of load-time nodes is part of a worker's `load_s`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from agent.bundle.graph import Graph
from agent.bundle.layer import Layer
from agent.errors import InputError
from agent.runtime.benchmark import BenchmarkResult, time_calls
from agent.runtime.graph_executor import GraphModule, load
from agent.runtime.host_tensor import check_fits, copy_of
from agent.runtime.program import Kernels
from agent.runtime.storage import Array
from builder.bundles.profile_report import Report, Row


def create(
    graph_json: str | bytes | Graph, module: str | os.PathLike[str] | Kernels, device: object = "cpu"
) -> GraphModuleDebug:
    """Set up a graph; parameters and errors are those of `agent.runtime.graph_executor.create`."""
    return GraphModuleDebug(*load(graph_json, module), device)


class GraphModuleDebug(GraphModule):
    """A graph whose nodes can be timed and inspected one by one; `create` makes one."""

    def run_individual(
        self, number: int = 10, repeat: int = 1, min_repeat_ms: float = 0
    ) -> list[tuple[float, ...]]:
        """Time each node separately, on the current contents of its inputs.

        Parameters
        ----------
        number, repeat, min_repeat_ms
            As in `agent.runtime.benchmark.time_calls`.

        Returns
        -------
        list of tuple of float
            For each node of the graph, `repeat` results in seconds; zeros for a node that `run` leaves out.

        Raises
        ------
        ExecutionError
            If a kernel fails.
        """
        self.run()
        times = [(0.0,) * repeat] * len(self._graph.nodes)
        for i in self._program.steps:
            times[i] = self.run_individual_node(
                i, number=number, repeat=repeat, min_repeat_ms=min_repeat_ms
            ).results
        return times

    def run_individual_node(
        self, index: int, number: int = 10, repeat: int = 1, min_repeat_ms: float = 0
    ) -> BenchmarkResult:
        """Time one node.

        Parameters
        ----------
        index
            The node's index in the graph.
        number, repeat, min_repeat_ms
            As in `agent.runtime.benchmark.time_calls`.

        Raises
        ------
        InputError
            If there is no such node, or `run` leaves it out.
        """
        if not self._program.bound:
            self._program.bind(self._load_time.nodes)
        if index not in self._program.steps:
            raise InputError(f"expected a node that runs, one of {self._program.steps!s:.200}, got {index}")
        function, arguments = self._program.calls[self._program.steps.index(index)]
        return time_calls(
            lambda: function(*arguments), number=number, repeat=repeat, min_repeat_ms=min_repeat_ms
        )

    def debug_get_output(self, node: int | str, out: Array | None = None, index: int = 0) -> Array:
        """Run up to a node and return a copy of its output, before a later node overwrites it.

        Parameters
        ----------
        node
            Index or name of the node.
        out
            Array of the output's shape and dtype to copy into, or None for a new one.
        index
            Index of the node's output.

        Raises
        ------
        InputError
            If there is no such node or output, or `out` does not fit.
        """
        nodes = self._graph.nodes
        names = {each.name: i for i, each in enumerate(nodes)}
        i = names.get(node, -1) if isinstance(node, str) else node
        if not 0 <= i < len(nodes) or not 0 <= index < nodes[i].num_outputs:
            raise InputError(f"node {node!r:.80} has no output {index}, or does not exist")
        if not self._program.bound:
            self._program.bind(self._load_time.nodes)
        for step in self._program.steps:
            if step > i:
                break
            self._program.execute(step)
        entry = self._graph.node_row_ptr[i] + index
        if self._memory.root[entry] in self._memory.freed:
            raise InputError(f"node {node!r:.80} was freed after load-time nodes had read it")
        if out is not None:
            check_fits("out", out, self._graph.spec(entry))
        return copy_of(self._memory.array(entry), out)

    def debug_get_outputs(self) -> list[tuple[int, Array]]:
        """Run, and copy each output of each node that depends on an input, in order.

        Returns
        -------
        list
            The node's index and the copy, for each.

        Raises
        ------
        ExecutionError
            If a kernel fails.
        """
        if not self._program.bound:
            self._program.bind(self._load_time.nodes)
        copies: list[tuple[int, Array]] = []
        steps = frozenset(self._program.steps)
        for step in sorted(steps | self._memory.left_out):
            if step in steps:
                self._program.execute(step)
            first = self._graph.node_row_ptr[step]
            entries = range(first, first + self._graph.nodes[step].num_outputs)
            copies += [(step, copy_of(self._memory.array(entry), None)) for entry in entries]
        return copies

    def flops(self) -> dict[str, float]:
        """Kernel -> floating-point operations of one call, where the graph says them."""
        nodes = self._graph.nodes
        return {node.func_name: float(node.attrs["flops"]) for node in nodes if "flops" in node.attrs}

    def profile(
        self,
        collectors: None = None,  # noqa: ARG002 - as in TVM; hardware counters are not read
        *,
        number: int = 10,
        flops: Mapping[str, float] | None = None,
        **inputs: object,
    ) -> Report:
        """Run the graph and time every call.

        Parameters
        ----------
        collectors
            Ignored; TVM's debug executor has it.
        number
            Number of runs to average, after one to warm up.
        flops
            Kernel -> floating-point operations of one call, for the report's GFLOP/s.
        **inputs
            Inputs to set first, by name; the others keep their values.

        Returns
        -------
        Report
            A row for each call of a run, in microseconds.

        Raises
        ------
        ValueError
            If `number` is less than 1.
        InputError
            If there is no such input, or a value does not fit it.
        ExecutionError
            If a kernel fails.
        """
        if number < 1:
            raise ValueError(f"number: expected at least 1, got {number}")
        self.run(**inputs)
        clock = time.perf_counter
        steps, calls = self._program.steps, self._program.calls
        spent = [0.0] * len(calls)
        start = clock()
        for _ in range(number):
            for position, (function, arguments) in enumerate(calls):
                before = clock()
                function(*arguments)
                spent[position] += clock() - before
        total = clock() - start
        rows = []
        for i, seconds in zip(steps, spent, strict=True):
            node = self._graph.nodes[i]
            rows.append(
                Row(
                    name=node.func_name,
                    duration_us=seconds / number * 1e6,
                    flops=(flops or {}).get(node.func_name),
                    shapes=", ".join(
                        f"{self._graph.dltype[e]}[{', '.join(map(str, self._graph.shape[e]))}]"
                        for e in self._program.entries(i)
                    ),
                    layers=(Layer.from_attrs(node.attrs),),
                )
            )
        return Report(tuple(rows), total / number * 1e6)
