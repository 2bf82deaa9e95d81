"""Buckets from end to end on this machine: any size within the bounds gives the reference's answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from tvm_ffi import structural_equal

from agent.bundle.graph import Graph
from agent.bundle.manifest import Manifest
from agent.runtime.bucketed_module import BucketedModule
from agent.runtime.graph_executor import GraphModule
from builder.bundles.package import Package
from builder.compiler import compile as compile_model
from builder.compiling import compilation
from builder.compiling.lower import LoweredModule, lower
from builder.compiling.options import Options
from builder.errors import ModelError, ShapeError
from builder.running.in_memory import load_kernels
from builder.running.local_run import profile, run
from builder.running.sizes import make_module, timed_bucket
from tests import changing_models

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def attention(attention_bundle: Path) -> Package:
    return Package.load(attention_bundle)


def module_of(package: Package) -> BucketedModule:
    return make_module(package, load_kernels(package.members["mod.so"]), GraphModule)


def test_any_size_and_any_mask_gives_the_answer_at_the_exact_size(attention: Package) -> None:
    module = module_of(attention)
    session = ort.InferenceSession(changing_models.attention().SerializeToString())
    rng = np.random.default_rng(0)
    used = set()
    for _ in range(150):
        batch, sequence = int(rng.integers(1, 4)), int(rng.integers(1, 17))
        mask = (rng.random((batch, sequence)) < 0.6).astype(np.int64)
        mask[np.arange(batch), rng.integers(0, sequence, batch)] = 1
        inputs = {"ids": rng.integers(0, changing_models.TOKENS, (batch, sequence)), "mask": mask}
        outputs = module.compute(inputs)
        used.add(module.modules.index(module.module))
        for got, wanted in zip(outputs.values(), session.run(None, inputs), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
    assert used == {0, 1, 2, 3}


def test_weights_exist_once_in_the_file_and_in_memory(attention: Package, tmp_path: Path) -> None:
    onnx.save(changing_models.attention(), str(tmp_path / "model.onnx"))
    exact = compile_model(
        tmp_path / "model.onnx", options=Options(input_shapes={"ids": (3, 16), "mask": (3, 16)})
    )
    more = len(attention.members["mod.params"]) - len(exact.members["mod.params"])
    assert more < 100  # a few shapes' worth of constants at most
    module = module_of(attention)
    weights = [
        {m.input_view(name).ctypes.data for name in m._index if name not in ("ids", "mask")}
        for m in module.modules
    ]
    assert all(each <= weights[-1] for each in weights)
    needed, single = attention.manifest.resources, exact.manifest.resources
    assert needed.params_bytes == single.params_bytes
    # Besides, a request that is smaller in both dimensions is written beside its padded form first.
    assert needed.arena_bytes <= 1.1 * single.arena_bytes + 2 * (3 * 16 * 8 + 64)


def test_a_bucket_at_its_edge_runs_the_kernels_of_the_exact_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cost at the edge is that of the exact shape: the same functions, called in the same order."""
    lowered: list[LoweredModule] = []

    def keep(*args: Any) -> LoweredModule:
        lowered.append(lower(*args))
        return lowered[-1]

    monkeypatch.setattr(compilation, "lower", keep)
    package = changing_models.compiled(changing_models.rows(), tmp_path, "x:[1..8,3]", buckets={"": (2, 8)})
    exact = compile_model(tmp_path / "model.onnx", options=Options(input_shapes={"x": (8, 3)}))
    _, ours, theirs = (each.kernels for each in lowered)
    assert len(ours.functions) == len(theirs.functions)
    by_name = {var.name_hint: function for var, function in theirs.functions.items()}
    for var, function in ours.functions.items():
        assert structural_equal(function, by_name[var.name_hint])
    assert flops_of(package) == flops_of(exact)


def flops_of(package: Package) -> list[str]:
    nodes = Graph.from_json(package.members["mod.json"]).nodes
    return [node.attrs["flops"] for node in nodes if not node.is_null]


def test_manifest_says_how_each_axis_is_padded_and_cut(attention: Package) -> None:
    buckets = attention.manifest.buckets
    assert buckets is not None
    assert [str(dimension) for dimension in buckets.dimensions] == ["batch=1..3", "sequence=1..16"]
    assert {(a.tensor, a.axis, a.value) for a in buckets.inputs} == {
        ("ids", 0, 7.0),
        ("ids", 1, 7.0),
        ("mask", 0, 0.0),
        ("mask", 1, 0.0),
    }
    assert {(a.tensor, a.axis) for a in buckets.outputs} == {("tokens", 0), ("tokens", 1), ("first", 0)}
    assert buckets.batch == "batch"
    assert attention.manifest.samples.count == 4
    assert Manifest.from_bytes(attention.manifest.to_bytes()) == attention.manifest


