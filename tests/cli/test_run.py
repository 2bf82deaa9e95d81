"""`edgebundle run` and `profile`: output as in TVMC, and inputs that do not fit."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image

from agent.bundle.manifest import Target
from builder.bundles.package import Package
from tests.cli.terminal import Edgebundle, Result, Terminal

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits"


def fails(result: Result, *words: str) -> None:
    assert result.code == 4, result
    assert result.out == ""
    assert result.err[0].startswith("edgebundle: error: "), result
    assert all(line.startswith("edgebundle: hint: ") for line in result.err[1:]), result
    assert len(result.err) <= 2
    for word in words:
        assert word in result.err[0]


@pytest.fixture(scope="module")
def digits(digits_bundle: Path) -> Path:
    return digits_bundle


@pytest.mark.slow
def test_picture_gives_labels(edgebundle_process: Edgebundle, digits: Path) -> None:
    done = edgebundle_process("run", digits, "--inputs", DIGITS / "seven.png")
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 3
    assert lines[0][1] == "seven"
    assert float(lines[0][0]) > 0.9
    assert sum(float(score) for score, _ in lines) <= 1.001


def test_time_summary_looks_like_that_of_tvmc(terminal: Terminal, digits: Path) -> None:
    result = terminal("run", digits, "--print-time", "--repeat", "5", "--number", "2")
    assert (result.code, result.err) == (0, [])
    assert "Execution time summary:" in result.out
    assert re.search(r"mean \(ms\)\s+median \(ms\)\s+max \(ms\)\s+min \(ms\)\s+std \(ms\)", result.out)


def test_arrays_give_output_0(terminal: Terminal, digits: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", image=np.zeros((1, 1, 8, 8), np.float32))
    result = terminal("run", digits, "--inputs", tmp_path / "in.npz", "--outputs", tmp_path / "out.npz")
    assert result.code == 0, result
    with np.load(tmp_path / "out.npz") as outputs:
        assert outputs.files == ["output_0"]
        assert outputs["output_0"].shape == (1, 10)


def test_a_streams_outputs_are_those_of_all_steps(terminal: Terminal, tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[1,2] x, float[1,2] sum)
        => (float[1,2] total, float[1,2] kept) { total = Add(x, sum) kept = Identity(total) }"""
    )
    onnx.save(model, tmp_path / "sum.onnx")
    bundle, totals = tmp_path / "sum.bundle", tmp_path / "totals.npz"
    assert terminal("compile", tmp_path / "sum.onnx", "--state", "sum:kept", "-o", bundle).code == 0
    files = [tmp_path / f"{step}.npz" for step in (1, 2, 3)]
    for step, file in enumerate(files, 1):
        np.savez(file, x=np.full((1, 2), step, np.float32))
    result = terminal("run", bundle, "--inputs", *files, "-o", totals)
    assert result.code == 0, result
    with np.load(totals) as outputs:
        assert outputs["output_0"].tolist() == [[[1, 1]], [[3, 3]], [[6, 6]]]


def test_outputs_of_several_inputs_that_are_no_stream(
    terminal: Terminal, digits: Path, tmp_path: Path
) -> None:
    np.savez(tmp_path / "in.npz", image=np.zeros((1, 1, 8, 8), np.float32))
    twice = [tmp_path / "in.npz"] * 2
    result = terminal("run", digits, "--inputs", *twice, "-o", tmp_path / "o.npz")
    fails(result, "--outputs: expected one input, got several")


def test_fill_modes_differ_and_random_is_reproducible(
    terminal: Terminal, digits: Path, tmp_path: Path
) -> None:
    outputs = []
    for mode in ("zeros", "ones", "random", "random"):
        path = tmp_path / "o.npz"
        assert terminal("run", digits, "--fill-mode", mode, "-o", path).code == 0
        with np.load(path) as archive:
            outputs.append(archive["output_0"])
    zeros, ones, random, again = outputs
    assert not np.array_equal(zeros, ones)
    assert not np.array_equal(ones, random)
    np.testing.assert_array_equal(random, again)


def test_print_top(terminal: Terminal, digits: Path) -> None:
    result = terminal("run", digits, "--inputs", DIGITS / "three.png", "--print-top", "2")
    assert result.code == 0
    assert re.search(r"\[\[ *3\.", result.out), result.out


