"""Parse `--input-shapes` with dimensions that have bounds: `"ids:[1,s=1..512] mask:[1,s]"`.

Promises shapes in which each changing dimension has a name and bounds, or a ShapeError that quotes the faulty
part. Leaves checking them against a model to `static_inputs`, which is given sizes, and choosing the sizes to
`builder.compiling.ladder`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.bundle.buckets import MAX_DIMENSIONS
from builder.errors import ShapeError
from builder.importer.input_shapes import MAX_DIM, MAX_RANK, UNNAMED, split_entries
from builder.spelling import did_you_mean

BOUNDS_HINT: Final = 'write --input-shapes "ids:[1,s=1..512] mask:[1,s]"'
_DIM: Final = re.compile(
    r"(?P<size>[0-9]{1,10})|((?P<name>[A-Za-z_][\w.-]{0,63})\s*=\s*)?(?P<low>[0-9]{1,10})\s*\.\.\s*"
    r"(?P<high>[0-9]{1,10})|(?P<symbol>[A-Za-z_][\w.-]{0,63})"
)
# What a dimension's name may have; ONNX allows anything in a dim_param.
_NAMED: Final = re.compile(r"[ -:<-~]{1,64}")


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of a dimension, both included.

    Attributes
    ----------
    name
        Its name; empty if the text gives none.
    low, high
        0 <= `low` <= `high`, and 1 <= `high`; only a cache that grows begins with 0.
    """

    name: str
    low: int
    high: int


Parsed = Mapping[str, tuple[int | str | Bounds, ...]]
Shapes = Mapping[str, Sequence[int | str]]


