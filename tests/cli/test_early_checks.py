"""Mistakes in names, files and flags are told before a compiler is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from builder.bundles.package import Package
from tests.cli.terminal import Edgebundle

MODEL = Path(__file__).resolve().parents[2] / "examples" / "digits" / "digits.onnx"
# Presets are checked by the device's own code, which needs numpy.
HEAVY = ("onnx", "onnxruntime", "tvm", "tvm_ffi")

MISTAKES = [
    (("complie", "x"), "did you mean compile?"),
    (("compile", "no.onnx"), "no such file: no.onnx"),
    (("compile", MODEL, "--target", "rpi6"), "did you mean rpi5?"),
    (("compile", MODEL, "--sing-key", "x"), "did you mean --sign-key?"),
    (("compile", MODEL, "--sign-key", "no.key"), "no.key"),
    (("compile", MODEL, "--sign-key", "no.key"), "no.key"),
    (("compile", MODEL, "--preprocess", "imagenett"), "did you mean imagenet?"),
    (("compile", MODEL, "--preprocess", "no.toml"), "no.toml"),
    (("compile", MODEL, "--postprocess", "no.toml"), "no.toml"),
    (("compile", MODEL, "--labels", "no.txt"), "no.txt"),
    (("compile", MODEL, "--tuning-records", "no-records"), "no-records"),
    (("compile", MODEL, "-o", "no-folder/x.bundle"), "no-folder"),
    (("compile", MODEL, "--name", "No Spaces"), "name: expected"),
    (("compile", MODEL, "--report", "nodes.pdf"), ".json or .html"),
    (("compile", "model.pte"), "torch.export.save"),
    (("tune", "no.onnx", "-o", "records"), "no such file: no.onnx"),
    (("tune", MODEL, "-o", "records", "--target", "hots"), "did you mean host?"),
    (("run", "no.bundle"), "no.bundle"),
    (("profile", "no.bundle"), "no.bundle"),
    (("verify", "no.bundle", "--trust", "no.pub"), "no.pub"),
    (("inspect", "no.bundle"), "no.bundle"),
    (("sign", "no.bundle", "--sign-key", "no.key"), "no.key"),
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
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr[-800:]
