"""`edgebundle run` with tables: the digits' 64 pixels as columns."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from agent.bundle.tensor_spec import TensorSpec
from agent.runtime.preprocess import Preprocessor
from builder import cli
from builder.bundles.package import Package
from builder.cli.rows import is_rows
from builder.compiling.declarations import preprocess
from tests.cli.terminal import Result, Terminal

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits"
NAMES = tuple(f"p{place}" for place in range(64))


def pixels(name: str) -> list[float]:
    """Return a picture as the example's preprocess makes it."""
    spec = TensorSpec("image", "FP32", (1, 1, 8, 8))
    made = Preprocessor(preprocess(str(DIGITS / "preprocess.toml"), (spec,)), spec)
    out = np.zeros(spec.shape, np.float32)
    made(made.decode((DIGITS / f"{name}.png").read_bytes(), "image/png"), out)
    return [float(value) for value in out.reshape(-1)]


@pytest.fixture(scope="module")
def rows_bundle(tmp_path_factory: pytest.TempPathFactory, digits_bundle: Path) -> Path:
    """The digits' bundle, with columns instead of a picture; nothing is compiled."""
    path = tmp_path_factory.mktemp("rows") / "digits.bundle"
    arguments = ["--preprocess", "none", "--columns", ",".join(NAMES), "-o", str(path)]
    assert cli.main(["repack", str(digits_bundle), *arguments]) == 0
    return path


@pytest.fixture
def readings(tmp_path: Path) -> Path:
    """Two digits, the columns in reverse, and what is right."""
    path = tmp_path / "readings.csv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow([*reversed(NAMES), "label"])
        for name in ("seven", "three"):
            rows.writerow([*map(str, reversed(pixels(name))), name])
    return path


def refused(result: Result, *words: str) -> None:
    assert result.code == 4, result
    assert result.out == ""
    assert result.err[0].startswith("edgebundle: error: ")
    for word in words:
        assert word in result.err[0], result


def test_each_row_has_an_answer(terminal: Terminal, rows_bundle: Path, readings: Path) -> None:
    result = terminal("run", rows_bundle, "--inputs", readings)
    assert result.code == 0, result
    assert [line.split()[::2] for line in result.out.splitlines()] == [["2", "seven"], ["3", "three"]]
    assert result.err[0] == "columns that the model does not take: label"
    assert result.err[1].startswith("2 rows in ")
    assert result.err[1].endswith("; 1 seven, 1 three")


def test_json_accuracy_and_files(
    terminal: Terminal, rows_bundle: Path, readings: Path, tmp_path: Path
) -> None:
    result = terminal("run", rows_bundle, "--inputs", readings, "--json")
    assert (result.code, result.err) == (0, [])
    document = json.loads(result.out)
    assert (document["rows"], document["failed"]) == (2, 0)
    assert [row["label"] for row in document["results"]] == ["seven", "three"]
    result = terminal("run", rows_bundle, "--inputs", readings, "--accuracy", readings)
    assert result.out == "top-1 100.0 % of 2 rows\n"
    (tmp_path / "truth.csv").write_text("label\n7\n4\n")
    result = terminal(
        "run", rows_bundle, "--inputs", readings, "--accuracy", tmp_path / "truth.csv", "--json"
    )
    assert json.loads(result.out)["accuracy"]["top1"] == 1
    out = tmp_path / "out.jsonl"
    assert terminal("run", rows_bundle, "--inputs", readings, "-o", out).out == ""
    assert [json.loads(line)["label"] for line in out.read_text().splitlines()] == ["seven", "three"]


