"""Mistakes in names, files and flags are told before a compiler is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import pytest

from builder.bundles import key_files
from builder.bundles.package import Package
from builder.cli.early_checks import check_folder_of
from builder.errors import PackageError
from tests.builder.importer.tflite.tflite_file import FileSubgraph, write
from tests.cli.terminal import Edgebundle
from tests.patience import PATIENCE_S

MODEL = Path(__file__).resolve().parents[2] / "examples" / "digits" / "digits.onnx"
# Presets are checked by the device's own code, which needs numpy.
HEAVY = ("onnx", "onnxruntime", "tvm", "tvm_ffi")

MISTAKES = [
    (("complie", "x"), "did you mean compile?"),
    (("compile", "no.onnx"), "no such file: no.onnx"),
    (("compile", MODEL, "--target", "rpi6"), "did you mean rpi5?"),
    (("compile", MODEL, "--sing-key", "x"), "did you mean --sign-key?"),
    (("compile", MODEL, "--sign-key", "no.key"), "no.key"),
    (("compile", MODEL, "--key", "no.key"), "did you mean --sign-key?"),
    (("compile", MODEL, "--columns", "no.csv"), "no.csv"),
    (("compile", MODEL, "--preprocess", "imagenett"), "did you mean imagenet?"),
    (("compile", MODEL, "--preprocess", "no.toml"), "no.toml"),
    (("compile", MODEL, "--postprocess", "no.toml"), "no.toml"),
    (("compile", MODEL, "--labels", "no.txt"), "no.txt"),
    (("compile", MODEL, "--labels", "cocco"), "did you mean coco?"),
    (("compile", MODEL, "--tuning-records", "no-records"), "no-records"),
    (("compile", MODEL, "-o", "no-folder/x.bundle"), "no-folder"),
    (("compile", MODEL, "--name", "No Spaces"), "name: expected"),
    (("compile", MODEL, "--report", "nodes.pdf"), ".json or .html"),
    (("compile", "model.pte"), "torch.export.save"),
    (("quantize", "no.onnx", "--calibration", "."), "no such file: no.onnx"),
    (("quantize", MODEL, "--calibration", "no-folder"), "no such file or folder: no-folder"),
    (("compile", MODEL, "--precision", "int8", "--calibration", "no"), "no such file or folder: no"),
    (("rollback", "--agent", "k", "--model", "m", "--borker", "mqtt://127.0.0.1:1"), "--broker"),
    (("tune", "no.onnx", "-o", "records"), "no such file: no.onnx"),
    (("tune", MODEL, "-o", "records", "--target", "hots"), "did you mean host?"),
    (("run", "no.bundle"), "no.bundle"),
    (("profile", "no.bundle"), "no.bundle"),
    (("verify", "no.bundle", "--trust", "no.pub"), "no.pub"),
    (("inspect", "no.bundle"), "no.bundle"),
    (("sign", "no.bundle", "--key", "no.key"), "--sign-key"),
    (("deploy", "no.bundle", "--agent", "k", "--broker", "mqtt://127.0.0.1:1"), "no.bundle"),
    (("sign", "no.bundle", "--sign-key", "no.key"), "no.key"),
]


@pytest.mark.parametrize(
    ("arguments", "words"), MISTAKES, ids=[" ".join(map(str, a))[-40:] for a, _ in MISTAKES]
)
def test_a_mistake_gets_one_line_and_a_hint(
    edgebundle: Edgebundle, tmp_path: Path, arguments: tuple[str | Path, ...], words: str
) -> None:
    result = edgebundle(*arguments, cwd=tmp_path)
    assert result.returncode in (2, 4)
    lines = result.stderr.splitlines()
    assert lines[0].startswith("edgebundle: error: ")
    assert len(lines) <= 2
    assert words in result.stderr
    assert list(tmp_path.iterdir()) == []


_NOBODY = ("--agent", "k", "--broker", "mqtt://127.0.0.1:1")
# Each names a file of the folder with one wrong letter.
MISSPELT = [
    (("run", "modle.bundle"), "model.bundle"),
    (("run", "model.bundle", "--inputs", "cats.jpg"), "cat.jpg"),
    (("profile", "modle.bundle"), "model.bundle"),
    (("verify", "modle.bundle", "--trust", "signing.pub"), "model.bundle"),
    (("verify", "model.bundle", "--trust", "signing.pup"), "signing.pub"),
    (("inspect", "modle.bundle"), "model.bundle"),
    (("sign", "modle.bundle", "--sign-key", "signing.key"), "model.bundle"),
    (("sign", "model.bundle", "--sign-key", "singing.key"), "signing.key"),
    (("deploy", "modle.bundle", *_NOBODY), "model.bundle"),
    (("infer", "--model", "m", "--inputs", "cats.jpg", *_NOBODY), "cat.jpg"),
    (("compile", MODEL, "--postprocess", "softmax,top3", "--labels", "lables.txt"), "labels.txt"),
    (("repack", "model.bundle", "--labels", "lables.txt"), "labels.txt"),
    (("compile", MODEL, "--preprocess", "pixel.toml"), "pixels.toml"),
]


@pytest.mark.parametrize(("arguments", "meant"), MISSPELT, ids=[f"{a[0]} {meant}" for a, meant in MISSPELT])
def test_a_misspelt_file_is_told_with_the_one_that_was_meant(
    edgebundle: Edgebundle, unsigned: Package, tmp_path: Path, arguments: tuple[str | Path, ...], meant: str
) -> None:
    key_files.generate(tmp_path)
    unsigned.save(tmp_path / "model.bundle")
    (tmp_path / "labels.txt").write_text("".join(f"{digit}\n" for digit in range(10)))
    (tmp_path / "pixels.toml").write_text('kind = "image"\n')
    (tmp_path / "cat.jpg").touch()
    done = edgebundle(*arguments, cwd=tmp_path)
    assert done.returncode == 4
    assert f"hint: did you mean {meant}?" in done.stderr, done.stderr


def test_a_bundle_without_a_signature_is_not_uploaded(
    edgebundle: Edgebundle, unsigned: Package, tmp_path: Path
) -> None:
    unsigned.save(tmp_path / "u.bundle")
    # Nothing listens there: the mistake is told before anybody is asked.
    done = edgebundle("deploy", tmp_path / "u.bundle", "--agent", "k", "--broker", "mqtt://127.0.0.1:1")
    assert done.returncode == 4
    assert "expected a signed bundle" in done.stderr
    assert "edgebundle sign" in done.stderr


@pytest.mark.slow
def test_no_mistake_loads_a_compiler(tmp_path: Path) -> None:
    program = f"""