@dataclass(frozen=True, slots=True)
class BoundedShapes:
    """The shapes of inputs, some of whose dimensions change.

    Attributes
    ----------
    dimensions
        The dimensions that change, with different names.
    shapes
        Input name -> shape; a text is the name of a dimension.
    """

    dimensions: tuple[Bounds, ...]
    shapes: Mapping[str, tuple[int | str, ...]]

    def at(self, sizes: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Return the shapes at some sizes, given in the order of `dimensions`."""
        size = {dimension.name: each for dimension, each in zip(self.dimensions, sizes, strict=True)}
        return {
            name: tuple(size[dim] if isinstance(dim, str) else dim for dim in shape)
            for name, shape in self.shapes.items()
        }


def has_bounds(text: str | Shapes | None) -> bool:
    """Whether a text of `--input-shapes` has a dimension with bounds."""
    return any(".." in dims for dims in _entries(text or {}).values())


def _entries(text: str | Shapes) -> Mapping[str, str]:
    if isinstance(text, str):
        return split_entries(text)
    return {name: ",".join(map(str, dims)) for name, dims in text.items()}


def parse_bounded_shapes(text: str | Shapes) -> Parsed:
    """Read `"ids:[1,s=1..512] mask:[1,s]"`.

    Parameters
    ----------
    text
        As for `parse_input_shapes`, or input name -> dimensions; a dimension may also be `LOW..HIGH`,
        `NAME=LOW..HIGH`, or a NAME.

    Raises
    ------
    ShapeError
        If the text is malformed, a name is repeated, or bounds are not positive and in order.
    """
    return {name: _dims(name, dims) for name, dims in _entries(text).items()}


def _dims(name: str, text: str) -> tuple[int | str | Bounds, ...]:
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if len(parts) > MAX_RANK:
        raise ShapeError(
            f"expected at most {MAX_RANK} dimensions for input '{name}', got {len(parts)}", hint=BOUNDS_HINT
        )
    return tuple(_dim(name, part) for part in parts)


def _dim(name: str, part: str) -> int | str | Bounds:
    match = _DIM.fullmatch(part)
    if match is None:
        raise ShapeError(
            f"expected a size, LOW..HIGH or NAME=LOW..HIGH in the shape of input '{name}', got {part[:60]!r}",
            hint=BOUNDS_HINT,
        )
    if match["symbol"] is not None:
        return match["symbol"]
    sizes = [int(match[key]) for key in ("size", "low", "high") if match[key] is not None]
    # A cache that grows begins with nothing (`growing`); no other dimension may be empty.
    least = 0 if match["low"] is not None and sizes[-1] else 1
    if not all(least <= size <= MAX_DIM for size in sizes) or sizes[0] > sizes[-1]:
        raise ShapeError(
            f"expected positive sizes in increasing order in the shape of input '{name}', got {part[:60]!r}",
            hint=BOUNDS_HINT,
        )
    return sizes[0] if len(sizes) == 1 else Bounds(match["name"] or "", sizes[0], sizes[1])


def resolve_bounds(parsed: Parsed, declared: Mapping[str, Sequence[str | int | None]]) -> BoundedShapes:
    """Name every changing dimension.

    Parameters
    ----------
    parsed
        What `parse_bounded_shapes` returned.
    declared
        Input name -> the dimensions in the model file, where they are known: bounds without a name take the
        symbol of their dimension there.

    Raises
    ------
    ShapeError
        If there is no such input, a name has no bounds or two, or too many dimensions change.
    """
    bounds: dict[str, Bounds] = {}
    shapes: dict[str, tuple[int | str, ...]] = {}
    for name, dims in parsed.items():
        if declared and name not in declared:
            known = ", ".join(declared)[:300]
            raise ShapeError(
                f"the model has no input {name[:80]!r}; its inputs are {known}",
                hint=did_you_mean(name, declared, otherwise=f"use one of {known}"),
            )
        shape: list[int | str] = []
        for axis, dim in enumerate(dims):
            if not isinstance(dim, Bounds):
                shape.append(dim)
                continue
            refuse_empty(name, dim)
            symbol = dim.name or _symbol(name, axis, declared.get(name, ()))
            named = Bounds(symbol, dim.low, dim.high)
            if bounds.setdefault(symbol, named) != named:
                other = bounds[symbol]
                raise ShapeError(
                    f"dimension '{symbol}': expected one range, got {other.low}..{other.high} "
                    f"and {dim.low}..{dim.high}",
                    hint="inputs whose dimensions have the same name in the model change together",
                )
            shape.append(symbol)
        shapes[name] = tuple(shape)
    for name, shape_of in shapes.items():
        for each in shape_of:
            if isinstance(each, str) and each not in bounds:
                raise ShapeError(f"input '{name}': expected bounds for '{each}', got none", hint=BOUNDS_HINT)
    if len(bounds) > MAX_DIMENSIONS:
        raise ShapeError(
            f"expected at most {MAX_DIMENSIONS} dimensions with bounds, got {len(bounds)}",
            hint="give the others one size",
        )
    return BoundedShapes(tuple(bounds.values()), shapes)


def refuse_empty(name: str, bounds: Bounds) -> None:
    """Refuse bounds from 0, which only a state may have.

    Raises
    ------
    ShapeError
        If they begin with 0.
    """
    if not bounds.low:
        raise ShapeError(
            f"input '{name}': expected bounds from 1, got {bounds.low}..{bounds.high}",
            hint="only a state may begin with nothing: name it with --state INPUT:OUTPUT",
        )


def _symbol(name: str, axis: int, declared: Sequence[str | int | None]) -> str:
    symbol = declared[axis] if axis < len(declared) else None
    if isinstance(symbol, str) and _NAMED.fullmatch(symbol):
        return symbol
    return re.sub(r"[^\w.-]", "_", f"{name[-40:]}_{axis}", flags=re.ASCII)


def declared_dims(path: str | Path) -> dict[str, tuple[str | int | None, ...]]:
    """Return the dimensions of the inputs in an ONNX file; nothing for other formats, and faulty files."""
    if Path(path).suffix.lower() != ".onnx":
        return {}
    # Only here: parsing flags must not take the time that loading these takes.
    import onnx
    from google.protobuf.message import DecodeError

    try:
        graph = onnx.load(str(path), load_external_data=False).graph
    except (OSError, DecodeError, ValueError):
        return {}
    return {
        value.name: tuple(
            dim.dim_value
            if dim.HasField("dim_value")
            else (None if dim.dim_param in UNNAMED else dim.dim_param)
            for dim in value.type.tensor_type.shape.dim
        )
        for value in graph.input
    }
