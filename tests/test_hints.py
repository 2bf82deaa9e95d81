"""Each command and each flag of a hint exists."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import builder.cli as cli
from agent.cli import _parser as agent_parser
from agent.errors import EnrollmentError
from builder.errors import InputFault, UnboundedError
from edgebundle.errors import UsageError

ROOT: Final = Path(__file__).parent.parent
ROOMS: Final = ("agent", "builder", "dashboard", "edgebundle")
COMMAND: Final = re.compile(r"\b(edgebundle|edge-agent) ([a-z][a-z-]*)((?: [^;:,()`]+)?)")
FLAG: Final = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
# Flags of other programs: of containers and of ssh's tunnel.
FOREIGN: Final = {"--memory"}
# What follows the name of a program in a sentence, where it is no verb.
WORDS: Final = {"again", "at", "compiles", "in", "runs", "wrote", "brings", "does", "before"}


def text_of(value: ast.expr) -> str:
    """Return the words of an expression, with X for what is computed."""
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return value.value
    if isinstance(value, ast.JoinedStr):
        return "".join(text_of(part) if isinstance(part, ast.Constant) else "X" for part in value.values)
    return " ; ".join(text_of(part) for part in ast.iter_child_nodes(value) if isinstance(part, ast.expr))


@cache
def hints() -> tuple[tuple[str, str], ...]:
    """Return where each hint stands, and its words."""
    found: list[tuple[str, str]] = []
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            found += [
                (f"{path.relative_to(ROOT)}:{node.value.lineno}", text_of(node.value))
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.keyword) and node.arg == "hint"
            ]
    return tuple(found)


def flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from flags(inner)


@cache
def verbs(program: str) -> dict[str, argparse.ArgumentParser]:
    parser = cli._parser() if program == "edgebundle" else agent_parser()
    [verbs] = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(verbs.choices)


def test_hints_are_found() -> None:
    assert len(hints()) > 200
    assert sum("--" in text for _, text in hints()) > 60


def test_each_flag_exists() -> None:
    known = {
        flag for program in ("edgebundle", "edge-agent") for p in verbs(program).values() for flag in flags(p)
    }
    wrong = [
        (where, flag) for where, text in hints() for flag in FLAG.findall(text) if flag not in known | FOREIGN
    ]
    assert not wrong


def test_each_command_exists_and_has_its_flags() -> None:
    wrong = []
    for where, text in hints():
        for program, verb, rest in COMMAND.findall(text):
            if verb in WORDS:
                continue
            parser = verbs(program).get(verb)
            if parser is None:
                wrong.append((where, f"{program} {verb}"))
                continue
            own = set(flags(parser))
            wrong += [(where, f"{verb} {flag}") for flag in FLAG.findall(rest) if flag not in own]
    assert not wrong


def test_a_command_on_a_file_names_it() -> None:
    """`edgebundle repack --labels FILE` would be refused: the bundle is missing."""
    wrong = [
        (where, verb)
        for where, text in hints()
        for _, verb, rest in COMMAND.findall(text)
        if verb in ("repack", "compile", "sign", "quantize") and rest.lstrip().startswith("--")
    ]
    assert not wrong


# Errors of a user's input or device; mypy holds the hints of the first two.
REFUSALS: Final = (InputFault, UsageError, EnrollmentError)
# Talk that does not say what to do.
EMPTY: Final = re.compile(
    r"^(please )?(check|verify|see) (the|your) \w+$|^try again$|^fix (it|the \w+)$", re.IGNORECASE
)


def classes_below(*roots: type[Exception]) -> set[str]:
    found = set(roots)
    while more := {below for each in found for below in each.__subclasses__()} - found:
        found |= more
    return {each.__name__ for each in found}


def refusals() -> Iterator[tuple[str, ast.Call]]:
    """Each place that makes a refusal."""
    names = classes_below(*REFUSALS)
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            own = names | ({"ConfigError"} if "provision" in path.parts else set())
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in own:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def test_each_refusal_has_a_hint() -> None:
    """`UnboundedError` gives itself one."""
    found = list(refusals())
    assert len(found) > 500
    hintless = [
        where
        for where, call in found
        if isinstance(call.func, ast.Name)
        and call.func.id != UnboundedError.__name__
        and not any(keyword.arg == "hint" for keyword in call.keywords)
    ]
    assert not hintless


def branches(value: ast.expr) -> list[ast.expr]:
    """Return what an expression may give."""
    if isinstance(value, ast.IfExp):
        return [*branches(value.body), *branches(value.orelse)]
    return branches(value.values[-1]) if isinstance(value, ast.BoolOp) else [value]


def test_no_refusal_has_none_as_its_hint() -> None:
    none = [
        where
        for where, call in refusals()
        for keyword in call.keywords
        if keyword.arg == "hint"
        and any(isinstance(each, ast.Constant) and not each.value for each in branches(keyword.value))
    ]
    assert not none


def test_no_hint_is_empty_talk() -> None:
    assert EMPTY.match("Check the file")
    assert not [(where, text) for where, text in hints() if EMPTY.match(text)]


def test_refusals_of_operators_of_tflite_get_a_hint() -> None:
    """`RefusalError` knows no hint for most operators; the conversion, its only reader, adds one."""
    tree = ast.parse((ROOT / "builder" / "importer" / "tflite" / "conversion.py").read_text())
    made = [
        keyword.value
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler) and ast.unparse(node.type or node) == "RefusalError"
        for call in ast.walk(node)
        if isinstance(call, ast.Call)
        for keyword in call.keywords
        if keyword.arg == "hint"
    ]
    assert len(made) == 2
    assert all(isinstance(value, ast.BoolOp) and ast.unparse(value.values[-1]) for value in made)
