"""`infer --accuracy`: what a real agent answers, compared with tables and with annotations."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.clients.conftest import DIGITS, Site

pytestmark = pytest.mark.slow


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    for name in ("seven", "three"):
        shutil.copy(DIGITS / f"{name}.png", tmp_path)
    return tmp_path


def test_classes_on_a_device(site: Site, pictures: Path, capfd: pytest.CaptureFixture[str]) -> None:
    table = pictures / "labels.csv"
    table.write_text("file,label\nseven.png,seven\nthree.png,zero\n")
    assert site.infer("kitchen", "--accuracy", table) == 0
    assert capfd.readouterr().out.splitlines()[1] == "top-1 50.0 % of 2 pictures"
    table.write_text("seven.png,7\n")
    assert site.infer("kitchen", "--accuracy", table, "--input", pictures / "seven.png", "--json") == 0
    document = json.loads(capfd.readouterr().out)
    assert document["accuracy"] == {"pictures": 1, "top1": 1, "top5": 1}
    (pictures / "three.png").write_text("no picture")
    table.write_text("three.png,three\nseven.png,7\nseven.png,8\n")
    assert site.infer("kitchen", "--accuracy", table) == 4
    out, err = capfd.readouterr()
    assert err.count("edgebundle: error: ") == 1
    assert "three.png" in err
    assert "; 1 could not be used" in out
    assert out.splitlines()[1] == "top-1 50.0 % of 2 pictures"
    assert out.endswith(" of 2 pictures\n")


def test_boxes_on_a_device(site: Site, pictures: Path, capfd: pytest.CaptureFixture[str]) -> None:
    document = {
        "images": [{"id": 1, "file_name": "seven.png"}, {"id": 2, "file_name": "absent.png"}],
        "annotations": [
            {"image_id": 1, "category_id": 2, "bbox": [1, 2, 2, 2]},
            {"image_id": 1, "category_id": 3, "bbox": [50, 60, 2, 2]},
        ],
        "categories": [{"id": 2, "name": "cat"}, {"id": 3, "name": "dog"}],
    }
    path = pictures / "instances.json"
    path.write_text(json.dumps(document))
    assert site.infer("odd", "--accuracy", path, "--input", pictures) == 0
    line = capfd.readouterr().out.splitlines()[1]
    assert line == "mAP 0.500, mAP50 0.500, mAP75 0.500 of 2 objects in 1 pictures"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "expected --inputs, got none"),
        (("--accuracy", "absent.csv"), "absent.csv: expected a CSV table"),
        (("--accuracy", "absent.json"), "absent.json: expected annotations of COCO"),
        (("--accuracy", "labels.csv", "--input", "three.png"), "has no row for three.png"),
        (("--accuracy", "boxes.json"), "expected a bundle that answers with boxes"),
    ],
)
def test_mistake_is_one_error(
    site: Site,
    pictures: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    words: str,
) -> None:
    monkeypatch.chdir(pictures)
    Path("labels.csv").write_text("seven.png,seven\n")
    images = [{"id": 1, "file_name": "seven.png"}]
    categories = [{"id": 1, "name": "seven"}]
    document = {"images": images, "annotations": [], "categories": categories}
    Path("boxes.json").write_text(json.dumps(document))
    assert site.infer("kitchen", *arguments) == 4
    assert words in capfd.readouterr().err