import contextlib, io, sys
from builder.cli import main
for arguments in {[[str(word) for word in arguments] for arguments, _ in MISTAKES]!r}:
    with contextlib.redirect_stderr(io.StringIO()):
        assert main(arguments) in (2, 4), arguments
    loaded = [name for name in {HEAVY!r} if name in sys.modules]
    assert not loaded, (arguments, loaded)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-800:]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("compile", MODEL, "--input-shapes", "imgae:[1,1,8,8]"), "did you mean image?"),
        (("compile", MODEL, "--input-shapes", "imgae:[1,1,1..8,8]"), "did you mean image?"),
        (("compile", MODEL, "--input-values", "sr=16000"), "its inputs are image"),
        (("tune", MODEL, "--input-values", "sr=16000"), "its inputs are image"),
        (("quantize", MODEL, "--calibration", ".", "--input-shapes", "x:[1]"), "its inputs are image"),
        (("check", MODEL, "--input-shapes", "x:[1]"), "its inputs are image"),
        (("compile", MODEL, "--state", "h:hn"), "inputs are image, outputs logits"),
        (("compile", MODEL, "--columns", "a,b"), "expected 64 names for image"),
    ],
)
def test_names_that_the_model_does_not_have_are_told_before_the_compiler_is_loaded(
    edgebundle: Edgebundle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str | Path, ...],
    words: str,
) -> None:
    for name in ("builder.compiling.compilation", "builder.importer.formats"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it fails
    result = edgebundle(*arguments, cwd=tmp_path)
    assert result.returncode == 4
    assert words in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("inputs", "outputs", "flags", "words"),
    [
        (
            {"input": [1, "n"], "state": [2, "b", 128], "sr": []},
            {"output": [1, 1], "stateN": [2, 1, 128]},
            (),
            "the model's inputs and states have the names of silero's: --preprocess silero",
        ),
        (
            {"x": [1, 4], "h": [1, 8]},
            {"y": [1, 2], "hn": [1, 8]},
            (),
            'some outputs may be inputs of the next run: --state "h:hn"',
        ),
        (
            {"images": [1, 3, 640, 640]},
            {"output0": [1, 84, 8400]},
            ("--postprocess", "yolov8"),
            "80 classes without names: if they are those of COCO, add --labels coco",
        ),
    ],
)
def test_what_a_model_looks_like_is_proposed_before_the_compiler_is_loaded(
    edgebundle: Edgebundle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    inputs: dict[str, list[int | str]],
    outputs: dict[str, list[int | str]],
    flags: tuple[str, ...],
    words: str,
) -> None:
    _save(tmp_path / "m.onnx", inputs, outputs)
    monkeypatch.setitem(sys.modules, "builder.compiling.compilation", None)  # importing it fails
    result = edgebundle("compile", tmp_path / "m.onnx", *flags)
    assert any(line.removeprefix("edgebundle: hint: ") == words for line in result.stderr.splitlines())


_KWS: Final = {"input_1": [1, 49, 10, 1]}


