"""docs/camera.md, with a camera that is a file: its command and its program are run as they are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.conftest import DIGITS, Site
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "camera.md").read_text()
# What the program uses of picamera2; after three pictures the camera is taken away.
PICAMERA2 = """
class Picamera2:
    left = 3
    def create_video_configuration(self, main):
        assert main == {"size": (1280, 720)}
        return main
    def configure(self, configuration): pass
    def start(self): pass
    def capture_file(self, file, format):
        assert format == "jpeg"
        if not Picamera2.left:
            raise KeyboardInterrupt
        Picamera2.left -= 1
        file.write(open(PICTURE, "rb").read())
"""


def adapted(text: str, site: Site) -> str:
    for theirs, ours in (("mqtt://localhost", site.url), ("faces", "digits")):
        assert theirs in text
        text = text.replace(theirs, ours)
    return text


def test_command_for_one_picture(site: Site, tmp_path: Path) -> None:
    (command,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    camera = tmp_path / "rpicam-still"
    camera.write_text(f'#!/bin/sh\ncase "$*" in *"--output -") cat "{DIGITS}/seven.png";; *) exit 1;; esac\n')
    camera.chmod(0o755)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "-c", adapted(command, site)],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1] == "seven"


def test_program_for_every_picture(site: Site, tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "picamera2.py").write_text(f"PICTURE = {str(DIGITS / 'seven.png')!r}\n{PICAMERA2}")
    (tmp_path / "camera.py").write_text(
        adapted(program, site).replace("answer.boxes", "answer.labels[0].label")
    )
    done = subprocess.run(
        [sys.executable, "camera.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.stdout.split().count("seven") >= 1, done.stderr
    assert "KeyboardInterrupt" in done.stderr


def test_standard_input_that_is_no_picture(site: Site) -> None:
    command = [sys.executable, "-m", "builder", "infer", "--agent", "kitchen", "--model", "digits"]
    done = subprocess.run(
        [*command, "--broker", site.url, "--input", "-"],
        input=b"text",
        cwd=ROOT,
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 4
    assert b"standard input: expected a JPEG or PNG image" in done.stderr
