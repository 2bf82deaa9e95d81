"""From a `.tflite` file to a compiled model."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from builder import compile, load, run
from builder.errors import ModelError
from tests.builder.importer.tflite.litert import distance, run_converted, run_litert
from tests.builder.importer.tflite.test_conversion import network, weights
from tests.builder.importer.tflite.tflite_file import write

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