@pytest.mark.parametrize(
    ("inputs", "outputs", "flags", "words"),
    [
        ({"x": [1, 3, "h", "w"]}, {"y": [1, 5]}, (), "expected a shape for each of these inputs: 'x'"),
        (
            {"x": [1, 3, "h", "w"]},
            {"y": [1, 5]},
            ("--input-shapes", "x:[1,1,8,8]"),
            "dimension 1 is fixed at 3",
        ),
        (
            {"x": ["n", 3, "h", "w"]},
            {"y": ["n", 5]},
            ("--input-shapes", "x:[1,3,8,8]", "--postprocess", "top3", "--labels", "coco"),
            "expected 5 labels for y, got 80",
        ),
        (
            {"input": [1, "n"], "state": [2, "b", 128], "sr": []},
            {"output": ["m"], "stateN": ["m"]},
            ("--preprocess", "silero", "--labels", "coco"),
            "expected a postprocess that names classes, got speech",
        ),
        (_KWS, {"y": [1, 12]}, ("--preprocess", "kws", "--labels", "coco"), "expected 12 labels for y"),
        (_KWS, {"y": [1, 12]}, ("--preprocess", "kws", "--postprocess", "yolox"), "postprocess yolox"),
        (_KWS, {"y": [1, 12]}, ("--preprocess", "silero"), "no input 'input'"),
        ({"x": [1, 7]}, {"y": [1, 12]}, ("--preprocess", "kws"), "expected an input of 490 values"),
    ],
)
def test_what_does_not_fit_the_tensors_is_told_before_the_compiler_is_loaded(
    edgebundle: Edgebundle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    inputs: dict[str, list[int | str]],
    outputs: dict[str, list[int | str]],
    flags: tuple[str, ...],
    words: str,
) -> None:
    _save(tmp_path / "m.onnx", inputs, outputs)
    monkeypatch.setitem(sys.modules, "builder.compiling.compilation", None)  # importing it fails
    result = edgebundle("compile", tmp_path / "m.onnx", *flags, cwd=tmp_path)
    assert result.returncode == 4
    assert words in result.stderr
    assert "loading the compiler" not in result.stderr


def test_a_model_of_tensorflow_lite_is_checked_before_the_compiler_is_loaded(
    edgebundle: Edgebundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = FileSubgraph()
    graph.inputs = [graph.tensor((1, 49, 10, 1), name="x", signature=(-1, 49, 10, 1))]
    graph.outputs = [graph.tensor((1, 12), name="y", signature=(-1, 12))]
    (tmp_path / "m.tflite").write_bytes(write(graph))
    for name in ("builder.compiling.compilation", "builder.importer.formats", "tvm", "onnxruntime"):
        monkeypatch.setitem(sys.modules, name, None)
    result = edgebundle("compile", "m.tflite", "--preprocess", "kws", "--labels", "coco", cwd=tmp_path)
    assert result.returncode == 4
    assert "coco: expected 12 labels for y, got 80" in result.stderr


def test_a_state_that_looks_like_a_picture_is_not_taken_for_one(
    edgebundle: Edgebundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(
        tmp_path / "m.onnx",
        {"src": [1, 3, 8, 8], "r1i": [1, 16, 4, 4]},
        {"pha": [1, 1, 8, 8], "r1o": [1, 16, 4, 4]},
    )
    monkeypatch.setitem(sys.modules, "builder.compiling.compilation", None)
    flags = ("--preprocess", "unit", "--state", "r1i:r1o")
    result = edgebundle("compile", "m.onnx", *flags, cwd=tmp_path)
    assert "loading the compiler" in result.stderr, result.stderr


def _save(path: Path, inputs: dict[str, list[int | str]], outputs: dict[str, list[int | str]]) -> None:
    from onnx import TensorProto, helper, save

    values = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in each.items()]
        for each in (inputs, outputs)
    ]
    nodes, weights = [], []
    if set(outputs) == {"y"} and "x" in inputs and len(inputs["x"]) == 4:  # the shape follows from the input
        size = int(outputs["y"][-1])
        nodes = [
            helper.make_node("GlobalAveragePool", ["x"], ["mean"]),
            helper.make_node("Flatten", ["mean"], ["flat"]),
            helper.make_node("MatMul", ["flat", "w"], ["y"]),
        ]
        weights = [helper.make_tensor("w", TensorProto.FLOAT, [3, size], [0.0] * 3 * size)]
    save(helper.make_model(helper.make_graph(nodes, "g", *values, weights)), path)


def test_output_that_cannot_be_written_is_an_error_before_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = str(tmp_path / "o.bundle")
    check_folder_of(output)
    with monkeypatch.context() as changed:
        changed.setattr(os, "access", lambda _path, mode: not mode & os.W_OK)  # root may write anywhere
        with pytest.raises(PackageError, match="may not write to the folder") as refused:
            check_folder_of(output)
    assert refused.value.hint == "free some space there, or write to another folder with -o"
    monkeypatch.setattr(os, "statvfs", lambda _path: SimpleNamespace(f_bavail=0))
    with pytest.raises(PackageError, match=r"the disk of the folder .* is full"):
        check_folder_of(output)
