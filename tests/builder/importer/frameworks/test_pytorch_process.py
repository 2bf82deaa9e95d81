"""What a program of PyTorch may import while it is loaded, without PyTorch."""

from __future__ import annotations

import importlib
import pickle
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from builder.importer.frameworks.pytorch_process import _load, _RefusalError
from tests.builder.importer.frameworks.archive import write_pt2

Load = Callable[[Callable[[Any], object]], object]


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Load a program by a stand-in for PyTorch, which does with `_pytree` what the real one does."""
    torch, export, ops = ModuleType("torch"), ModuleType("torch.export"), ModuleType("torch.ops")
    utils, pytree = ModuleType("torch.utils"), ModuleType("torch.utils._pytree")
    pytree.importlib = __import__("importlib")  # type: ignore[attr-defined]
    torch.export, torch.utils, torch.ops = export, utils, ops  # type: ignore[attr-defined]
    utils._pytree = pytree  # type: ignore[attr-defined]
    for module in (torch, export, ops, utils, pytree):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    path = write_pt2(tmp_path / "m.pt2")

    def load(read: Callable[[Any], object]) -> object:
        export.load = lambda _: read(pytree)  # type: ignore[attr-defined]
        genuine = pickle.loads, pytree.importlib
        try:
            return _load(path)
        finally:
            assert (pickle.loads, pytree.importlib) == genuine  # also after a refusal

    return load


@pytest.mark.parametrize("name", ["os", "builtins.os", "torch", "antigravity", ""])
def test_a_file_does_not_choose_what_is_imported(loaded: Load, name: str) -> None:
    with pytest.raises(_RefusalError, match="it would import the module") as caught:
        loaded(lambda pytree: pytree.importlib.import_module(name))
    assert repr(name) in str(caught.value)
    assert "antigravity" not in sys.modules
    assert "forward" in caught.value.reply["hint"]


def test_of_the_built_in_names_it_gets_types_only(loaded: Load) -> None:
    kinds = vars(loaded(lambda pytree: pytree.importlib.import_module("builtins")))
    assert set(kinds) == {"bool", "dict", "float", "int", "list", "set", "str", "tuple"}
    assert all(getattr(__import__("builtins"), name) is kind for name, kind in kinds.items())


def test_a_pickled_object_is_refused(loaded: Load) -> None:
    with pytest.raises(_RefusalError, match="pickled objects, which may run any code"):
        loaded(lambda _: pickle.loads(b"cos\nsystem\n(S'true'\ntR."))


def test_a_file_that_cannot_be_read_is_refused_with_a_hint(loaded: Load) -> None:
    def fail(_: object) -> object:
        raise RuntimeError("unknown class")

    with pytest.raises(_RefusalError, match=r"it cannot be read: .*unknown class"):
        loaded(fail)


def test_operators_are_registered_by_known_packages_only(
    tmp_path: Path, loaded: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A namespace of operators that is called like a module imports nothing."""
    asked: list[str] = []
    monkeypatch.setattr(importlib, "import_module", asked.append)
    sys.modules["torch.ops"].antigravity = ModuleType("antigravity")  # type: ignore[attr-defined]
    with zipfile.ZipFile(tmp_path / "m.pt2", "a") as archive:
        archive.writestr("model/models/more.json", '{"target": "torch.ops.antigravity.fly.default"}')
    with pytest.raises(_RefusalError, match=r"it has the operator antigravity\.fly, which no package"):
        loaded(lambda _: None)
    assert not asked
