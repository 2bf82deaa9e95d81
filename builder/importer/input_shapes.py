"""Parse `--input-shapes` and `--input-values`.

Promises exact values or a ShapeError that quotes the faulty part. Leaves checking them against a model to
`static_inputs`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from types import MappingProxyType
from typing import Final

from builder.errors import ShapeError

# TVMC's syntax: "data:[1,3,224,224] mask:[1,128]", also separated by commas. A name may contain nearly
# anything ("serving_default_x:0", "/model/input.1"), so it ends at the last colon before a bracket.
_ENTRY: Final = re.compile(r"\s*,?\s*(?P<name>[^\s\[\]]+?)\s*:\s*\[(?P<dims>[^\[\]]*)\]")
_DIM: Final = re.compile(r"[0-9]{1,10}")
# One dimension of this extent, at one byte per element, fills the memory of any board.
MAX_DIM: Final = 1 << 31
# NumPy's limit; models have far fewer dimensions.
MAX_RANK: Final = 32
# What exporters write for a dimension without a name; Paddle's writes it for several that differ.
UNNAMED: Final = frozenset({"", "?"})

SHAPES_HINT: Final = 'write --input-shapes "data:[1,3,224,224] mask:[1,128]"'
BOUNDS_ELSEWHERE: Final = "only `edgebundle compile` and `check` take bounds: give one size here"
VALUES_HINT: Final = "write --input-values sr=16000, or NAME=[1,2,3]"

Scalar = float | int | bool
Value = Scalar | tuple[Scalar, ...]

_WORDS: Final = MappingProxyType({"true": True, "false": False})


def parse_input_shapes(text: str) -> dict[str, tuple[int, ...]]:
    """Read `"data:[1,3,224,224] mask:[1,128]"`.

    Parameters
    ----------
    text
        One or more `NAME:[DIM,...]`, separated by white space or commas. `NAME:[]` is a scalar.

    Returns
    -------
    dict
        Input name -> shape, in the order of the text.

    Raises
    ------
    ShapeError
        If the text is malformed, a name is repeated, or a dimension is not a positive integer.
    """
    return {name: _dims(name, dims) for name, dims in split_entries(text).items()}


def split_entries(text: str) -> dict[str, str]:
    """Return the input names and what is between their brackets; errors are those of `parse_input_shapes`."""
    shapes: dict[str, str] = {}
    position = 0
    end = len(text.rstrip())
    while position < end:
        match = _ENTRY.match(text, position)
        if match is None:
            rest = text[position:end].strip()
            raise ShapeError(
                f"expected NAME:[DIM,...] in the input shapes, got {_quote(rest)}", hint=SHAPES_HINT
            )
        name = match["name"]
        if name in shapes:
            raise ShapeError(f"expected one shape for each input, got two for '{name}'", hint=SHAPES_HINT)
        shapes[name] = match["dims"]
        position = match.end()
    if not shapes:
        raise ShapeError("expected NAME:[DIM,...] in the input shapes, got nothing", hint=SHAPES_HINT)
    return shapes


def _dims(name: str, text: str) -> tuple[int, ...]:
    if not text.strip():
        return ()
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > MAX_RANK:
        raise ShapeError(
            f"expected at most {MAX_RANK} dimensions for input '{name}', got {len(parts)}", hint=SHAPES_HINT
        )
    for part in parts:
        if not _DIM.fullmatch(part) or not 0 < int(part) <= MAX_DIM:
            raise ShapeError(
                f"expected positive integers in the shape of input '{name}', got {_quote(part)}",
                hint=BOUNDS_ELSEWHERE if ".." in part else SHAPES_HINT,
            )
    return tuple(int(part) for part in parts)


def parse_input_values(texts: str | Iterable[str]) -> dict[str, Value]:
    """Read `"sr=16000"`, or several such texts: values for inputs that become constants.

    Parameters
    ----------
    texts
        `NAME=VALUE`; VALUE is an integer, a float, `true`, `false`, or a list `[VALUE,...]`. A text may hold
        several, separated by white space.

    Returns
    -------
    dict
        Input name -> value, in the order of the texts.

    Raises
    ------
    ShapeError
        If a text is malformed or a name is repeated.
    """
    values: dict[str, Value] = {}
    for text in [texts] if isinstance(texts, str) else texts:
        # White space separates entries, except inside brackets.
        for entry in re.sub(r"\[[^\]]*\]", lambda m: re.sub(r"\s", "", m[0]), text).split():
            name, equals, value = entry.rpartition("=")
            if not equals or not name or not value:
                raise ShapeError(
                    f"expected NAME=VALUE in the input values, got {_quote(entry)}", hint=VALUES_HINT
                )
            if name in values:
                raise ShapeError(f"expected one value for each input, got two for '{name}'", hint=VALUES_HINT)
            if value.startswith("[") and value.endswith("]"):
                inner = value[1:-1]
                values[name] = tuple(_scalar(name, part) for part in inner.split(",")) if inner else ()
            else:
                values[name] = _scalar(name, value)
    if not values:
        raise ShapeError("expected NAME=VALUE in the input values, got nothing", hint=VALUES_HINT)
    return values


def _scalar(name: str, text: str) -> Scalar:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise ShapeError(
        f"expected a number, true or false for input '{name}', got {_quote(text)}", hint=VALUES_HINT
    )


def _quote(text: str) -> str:
    """The text in quotes, shortened to one line."""
    flat = re.sub(r"\s+", " ", text)
    return repr(flat if len(flat) <= 60 else flat[:57] + "...")
