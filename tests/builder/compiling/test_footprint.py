"""The memory that a bundle declares is the memory that a process takes to load and run it."""

from __future__ import annotations

import select
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from agent.bundle.manifest import Resources
from builder import compile
from builder.bundles.package import Package
from builder.importer import import_onnx

MIB = 1 << 20
# What does not depend on the model's size: objects of Python for each node, stacks of threads, rounding.
FIXED_BYTES = 2 * MIB

SCRIPT = """
import mmap, os, sys
import numpy as np
from agent.runtime.graph_executor import create
from agent.runtime.module import KernelModule

folder, threads = sys.argv[1], int(sys.argv[2])

def step(name):
    print(name, flush=True)
    sys.stdin.readline()

step("start")
kernels = KernelModule.load(f"{folder}/mod.so")
kernels.set_threads(threads)
module = create(open(f"{folder}/mod.json", "rb").read(), kernels)
with open(f"{folder}/mod.params", "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
    with memoryview(mapped) as view:
        module.load_params(view)
for _ in range(10):
    module.run()
step("end")
"""


def anonymous_bytes(pid: int) -> int:
    """Return the memory of a process that no file backs."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel does not say")


def grown_bytes(folder: Path, threads: int) -> tuple[int, int]:
    """Load and run a model ten times in a process; return how much it grew, in the end and at most."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder), str(threads)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"start\n"
        before = most = anonymous_bytes(process.pid)
        process.stdin.write(b"\n")
        while not select.select([process.stdout], [], [], 0.001)[0]:
            most = max(most, anonymous_bytes(process.pid))
        assert process.stdout.readline() == b"end\n"
        after = anonymous_bytes(process.pid)
        process.stdin.write(b"\n")
    assert process.returncode == 0
    return after - before, max(most, after) - before


def network() -> onnx.ModelProto:
    """Make convolutions that Winograd's transform serves, a depthwise one on a large plane, a product."""
    random = np.random.default_rng(1)
    node = onnx.helper.make_node
    shapes: dict[str, tuple[int, ...]] = {"a": (64, 3, 3, 3), "b": (64, 1, 5, 5), "c": (256, 64, 3, 3)}
    shapes |= {"d": (256, 256, 3, 3), "e": (256, 256, 3, 3), "m": (256, 4000)}
    nodes = [
        node("Conv", ["x", "a"], ["xa"], pads=[1] * 4),
        node("Conv", ["xa", "b"], ["xb"], pads=[2] * 4, group=64, strides=[4, 4]),
        node("Conv", ["xb", "c"], ["xc"], pads=[1] * 4),
        node("Conv", ["xc", "d"], ["xd"], pads=[1] * 4),
        node("Conv", ["xd", "e"], ["xe"], pads=[1] * 4),
        node("ReduceMean", ["xe"], ["mean"], axes=[2, 3], keepdims=0),
        node("MatMul", ["mean", "m"], ["y"]),
    ]
    graph = onnx.helper.make_graph(
        nodes,
        "footprint",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, (1, 3, 112, 112))],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, (1, 4000))],
        [
            onnx.numpy_helper.from_array(
                (random.standard_normal(shape) / np.prod(shape[1:]) ** 0.5).astype(np.float32), name
            )
            for name, shape in shapes.items()
        ],
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    path = tmp_path_factory.mktemp("footprint") / "footprint.onnx"
    onnx.save(network(), path)
    return compile(import_onnx(path))


@pytest.mark.slow
def test_the_manifest_declares_the_memory_that_appears(package: Package, tmp_path: Path) -> None:
    resources = package.manifest.resources
    for name in ("mod.so", "mod.json", "mod.params"):
        (tmp_path / name).write_bytes(package.members[name])
    for threads in (1, 2, 4):
        declared = resources.needed_bytes(threads)
        end, peak = grown_bytes(tmp_path, threads)
        assert end <= peak <= 1.1 * declared + FIXED_BYTES
        assert peak >= 0.9 * declared - FIXED_BYTES
    # The network has transformed weights, and activations that matter.
    assert resources.params_bytes > 1.5 * len(package.members["mod.params"])
    assert resources.arena_bytes > 4 * MIB


def test_each_further_thread_takes_its_workspace() -> None:
    resources = Resources(arena_bytes=100, params_bytes=1000, thread_bytes=7)
    assert [resources.needed_bytes(threads) for threads in (0, 1, 2, 4)] == [1100, 1100, 1107, 1121]
    assert Resources(arena_bytes=100, params_bytes=1000).needed_bytes(4) == 1100
