"""Programs of PyTorch, with what PyTorch 2.14 answered when `record.py` asked it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import onnx
import pytest

from builder import compile, load, run
from builder.compiling.lower import lower
from builder.errors import ModelError, ParityError, ShapeError
from builder.importer import import_onnx
from builder.kernels.decisions import Schedules
from builder.target.device_target import resolve
from tests.builder.importer.frameworks.archive import write_pt2
from tests.builder.importer.frameworks.stand_in import VECTORS, stand_in


def imported(tmp_path: Path, name: str, **behaviour: str):  # type: ignore[no-untyped-def]  # noqa: ANN201
    path = write_pt2(tmp_path / f"{name}.pt2")
    return load(path, python=stand_in(tmp_path, VECTORS / name, **behaviour))


def test_a_program_keeps_its_names_and_brings_a_reference(tmp_path: Path) -> None:
    model = imported(tmp_path, "recurrent")
    assert model.name == "recurrent"
    assert model.source_sha256 == hashlib.sha256((tmp_path / "recurrent.pt2").read_bytes()).hexdigest()
    assert [(spec.name, spec.datatype, spec.shape) for spec in (*model.inputs, *model.outputs)] == [
        ("ids", "INT64", (1, 7)),
        ("mask", "FP32", (1, 7)),
        ("output_0", "FP32", (1, 7, 4)),
        ("output_1", "FP32", (1, 1, 4)),
    ]
    names = {node.name for node in model.source.nodes}
    assert {"table", "rnn/LSTM"} <= {name.partition("_")[0] for name in names}
    assert model.reference is not None
    assert model.reference.framework == "PyTorch 2.14.1"
    examples = np.load(VECTORS / "recurrent" / "examples.npz")
    np.testing.assert_array_equal(model.reference.inputs["ids"], examples["ids"])  # valid indices


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["x86", "xnnpack"])
def test_a_program_that_is_quantised_is_computed_with_integers(tmp_path: Path, backend: str) -> None:
    model = imported(tmp_path, f"quantised_{backend}")
    lines: list[str] = []
    package = compile(model, progress=lines.append)
    assert any(line.startswith("agrees with PyTorch 2.14.1") for line in lines)
    by_name = {fate.name: fate for fate in package.nodes}
    assert {"first", "block.0", "head"} <= set(by_name)
    graph = package.members["mod.json"]
    assert b"integer_conv2d" in graph or b"integer_winograd" in graph
    assert b"integer_matmul" in graph
    assert model.reference is not None
    result = run(package, dict(model.reference.inputs)).get_output("output_0")
    theirs = model.reference.outputs[0]
    assert np.abs(result - theirs).max() < 0.1 * np.abs(theirs).max()


@pytest.mark.parametrize("backend", ["x86", "xnnpack"])
@pytest.mark.parametrize(("target", "floats"), [("rpi5", 0), ("rpi4", 1)])
def test_each_layer_has_an_integer_kernel(backend: str, target: str, floats: int) -> None:
    """But the first, of three channels, where no instruction multiplies four bytes at once."""
    model = import_onnx(onnx.load(VECTORS / f"quantised_{backend}" / "model.onnx"))
    lowered = lower(model.mod, resolve(target), Schedules(strict=True))
    names = [var.name_hint for var in lowered.kernels.get_global_vars()]
    layers = [name for name in names if "conv2d" in name or "winograd" in name or "matmul" in name]
    assert len(layers) == 3  # first, block.0, head
    assert sum("integer" not in name for name in layers) == floats
    assert sum("integer_matmul" in name for name in layers) == 1


def test_a_shape_is_refused_as_for_other_models(tmp_path: Path) -> None:
    path = write_pt2(tmp_path / "m.pt2")
    with pytest.raises(ShapeError, match="the model has no input 'image'"):
        load(path, python=stand_in(tmp_path, VECTORS / "recurrent"), input_shapes={"image": (1,)})


def test_a_reference_of_another_shape_is_refused(tmp_path: Path) -> None:
    lie = "import numpy; numpy.savez('outputs.npz', output_0=numpy.zeros(3), output_1=numpy.zeros(3))"
    with pytest.raises(ModelError, match=r"output output_0: expected \[3\] as PyTorch"):
        imported(tmp_path, "recurrent", after=f"exec({lie!r}) if request['command'] == 'run' else None")


def test_an_export_that_is_wrong_is_found(tmp_path: Path) -> None:
    """A weight of the exported model is off by two percent."""
    vectors = tmp_path / "vectors"
    vectors.mkdir()
    for file in (VECTORS / "recurrent").iterdir():
        (vectors / file.name).write_bytes(file.read_bytes())
    exported = onnx.load(vectors / "model.onnx")
    [scale] = [tensor for tensor in exported.graph.initializer if tensor.name == "scale"]
    scale.CopyFrom(onnx.numpy_helper.from_array(np.float32(0.51), "scale"))
    onnx.save(exported, vectors / "model.onnx")
    model = load(write_pt2(tmp_path / "m.pt2"), python=stand_in(tmp_path, vectors))
    with pytest.raises(ParityError, match=r"against PyTorch 2\.14\.1"):
        compile(model)


def test_an_object_that_is_no_model_is_refused() -> None:
    with pytest.raises(ModelError, match="expected a path, or a module or program of PyTorch, got int"):
        load(3)
