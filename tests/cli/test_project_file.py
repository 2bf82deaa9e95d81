"""The project's file: every key is known, and a mistake is one error."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder.cli.project_file import FILE, MAX_FILE_BYTES, FleetTable, ModelTable, Project, SignTable
from builder.errors import ProjectError


def load(folder: Path, text: str | bytes) -> Project:
    path = folder / FILE
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return Project.load(path)


def test_whole_and_empty_files_are_read(tmp_path: Path) -> None:
    assert load(tmp_path, "") == Project()
    text = '[model]\nfile = "a.onnx"\n[sign]\nkey = "k"\n[fleet]\nbroker = "mqtt://b"\nagents = ["a", "b"]\n'
    assert load(tmp_path, text) == Project(
        ModelTable(file="a.onnx"), SignTable("k"), FleetTable("mqtt://b", ("a", "b"))
    )


@pytest.mark.parametrize(
    ("text", "words", "hint"),
    [
        ('[model]\ntargte = "rpi4"', "expected one of file, target", "did you mean target?"),
        ('[modle]\ntarget = "rpi4"', "expected the tables model, sign, fleet", "did you mean model?"),
        ('target = "rpi4"', "expected the tables", "write it below [model]"),
        ('[model]\nbroker = "b"', "[model]: expected one of", "write it below [fleet]"),
        ('[model]\nzzzz = "b"', "[model]: expected one of", "remove it from edgebundle.toml"),
        ("[model]\ntarget = 4", "[model] target: expected a string, got 4", 'write target = "'),
        ('[model]\ntarget = ""', '[model] target: expected a string, got ""', 'write target = "'),
        (
            "[fleet]\nagents = 'kitchen'",
            'agents: expected a list of names, such as ["kitchen"]',
            'write agents = ["',
        ),
        ("[fleet]\nagents = [1]", "expected a list of names", 'write agents = ["'),
        ("model = 1", "model: expected a table, [model], got a value", "write [model]"),
        ("[model", "expected TOML", "docs/project.md"),
        ("[model]\ntarget = 'a'\ntarget = 'b'", "expected TOML", "docs/project.md"),
        (b"\xff", "expected TOML", "docs/project.md"),
        ("#" * (MAX_FILE_BYTES + 1), "expected at most 65536 bytes", "docs/project.md"),
    ],
)
def test_mistake_is_one_error(tmp_path: Path, text: str | bytes, words: str, hint: str) -> None:
    with pytest.raises(ProjectError) as caught:
        load(tmp_path, text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value).strip()
    assert caught.value.hint.startswith(hint)


@given(st.text(max_size=200))
def test_any_text_is_a_project_or_one_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.getbasetemp()
    with contextlib.suppress(ProjectError):
        load(folder, text.encode("utf-8", "surrogatepass"))
