"""A project as a user has one: `new`, then the other verbs in its folder without arguments."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from builder.cli import main
from tests.agent.deploy.rig import DEVICE, make_bundle
from tests.builder.fleet.rig import Device
from tests.cli.terminal import Edgebundle
from tests.conftest import BrokerProcess

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two layers: 4 numbers to 3 scores."""
    weights = helper.make_tensor("w", TensorProto.FLOAT, [4, 3], np.arange(12, dtype=np.float32) / 12)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "scores",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 3])],
        [weights],
    )
    path = tmp_path / "scores.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def edit(folder: Path, pattern: str, line: str) -> None:
    """Replace a line of the project's file."""
    path = folder / "edgebundle.toml"
    text, count = re.subn(rf"(?m)^{pattern}.*$", line, path.read_text())
    assert count == 1
    path.write_text(text)


def test_compile_and_run_need_no_arguments_and_flags_win(
    edgebundle: Edgebundle, model: Path, tmp_path: Path
) -> None:
    made = edgebundle("new", "My Scores", model, cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert "edgebundle compile" in made.stdout
    folder = tmp_path / "My Scores"
    assert (folder / "keys" / "signing.key").stat().st_mode & 0o077 == 0
    (folder / "labels.txt").write_text("a\nb\nc\n")
    edit(folder, "# postprocess", 'postprocess = "softmax,top2"')
    edit(folder, "# labels", 'labels = "labels.txt"')

    done = edgebundle("compile", "--model-version", "1.2.3", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "my-scores.bundle: my-scores 1.2.3 for " in done.stdout
    assert edgebundle("verify", "my-scores.bundle", "--trust", "keys/signing.pub", cwd=folder).returncode == 0
    np.savez(folder / "x.npz", x=np.ones((1, 4), np.float32))
    ran = edgebundle("run", "--inputs", "x.npz", cwd=folder)
    assert ran.returncode == 0, ran.stderr
    assert re.search(r"c\b.*\n.*b\b", ran.stdout)

    # Repacking takes what was changed in the file.
    edit(folder, "version", 'version = "2.0.0"')
    assert edgebundle("repack", cwd=folder).returncode == 0
    assert json.loads(edgebundle("inspect", "--json", cwd=folder).stdout)["manifest"]["version"] == "2.0.0"

    # What the file says about its model is not applied to another one.
    shutil.copy(model, folder / "other.onnx")
    other = edgebundle("compile", "other.onnx", "--json", cwd=folder)
    assert other.returncode == 0, other.stderr
    document = json.loads(other.stdout)
    assert (document["name"], document["bundle"], document["signed"]) == ("other", "other.bundle", True)


def test_a_program_that_signs_is_kept_as_it_is_and_needs_no_yes(
    edgebundle: Edgebundle, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made = edgebundle("new", "p", model, "--sign-key", "exec:false --card 1", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert 'key = "exec:false --card 1"\n' in (tmp_path / "p" / "edgebundle.toml").read_text()
    assert not (tmp_path / "p" / "keys").exists()
    done = edgebundle("compile", cwd=tmp_path / "p")
    assert done.returncode == 4
    assert "edgebundle: error: false public-key: ended with status 1" in done.stderr


def test_a_classifier_with_its_softmax_gets_no_second_one_and_no_guess_of_its_pictures(
    edgebundle: Edgebundle, tmp_path: Path
) -> None:
    nodes = [
        helper.make_node("GlobalAveragePool", ["x"], ["mean"]),
        helper.make_node("Flatten", ["mean"], ["flat"]),
        helper.make_node("Softmax", ["flat"], ["y"]),
    ]
    image = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 8, 8])
    scores = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 3])
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [image], [scores])), tmp_path / "m.onnx")
    made = edgebundle("new", "three", "m.onnx", cwd=tmp_path)
    assert "a classifier (3 values that add up to 1): --postprocess top3" in made.stdout
    text = (tmp_path / "three" / "edgebundle.toml").read_text()
    assert 'postprocess = "top3"' in text
    assert '# preprocess = "imagenet"' in text


async def test_deploy_and_infer_ask_the_fleet(
    mosquitto: BrokerProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    async def run(*arguments: str) -> int:
        capfd.readouterr()
        return await asyncio.to_thread(main, list(arguments))

    monkeypatch.chdir(tmp_path)
    assert await run("new", "digits", "--broker", mosquitto.url, "--agent", DEVICE) == 0
    monkeypatch.chdir(tmp_path / "digits")
    (tmp_path / "digits" / "digits.bundle").write_bytes(make_bundle().raw)
    async with Device(tmp_path / "state", mosquitto.url):
        assert await run("deploy") == 0
        assert capfd.readouterr().out.startswith("digits 1.0.0 is in service on kitchen (")
        assert await run("agents") == 0
        assert capfd.readouterr().out.startswith("kitchen  online")
        # Only there, and not also to the project's own agent.
        assert await run("deploy", "--agent", "door") == 4
        told = capfd.readouterr()
        assert "no agent called door is known" in told.err
        assert told.out == ""
    (tmp_path / "digits" / "x.json").write_text("{}")
    assert await run("infer", "--input", "x.json", "--agent", "door", "--deadline", "3") == 4
    assert "door" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("line", "verb", "words"),
    [
        ('targte = "rpi4"', "compile", "did you mean target?"),
        ('target = "rpi44"', "compile", "rpi4"),
        ('precision = "int9"', "compile", "precision: expected one of int8, weights-int8"),
        ("target = ", "run", "expected TOML"),
    ],
)
def test_mistake_in_the_file_is_told_by_the_verbs_that_read_it(
    edgebundle: Edgebundle, model: Path, tmp_path: Path, line: str, verb: str, words: str
) -> None:
    assert edgebundle("new", "faces", model, cwd=tmp_path).returncode == 0
    edit(tmp_path / "faces", "target", line)
    done = edgebundle(verb, cwd=tmp_path / "faces")
    assert done.returncode == 4
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert edgebundle(verb, "--help", cwd=tmp_path / "faces").returncode == 0
    assert edgebundle("keygen", "others", cwd=tmp_path / "faces").returncode == 0


def test_mistake_of_new_leaves_nothing(edgebundle: Edgebundle, model: Path, tmp_path: Path) -> None:
    for arguments, words in (
        (("a", "b.onnx"), "b.onnx"),
        (("a", model, "--target", "rpi6"), "rpi6"),
        (("a/b",), "the folder a does not exist"),
        ((model.name,), "expected a new folder"),
    ):
        done = edgebundle("new", *arguments, cwd=tmp_path)
        assert (done.returncode, words in done.stderr) == (4, True), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["scores.onnx"]


def test_what_the_outputs_surely_are_is_filled_in(edgebundle: Edgebundle, tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("Identity", ["images"], ["output"])],
        "yolox",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, [1, 3, 416, 416])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, [1, 3549, 85])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), tmp_path / "yolox.onnx")
    done = edgebundle("new", "people", "yolox.onnx", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "people" / "edgebundle.toml").read_text()
    assert 'preprocess = "yolox"\npostprocess = "yolox"\n' in text
    assert 'file = "../yolox.onnx"' in text


def test_page_names_every_key() -> None:
    from dataclasses import fields

    from builder.cli.project_file import FleetTable, ModelTable, SignTable

    page = (ROOT / "docs" / "project.md").read_text()
    for table, kind in (("model", ModelTable), ("sign", SignTable), ("fleet", FleetTable)):
        assert f"`[{table}]`" in page
        for field in fields(kind):
            assert f"`{field.name}`" in page, field.name
