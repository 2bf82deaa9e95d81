"""Costs of builder and agent besides kernels: a cold compilation, a node of the graph, a first answer.

    python -m benchmarks.costs MODEL.onnx

Prints JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.noise import prefer_this_process

# Limits that are printed next to the measured values.
COMPILE_LIMIT_S, COMPILE_LIMIT_BYTES = 90.0, 4 << 30
NODE_LIMIT_US: Final = 1.0
ANSWER_LIMIT_S: Final = 1.5
COLD_TARGET: Final = "rpi4"
SAMPLE_S: Final = 0.05
ATTEMPTS: Final = 5


@dataclass(frozen=True, slots=True)
class Costs:
    """Figures of one model.

    Attributes
    ----------
    compile_s, compile_bytes
        `edgebundle compile` for a target whose C library the linker has not built yet: seconds, and the peak
        memory of the process and its children together.
    node_us
        The executor's overhead for a node, measured with kernels that return at once.
    nodes
        Nodes of that graph.
    answer_s
        Seconds from the start of a bundle's verification to its worker's first answer: the shortest of
        `ATTEMPTS` attempts.
    """

    compile_s: float
    compile_bytes: int
    node_us: float
    nodes: int
    answer_s: float


def measured(model: Path) -> Costs:
    """Measure the costs of a model, given as an ONNX file, in a separate process."""
    command = [sys.executable, "-m", "benchmarks.costs", str(model)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, start_new_session=True)
    return Costs(**json.loads(done.stdout.splitlines()[-1]))


def cold_compile(model: Path, folder: Path) -> tuple[float, int]:
    """Run `edgebundle compile` with an empty linker cache; return seconds and peak memory in bytes."""
    import psutil

    command = [sys.executable, "-m", "builder", "compile", str(model), "--target", COLD_TARGET]
    command += ["-o", str(folder / "cold.bundle")]
    environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": str(folder / "zig")}
    start, most = time.perf_counter(), 0
    process = psutil.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    while process.poll() is None:
        with contextlib.suppress(psutil.Error):
            family = [process, *process.children(recursive=True)]
            most = max(most, sum(each.memory_info().rss for each in family))
        time.sleep(SAMPLE_S)
    if process.returncode:
        raise RuntimeError(f"edgebundle compile: exit code {process.returncode}: {process.stderr.read()}")
    return time.perf_counter() - start, most


def first_answer_s(bundle: Path, folder: Path) -> float:
    """Verify a bundle and let a worker answer one request, as the agent does; return the seconds it took."""
    from agent.bundle.keyring import Keyring
    from agent.bundle.verify import verify
    from agent.worker.channel import Channel, send_load
    from agent.worker.frames import Answer, Load, Ready, Request
    from builder.bundles.key_files import generate, read_private
    from builder.bundles.package import Package
    from tests.agent.launching import fork, template

    pair = generate(folder / f"keys-{time.monotonic_ns()}")
    signed = folder / "signed.bundle"
    Package.load(bundle).sign(read_private(pair.private)).save(signed)
    keyring = Keyring.from_files([pair.public])
    spec = Package.load(signed).manifest.inputs[0]
    payload = np.random.default_rng(0).standard_normal(spec.shape).astype(np.float32).tobytes()
    tensor = f"{spec.name};FP32;{','.join(map(str, spec.shape))}"

    start = time.perf_counter()
    verified = verify(signed, keyring)
    ours, theirs = socket.socketpair()
    with ours, verified:
        with theirs, template() as (connection, _):
            worker = fork(connection, [theirs.fileno(), 2])
        try:
            names = tuple(verified.files)
            descriptors = [verified.files[name] for name in names]
            send_load(ours, Load(names), verified.manifest.to_bytes(), descriptors)
            channel = Channel(ours)
            ready = channel.receive()
            if ready is None or not isinstance(ready.header, Ready):
                raise RuntimeError(f"the worker: expected Ready, got {ready and ready.header}")
            channel.send(Request(1, "application/octet-stream", (tensor,)), payload)
            answer = channel.receive()
            taken = time.perf_counter() - start
            if answer is None or not isinstance(answer.header, Answer) or answer.header.status != 200:
                raise RuntimeError(f"the worker: expected status 200, got {answer and answer.header}")
        finally:
            worker.kill()
            worker.wait()
    return taken


def main(model: Path) -> None:
    """Measure the costs, and print them as JSON."""
    from agent.bundle.graph import Graph
    from benchmarks.engines import OURS, bundle_of
    from benchmarks.executor_overhead import overhead_us
    from builder.bundles.package import Package

    prefer_this_process()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        compile_s, compile_bytes = cold_compile(model, folder)
        bundle = bundle_of(model, OURS)
        graph = Graph.from_json(Package.load(bundle).members["mod.json"])
        node_us, nodes = overhead_us(graph)
        answer_s = min(first_answer_s(bundle, folder) for _ in range(ATTEMPTS))
    print(json.dumps(asdict(Costs(compile_s, compile_bytes, node_us, nodes, answer_s))))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
