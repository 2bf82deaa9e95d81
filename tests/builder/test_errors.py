from __future__ import annotations

import ast
from pathlib import Path

import builder
from agent.errors import EdgeError
from builder import errors

ROOT = Path(builder.__file__).parent


def exception_names() -> set[str]:
    return {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }


def test_docstring_draws_the_whole_tree() -> None:
    drawn = (errors.__doc__ or "").split()
    assert exception_names() <= set(drawn)


def test_every_public_exception_is_defined_in_errors() -> None:
    known = {"Exception", "BaseException", "ValueError", "RuntimeError", "OSError"} | exception_names()
    elsewhere = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in sorted(ROOT.rglob("*.py"))
        if path != ROOT / "errors.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        if any(ast.unparse(base).rpartition(".")[2] in known for base in node.bases)
        or node.name.endswith(("Error", "Fault"))
    ]
    assert elsewhere == []


def test_exit_codes_say_whose_fault_it_is() -> None:
    assert errors.LinkError("refused").exit_code == 1
    assert {cls.exit_code for cls in errors.InputFault.__subclasses__()} == {4}


def test_errors_of_both_programs_have_one_base_each() -> None:
    assert not issubclass(errors.BuildError, EdgeError)


def test_hint_is_not_part_of_the_message() -> None:
    error = errors.ModelError("expected a file, got a folder", hint="name the file")
    assert (str(error), error.hint) == ("expected a file, got a folder", "name the file")
    assert errors.BuildError("expected a sum, got a product").hint == errors.FAULT
