"""The model as it was given, against the model that we have made of it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from builder.compiler import compile as compile_model
from builder.compiling.comparison import check_rounding
from builder.compiling.judge import Judge
from builder.compiling.parity import compare, run_as_defined
from builder.compiling.sample_inputs import make_inputs
from builder.errors import ParityError
from builder.importer import ImportedModel, import_onnx
from builder.running.in_memory import execute

F, I64 = TensorProto.FLOAT, TensorProto.INT64


def value(name: str, kind: int, shape: Sequence[int | str] | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def made(
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    weights: Sequence[onnx.TensorProto] = (),
) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(weights))
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def saved(model: onnx.ModelProto, folder: Path) -> Path:
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def assert_same(model: ImportedModel, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Assert that original and normalised model give the same, in the same form; return it."""
    judge = Judge(model)
    wanted = judge.outputs(inputs)
    found = run_as_defined(model.onnx, inputs)
    names = [spec.name for spec in model.outputs]
    assert "normalised" not in judge.reference
    assert compare(names, found, wanted).error <= 1e-6
    judge.check_normalised(inputs, wanted)
    return wanted


def clipped() -> onnx.ModelProto:
    nodes = [
        helper.make_node("Mul", ["x", "x"], ["square"], name="squares"),
        helper.make_node("Clip", ["square", "", "high"], ["clipped"], name="limits"),
        helper.make_node("Neg", ["clipped"], ["y"], name="turns"),
    ]
    high = [numpy_helper.from_array(np.float32(0.5), "high")]
    return made(nodes, [value("x", F, [4])], [value("y", F, [4])], high)


X = {"x": np.array([0.1, 0.2, 2, -3], "f4")}


def test_a_file_is_judged_by_itself(tmp_path: Path) -> None:
    model = import_onnx(saved(clipped(), tmp_path))
    assert_same(model, X)
    assert Judge(model).reference.endswith("running the file itself")


def broken(model: ImportedModel) -> ImportedModel:
    """Return a model whose Clip the importer has lost."""
    wrong = onnx.ModelProto()
    wrong.CopyFrom(model.onnx)
    clip = next(node for node in wrong.graph.node if node.op_type == "Clip")
    clip.CopyFrom(helper.make_node("Identity", [clip.input[0]], [clip.output[0]], name=clip.name))
    return replace(model, onnx=wrong)


def test_what_normalising_breaks_is_refused_and_the_node_is_named(tmp_path: Path) -> None:
    model = broken(import_onnx(saved(clipped(), tmp_path)))
    judge = Judge(model)
    wanted = judge.outputs(X)
    with pytest.raises(
        ParityError, match=r"after normalising, output y.*first node that differs is Clip 'limits'"
    ) as caught:
        judge.check_normalised(X, wanted)
    assert "importer" in str(caught.value.hint)


def test_a_difference_of_the_kernels_is_not_blamed_on_the_importer(tmp_path: Path) -> None:
    judge = Judge(import_onnx(saved(clipped(), tmp_path)))
    wanted = judge.outputs(X)
    judge.check_normalised(X, wanted)
    ours = [wanted[0] + np.float32(0.01)]
    with pytest.raises(ParityError, match=r"output y: expected a relative error .* the file itself"):
        check_rounding(judge, X, ours, wanted, compare(["y"], ours, wanted), lambda _: None)


def test_a_file_that_is_changed_meanwhile_is_not_a_fault_of_the_importer(tmp_path: Path) -> None:
    path = saved(clipped(), tmp_path)
    model = import_onnx(path)
    other = clipped()
    other.graph.node[2].op_type = "Abs"
    saved(other, tmp_path)
    judge = Judge(model)
    with pytest.raises(ParityError, match="changed while it was compiled"):
        judge.check_normalised(X, judge.outputs(X))


