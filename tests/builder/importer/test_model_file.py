"""Reading model files: files that are not models, and external weights."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from builder.errors import ModelError
from builder.importer.model_file import decode, read_model
from builder.importer.onnx_import import import_onnx


def test_a_file_is_read_and_its_digest_is_that_of_its_bytes(tmp_path: Path, relu: onnx.ModelProto) -> None:
    path = tmp_path / "relu.onnx"
    path.write_bytes(relu.SerializeToString())
    file = read_model(path)
    assert file.model.graph.node[0].op_type == "Relu"
    assert file.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no such file: .*absent\.onnx"):
        read_model(tmp_path / "absent.onnx")


def test_a_hint_names_the_models_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "present.onnx").write_bytes(b"")
    (tmp_path / "notes.txt").write_bytes(b"")
    for path in (tmp_path / "xyz.onnx", tmp_path):
        with pytest.raises(ModelError) as caught:
            read_model(path)
        assert caught.value.hint == f"in {tmp_path}: present.onnx"


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="got a folder"):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        (b"", "again"),
        (b"hello, this is text", "again"),
        (b"\x00" * 100, "again"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 3\n", "git lfs pull"),
        (b"PK\x03\x04\x14\x00\x00\x00", "unpack it"),
        (b"PK\x03\x04\x14\x00\x00\x00archive/data.pkl", "torch.onnx.export"),
        (b"PK\x03\x04\x14\x00\x00\x00metadata.json", "suffix .keras"),
        (b"\x80\x04\x95\x10\x00sklearn.pipeline", "to_onnx(model, X[:1])"),
        (b"\xff\xd8\xff\xe0\x00\x10JFIF", "pictures are for --inputs"),
        (b"\x93NUMPY\x01\x00", "arrays are for --inputs"),
        (b"\x1f\x8b\x08\x00", "unpack it"),
        (b"tree\nversion=v4\n", "suffix .txt"),
        (b'{"learner": {}}', "suffix .json"),
        (b"\n<!doctype html>", "download the file itself"),
        (b"\x1c\x00\x00\x00TFL3" + b"\x00" * 20, "suffix .tflite"),
        (b"\x89HDF\r\n\x1a\n", "suffix .h5"),
        (b"<!DOCTYPE html><html></html>", "download the file itself"),
    ],
)
def test_a_file_that_is_not_a_model_gets_one_line_and_a_hint(
    tmp_path: Path, content: bytes, hint: str
) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        read_model(path)
    assert "\n" not in str(caught.value)
    assert "model.onnx" in str(caught.value)
    assert hint in (caught.value.hint or "")


def test_a_compressed_pickle_is_known_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "pipe.joblib"
    path.write_bytes(b"\x78\x9c\x00\x00")
    with pytest.raises(ModelError, match="got a pickle, as joblib and scikit-learn save models") as caught:
        read_model(path)
    assert "to_onnx" in (caught.value.hint or "")


def test_every_truncation_of_a_model_is_refused(relu: onnx.ModelProto) -> None:
    raw = relu.SerializeToString()
    for length in range(len(raw)):
        with pytest.raises(ModelError):
            import_onnx(decode(raw[:length], "cut.onnx"))


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_a_damaged_model_is_imported_or_refused_and_never_crashes(data: st.DataObject) -> None:
    node = helper.make_node("Conv", ["x", "w"], ["y"], name="conv", pads=[1, 1, 1, 1])
    graph = helper.make_graph(
        [node, helper.make_node("Relu", ["y"], ["z"])],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2, 4, 4])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, [1, 2, 4, 4])],
        initializer=[numpy_helper.from_array(np.ones((2, 2, 3, 3), np.float32), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    raw = bytearray(model.SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        import_onnx(decode(bytes(raw), "damaged.onnx"))
    except ModelError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("name", ["a\nhint: forged", "a\x1b[2J", "\x00", "a\r"])
def test_names_with_control_characters_are_refused(relu: onnx.ModelProto, name: str) -> None:
    relu.graph.node[0].name = name
    with pytest.raises(ModelError, match="not text"):
        decode(relu.SerializeToString(), "forged.onnx")


def test_an_exporters_notes_may_have_several_lines(relu: onnx.ModelProto) -> None:
    relu.graph.node[0].doc_string = "one\ntwo"
    relu.metadata_props.add(key="names", value="{0: 'a',\n 1: 'b'}")
    assert decode(relu.SerializeToString(), "noted.onnx").graph.node


def external(folder: Path, location: str, **entries: int) -> Path:
    """A model with a weight in another file; `location` is written into the model as it is."""
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[3], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, **entries}.items():
        weight.external_data.add(key=key, value=str(value))
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3])],
        initializer=[weight],
    )
    path = folder / "model.onnx"
    path.write_bytes(
        helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8
        ).SerializeToString()
    )
    return path


def test_weights_beside_the_model_are_loaded(tmp_path: Path) -> None:
    path = external(tmp_path, "weights.bin", offset=4, length=12)
    (tmp_path / "weights.bin").write_bytes(np.array([9, 1, 2, 3], np.float32).tobytes())
    file = read_model(path)
    assert numpy_helper.to_array(file.model.graph.initializer[0]).tolist() == [1, 2, 3]
    assert file.sha256 != hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_digest_covers_the_weights_file(tmp_path: Path) -> None:
    path = external(tmp_path, "weights.bin")
    digests = set()
    for value in (1, 2):
        (tmp_path / "weights.bin").write_bytes(np.full(3, value, np.float32).tobytes())
        digests.add(read_model(path).sha256)
    assert len(digests) == 2


@pytest.mark.parametrize(
    "location",
    ["../secret.bin", "/etc/hostname", "sub/../../secret.bin", "", "..", "a\\b", ".", "link.bin", "dir/x"],
)
def test_weights_outside_the_models_folder_are_refused(tmp_path: Path, location: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret.bin").write_bytes(bytes(12))
    (folder / "link.bin").symlink_to(tmp_path / "secret.bin")
    (folder / "dir").symlink_to(tmp_path)
    (tmp_path / "x").write_bytes(bytes(12))
    with pytest.raises(ModelError, match="weight 'w'"):
        read_model(external(folder, location))


@pytest.mark.parametrize(
    "entries",
    [{"offset": 8}, {"length": 13}, {"offset": 4, "length": 12}, {"offset": -1}, {"offset": 10**30}],
)
def test_weights_beyond_the_end_of_their_file_are_refused(tmp_path: Path, entries: dict[str, int]) -> None:
    (tmp_path / "weights.bin").write_bytes(bytes(12))
    with pytest.raises(ModelError, match="weight 'w'"):
        import_onnx(external(tmp_path, "weights.bin", **entries))


def test_a_missing_weights_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"weights\.bin beside the model"):
        read_model(external(tmp_path, "weights.bin"))


def test_a_model_in_memory_may_not_name_files(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(bytes(12))
    model = onnx.load(external(tmp_path, "weights.bin"), load_external_data=False)
    with pytest.raises(ModelError):
        import_onnx(model)


def test_pipe_without_a_writer_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.onnx")
    with pytest.raises(ModelError, match="expected a regular file, got a device or a pipe"):
        read_model(tmp_path / "model.onnx")


@pytest.mark.parametrize("entries", [{}, {"offset": 4, "length": 12}])
def test_weights_beyond_the_limit_are_refused_without_being_read(
    tmp_path: Path, entries: dict[str, int]
) -> None:
    with (tmp_path / "weights.bin").open("wb") as file:
        file.truncate(9 << 30)  # sparse: reading it would take many seconds
    with pytest.raises(ModelError, match=r"at most \d+ bytes of weights") as caught:
        read_model(external(tmp_path, "weights.bin", **entries))
    assert "quantise" in (caught.value.hint or "")
