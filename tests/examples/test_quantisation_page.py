"""The commands and the Python code in docs/quantisation.md work, and its figures are true."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from builder.quantising.session import Session
from tests.patience import PROGRAM_PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "quantisation.md").read_text()
sys.path.insert(0, str(ROOT / "examples" / "digits"))
import pictures  # noqa: E402


@pytest.mark.slow
def test_page_leads_from_pictures_to_an_answer_in_int8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One test, because each command needs what those before it wrote."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    commands = "".join(re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "-eu", "-c", commands],
        cwd=tmp_path,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=PROGRAM_PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    [shown] = re.findall(r"^```\n(digits-int8.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    titles = [line[:18] for line in shown.splitlines()[1:]]
    table = done.stdout[done.stdout.index("digits-int8.onnx: ") :].splitlines()
    assert table[0] == shown.splitlines()[0]
    assert [line[:18] for line in table[1 : len(titles) + 1]] == titles
    assert re.search(r"0\.\d+ +seven", done.stdout)
    assert {"digits-int8.onnx", "digits-int8.html", "digits-int8.bundle", "digits.bundle"} <= {
        path.name for path in tmp_path.iterdir()
    }

    _, _, images, classes = pictures.load()
    values = pictures.preprocess(images).transpose(0, 3, 1, 2)
    session = Session(onnx.load(tmp_path / "digits-int8.onnx"))
    right = sum(
        session.run({"image": value[None]})[0].argmax() == digit
        for value, digit in zip(values, classes, strict=True)
    )
    assert abs(int(right) - 448) <= 1  # as the page says; another processor may round one picture differently

    monkeypatch.chdir(tmp_path)
    code, in_one_step = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    before = (tmp_path / "digits-int8.onnx").read_bytes()
    exec(code, {"__name__": "__main__"})
    assert capsys.readouterr().out == "100 % in int8, 100.0 % agree\n"
    assert (tmp_path / "digits-int8.onnx").read_bytes() == before  # labels change what is measured only
    exec(in_one_step, {"__name__": "__main__"})
    assert "quantised       100.0 %" in capsys.readouterr().out
    assert np.isfinite(float(right))
