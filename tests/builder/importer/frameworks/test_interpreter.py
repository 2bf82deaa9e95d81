"""A Python with a framework is found, or the message says how to make one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from builder.errors import ModelError
from builder.importer.frameworks import interpreter
from builder.importer.frameworks.interpreter import VARIABLE, find_python
from tests.builder.importer.frameworks.stand_in import stand_in

ABSENT = (("no_such_framework",),)
INSTALL = "no-such-framework"


@pytest.fixture(autouse=True)
def _no_other_pythons(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (VARIABLE, "VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "none"))


def test_this_python_is_asked_first() -> None:
    assert find_python((("json",),), None, "m", "x") == sys.executable
    assert find_python((*ABSENT, ("json", "csv")), None, "m", "x") == sys.executable


def test_a_missing_framework_says_what_to_install() -> None:
    with pytest.raises(
        ModelError, match=r"importing m\.pt2 needs no_such_framework, and no Python"
    ) as caught:
        find_python(ABSENT, None, "m.pt2", INSTALL)
    assert "python3 -m venv framework && framework/bin/pip install no-such-framework" in str(
        caught.value.hint
    )
    assert "--python framework/bin/python" in str(caught.value.hint)


@pytest.mark.parametrize("place", ["VIRTUAL_ENV", "PATH"])
def test_the_users_other_pythons_are_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    folder = tmp_path / "env" / "bin"
    folder.mkdir(parents=True)
    python = stand_in(folder, tmp_path)
    monkeypatch.setenv(place, str(folder.parent if place == "VIRTUAL_ENV" else folder))
    assert find_python(ABSENT, None, "m", INSTALL) == python
    stand_in(folder, tmp_path, missing="no_such_framework")
    with pytest.raises(ModelError, match="no Python was found"):
        find_python(ABSENT, None, "m", INSTALL)


def test_a_python_that_is_named_is_taken_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = stand_in(tmp_path, tmp_path)
    assert find_python((("json",),), python, "m", "x") == python
    monkeypatch.setenv(VARIABLE, python)
    assert find_python((("json",),), None, "m", "x") == python
    with pytest.raises(ModelError, match="expected a Python that runs") as caught:
        find_python(ABSENT, str(tmp_path / "absent"), "m", INSTALL)
    assert "--python" in str(caught.value.hint)
    with pytest.raises(ModelError, match="needs no_such_framework, which") as caught:
        find_python(ABSENT, sys.executable, "m", INSTALL)
    assert caught.value.hint == f"{sys.executable} -m pip install no-such-framework"


def test_looking_for_packages_runs_no_module_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("contextlib", "types", "warnings", "threading", "json"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    assert interpreter._missing(sys.executable, ["json", "no_such_package"]) == ("no_such_package",)
    assert not (tmp_path / "ran").exists()