def test_rows_of_json(terminal: Terminal, rows_bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    for rows in ([pixels("seven")], pixels("seven"), dict(zip(NAMES, pixels("seven"), strict=True))):
        path.write_text(json.dumps(rows))
        result = terminal("run", rows_bundle, "--inputs", path)
        assert result.code == 0, result
        assert result.out.split()[2] == "seven"


def test_rows_that_cannot_be_used_are_told_and_the_others_go_on(
    terminal: Terminal, rows_bundle: Path, readings: Path, tmp_path: Path
) -> None:
    lines = readings.read_text().splitlines()
    wrong = ",".join(["x", *lines[1].split(",")[1:]])
    empty = ",".join(["", *lines[1].split(",")[1:]])
    table = tmp_path / "mixed.csv"
    table.write_text("\n".join([lines[0], wrong, lines[2], empty, *[wrong] * 30]) + "\n")
    result = terminal("run", rows_bundle, "--inputs", table, "--accuracy", table)
    assert result.code == 4
    assert result.err[0] == f"edgebundle: error: {table}:2: column 'p63': expected a number, got 'x'"
    assert result.err[1] == f"edgebundle: error: {table}:4: column 'p63': expected a value, got none"
    assert result.err[20] == "edgebundle: error: 12 more rows"
    assert "32 could not be used" in result.err[21]
    assert result.out == "top-1 100.0 % of 1 row\n"


def test_mistakes(
    terminal: Terminal, rows_bundle: Path, digits_bundle: Path, readings: Path, tmp_path: Path
) -> None:
    refused(terminal("run", digits_bundle, "--inputs", readings), "expected a bundle that declares columns")
    assert (
        "the model takes pictures: give --inputs"
        in terminal("run", digits_bundle, "--inputs", readings).err[-1]
    )
    short = tmp_path / "short.csv"
    short.write_text("p0,P1\n1,2\n")
    refused(terminal("run", rows_bundle, "--inputs", short), "expected 64 columns, missing 'p1', 'p2'")
    short.write_text("p0,p1\n")
    refused(terminal("run", rows_bundle, "--inputs", short), "missing")
    only = tmp_path / "only.csv"
    only.write_text(",".join(NAMES) + "\n")
    refused(terminal("run", rows_bundle, "--inputs", only), "expected rows, got none")
    refused(terminal("run", rows_bundle, "--inputs", readings, readings), "expected one table, got 2 files")
    refused(terminal("run", rows_bundle, "--inputs", readings, "-o", readings), "another file than the input")
    refused(terminal("run", rows_bundle, "--inputs", readings, "-o", tmp_path / "x.npz"), "ends in .csv")
    refused(terminal("run", rows_bundle, "--inputs", readings, "--print-time"), "--print-time")
    truth = tmp_path / "truth.csv"
    truth.write_text("label\n7\n")
    result = terminal("run", rows_bundle, "--inputs", readings, "--accuracy", truth)
    assert result.code == 4
    assert "has fewer rows than" in result.err[-2]
    truth.write_text("label\n7\n3\n1\n")
    result = terminal("run", rows_bundle, "--inputs", readings, "--accuracy", truth)
    assert result.code == 4
    assert "has more rows than" in result.err[-2]
    assert not (tmp_path / "x.npz").exists()


def test_columns_are_declared_or_refused(
    terminal: Terminal, digits_bundle: Path, rows_bundle: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.bundle"
    both = terminal("repack", digits_bundle, "--columns", ",".join(NAMES), "-o", out)
    refused(both, "expected columns or a preprocess")
    few = terminal("repack", digits_bundle, "--preprocess", "none", "--columns", "a,b", "-o", out)
    refused(few, "--columns: expected 64 names", "got 2: a, b")
    assert not out.exists()
    assert terminal("repack", rows_bundle, "--columns", "none", "-o", out).code == 0
    assert Package.load(out).manifest.columns is None
    assert Package.load(rows_bundle).manifest.columns is not None
    # Before the compiler is loaded.
    few = terminal("compile", DIGITS / "digits.onnx", "--columns", "a,b", "-q", "-o", out)
    refused(few, "--columns: expected 64 names")


def test_which_json_has_rows(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    for text, expected in (('{"inputs": [{}]}', False), ('{"a": 1}', True), ("[]", True), ("{", True)):
        path.write_text(text)
        assert is_rows(str(path)) is expected
    assert is_rows(str(tmp_path / "x.csv"))
    assert not is_rows(str(tmp_path / "none.json"))
    assert not is_rows("x.npz")


@pytest.mark.slow
def test_texts_of_a_pipeline_are_asked_as_they_are(terminal: Terminal, tmp_path: Path) -> None:
    skl2onnx = pytest.importorskip("skl2onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    from skl2onnx.common.data_types import FloatTensorType, StringTensorType
    from sklearn.compose import ColumnTransformer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder

    random = np.random.default_rng(0)
    table = np.empty((200, 3), object)
    table[:, 0], table[:, 1] = random.choice(["red", "green"], 200), random.choice(["hall", "loft"], 200)
    table[:, 2] = random.normal(20, 5, 200)
    names = np.where((table[:, 0] == "red") | (table[:, 2] > 22), "on", "off")
    encoder = ColumnTransformer(
        [("c", OneHotEncoder(handle_unknown="ignore"), [0, 1])], remainder="passthrough"
    )
    pipeline = make_pipeline(encoder, LogisticRegression()).fit(table, names)
    types = [("colour", StringTensorType([None, 1])), ("room", StringTensorType([None, 1]))]
    types.append(("temperature", FloatTensorType([None, 1])))
    opset = {"": 18, "ai.onnx.ml": 3}
    model = skl2onnx.to_onnx(
        pipeline, initial_types=types, options={"zipmap": False}, target_opset=opset
    ).SerializeToString()
    (tmp_path / "light.onnx").write_bytes(model)
    bundle, rows = tmp_path / "light.bundle", tmp_path / "rows.csv"
    bounds = ("--input-shapes", "colour:[n=1..2,1] room:[n,1] temperature:[n,1]")
    model_file = tmp_path / "light.onnx"
    assert terminal("compile", model_file, *bounds, "--postprocess", "top1", "-o", bundle).code == 0
    rows.write_text("temperature;room;colour\n25,5;hall;green\n10,5;loft;red\n10,5;loft;pink\n10,5;;red\n")
    result = terminal("run", bundle, "--inputs", rows, "--json")
    assert result.code == 4
    assert "rows.csv:5: column 'room': expected a value, got none" in result.err[0]
    found = json.loads(result.out)["results"]
    given = {
        "colour": np.array([["green"], ["red"], ["pink"]], object),
        "room": np.array([["hall"], ["loft"], ["loft"]], object),
        "temperature": np.array([[25.5], [10.5], [10.5]], np.float32),
    }
    labels, scores = onnxruntime.InferenceSession(model).run(None, given)
    assert [row["label"] for row in found] == labels.tolist()
    assert [row["probability"] for row in found] == pytest.approx(scores.max(axis=1), rel=1e-5)