def test_a_file_that_onnx_runtime_refuses_is_judged_as_normalised(tmp_path: Path) -> None:
    """Sqrt of bfloat16 has no kernel."""
    half = TensorProto.BFLOAT16
    nodes = [helper.make_node("Cast", ["x"], ["h"], to=half), helper.make_node("Sqrt", ["h"], ["r"])]
    nodes.append(helper.make_node("Cast", ["r"], ["y"], to=F))
    model = import_onnx(saved(made(nodes, [value("x", F, [2])], [value("y", F, [2])]), tmp_path))
    judge = Judge(model)
    (found,) = judge.outputs({"x": np.array([4, 9], "f4")})
    np.testing.assert_allclose(found, [2, 3])
    assert "the normalised model, because it cannot run the file: " in judge.reference
    assert judge.reference.isascii() and len(judge.reference) <= 256


def test_a_file_that_ends_onnx_runtime_is_judged_as_normalised(tmp_path: Path) -> None:
    """ONNX Runtime crashes on a Split whose first part is unread."""
    split = helper.make_node("Split", ["x"], ["", "y"], axis=0)
    file = saved(made([split], [value("x", F, [4])], [value("y", F, [2])]), tmp_path)
    model = import_onnx(file)
    assert model.original is not None
    judge = Judge(replace(model, original=replace(model.original, has_open_nodes=False)))
    np.testing.assert_array_equal(judge.outputs(X)[0], X["x"][2:])
    assert judge.reference.endswith("because it cannot run the file: ONNX Runtime crashed (SIGSEGV)")


@pytest.mark.parametrize("parts", [("", "y", ""), ("a", "y", ""), ("", "y", "c")])
def test_a_split_with_unnamed_parts_is_judged_by_the_file(parts: tuple[str, ...], tmp_path: Path) -> None:
    """ONNX Runtime crashes on each."""
    split = helper.make_node("Split", ["x"], parts, axis=0)
    file = saved(made([split], [value("x", F, [6])], [value("y", F, [2])]), tmp_path)
    judge = Judge(import_onnx(file))
    inputs = {"x": np.arange(6, dtype="f4")}
    np.testing.assert_array_equal(judge.outputs(inputs)[0], [2, 3])
    assert judge.reference.endswith("running the file itself")


def test_a_model_in_memory_that_ends_onnx_runtime_is_judged_as_normalised() -> None:
    split = helper.make_node("Split", ["x"], ["", "y"], axis=0)
    model = import_onnx(made([split], [value("x", F, [4])], [value("y", F, [2])]))
    assert model.original is not None
    judge = Judge(replace(model, original=replace(model.original, has_open_nodes=False)))
    np.testing.assert_array_equal(judge.outputs(X)[0], X["x"][2:])
    assert judge.reference.endswith("because it cannot run the file: ONNX Runtime crashed (SIGSEGV)")


def test_a_model_that_computes_in_float16_agrees_but_for_rounding(tmp_path: Path) -> None:
    half = TensorProto.FLOAT16
    nodes = [helper.make_node("Mul", ["x", "x"], ["s"]), helper.make_node("Exp", ["s"], ["y"])]
    model = import_onnx(saved(made(nodes, [value("x", half, [8])], [value("y", half, [8])]), tmp_path))
    inputs = {"x": np.linspace(-2, 2, 8).astype("f2")}
    judge = Judge(model)
    np.testing.assert_array_equal(judge.outputs(inputs)[0], run_as_defined(model.onnx, inputs)[0])
    assert judge.reference.endswith("which equals the file itself")
    rounded = onnx.ModelProto()
    rounded.CopyFrom(model.onnx)
    square = next(node for node in rounded.graph.node if node.op_type == "Mul")
    square.op_type = "Abs"
    del square.input[1]
    judge = Judge(replace(model, onnx=rounded))
    judge.outputs({"x": np.full(8, 1.01, "f2")})
    assert re.search(r"which agrees with the file itself to \d+ dB$", judge.reference)
    wrong = onnx.ModelProto()
    wrong.CopyFrom(model.onnx)
    next(node for node in wrong.graph.node if node.op_type == "Exp").op_type = "Neg"
    with pytest.raises(ParityError, match="expected a signal-to-noise ratio of at least 20 dB"):
        Judge(replace(model, onnx=wrong)).outputs(inputs)


