"""`edgebundle compile`: what it prints and writes, and how it reports unusable input."""

from __future__ import annotations

import json
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from builder.bundles.key_files import KeyPair
from builder.bundles.package import Package
from builder.importer import rewrites
from builder.kernels import schedule
from tests.cli.terminal import Edgebundle, Result, Terminal
from tests.patience import PATIENCE_S

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits"
MODEL = DIGITS / "digits.onnx"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.bundle"


def fails(result: Result, *words: str, hint: str | None = None) -> None:
    assert result.code == 4, result
    assert result.out == ""
    errors = [line for line in result.err if line.startswith("edgebundle: error: ")]
    hints = [line for line in result.err if line.startswith("edgebundle: hint: ")]
    assert len(errors) == 1, result
    assert len(hints) <= 1, result
    assert result.err == errors + hints, result
    for word in words:
        assert word in errors[0], errors[0]
    if hint is not None:
        assert hint in "".join(hints), result


def save(path: Path, *nodes: onnx.NodeProto, shape: tuple[int | str, ...] = (1, 4)) -> Path:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)
    model = helper.make_model(
        helper.make_graph(nodes, "small", [x], [y]), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    onnx.save(model, path)
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A model that is compiled in a tenth of the time, and differs from its reference in the last bits."""
    (tmp_path / "model").mkdir()
    return save(tmp_path / "model" / "small.onnx", helper.make_node("Softmax", ["x"], ["y"]), shape=(16, 400))


# Success


@pytest.mark.slow
def test_signed_bundle_is_written_and_verifies(
    edgebundle: Edgebundle, edgebundle_process: Edgebundle, pair: KeyPair, tmp_path: Path
) -> None:
    done = edgebundle_process(
        *("compile", MODEL, "--sign-key", pair.private, "--labels", DIGITS / "labels.txt"),
        *("--preprocess", DIGITS / "preprocess.toml", "--postprocess", "softmax,top3"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("digits.bundle: digits 1.0.0 for ")
    assert re.search(r"agrees to \S+ with onnxruntime \S+ running the file itself\n", done.stdout)
    assert any(line.startswith("comparing") for line in done.stderr.splitlines())  # progress
    assert edgebundle("verify", tmp_path / "digits.bundle", "--trust", pair.public).returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["digits.bundle", "keys"]


def test_json_is_the_only_output(terminal: Terminal, small: Path, out: Path) -> None:
    result = terminal("compile", small, "-o", out, "--json")
    assert (result.code, result.err) == (0, [])
    document = json.loads(result.out)
    assert (document["bundle"], document["signed"]) == (str(out), False)
    assert document["parity_error"] < 1e-4


def test_unsigned_bundle_is_reported(terminal: Terminal, small: Path, out: Path) -> None:
    result = terminal("compile", small, "-q", "-o", out)
    assert result.code == 0
    assert "not signed" in result.out
    assert "design space" not in result.out, "all kernels have one"


@pytest.mark.slow
def test_kernels_without_a_design_space_are_named(terminal: Terminal, tmp_path: Path, out: Path) -> None:
    model = save(tmp_path / "m.onnx", helper.make_node("Tan", ["x"], ["y"], "/head/tan"), shape=(1, 4000))
    printed = terminal("compile", model, "-q", "-o", out).out
    assert "  1 kernel has no design space (100.0 % of the work): tir_tan (Tan /head/tan)\n" in printed
    document = json.loads(terminal("compile", model, "--json", "-o", out).out)
    assert document["no_design_space"] == [{"name": "tir_tan", "share": 1.0, "nodes": ["Tan /head/tan"]}]


@pytest.mark.slow
def test_rewrites_and_design_spaces_that_fail_are_counted(
    terminal: Terminal, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise IndexError("a mistake in it")

    monkeypatch.setitem(rewrites._TABLES[""], "Tan", fail)
    monkeypatch.setattr(schedule, "SPACES", dict.fromkeys(schedule.SPACES, fail))
    model = save(tmp_path / "m.onnx", helper.make_node("Tan", ["x"], ["y"], "/head/tan"), shape=(1, 4000))
    printed = terminal("compile", model, "-q", "-o", out).out
    assert "of the compiler cost speed, not accuracy: not rewritten: Tan '/head/tan'" in printed
    document = json.loads(terminal("compile", model, "--json", "-o", out).out)
    assert "not rewritten: Tan '/head/tan' (IndexError: a mistake in it)" in document["fallbacks"]


def test_symbolic_batch_becomes_one_and_is_reported(terminal: Terminal, tmp_path: Path, out: Path) -> None:
    model = save(tmp_path / "m.onnx", helper.make_node("Relu", ["x"], ["y"]), shape=("N", 4))
    result = terminal("compile", model, "-o", out)
    assert result.code == 0, result
    assert any(re.search(r"\bN\b.*\b1\b", line) for line in result.err), result.err
    document = json.loads(terminal("inspect", out, "--json").out)
    assert document["manifest"]["inputs"] == [{"datatype": "FP32", "name": "x", "shape": [1, 4]}]


def test_given_name_version_and_counter_are_in_the_bundle(terminal: Terminal, small: Path, out: Path) -> None:
    result = terminal(
        *("compile", small, "-q", "-o", out, "--name", "eyes", "--model-version", "2.1.0"),
        *("--security-counter", "7", "--compatible", "raspberrypi,4-model-b"),
    )
    assert result.code == 0, result
    manifest = json.loads(terminal("inspect", out, "--json").out)["manifest"]
    assert manifest["name"] == "eyes"
    assert manifest["version"] == "2.1.0"
    assert manifest["security_counter"] == 7
    assert manifest["compatible"] == ["raspberrypi,4-model-b"]


# Models that cannot be read or used


@pytest.mark.parametrize("content", [b"", b"hello, this is not a model\n", bytes(4096), b"\xff" * 100])
def test_file_that_is_not_a_model(terminal: Terminal, tmp_path: Path, out: Path, content: bytes) -> None:
    (tmp_path / "no.onnx").write_bytes(content)
    fails(terminal("compile", tmp_path / "no.onnx", "-q", "-o", out), "no.onnx")
    assert not out.exists()


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9, 0.999])
def test_truncated_model(terminal: Terminal, tmp_path: Path, out: Path, part: float) -> None:
    whole = MODEL.read_bytes()
    (tmp_path / "cut.onnx").write_bytes(whole[: int(len(whole) * part)])
    fails(terminal("compile", tmp_path / "cut.onnx", "-q", "-o", out), "cut.onnx")
    assert not out.exists()


def test_missing_model(terminal: Terminal, tmp_path: Path, out: Path) -> None:
    fails(terminal("compile", tmp_path / "absent.onnx", "-q", "-o", out), "absent.onnx")


def test_folder_instead_of_a_model(terminal: Terminal, tmp_path: Path, out: Path) -> None:
    fails(terminal("compile", tmp_path, "-q", "-o", out), str(tmp_path))


def test_all_unsupported_operators_are_named_at_once(terminal: Terminal, tmp_path: Path, out: Path) -> None:
    model = save(
        tmp_path / "m.onnx",
        helper.make_node("Frobnicate", ["x"], ["a"], name="first"),
        helper.make_node("Relu", ["a"], ["b"], name="fine"),
        helper.make_node("Defenestrate", ["b"], ["y"], name="second"),
    )
    result = terminal("compile", model, "-q", "-o", out)
    assert result.code == 4
    text = "\n".join(result.err)
    for word in ("Frobnicate", "first", "Defenestrate", "second"):
        assert word in text
    assert "Traceback" not in text
    assert not out.exists()


# Shapes, targets, declarations


@pytest.mark.parametrize(
    "shapes",
    [
        "picture:[1,1,8,8]",
        "image:[1,1,8]",
        "image:[1,1,9,9]",
        "image:[1,1,8,0]",
        "image:[1,1,8,-1]",
        "image",
        "image:8",
    ],
)
def test_shapes_that_do_not_fit(terminal: Terminal, out: Path, shapes: str) -> None:
    fails(terminal("compile", MODEL, "-q", "-o", out, "--input-shapes", shapes))
    assert not out.exists()


def test_wrong_input_name_lists_the_existing_names(terminal: Terminal, out: Path) -> None:
    result = terminal("compile", MODEL, "-q", "-o", out, "--input-shapes", "picture:[1,1,8,8]")
    fails(result, "picture")
    assert "image" in "\n".join(result.err).replace(str(MODEL), "")


@pytest.mark.parametrize("target", ["pi", "llvm -mcpu=potato", '{"kind":', '{"kind":"cuda"}', ""])
def test_invalid_target(terminal: Terminal, out: Path, target: str) -> None:
    fails(terminal("compile", MODEL, "-q", "-o", out, "--target", target))
    assert not out.exists()


def test_unknown_target_lists_the_existing_targets(terminal: Terminal, out: Path) -> None:
    result = terminal("compile", MODEL, "-q", "-o", out, "--target", "rpi9")
    fails(result, "rpi9")
    assert "rpi4" in "\n".join(result.err)


@pytest.mark.parametrize(
    ("flag", "value", "word"),
    [
        ("--preprocess", "imagenot", "imagenot"),
        ("--preprocess", "absent.toml", "absent.toml"),
        ("--preprocess", "imagenet", "channels"),
        ("--postprocess", "softmax,top", "softmax,top"),
        ("--postprocess", "top0", "1"),
        ("--postprocess", "faces", "faces"),
        ("--labels", "absent.txt", "absent.txt"),
        ("--labels", "coco", "expected a --postprocess that names classes"),
        ("--postprocess", "yolov8", "postprocess yolov8: expected [1, 4 + classes, n]"),
        ("--postprocess", "top3,k=11", "at least 11 values"),
        ("--show-input", "shown.png", "--picture"),
        ("--picture", "absent.png", "declares how a picture becomes its input"),
    ],
)
def test_invalid_declaration(terminal: Terminal, out: Path, flag: str, value: str, word: str) -> None:
    fails(terminal("compile", MODEL, "-q", "-o", out, flag, value), word)
    assert not out.exists()


def test_a_picture_that_cannot_be_tried_is_refused_before_the_compiler_is_loaded(
    terminal: Terminal, out: Path
) -> None:
    prepared = "compile", MODEL, "-o", out, "--preprocess", "unit"
    fails(terminal(*prepared, "--picture", "absent.png"), "absent.png: cannot be read")
    sound = "compile", MODEL, "-o", out, "--preprocess", "silero", "--picture", "a.png"
    fails(terminal(*sound), "--picture: expected a preprocess for pictures")


def test_declarations_are_refused_before_the_compiler_is_loaded(terminal: Terminal, out: Path) -> None:
    result = terminal("compile", MODEL, "-o", out, "--postprocess", "yolo")
    fails(result, "got 'yolo'", hint="did you mean yolox?")  # no step was shown
    wrong = terminal("compile", MODEL, "-o", out, "--postprocess", "embedding", "--labels", "coco")
    fails(wrong, "expected a postprocess that names classes")


def test_the_preset_that_fits_is_proposed(terminal: Terminal, tmp_path: Path, out: Path) -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, 3, 48, 48))
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, (1, 49, 85))
    nodes = [
        helper.make_node("Flatten", ["x"], ["flat"]),
        helper.make_node("Slice", ["flat", "begin", "end", "axis"], ["part"]),
        # Scores from 0 to 1: others would be told.
        helper.make_node("Sigmoid", ["part"], ["scores"]),
        helper.make_node("Reshape", ["scores", "shape"], ["y"]),
    ]
    values = {"begin": [0], "end": [49 * 85], "axis": [1], "shape": [1, 49, 85]}
    weights = [helper.make_tensor(n, TensorProto.INT64, (len(v),), v) for n, v in values.items()]
    graph = helper.make_graph(nodes, "detector", [x], [y], weights)
    opset = [helper.make_opsetid("", 17)]
    made = helper.make_model(graph, opset_imports=opset, ir_version=8)
    made.metadata_props.add(key="names", value=str({i: f"thing {i}" for i in range(80)}))
    onnx.save(made, tmp_path / "detector.onnx")
    proposal = "the outputs look like YOLOX (49 rows of 85 at 48x48): --postprocess yolox --preprocess yolox"
    result = terminal("compile", tmp_path / "detector.onnx", "-o", out)
    assert result.code == 0
    assert proposal not in result.err  # which is before the sample was looked at
    assert proposal in result.out
    tried = terminal("compile", tmp_path / "detector.onnx", "-o", out, "--picture", "absent.png")
    fails(tried, "--picture: expected --preprocess beside it, got none", hint=proposal)
    arguments = ("--postprocess", "yolox", "--preprocess", "yolox")
    result = terminal("compile", tmp_path / "detector.onnx", "-o", out, *arguments)
    assert "labels: the 80 names in the model file" in result.err
    assert "look like" not in "".join(result.err) + result.out
    assert Package.load(out).members["labels.txt"].splitlines()[79] == b"thing 79"
    # A preset of another number of classes than the file names is refused.
    other = ("compile", tmp_path / "detector.onnx", "-q", "-o", out, "--postprocess", "nanodet")
    fails(terminal(*other), "--postprocess: expected 80 classes, as the file says")
    # Another one that the shapes allow is the user's choice, and told.
    del made.metadata_props[:]
    onnx.save(made, tmp_path / "detector.onnx")
    assert proposal in terminal(*other).out


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("colour = GRAY", "TOML"),
        ('colour = "MAUVE"', "MAUVE"),
        ("resize = [16, 16]", "(16, 16)"),
        ('scael = 1.0\ncolour = "GRAY"', "scael"),
        ("std = [0.0]", "std"),
        ('input = "picture"', "picture"),
        ('mean = ["a"]', "'a'"),
        ("resize = [8]", "resize"),
        ('resize = "8x8"', "resize"),
    ],
)
def test_preprocess_file_with_a_mistake(
    terminal: Terminal, tmp_path: Path, out: Path, text: str, word: str
) -> None:
    (tmp_path / "p.toml").write_text(text)
    fails(terminal("compile", MODEL, "-q", "-o", out, "--preprocess", tmp_path / "p.toml"), word)
    assert not out.exists()


def test_names_in_the_file_that_do_not_fit_are_told(terminal: Terminal, tmp_path: Path, out: Path) -> None:
    made = onnx.load(MODEL)
    made.metadata_props.add(key="names", value=str({0: "none", 1: "one"}))
    onnx.save(made, tmp_path / "two.onnx")
    result = terminal("compile", tmp_path / "two.onnx", "-o", out, "--postprocess", "softmax,top3")
    assert "labels: the 2 names in the model file do not fit this postprocess, and are left out" in result.err
    assert "labels.txt" not in Package.load(out).members


@pytest.mark.parametrize("content", [b"", b"zero\none\n", b"a\n" * 11, b"\xff\xfe\n" * 10])
def test_labels_that_do_not_fit(terminal: Terminal, tmp_path: Path, out: Path, content: bytes) -> None:
    (tmp_path / "l.txt").write_bytes(content)
    fails(
        terminal("compile", MODEL, "-q", "-o", out, "--postprocess", "top3", "--labels", tmp_path / "l.txt"),
        "l.txt",
    )
    assert not out.exists()


@pytest.mark.parametrize(
    ("flag", "value", "word"),
    [
        ("--name", "No Spaces!", "name"),
        ("--name", "../../etc", "name"),
        ("--model-version", "1.0", "version"),
        ("--model-version", "01.0.0", "version"),
        ("--model-version", "1.0.0-" + "a" * 74, "version"),
        ("--security-counter", "-1", "security_counter"),
        ("--security-counter", str(1 << 63), "security_counter"),
        ("--compatible", "a b", "compatible"),
        ("--compatible", "x" * 129, "compatible"),
    ],
)
def test_description_that_no_manifest_allows_is_refused_before_the_model_is_read(
    terminal: Terminal, tmp_path: Path, out: Path, flag: str, value: str, word: str
) -> None:
    (tmp_path / "unread.onnx").touch()
    result = terminal("compile", tmp_path / "unread.onnx", "-q", "-o", out, f"{flag}={value}")
    fails(result, f"{word}: expected")
    assert not out.exists()


def test_disagreement_with_the_reference_writes_nothing_and_keeps_the_old_bundle(
    terminal: Terminal, small: Path, out: Path
) -> None:
    fails(terminal("compile", small, "-q", "-o", out, "--tolerance", "1e-30"))
    assert not out.exists()
    out.write_bytes(b"old")
    fails(terminal("compile", small, "-q", "-o", out, "--tolerance", "1e-30"))
    assert out.read_bytes() == b"old"


# Keys and outputs are checked before minutes of work


def test_missing_key_is_reported_first(terminal: Terminal, tmp_path: Path, out: Path) -> None:
    result = terminal("compile", MODEL, "-o", out, "--sign-key", tmp_path / "absent")
    fails(result, "absent", hint="keygen")  # no step has begun: fails() allows no other line


def test_public_key_cannot_sign(terminal: Terminal, pair: KeyPair, out: Path) -> None:
    pair.public.chmod(0o600)
    fails(terminal("compile", MODEL, "-o", out, "--sign-key", pair.public), "got a public key")


def test_missing_output_folder_is_reported_first(terminal: Terminal, tmp_path: Path) -> None:
    fails(terminal("compile", MODEL, "-o", tmp_path / "no" / "o.bundle"), "no", hint="mkdir")


def test_output_that_is_a_folder(terminal: Terminal, tmp_path: Path) -> None:
    (tmp_path / "o.bundle").mkdir()
    fails(terminal("compile", MODEL, "-q", "-o", tmp_path / "o.bundle"), "o.bundle")


def test_full_disk_leaves_no_incomplete_file(
    terminal: Terminal, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_package = Package.save

    def save_on_a_full_disk(package: Package, path: str) -> None:
        # With a limit of 4 KiB per file, writing the bundle fails halfway, as on a full disk.
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 10, before[1]))
        try:
            save_package(package, path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    monkeypatch.setattr(Package, "save", save_on_a_full_disk)
    fails(terminal("compile", small, "-q", "-o", tmp_path / "o.bundle"), "File too large")
    assert list(tmp_path.iterdir()) == [small.parent]


@pytest.mark.parametrize(
    "arguments", [["-O", "9"], ["--tolerance", "small"], ["--security-counter", "x"]], ids=str
)
def test_unreadable_values_are_usage_errors(terminal: Terminal, arguments: list[str]) -> None:
    result = terminal("compile", MODEL, *arguments)
    assert result.code == 2
    assert result.err[-1] == "edgebundle: hint: see `edgebundle compile --help`"


@pytest.mark.slow
def test_interrupted_compile_leaves_nothing(tmp_path: Path) -> None:
    command = str(Path(sys.executable).parent / "edgebundle")
    process = subprocess.Popen(
        [command, "compile", str(MODEL), "-o", "o.bundle"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("importing"):
            break
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    assert process.wait(PATIENCE_S) == 130
    assert "Traceback" not in rest
    assert list(tmp_path.iterdir()) == []
