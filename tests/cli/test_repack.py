"""`edgebundle repack`: the same kernels with other declarations."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from builder.bundles.key_files import KeyPair
from builder.bundles.package import Package
from tests.cli.terminal import Terminal
from tests.patience import PATIENCE_S

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits"


def test_a_repacked_bundle_is_signed_verified_and_run(
    terminal: Terminal, digits_bundle: Path, pair: KeyPair, tmp_path: Path
) -> None:
    new = tmp_path / "new.bundle"
    steps, version = ("--postprocess", "softmax,top1"), ("--model-version", "1.2.3")
    flags = (*steps, *version, "--name", "one", "--security-counter", "9")
    result = terminal("repack", digits_bundle, "-o", new, "--sign-key", pair.private, *flags)
    assert (result.code, result.err) == (0, [])
    assert result.out == f"{new}: one 1.2.3, counter 9\n"
    assert terminal("verify", new, "--trust", pair.public).code == 0
    assert [
        line.split()[1] for line in terminal("run", new, "-i", DIGITS / "seven.png").out.splitlines()
    ] == ["seven"]
    before, after = Package.load(digits_bundle), Package.load(new)
    assert before.members == after.members
    assert before.manifest.preprocess == after.manifest.preprocess


def test_counter_ahead_of_time_needs_its_flag_and_is_then_in_the_manifest(
    terminal: Terminal, digits_bundle: Path, tmp_path: Path
) -> None:
    new = tmp_path / "new.bundle"
    counter = ("--security-counter", str(1 << 40))
    refused = terminal("repack", digits_bundle, "-o", new, *counter)
    assert (refused.code, new.exists()) == (4, False)
    assert "would lock out later builds" in refused.err[0]
    assert terminal("repack", digits_bundle, "-o", new, *counter, "--counter-ahead-of-time").code == 0
    assert Package.load(new).manifest.counter_ahead_of_time is True
    # The next build has the time again, and needs no flag.
    assert terminal("repack", new, "-o", new).code == 0
    assert Package.load(new).manifest.counter_ahead_of_time is None


def test_an_unsigned_result_is_told_and_json_is_the_only_output(
    terminal: Terminal, digits_bundle: Path, tmp_path: Path
) -> None:
    new = tmp_path / "new.bundle"
    assert "not signed" in terminal("repack", digits_bundle, "-o", new).out
    document = json.loads(terminal("repack", digits_bundle, "-o", new, "--json").out)
    assert (document["bundle"], document["signed"]) == (str(new), False)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--postprocess", "yolox"], "postprocess yolox: expected"),
        (["--postprocess", "softmx"], "got 'softmx'"),
        (["--preprocess", "absent.toml"], "absent.toml: cannot be read"),
        (["--labels", "coco"], "expected 10 labels"),
        (["--postprocess", "none"], "the bundle's labels: expected a postprocess"),
        (["--model-version", "1"], "version: expected"),
        (["--sign-key", "absent.key"], "absent.key"),
    ],
)
def test_what_does_not_fit_leaves_the_bundle_as_it_is(
    terminal: Terminal, digits_bundle: Path, tmp_path: Path, flags: list[str], words: str
) -> None:
    copy = tmp_path / "copy.bundle"
    copy.write_bytes(digits_bundle.read_bytes())
    result = terminal("repack", copy, *flags)
    assert result.code == 4
    assert words in result.err[0]
    assert all(line.startswith(("edgebundle: error: ", "edgebundle: hint: ")) for line in result.err)
    assert copy.read_bytes() == digits_bundle.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["copy.bundle"]


def test_repacking_does_not_load_the_compiler() -> None:
    """Which would take seconds, and a changed label is worth less."""
    script = "import sys; import builder.compiling.repack; print({'tvm', 'onnxslim'} & {*sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.stdout.strip() == "set()", done.stderr
