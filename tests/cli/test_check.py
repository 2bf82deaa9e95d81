"""`edgebundle check`: whether a model can be compiled, and if not, why and what to change."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from builder.bundles.package import Package
from builder.running.local_run import Runner
from tests.builder.importer.tflite.test_control_flow import with_variable
from tests.builder.importer.tflite.tflite_file import write
from tests.cli.terminal import Terminal

MODEL = Path(__file__).resolve().parents[2] / "examples" / "digits" / "digits.onnx"


def refused(path: Path, producer: str) -> Path:
    """A model with two operators that cannot be imported, as `producer` wrote it."""
    nodes = [
        helper.make_node("NonZero", ["x"], ["n"], name="/where"),
        helper.make_node("RandomNormalLike", ["x"], ["r"], name="/noise"),
    ]
    x, r = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1100, 1000]) for name in "xr")
    n = helper.make_tensor_value_info("n", TensorProto.INT64, [2, None])
    graph = helper.make_graph(nodes, "graph", [x], [n, r])
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8, producer_name=producer), path)
    return path


def test_a_model_that_can_be_compiled(terminal: Terminal) -> None:
    result = terminal("check", MODEL, "-q")
    assert result.code == 0
    assert result.err == []
    assert f"{MODEL}: can be compiled" in result.out
    assert "input image: FP32 [1,1,8,8]" in result.out
    document = json.loads(terminal("check", MODEL, "--json").out)
    assert document["accepted"]
    assert document["outputs"] == [{"name": "logits", "datatype": "FP32", "shape": [1, 10]}]


@pytest.mark.parametrize(
    ("producer", "advice"), [("pytorch", "torch.where"), ("tf2onnx", "tf.boolean_mask"), ("other", "Where")]
)
def test_a_refusal_says_what_to_change_in_the_framework(
    terminal: Terminal, tmp_path: Path, producer: str, advice: str
) -> None:
    result = terminal("check", refused(tmp_path / "m.onnx", producer), "-q")
    assert result.code == 4
    assert result.out == ""
    assert result.err[0].startswith("edgebundle: error: 2 operators cannot be imported")
    explained = [line for line in result.err if line.startswith("  ")]
    assert explained[0] == "  NonZero, 1 node: /where"
    assert "known at run time" in explained[1]
    assert advice in explained[2]
    assert len(result.err) < 24


@pytest.mark.slow
def test_a_variable_of_tensorflow_lite_is_a_state(terminal: Terminal, tmp_path: Path) -> None:
    """It counts in a bundle, too, without a declaration."""
    first = np.full((2, 3), 0.5, np.float32)
    model, bundle = tmp_path / "sum.tflite", tmp_path / "sum.bundle"
    model.write_bytes(write(*with_variable(counts=True, first=first)))
    result = terminal("check", model, "-q")
    assert "  input t0: FP32 [2,3]\n  output t3: FP32 [2,3]\n" in result.out
    assert "  state v_before: FP32 [2,3], first 0.5, then v_after\n" in result.out
    document = json.loads(terminal("check", model, "--json").out)
    assert document["states"] == [{"input": "v_before", "output": "v_after", "initial": 0.5, "most": None}]
    assert [spec["name"] for spec in document["inputs"]] == ["t0"]
    assert terminal("compile", model, "-q", "-o", bundle).code == 0
    assert "v_after becomes v_before, first 0.5" in terminal("inspect", bundle).out
    run = Runner(Package.load(bundle))
    sums = [float(run({"t0": np.ones((2, 3), np.float32)}).outputs["output_0"][0, 0]) for _ in range(3)]
    assert sums == [1.5, 2.5, 3.5]


def test_compile_explains_a_refusal_in_the_same_words(terminal: Terminal, tmp_path: Path) -> None:
    model = refused(tmp_path / "m.onnx", "pytorch")
    checked = terminal("check", model, "-q")
    compiled = terminal("compile", model, "-q", "-o", tmp_path / "m.bundle")
    assert (compiled.code, compiled.err) == (checked.code, checked.err)


def test_a_refusal_as_json(terminal: Terminal, tmp_path: Path) -> None:
    result = terminal("check", refused(tmp_path / "m.onnx", "pytorch"), "--json")
    assert result.code == 4
    document = json.loads(result.out)
    assert not document["accepted"]
    assert [o["operator"] for o in document["obstacles"]] == ["NonZero", "RandomNormalLike"]
    assert document["obstacles"][1]["nodes"] == ["/noise"]


def test_open_shapes_are_explained_in_the_framework_too(terminal: Terminal, tmp_path: Path) -> None:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", "m"]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "graph", [x], [y])
    onnx.save(helper.make_model(graph, ir_version=8, producer_name="pytorch"), tmp_path / "m.onnx")
    result = terminal("check", tmp_path / "m.onnx", "-q")
    assert result.code == 4
    assert "torch.onnx.export" in result.err[1]
    assert "--input-shapes" in result.err[-1]


def test_a_model_that_the_reference_refuses_is_not_accepted(terminal: Terminal, tmp_path: Path) -> None:
    """ONNX Runtime 1.32 has no kernel for Relu of int16."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.INT16, [4]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "graph", [x], [y])
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), tmp_path / "m.onnx")
    result = terminal("check", tmp_path / "m.onnx", "-q")
    assert result.code == 4
    assert "ONNX Runtime refused the model" in result.err[0]


def test_a_wrong_name_is_reported_before_any_library_is_loaded(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "builder.importer.formats", None)  # importing it would fail
    monkeypatch.delitem(sys.modules, "builder.compiling.parity", raising=False)
    (tmp_path / "right.onnx").touch()
    for verb in ("check", "compile"):
        result = terminal(verb, tmp_path / "wrong.onnx", "-q")
        assert result.code == 4
        assert "no such file" in result.err[0]
        assert "right.onnx" in result.err[1]