@pytest.mark.parametrize(
    ("factor", "changed", "words"),
    [
        (1e8, "Cos", ""),
        (1, "Cos", "at least 20 dB"),
        (1e8, "Neg", r"at least 1\d[.\d]* dB .* got -"),
    ],
    ids=["a file that amplifies rounding", "a file that does not", "a fault beyond its noise"],
)
def test_a_file_that_amplifies_rounding_is_compared_with_its_own_noise(
    tmp_path: Path, factor: float, changed: str, words: str
) -> None:
    nodes = [
        helper.make_node("Mul", ["x", "factor"], ["m"]),
        helper.make_node("Sin", ["m"], ["s"]),
        helper.make_node("Mul", ["s", "part"], ["p"]),
        helper.make_node("Add", ["x", "p"], ["a"]),
        helper.make_node("QuantizeLinear", ["a", "step", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "step", "zero"], ["y"]),
    ]
    numbers = {"factor": factor, "part": 0.25, "step": 0.02}
    weights = [numpy_helper.from_array(np.float32(number), name) for name, number in numbers.items()]
    weights.append(numpy_helper.from_array(np.uint8(128), "zero"))
    file = saved(made(nodes, [value("x", F, [4096])], [value("y", F, [4096])], weights), tmp_path)
    model = import_onnx(file)
    other = onnx.ModelProto()
    other.CopyFrom(model.onnx)
    next(node for node in other.graph.node if node.op_type == "Sin").op_type = changed
    judge = Judge(replace(model, onnx=other))
    inputs = {"x": np.linspace(-2, 2, 4096, dtype="f4")}
    if words:
        with pytest.raises(ParityError, match=words):
            judge.outputs(inputs)
    else:
        judge.outputs(inputs)
        assert re.search(
            r"agrees with .* to 1\d dB, as it does with itself if its inputs move", judge.reference
        )


def test_inputs_that_became_constants_are_given_to_the_file(tmp_path: Path) -> None:
    nodes = [helper.make_node("Mul", ["x", "factor"], ["m"]), helper.make_node("Add", ["m", "list"], ["y"])]
    inputs = [value("x", F, ["n"]), value("factor", F, ["n"]), value("list", I64, [3])]
    nodes.insert(1, helper.make_node("Cast", ["list"], ["floats"], to=F))
    nodes[2].input[1] = "floats"
    model = import_onnx(
        saved(made(nodes, inputs, [value("y", F, ["n"])]), tmp_path),
        input_shapes={"x": [3]},
        input_values={"factor": 2, "list": [1, 2, 3]},
    )
    (found,) = assert_same(model, {"x": np.ones(3, "f4")})
    np.testing.assert_array_equal(found, [3, 4, 5])


def test_a_classifier_with_texts_on_both_sides(tmp_path: Path) -> None:
    """Its input has texts, its label is a text, and its scores are dictionaries, not in the order of keys."""
    classes = {"domain": "ai.onnx.ml", "classlabels_strings": ["zebra", "ape", "cat"]}
    codes = {"domain": "ai.onnx.ml", "keys_strings": ["a", "b"], "values_floats": [1.0, 2.0]}
    planes = {"coefficients": [1.0, -1.0, 0.5], "intercepts": [0.0, 1.0, 0.2]}
    nodes = [
        helper.make_node("LabelEncoder", ["t"], ["e"], **codes),
        helper.make_node("LinearClassifier", ["e"], ["label", "scores"], **planes, **classes),
        helper.make_node("ZipMap", ["scores"], ["map"], **classes),
    ]
    scores = helper.make_value_info(
        "map",
        helper.make_sequence_type_proto(
            helper.make_map_type_proto(TensorProto.STRING, helper.make_tensor_type_proto(F, []))
        ),
    )
    proto = made(
        nodes, [value("t", TensorProto.STRING, [1, 1])], [value("label", TensorProto.STRING, [1]), scores]
    )
    model = import_onnx(saved(proto, tmp_path))
    label, found = assert_same(model, {"t": np.array([[1]])})
    assert label.tolist() == [0]
    np.testing.assert_allclose(found, [[2, -1, 1.2]], rtol=1e-6)


