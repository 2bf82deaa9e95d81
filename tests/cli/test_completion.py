"""Shells complete verbs, flags, targets and files: the scripts are run by the shells themselves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.terminal import Edgebundle
from tests.patience import PATIENCE_S

COMMAND = Path(sys.executable).parent / "edgebundle"


def asked(line: str, cwd: Path) -> list[str]:
    """Return what the command answers a shell that has `line` before the cursor."""
    answer = cwd / "answer"
    environment = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "COMP_TYPE": "9",
    }
    done = subprocess.run(
        [COMMAND],
        env={**os.environ, **environment},
        cwd=cwd,
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.stdout == b""
    return [word.strip() for word in answer.read_text().split("\n")]


@pytest.mark.slow
def test_words_of_every_kind_are_completed(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").touch()
    assert asked("edgebundle comp", tmp_path) == ["compile", "completion"]
    assert "--sign-key" in asked("edgebundle compile --si", tmp_path)
    assert asked("edgebundle compile m.onnx --target rpi", tmp_path) == ["rpi3", "rpi4", "rpi5", "rpi-armv7"]
    assert "model.onnx" in asked("edgebundle compile mo", tmp_path)
    assert asked("edgebundle run b --fill-mode z", tmp_path) == ["zeros"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_script(edgebundle: Edgebundle, shell: str) -> None:
    done = edgebundle("completion", shell)
    assert done.returncode == 0
    assert "edgebundle" in done.stdout
    program = shutil.which(shell)
    if program is not None:
        subprocess.run(
            [program, "-n", "/dev/stdin"], input=done.stdout, text=True, timeout=PATIENCE_S, check=True
        )


def test_an_unknown_shell_is_refused(edgebundle: Edgebundle) -> None:
    done = edgebundle("completion", "bsh")
    assert done.returncode == 2
    assert "did you mean bash?" in done.stderr
