"""The tree of errors: it holds every class, and codes and statuses keep their meaning."""

from __future__ import annotations

import ast
import builtins
import re
from functools import cache
from pathlib import Path
from typing import TypeVar

from agent import errors

Class = TypeVar("Class", bound=errors.EdgeError)
AGENT = Path(errors.__file__).parent


def leaves(cls: type[Class]) -> list[type[Class]]:
    below = cls.__subclasses__()
    return [leaf for child in below for leaf in leaves(child)] or [cls]


def drawn_parents() -> dict[str, str | None]:
    """Return each class that the docstring draws with the class above it."""
    assert errors.__doc__ is not None
    parents: dict[str, str | None] = {}
    above: list[str] = []
    for line in errors.__doc__.splitlines():
        found = re.match(r" {4}([│├└─ ]*)([A-Z]\w+Error)\b", line)
        if found:
            depth = len(found[1]) // 4
            above[depth:] = [found[2]]
            parents[found[2]] = above[depth - 1] if depth else None
    return parents


@cache
def exceptions_by_file(root: Path) -> dict[str, set[str]]:
    """Return the names of the public exception classes that each file below a folder defines."""
    found = [
        (str(path.relative_to(root)), node)
        for path in sorted(root.rglob("*.py"))
        if re.search(r"class \w+\(", path.read_text())  # parsing is slow
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    bases = {node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases} for _, node in found}

    def is_exception(name: str) -> bool:
        known = getattr(builtins, name, None)
        if isinstance(known, type):
            return issubclass(known, BaseException)
        return any(is_exception(base) for base in bases.get(name, ()))

    by_file: dict[str, set[str]] = {}
    for path, node in found:
        if is_exception(node.name) and not node.name.startswith("_"):
            by_file.setdefault(path, set()).add(node.name)
    return by_file


def test_wire_codes_never_change() -> None:
    codes = {cls.__name__: cls.code for cls in leaves(errors.BundleError)}
    assert codes == {
        "SignatureError": "ERR_ARBITRARY_SOFTWARE",
        "FormatError": "ERR_ARBITRARY_SOFTWARE",
        "MixAndMatchError": "ERR_MIX_AND_MATCH",
        "EndlessDataError": "ERR_ENDLESS_DATA",
        "RollbackError": "ERR_ROLLBACK",
        "CounterAheadError": "ERR_COUNTER_AHEAD",
        "IncompatibleError": "ERR_INCOMPATIBLE",
        "KeyRevokedError": "ERR_KEY_REVOKED",
        "SelfTestError": "ERR_SELF_TEST",
    }
    assert errors.NoSpaceError.code == "ERR_NO_SPACE"
    assert errors.ConflictError.code == "ERR_CONFLICT"


def test_statuses_never_change() -> None:
    statuses = {cls.__name__: cls.status for cls in leaves(errors.RequestError)}
    assert statuses == {
        "InputError": 400,
        "UnknownModelError": 404,
        "DeadlineError": 408,
        "SessionStepError": 409,
        "SessionGoneError": 410,
        "PayloadError": 413,
        "MediaTypeError": 415,
        "ExecutionError": 500,
        "OverloadedError": 503,
    }


def test_exit_codes_never_change() -> None:
    assert (errors.ConfigError.exit_code, errors.EnrollmentError.exit_code) == (78, 4)


def test_every_exception_of_the_agent_is_defined_in_errors() -> None:
    elsewhere = {path: names for path, names in exceptions_by_file(AGENT).items() if path != "errors.py"}
    assert not elsewhere, "move these to agent/errors.py, or make them private to their file"


def test_docstring_draws_the_whole_tree() -> None:
    defined = {cls for cls in vars(errors).values() if isinstance(cls, type)}
    assert {cls.__name__ for cls in defined} == exceptions_by_file(AGENT)["errors.py"]
    assert drawn_parents() == {
        cls.__name__: None if cls is errors.EdgeError else cls.__bases__[0].__name__ for cls in defined
    }


def test_docstring_gives_the_codes_of_the_classes() -> None:
    assert errors.__doc__ is not None
    for name, code in re.findall(r"(\w+Error) .* (ERR_\w+|\d+)$", errors.__doc__, re.MULTILINE):
        cls = getattr(errors, name)
        own = {cls.code, str(getattr(cls, "status", "")), str(getattr(cls, "exit_code", ""))}
        assert code in own, name


def test_hint_is_not_part_of_the_message() -> None:
    error = errors.ConfigError("expected a port, got x", hint="set mqtt.port")
    assert (str(error), error.hint) == ("expected a port, got x", "set mqtt.port")
    assert errors.SourceError("gone").hint is None
