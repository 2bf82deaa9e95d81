"""A model's inputs as the columns of a table: what a row of named values needs to become tensors.

Promises that a declaration fits the model's inputs, and that every name is bounded. Leaves turning rows into
tensors to `agent.runtime.rows`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from agent.bundle.canonical_json import LATER
from agent.bundle.tensor_spec import TensorSpec

# Tables of sensors have some hundred. All names have to fit the manifest, too.
MAX_COLUMNS: Final = 4096
MAX_NAME_CHARACTERS: Final = 128
# Of all columns together: names of cities, of products.
MAX_CATEGORIES: Final = 1 << 14
MAX_CATEGORY_CHARACTERS: Final = 256
# The largest place of a category that a small datatype holds exactly; other datatypes hold all places.
_LARGEST_PLACE: Final = {"BOOL": 1, "INT8": 127, "UINT8": 255, "FP16": 1 << 11}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes
    ----------
    name
        1 to 128 printable characters, without spaces at its ends.
    categories
        The texts that the column may have; the model gets the place of one among them, from 0. None for a
        column of numbers.
    unknown
        What the model gets for any other text. None means that such a row is refused.
    """

    name: str
    categories: tuple[str, ...] | None = field(default=None, metadata=LATER)
    unknown: int | None = field(default=None, metadata=LATER)

    def __post_init__(self) -> None:
        if not is_column_name(self.name):
            raise ValueError(
                f"a column's name: expected 1 to {MAX_NAME_CHARACTERS} printable characters, "
                f"without spaces at its ends, got {self.name!r:.80}"
            )
        if self.categories is None:
            if self.unknown is not None:
                raise ValueError(f"column {self.name!r:.80}: unknown: expected categories with it, got none")
            return
        if not self.categories or len(set(self.categories)) != len(self.categories):
            raise ValueError(f"column {self.name!r:.80}: expected different categories, at least one")
        for category in self.categories:
            if len(category) > MAX_CATEGORY_CHARACTERS or not _is_text(category):
                raise ValueError(
                    f"column {self.name!r:.80}: expected a category of at most {MAX_CATEGORY_CHARACTERS} "
                    f"printable characters, got {category!r:.80}"
                )
        if self.unknown is not None and not -1 <= self.unknown <= MAX_CATEGORIES:
            raise ValueError(f"unknown: expected -1 to {MAX_CATEGORIES}, got {self.unknown}")


@dataclass(frozen=True, slots=True)
class InputColumns:
    """The columns that one input takes.

    Attributes
    ----------
    input
        Name of the model's input.
    columns
        Its columns, in the order in which the input has them.
    missing
        Whether a row may lack a value. The model then gets NaN, which it takes for a missing value.
    """

    input: str
    columns: tuple[Column, ...]
    missing: bool = False


def is_column_name(name: str) -> bool:
    """Return whether a text can be the name of a column."""
    return 1 <= len(name) <= MAX_NAME_CHARACTERS and name == name.strip() and _is_text(name)


def columns_of(declared: Sequence[InputColumns]) -> tuple[Column, ...]:
    """Return all columns, in their order."""
    return tuple(column for each in declared for column in each.columns)


def row_datatypes(
    declared: Sequence[InputColumns] | None, inputs: Sequence[TensorSpec], quantised: Collection[str] = ()
) -> Iterator[tuple[str, str]]:
    """Yield each column's name and datatype; nothing without columns.

    It is `BYTES` for texts, and `FP32` for a quantised input, whose rows have real numbers.
    """
    datatypes = {spec.name: "FP32" if spec.name in quantised else spec.datatype for spec in inputs}
    for each in declared or ():
        for column in each.columns:
            yield column.name, datatypes[each.input] if column.categories is None else "BYTES"


def check_columns(declared: Sequence[InputColumns], inputs: Sequence[TensorSpec]) -> None:
    """Check that columns fit a model's inputs.

    Parameters
    ----------
    declared
        The columns of each input.
    inputs
        The inputs that a request has, in the shapes of the smallest request.

    Raises
    ------
    ValueError
        If an input does not exist, or has more or fewer values than columns; if a name
        is used twice; or if an input cannot hold what its columns may have.
    """
    specs = {spec.name: spec for spec in inputs}
    names = [each.input for each in declared]
    if unknown := [name for name in names if name not in specs]:
        raise ValueError(f"columns are for input {unknown[0]!r:.80}, which does not exist")
    if len(set(names)) != len(names):
        raise ValueError("columns: expected each input once, got a duplicate")
    if lacking := [name for name in specs if name not in names]:
        raise ValueError(f"columns: expected columns for input {lacking[0]!r:.80}, got none")
    columns = columns_of(declared)
    if not 1 <= len(columns) <= MAX_COLUMNS:
        raise ValueError(f"columns: expected 1 to {MAX_COLUMNS}, got {len(columns)}")
    seen: set[str] = set()
    for column in columns:
        if column.name in seen:
            raise ValueError(f"columns: expected different names, got {column.name!r:.80} twice")
        seen.add(column.name)
    if sum(len(column.categories or ()) for column in columns) > MAX_CATEGORIES:
        raise ValueError(f"columns: expected at most {MAX_CATEGORIES} categories in all, got more")
    for each in declared:
        _check_input(each, specs[each.input])


def _check_input(declared: InputColumns, spec: TensorSpec) -> None:
    count = math.prod(spec.shape)
    if count != len(declared.columns):
        raise ValueError(f"columns: expected {count} for input {spec!s:.120}, got {len(declared.columns)}")
    if declared.missing and not spec.datatype.startswith("FP"):
        raise ValueError(f"columns: expected an input of FP32 for missing values, got {spec!s:.120}")
    for column in declared.columns:
        if column.categories is None:
            continue
        most = _LARGEST_PLACE.get(spec.datatype, MAX_CATEGORIES)
        largest = max(len(column.categories) - 1, column.unknown or 0)
        if largest > most:
            raise ValueError(
                f"column {column.name!r:.80}: expected categories at places up to {most} "
                f"for input {spec!s:.120}, got {largest}"
            )
        if column.unknown is not None and column.unknown < 0 and spec.datatype.startswith(("U", "BOOL")):
            raise ValueError(f"columns: expected a signed input for {column.name!r:.80}, got {spec!s:.120}")


def _is_text(text: str) -> bool:
    return text.isprintable()