def test_json_is_the_only_output(terminal: Terminal, digits: Path) -> None:
    result = terminal("run", digits, "--inputs", DIGITS / "zero.png", "--json", "--print-time")
    assert (result.code, result.err) == (0, [])
    document = json.loads(result.out)
    assert document["outputs"]["output_0"] == {"shape": [1, 10], "dtype": "float32"}
    assert document["answers"]["labels"][0] == "zero"
    assert set(document["times_s"]) == {"mean", "median", "max", "min", "std"}


def test_profile_has_a_row_for_each_kernel(terminal: Terminal, digits: Path) -> None:
    result = terminal("profile", digits, "--number", "3")
    assert result.code == 0
    assert "conv2d" in result.out
    assert result.out.splitlines()[0].split()[:2] == ["Time", "(us)"]
    assert max(map(len, result.out.splitlines())) <= 100
    calls = json.loads(terminal("profile", digits, "--json", "--number", "2").out)["calls"]
    assert all(layer["onnx"] for call in calls for layer in call["Layers"])
    assert "Conv_0" in terminal("profile", digits, "--calls", "--number", "1").out


def test_profile_takes_the_inputs_that_it_is_given(terminal: Terminal, digits: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", wrong=np.zeros(1, np.float32))
    fails(terminal("profile", digits, "--inputs", tmp_path / "in.npz"), "wrong")
    fails(terminal("run", digits, "--profile", "--inputs", tmp_path / "in.npz"), "wrong")
    np.savez(tmp_path / "in.npz", image=np.zeros((1, 1, 8, 8), np.float32))
    result = terminal("profile", digits, "--inputs", tmp_path / "in.npz", "--fill-mode", "ones")
    assert result.code == 0


def test_profile_writes_a_page_with_a_comparison(terminal: Terminal, digits: Path, tmp_path: Path) -> None:
    before = terminal("profile", digits, "--json", "--number", "1")
    (tmp_path / "before.json").write_text(before.out)
    page = tmp_path / "page.html"
    compare = ("--compare", tmp_path / "before.json")
    assert terminal("profile", digits, "--number", "1", "--html", page, *compare).code == 0
    assert "Conv_0" in page.read_text()
    fails(terminal("profile", digits, *compare), "--html")
    fails(terminal("profile", digits, "--html", page, "--compare", digits), "profile --json")
    (tmp_path / "before.json").write_text('{"calls": 1}')
    fails(terminal("profile", digits, "--html", page, *compare), "profile --json")
    fails(terminal("profile", digits, "--html", tmp_path / "absent" / "page.html"), "absent")
    assert terminal("inspect", digits, "--html", tmp_path / "graph.html").code == 0
    assert "Conv_0" in (tmp_path / "graph.html").read_text()


# Unusable bundles and inputs


def test_missing_bundle(terminal: Terminal, tmp_path: Path) -> None:
    fails(terminal("run", tmp_path / "absent.bundle"), "absent.bundle")


@pytest.mark.parametrize("content", [b"", b"not a bundle\n", bytes(2048)])
def test_file_that_is_not_a_bundle(terminal: Terminal, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "no.bundle").write_bytes(content)
    fails(terminal("run", tmp_path / "no.bundle"), "no.bundle")
    fails(terminal("profile", tmp_path / "no.bundle"), "no.bundle")


@pytest.mark.slow
def test_bundle_for_another_machine(terminal: Terminal, digits: Path, tmp_path: Path) -> None:
    package = Package.load(digits)
    target = Target("aarch64-linux-gnu", "cortex-a72", ("asimd",))
    Package(replace(package.manifest, target=target), package.members).save(tmp_path / "other.bundle")
    result = terminal("run", tmp_path / "other.bundle")
    fails(result, "aarch64")


@pytest.mark.parametrize(
    ("arrays", "word"),
    [
        ({"picture": np.zeros((1, 1, 8, 8), np.float32)}, "picture"),
        ({"image": np.zeros((1, 1, 8, 9), np.float32)}, "9"),
        ({"image": np.zeros((8, 8), np.float32)}, "8"),
        ({"image": np.zeros((1, 1, 8, 8), np.float64)}, "float64"),
        ({"image": np.zeros((1, 1, 8, 8), np.int32)}, "int32"),
        ({"image": np.zeros((0,), np.float32)}, "image"),
        ({"image": np.full((1, 1, 8, 8), "a")}, "image"),
    ],
    ids=["name", "shape", "rank", "double", "integer", "empty", "text"],
)
def test_arrays_that_do_not_fit(
    terminal: Terminal, digits: Path, tmp_path: Path, arrays: dict[str, object], word: str
) -> None:
    np.savez(tmp_path / "in.npz", **arrays)  # type: ignore[arg-type]
    fails(terminal("run", digits, "--inputs", tmp_path / "in.npz"), word)


def test_pickled_array_is_not_unpickled(terminal: Terminal, digits: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "in.npz", image=np.array([print], dtype=object))
    fails(terminal("run", digits, "--inputs", tmp_path / "in.npz"))


@pytest.mark.parametrize("name", ["in.npz", "in.png", "in.jpg", "in.txt", "in"])
@pytest.mark.parametrize("content", [b"", b"what is this?"])
def test_input_file_that_cannot_be_read(
    terminal: Terminal, digits: Path, tmp_path: Path, name: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(content)
    fails(terminal("run", digits, "--inputs", tmp_path / name))


def test_missing_input_file(terminal: Terminal, digits: Path, tmp_path: Path) -> None:
    for name in ("absent.npz", "absent.png"):
        fails(terminal("run", digits, "--inputs", tmp_path / name), name)


def test_truncated_picture(terminal: Terminal, digits: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.png").write_bytes((DIGITS / "seven.png").read_bytes()[:300])
    fails(terminal("run", digits, "--inputs", tmp_path / "cut.png"))


@pytest.mark.slow
def test_picture_for_a_model_that_declares_no_preprocessing(terminal: Terminal, tmp_path: Path) -> None:
    path = tmp_path / "plain.bundle"
    assert terminal("compile", DIGITS / "digits.onnx", "-q", "-o", path).code == 0
    fails(terminal("run", path, "--inputs", DIGITS / "seven.png"))


def test_missing_output_folder(terminal: Terminal, digits: Path, tmp_path: Path) -> None:
    fails(terminal("run", digits, "--outputs", tmp_path / "no" / "o.npz"), "o.npz")


@pytest.mark.parametrize(
    "flags",
    [["--repeat", "0"], ["--number", "0"], ["--repeat", "-1"], ["--threads", "0"], ["--threads", "-2"]],
    ids=" ".join,
)
def test_counts_below_one(terminal: Terminal, digits: Path, flags: list[str]) -> None:
    result = terminal("run", digits, "--print-time", *flags)
    assert result.code in {2, 4}, result
    assert result.err[0].startswith("edgebundle: error: ")
    assert len(result.err) <= 2


def test_unknown_device(terminal: Terminal, digits: Path) -> None:
    result = terminal("run", digits, "--device", "cuda")
    assert result.code == 2
    assert "cuda" in result.err[0]


def test_many_pictures_have_their_answers_and_a_summary(
    terminal: Terminal, digits: Path, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    for name in ("seven", "three"):
        shutil.copy(DIGITS / f"{name}.png", tmp_path / "in")
    (tmp_path / "in" / "broken.png").write_bytes(b"\x89PNG no picture")
    result = terminal("run", digits, "--inputs", tmp_path / "in", "--draw", f"{tmp_path}/drawn/")
    assert result.code == 4  # one of them could not be read
    assert len(result.err) == 2  # with a hint
    assert "broken.png: " in result.err[0]
    assert "cannot be read" in result.err[0]
    lines = result.out.splitlines()
    assert lines[0] == f"{tmp_path / 'in' / 'seven.png'}:"
    assert lines[1].split()[1] == "seven"
    assert re.fullmatch(r"2 inputs in .* s, .* ms each; 1 seven, 1 three; 1 could not be used", lines[-1])
    assert sorted(path.name for path in (tmp_path / "drawn").iterdir()) == ["seven.png", "three.png"]
    with Image.open(tmp_path / "drawn" / "seven.png") as image, Image.open(DIGITS / "seven.png") as original:
        assert image.size == original.size
    # A shell expands a pattern before the bundle's name too.
    both = terminal("run", "--inputs", DIGITS / "seven.png", DIGITS / "three.png", digits, "--json")
    document = json.loads(both.out)
    assert [each["answers"]["labels"][0] for each in document["results"]] == ["seven", "three"]


def test_accuracy_of_known_pictures(terminal: Terminal, digits: Path, tmp_path: Path) -> None:
    for name in ("seven", "three"):
        shutil.copy(DIGITS / f"{name}.png", tmp_path)
    (tmp_path / "labels.csv").write_text("seven.png,seven\nthree.png,8\n")
    result = terminal("run", digits, "--accuracy", tmp_path / "labels.csv")
    assert result.code == 0
    assert re.search(r"top-1 50\.0 %, top-5 \d+\.0 % of 2 pictures\n", result.out)
    document = json.loads(terminal("run", digits, "--accuracy", tmp_path / "labels.csv", "--json").out)
    assert document["accuracy"]["top1"] == 1
    table = tmp_path / "tables" / "labels.csv"
    table.parent.mkdir()
    shutil.copy(tmp_path / "labels.csv", table)
    result = terminal("run", digits, "--accuracy", table, "--inputs", tmp_path, "--json")
    assert json.loads(result.out)["accuracy"]["top1"] == 1


def test_accuracy_counts_rows_and_goes_on_after_a_class_that_the_model_does_not_have(
    terminal: Terminal, digits: Path, tmp_path: Path
) -> None:
    for name in ("seven", "three"):
        shutil.copy(DIGITS / f"{name}.png", tmp_path)
    (tmp_path / "labels.csv").write_text("seven.png,seven\nseven.png,10\nthree.png,3\nseven.png,8\n")
    result = terminal("run", digits, "--accuracy", tmp_path / "labels.csv")
    assert result.code == 4
    error = f"edgebundle: error: {tmp_path / 'seven.png'}: expected a class below 10, got 10"
    assert result.err[0] == error
    assert result.err[1].startswith("edgebundle: hint: count the classes from 0, as the model's output does")
    assert re.search(r"; 1 could not be used\ntop-1 66\.7 %, top-5 \d+\.\d %( of 3 pictures)\n", result.out)
    result = terminal("run", digits, "-i", tmp_path, "--accuracy", tmp_path / "labels.csv", "--json")
    assert json.loads(result.out)["accuracy"]["pictures"] == 3


def test_input_and_answer_are_shown(terminal: Terminal, digits: Path, tmp_path: Path) -> None:
    shown, drawn = tmp_path / "shown.png", tmp_path / "drawn.jpg"
    result = terminal("run", digits, "-i", DIGITS / "seven.png", "--show-input", shown, "--draw", drawn)
    assert result.code == 0
    with Image.open(shown) as image:
        assert (image.size, image.mode) == ((8, 8), "L")
    with Image.open(drawn) as image:
        assert image.format == "JPEG"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--draw", "x.jpg"], ["--draw: expected a picture"]),
        (["--show-input", "x.png"], ["--show-input: expected a picture"]),
        (["-i", str(DIGITS), "--draw", "x.jpg"], ["--draw: expected a folder for"]),
        (["-i", str(DIGITS), "--print-time"], ["--print-time: expected one input"]),
        (["-i", str(DIGITS / "seven.png"), "--draw", "absent/x.jpg"], ["does not exist"]),
        (["-i", str(DIGITS / "seven.png"), "--draw", "x.npz"], ["suffix of a picture"]),
        (["-i", "absent*.jpg"], ["expected files that match"]),
        (["--accuracy", "absent.csv"], ["expected a CSV table"]),
    ],
)
def test_what_cannot_be_drawn_or_counted(
    terminal: Terminal, digits: Path, flags: list[str], words: list[str]
) -> None:
    fails(terminal("run", digits, *flags), *words)
    assert not Path("x.jpg").exists()


def test_the_picture_itself_is_not_drawn_over(terminal: Terminal, digits: Path, tmp_path: Path) -> None:
    picture = shutil.copy(DIGITS / "seven.png", tmp_path)
    fails(terminal("run", digits, "-i", picture, "--draw", picture), "another file than the input")
    assert terminal("run", digits, "-i", picture, "--draw", f"{tmp_path}/").code == 0
    assert (tmp_path / "seven.png").read_bytes() == (DIGITS / "seven.png").read_bytes()
    assert (tmp_path / "seven-2.png").exists()


def test_missing_bundle_argument(terminal: Terminal) -> None:
    fails(terminal("run", "--inputs", "a.jpg"), "expected a bundle, got none")
