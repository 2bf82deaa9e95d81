"""No test says how many seconds it waits for what must happen: `tests/patience.py` does.

A wait that must run out has a number, below `pytest.raises` or `contextlib.suppress` of its error, and so has
one in virtual time.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent

# What waits for so many seconds, and the place of its limit; None where it has only a keyword.
WAITS = {
    "timeout": 0,
    "wait_for": 1,
    "wait": 0,
    "join": 0,
    "result": 0,
    "settimeout": 0,
    "run": None,
    "get": None,
    "acquire": None,
    "communicate": None,
    "urlopen": None,
}
KEYWORDS = ("timeout", "limit_s")
CLOCK = re.compile(r"\b(monotonic|perf_counter|loop\(\)\.time|loop\.time)\(\)")
RUNS_OUT = re.compile(r"\b(raises|suppress)\((TimeoutError|queue\.Empty|subprocess\.TimeoutExpired)")


def is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and node.value != 0


def exempt(tree: ast.Module) -> set[int]:
    """Return the lines of tests in virtual time, and of waits that must run out."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            said = [ast.unparse(decorator) for decorator in node.decorator_list]
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            said = [ast.unparse(item) for item in node.items]
        else:
            continue
        if any("in_virtual_time" in text or RUNS_OUT.search(text) for text in said):
            lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def limits(node: ast.Call) -> Iterator[ast.expr]:
    """Yield the expressions that limit a wait."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name not in WAITS:
        return
    yield from (each.value for each in node.keywords if each.arg in KEYWORDS)
    place = WAITS[name]
    if place is not None and len(node.args) > place:
        yield node.args[place]


def own_numbers(text: str) -> Iterator[int]:
    """Yield the lines of a test that say how long something may take."""
    tree = ast.parse(text)
    left_out = exempt(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Call():
                found = any(map(is_number, limits(node)))
            # Upper limits only: nothing can be too slow for a lower one.
            case ast.Compare(left=left, ops=[ast.Lt() | ast.LtE()], comparators=[limit]):
                found = bool(CLOCK.search(ast.unparse(left))) and is_number(limit)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found = name.endswith("LIMIT_S") and is_number(value)
            case ast.FunctionDef(args=arguments) | ast.AsyncFunctionDef(args=arguments):
                given = arguments.args[len(arguments.args) - len(arguments.defaults) :]
                pairs = [*zip(given, arguments.defaults, strict=True)]
                pairs += [
                    (argument, default)
                    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
                    if default is not None
                ]
                found = any(each.arg in KEYWORDS and is_number(default) for each, default in pairs)
            case _:
                continue
        if found and node.lineno not in left_out:
            yield node.lineno


# Their programs run for seconds, each with a limit of minutes.
LEFT_OUT = ("builder/kernels/", "builder/codegen/")

# Promises about the wall clock, which `least_s` measures, and limits in a clock that tests set.
CLAIMS = {
    ("agent/mqtt/test_negotiation.py", "LIMIT_S = 10.0"): "in virtual time",
    ("agent/service/test_session_seq.py", "LIMIT_S = 10.0"): "a number beside the clock of the device",
    ("agent/test_agent_process.py", "READY_LIMIT_S = 1.5"): "docs/mqtt.md promises it",
    ("cli/test_wrong_names.py", "LIMIT_S = 1.6"): "in virtual time",
    ("edgebundle/test_quiet.py", "async with asyncio.timeout(0.01):"): "it runs out",
}


def test_no_test_has_a_patience_of_its_own() -> None:
    wrong = []
    for path in sorted(TESTS.rglob("*.py")):
        text, name = path.read_text(encoding="utf-8"), path.relative_to(TESTS).as_posix()
        if name.startswith(LEFT_OUT):
            continue
        lines = text.splitlines()
        for number in sorted(set(own_numbers(text))):
            line = lines[number - 1].strip()
            if (name, line) not in CLAIMS:
                wrong.append(f"tests/{name}:{number}: {line}")
    assert wrong == [], "expected PATIENCE_S of tests/patience.py, an event, or least_s"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("await asyncio.wait_for(answer, 5)", True),
        ("await asyncio.wait_for(answer, PATIENCE_S)", False),
        ("process.wait(30)", True),
        ("done = subprocess.run(command, timeout=60)", True),
        ("done = subprocess.run(command, timeout=PROGRAM_PATIENCE_S)", False),
        ("assert time.monotonic() - began < 8", True),
        ("assert time.monotonic() - began >= 0.05", False),
        ("assert least_s(ready_s, 1.5) <= 1.5", False),
        ("START_LIMIT_S = 20.0", True),
        ("def until(condition, limit_s=5.0): ...", True),
        ("with pytest.raises(TimeoutError): sock.settimeout(0.1)", False),
        ("@in_virtual_time\nasync def test_x(): await asyncio.wait_for(answer, 5)", False),
    ],
)
def test_a_number_of_its_own_is_found(line: str, found: bool) -> None:
    assert bool(list(own_numbers(line))) is found