def test_a_length_that_is_only_known_at_run_time_is_padded_and_counted(tmp_path: Path) -> None:
    nodes = [helper.make_node("NonZero", ["x"], ["y"])]
    model = import_onnx(saved(made(nodes, [value("x", F, [4])], [value("y", I64, None)]), tmp_path))
    places, count = assert_same(model, {"x": np.array([0, 1, 0, 2], "f4")})
    assert places.tolist() == [[1, 3, 0, 0]]
    assert count.tolist() == [2]


def test_a_first_output_that_nothing_reads(tmp_path: Path) -> None:
    """ONNX Runtime crashes on it."""
    nodes = [helper.make_node("Split", ["x", "parts"], ["", "y"], axis=0)]
    parts = [numpy_helper.from_array(np.array([1, 3]), "parts")]
    model = made(nodes, [value("x", F, [4])], [value("y", F, [3])], parts)
    x = np.arange(4, dtype=np.float32)
    for source in (model, saved(model, tmp_path)):
        (wanted,) = assert_same(import_onnx(source), {"x": x})
        np.testing.assert_array_equal(wanted, x[1:])


@pytest.mark.parametrize("largest", [0, 1])
def test_the_largest_in_any_order_are_judged_in_that_of_their_values(tmp_path: Path, largest: int) -> None:
    top = helper.make_node("TopK", ["x", "k"], ["y", "places"], sorted=0, largest=largest)
    weights = [numpy_helper.from_array(np.array([9]), "k")]
    model = made(
        [top], [value("x", F, [2, 40])], [value("y", F, [2, 9]), value("places", I64, None)], weights
    )
    x = np.random.default_rng(0).standard_normal((2, 40)).astype(np.float32)
    for source in (model, saved(model, tmp_path)):
        wanted, _ = assert_same(import_onnx(source), {"x": x})
        np.testing.assert_array_equal(wanted, np.sort(x)[:, ::-1][:, :9] if largest else np.sort(x)[:, :9])


@pytest.mark.parametrize("kind", [TensorProto.UINT8, TensorProto.INT8])
def test_a_picture_of_bytes_may_be_rounded_apart(kind: int) -> None:
    node = helper.make_node(
        "Resize", ["x", "", "s"], ["y"], mode="linear", coordinate_transformation_mode="align_corners"
    )
    model = import_onnx(
        made(
            [node],
            [value("x", kind, [1, 2, 5, 6])],
            [value("y", kind, [1, 2, 10, 12])],
            [numpy_helper.from_array(np.array([1, 1, 2, 2], np.float32), "s")],
        )
    )
    judge = Judge(model)
    inputs = make_inputs(model.inputs, model.onnx)
    assert np.ptp(inputs["x"].astype(int)) > 200  # not a mask
    judge.outputs(inputs)
    assert "which agrees" in judge.reference
    assert not judge.compares_floats


def voting(trees: int, classes: int, seed: int) -> onnx.ModelProto:
    """Trees of one test whose leaves vote for a class, with equal weights; many samples tie."""
    random = np.random.default_rng(seed)
    votes = random.integers(0, classes, 2 * trees)
    features = random.integers(0, 4, trees)
    node = helper.make_node(
        "TreeEnsembleClassifier",
        ["x"],
        ["label", "scores"],
        domain="ai.onnx.ml",
        nodes_treeids=np.repeat(np.arange(trees), 3).tolist(),
        nodes_nodeids=[0, 1, 2] * trees,
        nodes_featureids=np.kron(features, [1, 0, 0]).tolist(),
        nodes_values=[0.5, 0.0, 0.0] * trees,
        nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"] * trees,
        nodes_truenodeids=[1, 0, 0] * trees,
        nodes_falsenodeids=[2, 0, 0] * trees,
        class_treeids=np.repeat(np.arange(trees), 2).tolist(),
        class_nodeids=[1, 2] * trees,
        class_ids=votes.tolist(),
        class_weights=[1 / trees] * (2 * trees),
        classlabels_int64s=list(range(classes)),
    )
    outputs = [value("label", I64, [1]), value("scores", F, [1, classes])]
    return made([node], [value("x", F, [1, 4])], outputs)


