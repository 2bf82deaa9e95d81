"""Writing values into the commented configuration file; comments and everything else in it are kept.

Promises: the result has the old values and the given ones, and nothing else; it is parsed to check this.
Does no I/O.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from typing import Final

from agent.errors import ConfigError

Value = str | int | float | bool | tuple[str, ...]

_SECTION: Final = re.compile(r"\s*\[([A-Za-z0-9_.-]+)\]\s*(#.*)?")


def fill(text: str, values: Mapping[str, Value | None]) -> str:
    """Write values into a configuration, as `sample_config` writes it or as edited since.

    Each value, named with its section as in `broker.url`, goes to its key, or to its commented-out key, or
    else to the end of its section; None removes the key. A text that is not TOML, or has a layout that cannot
    be edited, raises ConfigError.
    """
    before = _parse(text)
    lines = text.removesuffix("\n").split("\n")  # splitlines() would also split inside strings
    for name, value in values.items():
        section, _, key = name.rpartition(".")
        lines = _set(lines, section, key, None if value is None else f"{key} = {_toml(value)}")
    filled = "\n".join(lines) + "\n"
    wanted = {**_flatten(before), **{name: _plain(value) for name, value in values.items()}}
    if _flatten(_parse(filled)) != {name: value for name, value in wanted.items() if value is not None}:
        raise ConfigError(
            f"cannot write {', '.join(values)} into a configuration with this layout",
            hint="put each key on its own line under its [section], or start from edge-agent config",
        )
    return filled


def _set(lines: list[str], section: str, key: str, statement: str | None) -> list[str]:
    first, end = _range(lines, section)
    if first < 0:
        return lines if statement is None else [*lines, "", f"[{section}]", statement]
    stated = re.compile(rf"\s*{re.escape(key)}\s*=")
    for at in range(first, end):
        if stated.match(lines[at]):
            last = _statement_end(lines, at, end)
            return [*lines[:at], *([f"#{key} = ..."] if statement is None else [statement]), *lines[last:]]
    if statement is None:
        return lines
    commented = re.compile(rf"#\s?{re.escape(key)}\s*=")
    for at in range(first, end):
        if commented.match(lines[at]):
            return [*lines[:at], statement, *lines[at + 1 :]]
    while end > first and not lines[end - 1].strip():
        end -= 1
    return [*lines[:end], statement, *lines[end:]]


def _range(lines: list[str], section: str) -> tuple[int, int]:
    """Return the range of a section's lines, or (-1, -1); lines before the first section belong to `""`."""
    first = 0 if not section else -1
    for at, line in enumerate(lines):
        match = _SECTION.fullmatch(line)
        if match is None:
            continue
        if first >= 0:
            return first, at
        if match[1] == section:
            first = at + 1
    return (first, len(lines)) if first >= 0 else (-1, -1)


def _statement_end(lines: list[str], at: int, end: int) -> int:
    """Return the line after a statement, which may be an array over several lines."""
    for last in range(at + 1, end + 1):
        try:
            tomllib.loads("\n".join(lines[at:last]))
        except tomllib.TOMLDecodeError:
            continue
        return last
    return at + 1


def _parse(text: str) -> dict[str, object]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"expected TOML: {error}", hint="correct the file, or move it away") from error


def _flatten(document: Mapping[str, object]) -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in document.items():
        if isinstance(value, dict):
            flat.update({f"{name}.{inner}": item for inner, item in value.items()})
        else:
            flat[name] = value
    return flat


def _plain(value: Value | None) -> object:
    return list(value) if isinstance(value, tuple) else value


def _toml(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # A basic string of TOML 1.0 is escaped as in JSON; DEL must be escaped too.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return str(value)
