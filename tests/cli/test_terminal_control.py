"""What a model or a device wrote cannot control the terminal of the command that shows it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from builder.bundles.package import Package
from tests.cli.terminal import Edgebundle

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits"
ESCAPES = "\x1b]0;owned\x07\x1b[2J\x1b[1Gedgebundle: error: forged"


@pytest.fixture
def hostile_bundle(digits_bundle: Path, tmp_path: Path) -> Path:
    package = Package.load(digits_bundle)
    labels = "".join(f"{ESCAPES} {number}\n" for number in range(10)).encode()
    path = tmp_path / "hostile.bundle"
    replace(package, members={**package.members, "labels.txt": labels}).save(path)
    return path


@pytest.mark.parametrize("count", [1, 2])
def test_labels_of_a_bundle(edgebundle: Edgebundle, hostile_bundle: Path, count: int) -> None:
    pictures = sorted(DIGITS.glob("*.png"))[:1] * count
    done = edgebundle("run", str(hostile_bundle), "--inputs", *map(str, pictures))
    assert done.returncode == 0, done.stderr
    assert "]0;owned" in done.stdout
    assert all(line.isprintable() for line in (done.stdout + done.stderr).split("\n"))


def test_labels_in_json_are_escaped_and_complete(edgebundle: Edgebundle, hostile_bundle: Path) -> None:
    picture = next(DIGITS.glob("*.png"))
    done = edgebundle("run", str(hostile_bundle), "--inputs", str(picture), "--json")
    assert all(line.isprintable() for line in done.stdout.split("\n"))
    assert json.loads(done.stdout)["answers"]["labels"][0].startswith(ESCAPES)


def test_a_name_of_a_file(edgebundle: Edgebundle, tmp_path: Path) -> None:
    path = tmp_path / f"model{ESCAPES}.onnx"
    path.write_bytes(b"no model")
    done = edgebundle("check", str(path), "--traceback")
    assert done.returncode != 0
    assert all(line.isprintable() for line in (done.stdout + done.stderr).split("\n"))
