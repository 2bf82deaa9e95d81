"""Kernels for every named ARM target, on an emulator of that processor, against this machine's outputs.

An instruction that the processor does not have ends the program, so the target's features are tested as well.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from builder import run
from tests.packaging.conftest import Root, edgebundle

pytestmark = pytest.mark.arm

PROGRAM = """
import sys
from pathlib import Path
import numpy
from agent.runtime.graph_executor import create
folder = Path("/opt/model")
module = create((folder / "mod.json").read_bytes(), str(folder / "mod.so"))
module.load_params((folder / "mod.params").read_bytes())
module.set_input(0, numpy.load(folder / "input.npy"))
for _ in range(2):  # buffers are reused: a kernel that relies on zeros fails the second time
    module.run()
for index in range(module.get_num_outputs()):
    numpy.save(folder / f"output_{index}.npy", numpy.array(module.get_output(index)))
print(module.get_num_outputs())
"""
# name of the target, Debian's architecture, processor of the board
TARGETS = (
    ("rpi3", "arm64", "cortex-a53"),
    ("rpi4", "arm64", "cortex-a72"),
    ("rpi5", "arm64", "cortex-a76"),
    ("rpi-armv7", "armhf", "cortex-a7"),
)
each_target = pytest.mark.parametrize(("target", "arch", "cpu"), TARGETS, ids=[row[0] for row in TARGETS])


@pytest.fixture(scope="module")
def installed(make_root: Callable[[str, str], Root], build_deb: Callable[..., Path]) -> Callable[[str], Root]:
    """Return a bookworm root for an architecture with the package installed, each made once."""
    roots: dict[str, Root] = {}

    def find(arch: str) -> Root:
        if arch not in roots:
            root = make_root(arch, "bookworm")
            shutil.copy(build_deb("bookworm", arch), root.path / "tmp/edge-agent.deb")
            root.run("apt-get", "install", "--yes", "/tmp/edge-agent.deb")
            roots[arch] = root
        return roots[arch]

    return find


def run_there(root: Root, cpu: str, bundle: Path, value: np.ndarray) -> list[np.ndarray]:
    folder = root.path / "opt/model"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tarfile.open(bundle) as archive:
        for name in ("mod.so", "mod.json", "mod.params"):
            archive.extract(name, folder, filter="data")
    np.save(folder / "input.npy", value)
    python = ["/usr/bin/env", f"QEMU_CPU={cpu}", "/usr/lib/edge-agent/current/bin/python", "-I", "-c"]
    count = int(root.run(*python, PROGRAM).split()[0])
    return [np.load(folder / f"output_{index}.npy") for index in range(count)]


def assert_same(here: list[np.ndarray], there: list[np.ndarray], limit: float) -> None:
    assert len(here) == len(there)
    for mine, theirs in zip(here, there, strict=True):
        assert mine.shape == theirs.shape
        assert np.abs(mine - theirs).max() / np.abs(mine).max() < limit


@each_target
def test_the_classifier_gives_this_machines_outputs(
    target: str,
    arch: str,
    cpu: str,
    installed: Callable[[str], Root],
    compiled: Callable[..., Path],
    digits_onnx: Path,
) -> None:
    (tensor,) = onnx.load(digits_onnx).graph.input
    shape = [dim.dim_value or 1 for dim in tensor.type.tensor_type.shape.dim]
    value = np.random.default_rng(1).random(shape, dtype=np.float32)
    here = run(compiled("host", plain=True), {tensor.name: value}).get_output("output_0")
    there = run_there(installed(arch), cpu, compiled(target, plain=True), value)
    assert_same([here], there, 1e-5)


@each_target
def test_a_real_detector_gives_this_machines_outputs(
    target: str, arch: str, cpu: str, installed: Callable[[str], Root], tmp_path: Path
) -> None:
    models = os.environ.get("EDGEBUNDLE_MODELS")
    if models is None:
        pytest.skip("EDGEBUNDLE_MODELS does not name the folder of the real models")
    (model,) = Path(models).rglob("*slim*320*.onnx")
    bundles = {name: tmp_path / f"{name}.bundle" for name in ("host", target)}
    for name, path in bundles.items():
        edgebundle("compile", model, "--target", name, "--name", "slim", "-o", path)
    (tensor,) = [entry for entry in onnx.load(model).graph.input if entry.type.tensor_type.shape.dim][:1]
    shape = [dim.dim_value or 1 for dim in tensor.type.tensor_type.shape.dim]
    value = np.random.default_rng(1).random(shape, dtype=np.float32) * 2 - 1
    result = run(bundles["host"], {tensor.name: value})
    here = [result.get_output(f"output_{index}") for index in range(len(result.outputs))]
    assert_same(here, run_there(installed(arch), cpu, bundles[target], value), 1e-4)
