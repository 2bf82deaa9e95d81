"""Where a model's time goes, layer by layer, under the roofline of this machine.

    python -m benchmarks.layers THREADS BUNDLE...

Prints JSON. A layer's time is the shortest over many runs of the whole model, so its caches are as in normal
use. Its operations are those that its kernel executes, fused operators included, as TVM estimates them (for
Winograd, the fewer operations of the transform, not those of the convolution). Its bytes are the sizes of its
arguments, each counted once.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.noise import prefer_this_process

RUNS_S: Final = 3.0
LEAST_RUNS: Final = 8
# Bytes of each thread's arrays, which fit a core's L2 cache, the shared L3 cache, or no cache.
LEVELS: Final[Mapping[str, int]] = {"L2": 384 << 10, "L3": 4 << 20, "memory": 192 << 20}
KINDS: Final = ("winograd", "depthwise", "conv2d", "attention", "matmul")


@dataclass(frozen=True, slots=True)
class Layer:
    """One node of the graph.

    Attributes
    ----------
    name
        The kernel's name.
    kind
        One of `KINDS`, or "other".
    time_us
        Microseconds of a call.
    flops, bytes
        Operations of a call, and bytes of its arguments.
    """

    name: str
    kind: str
    time_us: float
    flops: float
    bytes: float

    @property
    def is_product(self) -> bool:
        """Whether it consists of multiply-adds; for other layers the peak means nothing."""
        return self.kind in KINDS

    @property
    def gflops(self) -> float:
        """Billions of operations per second."""
        return self.flops / self.time_us / 1e3

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.bytes


@dataclass(frozen=True, slots=True)
class Roof:
    """The machine's limits with a number of threads.

    Attributes
    ----------
    gflops
        Independent multiply-adds, two operations each.
    gbytes_per_s
        The bandwidth of a triad, by the level of memory that holds its arrays.
    """

    gflops: float
    gbytes_per_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Layers:
    """A model's layers under the roof."""

    threads: int
    roof: Roof
    layers: tuple[Layer, ...]

    @property
    def share_of_peak(self) -> float:
        """Operations of the products, divided by those that the peak allows in the time of all layers."""
        time_us = sum(layer.time_us for layer in self.layers)
        return (
            sum(layer.flops for layer in self.layers if layer.is_product) / time_us / 1e3 / self.roof.gflops
        )

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Layers:
        """Read the JSON that a measuring process printed."""
        layers = tuple(Layer(**layer) for layer in document["layers"])
        return cls(document["threads"], Roof(**document["roof"]), layers)


def measured(bundles: Sequence[Path], threads: int) -> list[Layers]:
    """Measure all bundles in one separate process, so that they share one roof."""
    command = [sys.executable, "-m", "benchmarks.layers", str(threads), *map(str, bundles)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, start_new_session=True)
    return [Layers.of(each) for each in json.loads(done.stdout.splitlines()[-1])]


def roof(threads: int) -> Roof:
    """Measure the machine's peak and its bandwidths."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "machine_peak")
        source = Path(__file__).with_name("machine_peak.c")
        command = [sys.executable, "-m", "ziglang", "cc", "-O3", "-mcpu=native", "-ffp-contract=fast"]
        command += ["-fno-sanitize=all", "-pthread", str(source), "-o", str(program)]
        subprocess.run(command, check=True, capture_output=True)

        def ask(*words: object) -> float:
            asked = [str(program), *map(str, words)]
            return float(subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=True).stdout)

        return Roof(ask("fma", threads), {name: ask("triad", threads, size) for name, size in LEVELS.items()})


def profile(bundle: Path, threads: int) -> tuple[Layer, ...]:
    """Time every layer of a bundle, in order of execution."""
    from agent.bundle.graph import Graph
    from builder.bundles.package import Package
    from builder.running import debug_executor
    from builder.running.in_memory import load_kernels

    package = Package.load(bundle)
    graph = Graph.from_json(package.members["mod.json"])
    kernels = load_kernels(package.members["mod.so"])
    kernels.set_threads(threads)
    module = debug_executor.create(graph, kernels)
    module.load_params(package.members["mod.params"])
    random = np.random.default_rng(0)
    for spec in package.manifest.inputs:
        values = random.standard_normal(spec.shape) if "float" in spec.dtype else np.ones(spec.shape)
        module.set_input(spec.name, values.astype(spec.dtype))
    flops = {node.func_name: float(node.attrs["flops"]) for node in graph.nodes if "flops" in node.attrs}
    first = module.profile(number=3, flops=flops)
    runs = max(LEAST_RUNS, int(RUNS_S / (first.total_us * 1e-6)))
    reports = [module.profile(number=1, flops=flops).rows for _ in range(min(runs, 400) // 2)]
    return tuple(
        Layer(
            rows[0].name,
            kind_of(rows[0].name),
            min(row.duration_us for row in rows),
            rows[0].flops or 0.0,
            sum(map(_bytes, rows[0].shapes.split("], "))),
        )
        for rows in zip(*reports, strict=True)
    )


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel, by its name: one of `KINDS`, or "other"."""
    return next((kind for kind in KINDS if kind in kernel), "other")


def _bytes(argument: str) -> float:
    dtype, _, shape = argument.rstrip("]").partition("[")
    sizes = [int(size) for size in shape.split(",") if size.strip()]
    return np.dtype(dtype).itemsize * math.prod(sizes)


def main(threads: int, bundles: Sequence[Path]) -> None:
    """Measure the layers of bundles, and print them as JSON."""
    prefer_this_process()
    os.environ["EDGE_NUM_THREADS"] = str(threads)
    top = roof(threads)
    print(json.dumps([asdict(Layers(threads, top, profile(bundle, threads))) for bundle in bundles]))


if __name__ == "__main__":
    main(int(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
