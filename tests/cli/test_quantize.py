"""`edgebundle quantize`, and `edgebundle compile --precision int8`."""

from __future__ import annotations

import hashlib
import html.parser
import json
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from builder.bundles.package import Package
from builder.compiling.options import PRECISIONS
from builder.quantising.session import Session
from builder.quantising.weights_only import WEIGHTS_PRECISIONS
from tests.cli.terminal import Terminal

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits"
DATA = ("--calibration", "DATA")
MODEL = DIGITS / "digits.onnx"
sys.path.insert(0, str(DIGITS))
import pictures  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 training pictures, and their classes."""
    path = tmp_path_factory.mktemp("calibration") / "pictures"
    pictures.write_calibration(path, 64)
    return path


@pytest.fixture(scope="module")
def arrays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibration") / "digits.npz"
    images = pictures.load()[0][:64]
    np.savez(path, image=pictures.preprocess(images).transpose(0, 3, 1, 2))
    return path


@pytest.mark.slow
def test_digits_in_int8_are_as_accurate_as_in_float(terminal: Terminal, folder: Path, tmp_path: Path) -> None:
    """On the held-out pictures, by ONNX Runtime without and with its optimisations."""
    out, report = tmp_path / "int8.onnx", tmp_path / "int8.html"
    done = terminal(
        "quantize", MODEL, "--calibration", folder, "--calibration-labels", folder / "classes.csv", "-o", out,
        "--preprocess", DIGITS / "preprocess.toml", "--report", report,
    )  # fmt: skip
    assert done.code == 0, done
    lines = done.out.splitlines()
    assert lines[0] == f"{out}: digits in int8, activations in uint8"
    titles = {line[:18].strip() for line in lines[1:]}
    assert {"size", "accuracy", "agreement", "noise", "quantised", "ranges", "bias correction"} <= titles
    assert "64 calibration samples" in done.err
    _, _, images, classes = pictures.load()
    values = pictures.preprocess(images).transpose(0, 3, 1, 2)

    def accuracy(session: Session) -> float:
        found = [session.run({"image": value[None]})[0].argmax() for value in values]
        return 100 * float(np.mean(np.array(found) == classes))

    model = onnx.load(out)
    assert accuracy(Session(model)) >= accuracy(Session(onnx.load(MODEL))) - 0.5
    optimised = onnxruntime.InferenceSession(out, providers=["CPUExecutionProvider"])
    found = [optimised.run(None, {"image": value[None]})[0].argmax() for value in values]
    assert 100 * float(np.mean(np.array(found) == classes)) > 98
    assert {n.op_type for n in model.graph.node} == {
        "Conv", "DequantizeLinear", "Flatten", "Gemm", "MaxPool", "QuantizeLinear",
    }  # fmt: skip
    page = report.read_text()
    html.parser.HTMLParser().feed(page)
    assert page.count("<rect") == 4
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_json_has_the_report_and_nothing_else_is_printed(
    terminal: Terminal, arrays: Path, tmp_path: Path
) -> None:
    done = terminal("quantize", MODEL, "--calibration", arrays, "--json", "-o", tmp_path / "a.onnx")
    assert (done.code, done.err) == (0, [])
    report = json.loads(done.out)["report"]
    assert report["int8_share"] == 100
    assert report["agreement"]["samples"] == 64
    assert report["bytes"] == (tmp_path / "a.onnx").stat().st_size
    assert [block["precision"] for block in report["blocks"]] == ["int8"] * 4


@pytest.mark.slow
def test_compile_quantises_first(terminal: Terminal, arrays: Path, tmp_path: Path) -> None:
    """It compiles what `quantize` writes for that target, under the float model's name."""
    out, model = tmp_path / "digits.bundle", tmp_path / "model.onnx"
    done = terminal(
        "compile", MODEL, "--precision", "int8", "--calibration", arrays, "--target", "rpi4", "-o", out,
    )  # fmt: skip
    assert done.code == 0, done
    assert "quantised       100.0 %" in done.out
    manifest = Package.load(out).manifest
    assert manifest.name == "digits"
    assert terminal("quantize", MODEL, "--calibration", arrays, "-o", model, "--target", "rpi4").code == 0
    assert manifest.provenance.source_sha256 == hashlib.sha256(model.read_bytes()).hexdigest()
    zero_points = [t.data_type for t in onnx.load(model).graph.initializer if t.name.startswith("zero_point")]
    assert set(zero_points) == {onnx.TensorProto.INT8}


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        ([], "expected calibration data to quantise with, got none", "give --calibration a folder"),
        (["--calibration", "none.npz"], "no such file or folder: none.npz", "give a folder of about 100"),
        (["--calibration", "."], "expected JPEG, PNG or .npz files, got only others", "give a folder"),
        (["--calibration", "DATA", "-o", "a/b.onnx"], "a/b.onnx: the folder a does not exist", "mkdir -p a"),
        (["--calibration", "DATA", "-o", "."], "expected a file, got a folder", "name the file"),
        (["--calibration", "DATA", "--report", "a/b.html"], "a/b.html: the folder a does", "mkdir -p a"),
        (["--calibration", "DATA", "-o", "model.onnx"], "another file than the model itself", "name another"),
        ([*DATA, "--calibration-labels", "model.onnx"], "model.onnx: expected CSV in UTF-8", ""),
        ([*DATA, "--calibration-labels", "good.csv"], "line 2: expected a class from 0 to 9", ""),
        ([*DATA, "--calibration-labels", "none.csv"], "none.csv: cannot be read", ""),
        (["--calibration", "DATA", "--max-float", "0", "--metric", "sqnr", "--min-sqnr", "99"],
         "expected at least 99 dB, got", "raise --min-sqnr, or --max-float"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_one_line_and_a_hint_and_writes_nothing(
    terminal: Terminal,
    arrays: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
    hint: str,
) -> None:
    (tmp_path / "model.onnx").write_bytes(MODEL.read_bytes())
    (tmp_path / "good.csv").write_text("0,3\n1,10\n")
    monkeypatch.chdir(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    done = terminal("quantize", "model.onnx", "-q", *(str(arrays) if a == "DATA" else a for a in arguments))
    assert done.code == 4, done
    assert done.out == ""
    assert done.err[0].startswith("edgebundle: error: ")
    assert message in done.err[0]
    assert len(done.err) == (2 if hint else len(done.err))
    assert hint in done.err[-1]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_flags_of_quantising_need_the_precision(terminal: Terminal, arrays: Path) -> None:
    done = terminal("compile", MODEL, "--calibration", arrays, "-q")
    assert done.err == [
        "edgebundle: error: --calibration: expected --precision int8 beside it, got none",
        "edgebundle: hint: add --precision int8",
    ]
    assert (
        terminal("compile", MODEL, "--precision", "int8", "-q").err[0].endswith("to quantise with, got none")
    )


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--max-drop", "nan"), ("--max-drop", "-1"), ("--max-float", "101"), ("--min-sqnr", "x")],
)
def test_numbers_out_of_range_are_usage_errors(terminal: Terminal, flag: str, value: str) -> None:
    done = terminal("quantize", MODEL, flag, value)
    assert done.code == 2
    assert value in done.err[0]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["weights-int8", "weights-fp16"])