def test_equal_votes_do_not_depend_on_the_number_of_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = onnxruntime.SessionOptions

    def with_two_threads() -> onnxruntime.SessionOptions:
        made_options = options()
        made_options.intra_op_num_threads = 2
        return made_options

    monkeypatch.setattr(onnxruntime, "SessionOptions", with_two_threads)
    model = import_onnx(saved(voting(110, 3, 14), tmp_path))
    members = compile_model(model, target="host").members
    judge = Judge(model)
    ties = 0
    for bits in itertools.product([0, 1], repeat=4):
        x = {"x": np.array([bits], "f4")}
        label, scores = judge.outputs(x)
        assert run_as_defined(model.onnx, x)[0] == label
        assert execute(members["mod.so"], members["mod.json"], members["mod.params"], x)[0] == label
        _, second, first = np.sort(scores[0])
        ties += first - second < 1e-6
    assert ties


def test_an_lstm_that_rounds_its_steps_is_judged_as_one_of_real_numbers(tmp_path: Path) -> None:
    state = np.random.default_rng(1)
    weights = {
        "w": state.integers(-127, 128, (1, 6, 16)).astype("i1"),
        "r": state.integers(-127, 128, (1, 4, 16)).astype("i1"),
        "p": state.standard_normal((1, 12)).astype("f4"),
        "s": np.full(1, 0.01, "f4"),
        "z": np.zeros(1, "i1"),
    }
    inputs = ["d", "w", "r", "", "", "", "", "p", "s", "z", "s", "z"]
    lstm = helper.make_node(
        "DynamicQuantizeLSTM", inputs, ["y"], domain="com.microsoft", hidden_size=4, direction="forward"
    )
    model = made(
        [helper.make_node("Mul", ["x", "x"], ["d"]), lstm],
        [value("x", F, [5, 2, 6])],
        [value("y", F, [5, 1, 2, 4])],
        [numpy_helper.from_array(each, name) for name, each in weights.items()],
    )
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    imported = import_onnx(saved(model, tmp_path))
    x = {"x": state.standard_normal((5, 2, 6)).astype("f4")}
    assert_same(imported, x)
    assert Judge(imported).reference.endswith("DynamicQuantizeLSTM as an LSTM of real numbers")
    other = onnx.ModelProto()
    other.CopyFrom(imported.onnx)
    next(node for node in other.graph.node if node.op_type == "Mul").op_type = "Add"
    judge = Judge(replace(imported, onnx=other))
    with pytest.raises(ParityError, match="after normalising"):
        judge.check_normalised(x, judge.outputs(x))


@pytest.mark.parametrize("bias", [0.0, np.finfo("f4").min, -np.inf])
def test_scores_that_a_mask_forbids(tmp_path: Path, bias: float) -> None:
    """ONNX Runtime has the least number where ONNX has minus infinity, and a mask may hold either."""
    names = ["q", "k", "v", "mask", "past_k", "past_v"]
    shapes = [[1, 1, 2, 4], [1, 1, 3, 4], [1, 1, 3, 4], [1, 1, 2, 5], [1, 1, 2, 4], [1, 1, 2, 4]]
    rng = np.random.default_rng(0)
    inputs = {n: rng.standard_normal(s).astype("f4") for n, s in zip(names, shapes, strict=True)}
    inputs["mask"][..., 0] = bias
    node = helper.make_node(
        "Attention", names, ["y", "present_k", "present_v", "scores"], is_causal=1, qk_matmul_output_mode=2
    )
    ends = [value("y", F, [1, 1, 2, 4]), value("scores", F, [1, 1, 2, 5])]
    graph = helper.make_graph([node], "g", [value(n, F, inputs[n].shape) for n in names], ends)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    found = assert_same(import_onnx(saved(model, tmp_path)), inputs)[1]
    assert np.isneginf(found).any()
