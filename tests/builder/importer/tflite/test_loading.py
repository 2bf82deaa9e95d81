"""From a `.tflite` file to a compiled model."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from builder import compile, load, run
from builder.errors import ModelError, ShapeError, UnsupportedOperatorError
from tests.builder.importer.tflite.litert import distance, run_converted, run_litert
from tests.builder.importer.tflite.test_conversion import network, weights
from tests.builder.importer.tflite.tflite_file import FileSubgraph, write

TINY = ("ic_float32", "ic_int8", "kws_float32", "kws_int8")


def test_a_file_is_imported_and_compiled(tmp_path: Path) -> None:
    path = tmp_path / "small.tflite"
    path.write_bytes(write(network()))
    model = load(path)
    assert (model.name, model.notes) == ("small", ())
    assert model.source_sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert [(spec.name, spec.datatype, spec.shape) for spec in (*model.inputs, *model.outputs)] == [
        ("picture", "FP32", (1, 8, 8, 3)),
        ("answer", "FP32", (1, 5)),
    ]
    package = compile(model)
    picture = weights(1, 8, 8, 3)
    theirs = run_litert(path.read_bytes(), [picture])
    assert not isinstance(theirs, str)
    np.testing.assert_allclose(
        run(package, {"picture": picture}).get_output("output_0"), theirs[0], rtol=1e-4, atol=1e-5
    )


def test_another_shape_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "small.tflite"
    path.write_bytes(write(network()))
    assert load(path, input_shapes={"picture": (3, 8, 8, 3)}).outputs[0].shape == (3, 5)


def test_a_length_of_0_is_given_for_an_open_one(tmp_path: Path) -> None:
    graph = FileSubgraph()
    x, w = (graph.tensor((n, 1), name=name, signature=(n, -1)) for n, name in ((2, "x"), (3, "w")))
    top, mean = graph.tensor((2,), name="top"), graph.tensor((2,), name="mean")
    product = graph.tensor((2, 3), name="product")
    graph.op("REDUCE_MAX", [x, graph.constant([1])], [top], "ReducerOptions")
    graph.op("MEAN", [x, graph.constant([1])], [mean], "ReducerOptions")
    graph.op("FULLY_CONNECTED", [x, w, -1], [product], "FullyConnectedOptions")
    graph.inputs, graph.outputs = [x, w], [top, mean, product]
    path = tmp_path / "empty.tflite"
    path.write_bytes(write(graph))
    package = compile(load(path, input_shapes={"x": (2, 0), "w": (3, 0)}))
    result = run(package, {"x": np.zeros((2, 0), np.float32), "w": np.zeros((3, 0), np.float32)})
    wanted = {"output_0": [-np.inf] * 2, "output_1": [0] * 2, "output_2": np.zeros((2, 3))}
    for name, value in wanted.items():
        np.testing.assert_array_equal(result.get_output(name), value)


def filled(*, signature: tuple[int, ...] = ()) -> bytes:
    """A tensor whose shape is an input, computed on the way, times another input."""
    graph = FileSubgraph()
    dims, x = graph.tensor((2,), "int32", name="dims", signature=signature), graph.tensor((), name="x")
    more, tensor, answer = graph.tensor((2,), "int32"), graph.tensor((3, 4)), graph.tensor((3, 4), name="y")
    graph.op("ADD", [dims, graph.constant([1, 1])], [more], "AddOptions")
    graph.op("FILL", [more, x], [tensor])
    graph.op("MUL", [tensor, x], [answer], "MulOptions")
    graph.inputs, graph.outputs = [dims, x], [answer]
    return write(graph)


def test_an_input_that_is_a_shape_becomes_a_constant(tmp_path: Path) -> None:
    path = tmp_path / "filled.tflite"
    path.write_bytes(filled())
    with pytest.raises(UnsupportedOperatorError, match="its shape 't2' depends on values") as caught:
        load(path)
    assert "--input-values" in str(caught.value.hint)
    model = load(path, input_values={"dims": [2, 3]})
    assert [spec.name for spec in model.inputs] == ["x"]
    assert model.outputs[0].shape == (3, 4)
    assert load(path, input_values={"dims": 4}).outputs[0].shape == (5, 5)


def test_an_input_of_open_length_is_as_long_as_its_value(tmp_path: Path) -> None:
    path = tmp_path / "filled.tflite"
    path.write_bytes(filled(signature=(-1,)))
    assert load(path, input_values={"dims": [2]}).outputs[0].shape == (3, 3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dims": [1, 2, 3]}, r"input 'dims': expected \[2\], got a value of \[3\]"),
        ({"dims": [1.5, 2]}, "input 'dims': expected int32"),
        ({"size": [1, 2]}, "the model has no input 'size'; its inputs are dims, x"),
    ],
)
def test_a_value_that_does_not_fit(tmp_path: Path, values: dict[str, list[float]], message: str) -> None:
    path = tmp_path / "filled.tflite"
    path.write_bytes(filled())
    with pytest.raises(ShapeError, match=message):
        load(path, input_values=values)


def test_a_damaged_file_gets_one_line(tmp_path: Path) -> None:
    path = tmp_path / "damaged.tflite"
    path.write_bytes(write(network())[:-300])
    with pytest.raises(ModelError, match=r"damaged\.tflite"):
        load(path)


@pytest.mark.models
@pytest.mark.parametrize("name", TINY)
def test_published_files_keep_their_numbers(name: str) -> None:
    folder = os.environ.get("EDGEBUNDLE_MODELS")
    if folder is None:
        pytest.skip("EDGEBUNDLE_MODELS is not set to a folder of real models")
    path = Path(folder) / "tiny" / f"{name}.tflite"
    model = load(path)  # compares every operator with LiteRT
    assert model.notes == ()
    spec = model.inputs[0]
    rng = np.random.default_rng(0)
    smooth = np.cumsum(rng.standard_normal(spec.shape), axis=1)
    feed = smooth / np.abs(smooth).max()
    feed = np.round(feed * 127) if spec.dtype == "int8" else feed
    raw = path.read_bytes()
    theirs = run_litert(raw, [feed.astype(spec.dtype)])
    assert not isinstance(theirs, str)
    error = distance(run_converted(raw, [feed.astype(spec.dtype)]), theirs)
    # kws_float32 has 8-bit weights, and the interpreter rounds the data too.
    assert error <= {"ic_float32": 1e-5, "kws_float32": 0.05, "ic_int8": 2, "kws_int8": 2}[name]
    if name.endswith("float32"):
        compile(model)
