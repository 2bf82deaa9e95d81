"""The overhead of the graph executor: the time of a run with kernels that return at once.

    python -m benchmarks.executor_overhead [MOD.JSON]

Takes a compiled model's graph, or a chain of 200 nodes with two inputs each, and prints nanoseconds per node.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from agent.bundle.graph import Graph
from agent.bundle.node import NOP, Node, NodeEntry
from agent.runtime import graph_executor

LIMIT_US: Final = 1.0


def chain(length: int = 200) -> Graph:
    """Return a graph in which each node reads the two nodes before it, as in residual networks."""
    nodes = [Node.null("x"), Node.null("y")]
    nodes.extend(
        Node.call(f"n{i}", f"kernel_{i % 20}", [NodeEntry(i), NodeEntry(i + 1)]) for i in range(length)
    )
    storage = [i if i < 2 else 2 + i % 3 for i in range(len(nodes))]
    shape = [(1, 16, 8, 8)] * len(nodes)
    return Graph.build(nodes, [NodeEntry(len(nodes) - 1)], ["float32"] * len(nodes), storage, shape)


def empty_kernels(graph: Graph, folder: Path) -> Path:
    """Compile a library with the graph's kernels, each of which returns at once; return its path."""
    names = sorted({node.func_name for node in graph.nodes if not node.is_null} - {NOP})
    source = folder / "empty.c"
    source.write_text(
        "\n".join(
            f"int __tvm_ffi_{name}(void *s, const void *a, int n, void *r) {{ return 0; }}" for name in names
        )
    )
    library = folder / "empty.so"
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return library


def overhead_us(graph: Graph, repeat: int = 15) -> tuple[float, int]:
    """Return microseconds per node, and the number of nodes that run.

    The figure is the fastest of `repeat` results of 50 runs each: other programs can only add to it.
    """
    with tempfile.TemporaryDirectory() as folder:
        module = graph_executor.create(graph, empty_kernels(graph, Path(folder)))
        count = sum(1 for node in graph.nodes if not node.is_null and node.func_name != NOP)
        results = module.benchmark(repeat=repeat, number=50).results
        return min(results) / count * 1e6, count


def main() -> int:
    """Print the overhead; return 1 if it exceeds the limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("graph", nargs="?", type=Path, help="mod.json of a compiled model")
    path = parser.parse_args().graph
    graph = chain() if path is None else Graph.from_json(path.read_bytes())
    each_us, count = overhead_us(graph)
    run_us = each_us * count
    print(f"executor overhead: {each_us * 1e3:.0f} ns per node with {count} nodes, {run_us:.1f} us per run")
    print(f"limit: {LIMIT_US * 1e3:.0f} ns per node")
    return 0 if each_us <= LIMIT_US else 1


if __name__ == "__main__":
    raise SystemExit(main())
