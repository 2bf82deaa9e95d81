"""`infer` with pictures: one, many, drawn, and the model's own outputs; with real agents."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from builder.cli import main
from tests.clients.conftest import DIGITS, Site

pytestmark = pytest.mark.slow


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two pictures that are large enough for the boxes of `odd`, and a file that is not a picture."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for name in ("a.png", "b.png"):
        Image.new("RGB", (64, 48)).save(folder / name)
    (folder / "c.png").write_text("no picture")
    return folder


def is_drawn(path: Path) -> bool:
    with Image.open(path) as image:
        return image.size == (64, 48) and bool(np.asarray(image.convert("RGB")).any())


def test_the_answer_of_a_device_is_drawn(
    site: Site, photos: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert site.infer("odd", "--inputs", photos / "a.png", "--draw", tmp_path / "drawn.jpg") == 0
    assert is_drawn(tmp_path / "drawn.jpg")
    assert "cat  [1, 2, 3, 4]" in capfd.readouterr().out


def test_a_picture_of_standard_input_is_drawn(
    site: Site, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = (photos / "a.png").read_bytes()
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(content)))
    assert site.infer("odd", "--inputs", "-", "--draw", tmp_path / "drawn.png") == 0
    assert is_drawn(tmp_path / "drawn.png")


@pytest.mark.parametrize(
    "names", [("photos",), ("photos/*.png",), ("photos/a.png", "photos/b.png", "photos/c.png")]
)
def test_many_pictures_are_asked_about_drawn_and_summed_up(
    site: Site,
    photos: Path,
    names: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(photos.parent)
    assert site.infer("odd", "--inputs", *names, "--draw", "drawn/") == 4
    out, err = capfd.readouterr()
    assert out.count("cat  [1, 2, 3, 4]") == 2
    assert [line for line in out.splitlines() if line.endswith("png:")] == ["photos/a.png:", "photos/b.png:"]
    last = out.splitlines()[-1]
    assert last.startswith("2 inputs in ")
    assert last.endswith("; 2 cat, 2 dog; 1 could not be used")
    assert err.count("edgebundle: error: photos/c.png: ") == 1
    assert sorted(path.name for path in Path("drawn").iterdir()) == ["a.png", "b.png"]
    assert all(is_drawn(path) for path in Path("drawn").iterdir())


def test_many_answers_as_json(site: Site, photos: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("seven", "four"):
        shutil.copy(DIGITS / f"{name}.png", photos)
    (photos / "c.png").unlink()
    assert site.infer("kitchen", "--inputs", photos, "--json") == 0
    document = json.loads(capfd.readouterr().out)
    best = {Path(each["file"]).stem: each["top"][0]["label"] for each in document["results"]}
    assert (best["seven"], best["four"], len(best), document["failed"]) == ("seven", "four", 4, 0)


def test_a_device_and_this_machine_say_the_same(
    site: Site, photos: Path, digits_bundle: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("seven", "four"):
        shutil.copy(DIGITS / f"{name}.png", photos)

    def both(*arguments: object, code: int = 0) -> tuple[str, str]:
        assert site.infer("kitchen", "--inputs", *arguments) == code
        there = capfd.readouterr().out
        assert main(["run", str(digits_bundle), "--inputs", *map(str, arguments)]) == code
        return there, capfd.readouterr().out

    there, here = both(photos / "seven.png")
    assert here == there
    assert here.splitlines()[0].split()[1] == "seven"
    there, here = both(photos, code=4)
    assert here.splitlines()[:-1] == there.splitlines()[:-1]
    there, here = both(photos / "four.png", "--json")
    for key in ("top", "boxes"):
        assert json.loads(here)[key] == json.loads(there)[key]


def test_the_models_own_outputs(site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    assert site.infer("kitchen", "--inputs", DIGITS / "seven.png", "--raw", "--json") == 0
    (logits,) = json.loads(capfd.readouterr().out)["outputs"]
    assert (logits["name"], int(np.argmax(logits["data"]))) == ("logits", 7)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-i", "photos", "--draw", "x.png"), "--draw: expected a folder for 3 inputs"),
        (("-i", "photos/a.png", "--draw", "photos/a.png"), "expected another file than the input"),
        (("-i", "photos/a.png", "--draw", "absent/x.png"), "the folder absent does not exist"),
        (("-i", "photos/a.png", "--draw", "x.npz"), "expected the suffix of a picture"),
        (("-i", "in.npz", "--draw", "x.png"), "--draw: expected a picture to draw on, got in.npz"),
        (
            ("-i", "photos/a.png", "--draw", "x.png", "--raw"),
            "--draw: expected the answer of the postprocess",
        ),
        (("-i", "rows.csv", "--draw", "x.png"), "--draw: expected pictures or tensors, got a table"),
        (("--accuracy", "rows.csv", "--raw"), "--raw: expected pictures or tensors, got --accuracy"),
        (("-i", "rows.csv", "photos"), "--inputs: expected one table, got 2 files"),
        (("-i", "photos", "--repeat", "2"), "--repeat: expected one input, got several"),
        (("-i", "photos", "-o", "out.npz"), "--outputs: expected one input, got several"),
        (("-i", "photos", "-"), "expected - as the only input"),
        (("-i", "empty"), "expected pictures in the folder, got none"),
    ],
)
def test_a_mistake_is_told_before_anything_is_sent(
    photos: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    words: str,
) -> None:
    monkeypatch.chdir(photos.parent)
    Path("empty").mkdir()
    Path("rows.csv").write_text("a,b\n1,2\n")
    np.savez("in.npz", x=np.zeros(3, np.float32))
    # Nothing listens there.
    where = ["infer", "--agent", "a", "--model", "m", "--broker", "mqtt://127.0.0.1:1"]
    assert main([*where, *arguments]) == 4
    assert words in capfd.readouterr().err
