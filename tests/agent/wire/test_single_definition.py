"""One definition: patterns, limits and words of the wire stand in one file of agent and builder."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCES = sorted(
    path for package in ("agent", "builder", "dashboard") for path in (ROOT / package).rglob("*.py")
)
# Text -> the file that may have it.
TEXTS = {
    "[a-z0-9][a-z0-9._-]{0,63}": "agent/bundle/names.py",
    "[A-Za-z0-9][A-Za-z0-9._-]{0,63}": "agent/bundle/names.py",
    "[0-9a-f]{64}": "agent/bundle/names.py",
    "[A-Za-z0-9][A-Za-z0-9,._+-]{0,127}": "agent/bundle/names.py",
    "__stat": "agent/wire/properties.py",
    "__stMsg": "agent/wire/properties.py",
    "traceparent": "agent/wire/properties.py",
    "edge/v1": "agent/wire/topics.py",
    "offline": "agent/wire/presence.py",
    "online": "agent/wire/presence.py",
    "application/json": "agent/wire/content_types.py",
    "application/octet-stream": "agent/wire/content_types.py",
    "SUCCEEDED": "agent/wire/job.py",
    "CANCELED": "agent/wire/job.py",
    "FAILED_NO_STATE_CHANGE": "agent/wire/job.py",
    "ERR_CONFLICT": "agent/errors.py",
}
LIMITS = {
    "MAX_BUNDLE_BYTES": "agent/bundle/archive.py",
    "MAX_DESIRED_BYTES": "agent/wire/desired.py",
    "MAX_MODELS": "agent/wire/desired.py",
    "MAX_SOURCES": "agent/wire/desired.py",
    "MAX_WANT_BYTES": "agent/wire/blocks.py",
    "MAX_BLOCK_BYTES": "agent/wire/blocks.py",
    "MAX_ID_CHARACTERS": "agent/wire/envelope.py",
    "MAX_TOPIC_CHARACTERS": "agent/wire/topics.py",
    "MAX_STATUS_MESSAGE_CHARACTERS": "agent/wire/answer_head.py",
    "MAX_MESSAGE_CHARACTERS": "agent/wire/job.py",
}


@cache
def source(path: Path) -> str:
    return path.read_text()


@cache
def texts(path: Path) -> frozenset[str]:
    """Every string of a module but its docstrings."""
    tree = ast.parse(source(path))
    documentation = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    return frozenset(
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation
    )


@cache
def assigned(path: Path) -> tuple[str, ...]:
    return tuple(
        node.target.id
        for node in ast.walk(ast.parse(source(path)))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    )


@pytest.mark.parametrize(("text", "owner"), TEXTS.items())
def test_text_is_only_in_its_owner(text: str, owner: str) -> None:
    found = [str(path.relative_to(ROOT)) for path in SOURCES if text in source(path) and text in texts(path)]
    assert found == [owner]


@pytest.mark.parametrize(("name", "owner"), LIMITS.items())
def test_limit_is_defined_only_by_its_owner(name: str, owner: str) -> None:
    naming = [path for path in SOURCES if name in source(path)]  # parsing all takes seconds
    assert [str(path.relative_to(ROOT)) for path in naming if name in assigned(path)] == [owner]


def test_no_loose_dict_in_the_fleet() -> None:
    """Documents are types; only the numbers of an answer are of any type (`ndarray[Any, Any]`)."""
    for path in (ROOT / "builder/fleet").glob("*.py"):
        assert "dict[str, Any]" not in path.read_text(), path
        assert "json" not in {
            alias.name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Import)
            for alias in node.names
        }, f"{path}: documents are read and written in agent/wire"


def test_wire_does_no_io_and_needs_no_numpy() -> None:
    for path in (ROOT / "agent/wire").glob("*.py"):
        modules = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                modules.add(node.module or "")
        assert not modules & {
            "numpy",
            "os",
            "pathlib",
            "socket",
            "asyncio",
            "time",
            "logging",
            "agent.mqtt.connection",
        }
