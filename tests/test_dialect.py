"""One dialect (CONTRIBUTING.md, "How the code is written"): what ruff cannot check is checked here.

Each rule reads the syntax tree of every Python file that git knows, and names the lines that break it.
"""

from __future__ import annotations

import ast
import gc
import io
import re
import subprocess
import tokenize
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ("agent", "builder", "dashboard", "edgebundle")

# What readers stumbled over, and what to write instead. Looked for in docstrings and comments everywhere, and
# in the messages of the two programs.
PARTICIPLES = (
    r"\w+ed|been|yet|come|seen|sent|gone|begun|taken|run|read|got|heard|become|given|made|found|done|said|built"
    r"|held|kept|left"
)
PLAIN_ENGLISH = {
    r"\bwhoever\b|\bwhomever\b": "name who it is",
    r"\bnobody\b": "name who does not, or say what is not done",
    r"\banew\b": "again",
    r"\balone\b": "only",
    r"expected [^.]*\bcame\b|, came \S+$": "expected X, got Y",
    r"\bstands there\b|\bstand there\b": "is present",
    r"\bthat there (is|are)\b": "leave it out",
    r"\bnone any more\b": "no longer valid",
    r"\bis not to be\b|\bare not to be\b": "must not",
    rf"\b(has|have) not\b(?! ({PARTICIPLES})\b)": "does not have",
}

# Finds every text that one of the patterns finds, and the files with such docstrings and comments.
NOT_PLAIN = re.compile("|".join(pattern.removesuffix("$") for pattern in PLAIN_ENGLISH), re.IGNORECASE)


class Line(NamedTuple):
    """A place that breaks a rule."""

    path: str
    number: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.number}: {self.text}"


@cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree))


@cache
def sources() -> tuple[tuple[str, str, ast.Module], ...]:
    """Path, text and tree of every Python file, in the order of git."""
    done = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = [path for path in done.stdout.split("\0") if path and (ROOT / path).exists()]
    found = [(path, (ROOT / path).read_text(encoding="utf-8")) for path in paths]
    return tuple((path, text, ast.parse(text)) for path, text in found)


def programs() -> Iterator[tuple[str, str, ast.Module]]:
    return (source for source in sources() if source[0].split("/")[0] in PROGRAMS)


