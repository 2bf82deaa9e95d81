"""docs/clients.md says what the code does."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgebundle
from tests.clients.conftest import DIGITS, Site
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "clients.md").read_text()
README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
HERE = {"faces": "digits", "cat.jpg": str(DIGITS / "seven.png"), "1.jpg": str(DIGITS / "seven.png")}
HERE |= {"2.jpg": str(DIGITS / "four.png")}


def ours(program: str, site: Site) -> str:
    """Replace the page's broker, model and pictures by those of the tests."""
    program = re.sub(r"mqtts://(alice@)?broker", site.url, program)
    program = program.replace(', cafile="ca.pem", password_file="password"', "")
    for theirs, mine in HERE.items():
        program = program.replace(f'"{theirs}"', repr(mine))
    return program


@pytest.mark.slow
def test_three_lines_of_python(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    exec(ours(PYTHON[0], site).replace(".boxes", ".labels"))
    assert "Label(label='seven'" in capsys.readouterr().out


@pytest.mark.slow
def test_program_of_the_readme(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    [program] = re.findall(r"```python\n(from edgebundle .*?)```", README, re.DOTALL)
    monkeypatch.chdir(ROOT)
    exec(program.replace("mqtts://broker.lan", site.url))
    assert capsys.readouterr().out == "seven\n"


@pytest.mark.slow
def test_every_call_of_the_page(site: Site) -> None:
    program = ours(PYTHON[1], site)
    for line in ("answer = model(ids=ids, mask=mask)", 'answer["scores"]', 'client.group_model("door", '):
        assert line in program
    program = program.replace("ids=ids, mask=mask", "image=array")
    names: dict[str, Any] = {
        "Client": edgebundle.Client,
        "array": np.zeros((1, 1, 8, 8)),
        "paths": [DIGITS / "seven.png", DIGITS / "four.png"],
        "frame": (DIGITS / "four.png").read_bytes(),
    }
    exec(program, names)
    assert names["future"].result(PATIENCE_S).labels[0].label == "four"
    names["client"].close()


@pytest.mark.slow
def test_asyncio_of_the_page(site: Site) -> None:
    program = ours(PYTHON[2], site)

    async def frames() -> Any:
        yield DIGITS / "seven.png"

    names: dict[str, Any] = {"asyncio": asyncio, "frames": frames}
    head, _, body = program.partition("\n\n")
    exec(head, names)
    indented = "\n".join(f"    {line}" for line in body.splitlines())
    exec(f"async def run():\n{indented}\n    return first, second, answer", names)
    first, second, last = asyncio.run(names["run"]())
    assert [answer.labels[0].label for answer in (first, second, last)] == ["seven", "four", "seven"]


def test_every_error_is_on_the_page() -> None:
    errors = {name for name in edgebundle.__all__ if name.endswith("Error")}
    assert set(re.findall(r"`(\w+Error)`", PAGE)) - {"ValueError", "TimeoutError"} == errors
    for name, status in re.findall(r"`(\w+Error)` (\d{3})", PAGE):
        assert getattr(edgebundle, name).default_status == int(status)
