"""The graph executor's slow sibling: it looks at every node.

Promises the names of TVM's debug executor, and the same answers as `GraphModule`. Reports list what `run`
executes: load-time nodes are in `load_s` of a worker, not here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from agent.bundle.graph import Graph
from agent.errors import InputError
from agent.runtime.benchmark import BenchmarkResult, time_calls
from agent.runtime.graph_executor import GraphModule, load
from agent.runtime.host_tensor import check_fits, copy_of
from agent.runtime.program import Kernels
from agent.runtime.report import Report, Row
from agent.runtime.storage import Array


def create(
    graph_json: str | bytes | Graph, module: str | os.PathLike[str] | Kernels, device: object = "cpu"
) -> GraphModuleDebug:
    """Set a graph up, as `agent.runtime.graph_executor.create` does."""
    return GraphModuleDebug(*load(graph_json, module), device)


class GraphModuleDebug(GraphModule):
    """A graph whose nodes can be timed and looked at one by one."""

    def run_individual(
        self, number: int = 10, repeat: int = 1, min_repeat_ms: float = 0
    ) -> list[tuple[float, ...]]:
        """Time every node alone, each on whatever lies in its inputs.

        Returns
        -------
        list of tuple of float
            Seconds: a tuple of `repeat` results for each node of the graph, zeros for a node that `run`
            leaves out.
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
        """Time one node by its index in the graph.

        Raises
        ------
        InputError
            If there is no such node, or `run` leaves it out.
        """
        if not self._program.bound:
            self._program.bind(self._load_time.nodes)
        if index not in self._program.steps:
            raise InputError(f"node {index} is not one of those that run: {self._program.steps}")
        function, arguments = self._program.calls[self._program.steps.index(index)]
        return time_calls(
            lambda: function(*arguments), number=number, repeat=repeat, min_repeat_ms=min_repeat_ms
        )

    def debug_get_output(self, node: int | str, out: Array | None = None, index: int = 0) -> Array:
        """Run up to a node and return a copy of what it wrote, before a later node writes over it.

        Parameters
        ----------
        node
            Index or name of the node.
        out
            Array to copy into, or None.
        index
            Which of the node's outputs.

        Raises
        ------
        InputError
            If there is no such node or output, or `out` does not fit.
        """
        nodes = self._graph.nodes
        names = {each.name: i for i, each in enumerate(nodes)}
        i = names.get(node, -1) if isinstance(node, str) else node
        if not 0 <= i < len(nodes) or not 0 <= index < nodes[i].num_outputs:
            raise InputError(f"there is no output {index} of node {node!r:.80}")
        if not self._program.bound:
            self._program.bind(self._load_time.nodes)
        for step in self._program.steps:
            if step > i:
                break
            self._program.execute(step)
        entry = self._graph.node_row_ptr[i] + index
        if self._memory.root[entry] in self._memory.freed:
            raise InputError(f"node {node!r} was freed after load-time nodes had read it")
        if out is not None:
            check_fits("out", out, self._graph.spec(entry))
        return copy_of(self._memory.array(entry), out)

    def profile(
        self,
        collectors: None = None,  # noqa: ARG002 - the classic's signature; hardware counters are not read
        *,
        number: int = 10,
        flops: Mapping[str, float] | None = None,
        **inputs: object,
    ) -> Report:
        """Run the graph with a clock around every call.

        Parameters
        ----------
        number
            Runs that are averaged, after one to warm up.
        flops
            Floating-point operations of one call by kernel, for the report's GFLOP/s.
        **inputs
            Set before; what is not given keeps its value.

        Raises
        ------
        ValueError
            If `number` is not positive.
        """
        if number < 1:
            raise ValueError(f"number is at least 1, not {number}")
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
                )
            )
        return Report(tuple(rows), total / number * 1e6)