def test_weights_only_needs_no_calibration_data(terminal: Terminal, precision: str, tmp_path: Path) -> None:
    """`quantize` writes a model, `compile` a bundle; with labelled pictures both say what it cost."""
    out = tmp_path / "small.onnx"
    done = terminal("quantize", MODEL, "--precision", precision, "-o", out)
    assert done.code == 0, done
    assert done.out.splitlines()[0] == f"{out}: digits with {precision}, arithmetic in float32"
    assert "random inputs" in done.out
    onnx.checker.check_model(onnx.load(out))
    bundle = tmp_path / "small.bundle"
    done = terminal("compile", MODEL, "--precision", precision, "-o", bundle, "--json")
    assert done.code == 0, done
    document = json.loads(done.out)
    assert document["quantisation"]["precision"] == precision
    plain = tmp_path / "plain.bundle"
    assert terminal("compile", MODEL, "-o", plain).code == 0
    small, large = (len(Package.load(path).members["mod.params"]) for path in (bundle, plain))
    assert small < (0.32 if precision == "weights-int8" else 0.55) * large


def test_digits_with_few_bits_are_as_accurate(terminal: Terminal, folder: Path, tmp_path: Path) -> None:
    """float16 is right as often as float32."""
    accuracies = {}
    for precision in ("weights-fp16", "weights-int8", "weights-int4"):
        done = terminal(
            "quantize", MODEL, "--precision", precision, "--calibration", folder, "--json",
            "--calibration-labels", folder / "classes.csv", "--preprocess", DIGITS / "preprocess.toml",
            "-o", tmp_path / "small.onnx",
        )  # fmt: skip
        assert done.code == 0, done
        agreement = json.loads(done.out)["report"]["agreement"]
        accuracies[precision] = agreement["accuracy"] - agreement["float_accuracy"]
    assert accuracies["weights-fp16"] == 0
    assert abs(accuracies["weights-int8"]) <= 0.5
    assert abs(accuracies["weights-int4"]) <= 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-drop", "1"], "--max-drop: expected --precision int8 beside it, got weights-int8"),
        (["--report", "r.html"], "--report: expected --precision int8 beside it, got weights-int8"),
        (["--calibration-labels", "classes.csv"], "expected calibration data beside the labels, got none"),
    ],
)
def test_flags_without_a_use_for_weights_only(
    terminal: Terminal, flags: list[str], message: str, tmp_path: Path
) -> None:
    done = terminal("quantize", MODEL, "--precision", "weights-int8", "-o", tmp_path / "out.onnx", *flags)
    assert done.code != 0
    assert any(message in line for line in done.err)
    assert list(tmp_path.iterdir()) == []