def docstrings(tree: ast.Module) -> Iterator[tuple[ast.AST, int, str]]:
    """What is documented, the first line of its docstring, and the docstring."""
    for node in nodes(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        match node.body[:1]:
            case [ast.Expr(value=ast.Constant(value=str(text), lineno=line))]:
                yield node, line, text


def is_dataclass(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(d) for d in node.decorator_list)


def caught_errors() -> Iterator[Line]:
    for path, _, tree in sources():
        for node in nodes(tree):
            if isinstance(node, ast.ExceptHandler) and node.name not in (None, "error"):
                yield Line(path, node.lineno, f"except ... as {node.name}, expected `error`")


def loggers() -> Iterator[Line]:
    for path, _, tree in sources():
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("logging.getLogger("):
                name = ast.unparse(node.targets[0])
                if name != "_log":
                    yield Line(path, node.lineno, f"{name}, expected `_log`")


def fields_under_parameters() -> Iterator[Line]:
    for path, _, tree in programs():
        for node, line, text in docstrings(tree):
            if is_dataclass(node) and re.search(r"^\s*Parameters\n\s*-+$", text, re.MULTILINE):
                yield Line(path, line, "a dataclass's fields are documented under Attributes")


def raises_entries() -> Iterator[Line]:
    for path, _, tree in programs():
        for _, line, text in docstrings(tree):
            section = re.search(r"^( *)Raises\n *-+\n((?:\1.*\n|\n)*)", text + "\n", re.MULTILINE)
            if section is None:
                continue
            for name, condition in pairwise(section[2].split("\n")):
                is_entry = re.fullmatch(section[1] + r"\S[\w., ]*", name) and condition.startswith(
                    section[1] + " "
                )
                if is_entry and not condition.strip().startswith("If "):
                    yield Line(path, line, f"Raises: {condition.strip()!r}, expected 'If ...'")


def roles_and_double_backticks() -> Iterator[Line]:
    for path, _, tree in sources():
        for _, line, text in docstrings(tree):
            found = re.search(r":(class|meth|func|mod|data|attr|exc):`|``\w", text)
            if found:
                yield Line(path, line, f"{found[0]}, expected plain backticks")


def frozen_without_slots() -> Iterator[Line]:
    for path, _, tree in programs():
        for node in nodes(tree):
            if not isinstance(node, ast.ClassDef):
                continue
            for decorator in map(ast.unparse, node.decorator_list):
                if (
                    decorator.startswith("dataclass(")
                    and "frozen=True" in decorator
                    and "slots" not in decorator
                ):
                    yield Line(path, node.lineno, "a frozen dataclass, expected slots=True or a reason")


def constants_without_final() -> Iterator[Line]:
    for path, _, tree in programs():
        for node in tree.body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    if re.fullmatch(r"_?[A-Z][A-Z0-9_]+", name) and "TypeVar" not in ast.unparse(value):
                        yield Line(path, node.lineno, f"{name}, expected `{name}: Final`")


def progress_by_other_names() -> Iterator[Line]:
    """Callbacks named `on_...` are events and not progress."""
    for path, _, tree in programs():
        for node in nodes(tree):
            if isinstance(node, ast.arg) and node.annotation is not None:
                kind = ast.unparse(node.annotation).removesuffix(" | None")
                if kind == "Callable[[str], None]" and not re.match(r"progress$|on_", node.arg):
                    yield Line(path, node.lineno, f"{node.arg}: {kind}, expected the name `progress`")


# Their stderr is a pipe of a process of ours, and some must not import more than they need.
OTHER_WRITERS = {
    "agent/worker/__main__.py",
    "builder/importer/frameworks/confinement.py",
}
# They are given a standard stream: the log has a formatter that calls `printable`, and the other closes it.
NO_WRITERS = {"logging.StreamHandler", "_silence"}
TERMINAL_WRITERS = re.compile(r"sys\.(stdout|stderr)\.(write|writelines|buffer)\b|traceback\.print_|print$")


def writers_to_the_terminal() -> Iterator[Line]:
    """Only `agent/terminal.py` writes to a terminal, because it replaces what would control one."""
    for path, _, tree in programs():
        if path == "agent/terminal.py" or path in OTHER_WRITERS:
            continue
        for node in nodes(tree):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            given = {ast.unparse(each) for each in (*node.args, *(word.value for word in node.keywords))}
            hands_it_on = given & {"sys.stdout", "sys.stderr"} and name not in NO_WRITERS
            if TERMINAL_WRITERS.match(name) or hands_it_on:
                yield Line(path, node.lineno, f"{name}, expected agent.terminal")


def prose() -> Iterator[Line]:
    for path, text, tree in sources():
        if path == Path(__file__).relative_to(ROOT).as_posix():
            continue  # it quotes what it forbids
        pieces = set()
        if NOT_PLAIN.search(text):  # else no docstring or comment is worth the time
            pieces |= {(line, docstring) for _, line, docstring in docstrings(tree)}
            tokens = tokenize.generate_tokens(io.StringIO(text).readline)
            pieces |= {(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT}
        if path.split("/")[0] in PROGRAMS:
            pieces |= messages(tree)
        for number, piece in sorted(piece for piece in pieces if NOT_PLAIN.search(piece[1])):
            for pattern, instead in PLAIN_ENGLISH.items():
                found = re.search(pattern, piece, re.IGNORECASE)
                if found:
                    line = number + piece.count("\n", 0, found.start())
                    yield Line(path, line, f"{found[0]!r}, expected: {instead}")


def messages(tree: ast.Module) -> set[tuple[int, str]]:
    """Literal text of more than one word: what a person may read."""
    return {
        (node.lineno, node.value)
        for node in nodes(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip()
    }


# Rooms in which only what other rooms use has a docstring with sections.
SHORT_ROOMS = (
    *(f"builder/{name}" for name in ("codegen", "compiling", "importer", "kernels", "quantising")),
    *(
        f"agent/{name}"
        for name in ("bundle", "config", "confinement", "deploy", "mqtt", "provision", "runtime")
    ),
    "agent/wire",
)
SECTION = re.compile(r"^ *(Parameters|Attributes|Returns|Raises)\n *-+$", re.MULTILINE)


def names_used_outside(room: str) -> set[str]:
    """Names that other rooms import from a room, or may use through one of its modules, and public ones."""
    module = room.replace("/", ".")
    found = set()
    for path, text, tree in programs():
        if path in ("builder/__init__.py", f"{room}/__init__.py"):
            found |= set(re.findall(r'"(\w+)"', text))  # imported when they are first used
        elif not path.startswith(f"{room}/") and module in text:
            for node in nodes(tree):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(module):
                    found |= {alias.name for alias in node.names}
                elif isinstance(node, ast.Attribute):
                    found.add(node.attr)
    return found


def sections_inside_a_room() -> Iterator[Line]:
    """Inside a room, a docstring is a summary and a line for each name that does not say it all."""
    for room in SHORT_ROOMS:
        outside = names_used_outside(room)
        for path, _, tree in programs():
            for top in tree.body if path.startswith(f"{room}/") else ():
                if not isinstance(top, (ast.ClassDef, ast.FunctionDef)) or top.name in outside:
                    continue
                for _, line, text in docstrings(ast.Module([top], [])):
                    if section := SECTION.search(text):
                        yield Line(path, line, f"{section[1]}, expected no sections: only its room uses it")


RULES: tuple[Callable[[], Iterator[Line]], ...] = (
    caught_errors,
    loggers,
    fields_under_parameters,
    raises_entries,
    roles_and_double_backticks,
    frozen_without_slots,
    constants_without_final,
    progress_by_other_names,
    writers_to_the_terminal,
    sections_inside_a_room,
    prose,
)


@pytest.mark.slow
def test_dialect() -> None:
    """All rules are one test, because reading and parsing every file takes longer than they do."""
    gc.disable()  # searching millions of new objects for cycles takes longer than the rules
    try:
        broken = [line for rule in RULES for line in rule()]
    finally:
        gc.enable()
        sources.cache_clear()
        nodes.cache_clear()
    assert not broken, f"{len(broken)} lines:\n" + "\n".join(map(str, broken[:60]))