def test_run_and_profile_take_any_size(attention: Package) -> None:
    given = {"ids": np.ones((2, 5), np.int64), "mask": np.ones((2, 5), np.int64)}
    assert run(attention, given).outputs["output_0"].shape == (2, 5, 4)
    assert run(attention).outputs["output_0"].shape == (3, 16, 4)
    assert run(attention, input_shapes={"ids": (1, 3)}).outputs["output_1"].shape == (1, 4)
    for shapes, rows in (({"ids": (1, 3)}, "[1, 4]"), ({"ids": (2, 9)}, "[3, 16]")):
        report = profile(attention, input_shapes=shapes, number=1)
        assert any(rows in row.shapes for row in report.rows)
        graph = Graph.from_json(timed_bucket(attention, {}, shapes).members["mod.json"])
        assert {row.name for row in report.rows} <= {node.func_name for node in graph.nodes}
    with pytest.raises(ShapeError, match=r"sequence must be from 1 to 16"):
        run(attention, input_shapes={"ids": (1, 17)})
    with pytest.raises(ShapeError, match="one size of sequence, got 5 in input 'ids' and 6 in 'mask'"):
        run(attention, {**given, "mask": np.ones((2, 6), np.int64)})


def test_an_output_shorter_than_its_input_is_cut_by_its_rule(tmp_path: Path) -> None:
    model = changing_models.frames()
    module = module_of(changing_models.compiled(model, tmp_path, "x:[1,1,5..20]", buckets={"": (12,)}))
    session = ort.InferenceSession(model.SerializeToString())
    for length in range(5, 21):
        x = np.random.default_rng(length).standard_normal((1, 1, length)).astype(np.float32)
        (wanted,) = session.run(None, {"x": x})
        np.testing.assert_allclose(module.compute({"x": x})["y"], wanted, rtol=1e-4, atol=1e-5)


def test_a_model_that_padding_changes_is_compiled_for_each_of_few_sizes(tmp_path: Path) -> None:
    lines: list[str] = []
    model = changing_models.smooth()
    package = changing_models.compiled(model, tmp_path, "x:[1,1,6..8]", progress=lines.append)
    assert package.manifest.buckets is not None
    assert package.manifest.buckets.dimensions[0].sizes == (6, 7, 8)
    assert any("changes output 'y'" in line and "every size from 6 to 8" in line for line in lines)
    module, session = module_of(package), ort.InferenceSession(model.SerializeToString())
    for length in range(6, 9):
        x = np.random.default_rng(length).standard_normal((1, 1, length)).astype(np.float32)
        np.testing.assert_allclose(
            module.compute({"x": x})["y"], session.run(None, {"x": x})[0], rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize(
    ("model", "bounds", "output"),
    [
        (changing_models.smooth(), "x:[1,1,6..24]", "y"),
        (changing_models.attention(masked=False), "ids:[1,1..20]", "tokens"),
        (changing_models.largest(), "x:[1,8..90]", "y"),
        (changing_models.centred_rows(), "x:[1..20,3]", "y"),
    ],
)
def test_a_model_that_padding_changes_is_refused_with_the_output(
    tmp_path: Path, model: onnx.ModelProto, bounds: str, output: str
) -> None:
    with pytest.raises(ModelError, match=f"padding .* from .* to .* changes output '{output}'") as caught:
        changing_models.compiled(model, tmp_path, bounds)
    assert "mask" in str(caught.value.hint)


def test_the_sample_of_the_smallest_size_is_looked_at(tmp_path: Path) -> None:
    """Boxes as fractions, which the preset takes for pixels."""
    rows = np.zeros((1, 6, 21), np.float32)
    rows[0, :, 3] = [0.5, 0.5, 0.5, 0.25, 0, 0.9]
    source = """<ir_version: 8, opset_import: ["" : 17]> g (float[n,3,32,32] x) => (float[n,6,21] y)
    { zero = Constant<value = float {0}>() mean = ReduceMean<axes = [1, 2, 3]>(x) none = Mul(mean, zero)
      flat = Flatten(none) axes = Constant<value_ints = [2]>() column = Unsqueeze(flat, axes)
      y = Add(column, rows) }"""
    model = onnx.parser.parse_model(source)
    model.graph.initializer.append(onnx.numpy_helper.from_array(rows, "rows"))
    with pytest.raises(ModelError, match=r"expected boxes as pixels .* as fractions of the picture do"):
        changing_models.compiled(
            model, tmp_path, "x:[1..2,3,32,32]", preprocess="yolov8", postprocess="yolov8"
        )