def test_precisions_are_those_of_the_quantiser() -> None:
    assert PRECISIONS == ("int8", "weights-int8", "weights-int4", "weights-fp16")
    assert set(PRECISIONS[1:]) == set(WEIGHTS_PRECISIONS)


def test_fp16_is_arithmetic_where_the_target_has_it(terminal: Terminal, tmp_path: Path) -> None:
    bundle = tmp_path / "digits.bundle"
    done = terminal("compile", MODEL, "--precision", "fp16", "--target", "rpi5", "-o", bundle, "--json")
    assert done.code == 0
    report = json.loads(done.out)["quantisation"]
    assert report["precision"] == "fp16"
    assert report["floats"] == []
    assert report["half_macs"] == report["total_macs"]


def test_fp16_elsewhere_is_refused_in_one_line(terminal: Terminal, tmp_path: Path) -> None:
    done = terminal(
        "compile", MODEL, "--precision", "fp16", "--target", "rpi4", "-o", tmp_path / "x.bundle", "-q"
    )
    assert done.code != 0
    assert done.err[0].endswith("got rpi4 (cortex-a72), where it would be slower than float32")
    assert "weights-fp16" in done.err[1]
    assert list(tmp_path.iterdir()) == []


def test_fp16_has_no_use_for_labels(terminal: Terminal, tmp_path: Path) -> None:
    done = terminal(
        "compile",
        MODEL,
        "--precision",
        "fp16",
        "--calibration-labels",
        "classes.csv",
        "-o",
        tmp_path / "x.bundle",
    )
    assert done.code != 0
    assert done.err[0].endswith("--calibration-labels: expected --precision int8 beside it, got fp16")
