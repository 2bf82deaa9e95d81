"""Declare the columns of a table that a model takes, from the user's names or from the model's own.

Promises names that fit the model's inputs, or an error that says how many are expected. What the model does
with a missing value is read from its graph (`builder.compiling.missing_values`).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agent.bundle.columns import MAX_COLUMNS, Column, InputColumns, check_columns, is_column_name
from agent.bundle.tensor_spec import TensorSpec
from builder.errors import ModelError
from builder.running.row_file import TABLE_SUFFIXES, read_header

if TYPE_CHECKING:  # which loads ONNX
    from builder.importer.classic.string_inputs import Texts

Names = str | Sequence[str]
_HINT: Final = "name them in the order of the model's features: --columns temperature,humidity,light"
_SHOWN: Final = 8


def read_names(source: Names) -> tuple[str, ...]:
    """Return the names of columns.

    `source`: the names; or a text of names with commas between them; or the path of a table, whose first line
        has them.
    Raises `ModelError` if a name cannot be one, or the table cannot be read.
    """
    if isinstance(source, str):
        is_table = Path(source).suffix.lower() in TABLE_SUFFIXES
        names = read_header(source) if is_table else _split(source)
    else:
        names = tuple(source)
    if not 1 <= len(names) <= MAX_COLUMNS:
        raise ModelError(f"--columns: expected 1 to {MAX_COLUMNS} names, got {len(names)}", hint=_HINT)
    for name in names:
        if not is_column_name(name):
            raise ModelError(
                f"--columns: expected names of 1 to 128 printable characters, got {name!r:.80}", hint=_HINT
            )
    return names


def _split(text: str) -> tuple[str, ...]:
    try:
        return tuple(cell.strip() for cell in next(csv.reader([text], strict=True), ()))
    except csv.Error as error:
        raise ModelError(
            f"--columns: expected names with commas between them ({error})", hint=_HINT
        ) from error


def own_columns(names: Sequence[str], inputs: Sequence[TensorSpec]) -> tuple[str, ...]:
    """Return the columns that a model names itself; none if it does not.

    `names`: names of its features, from its file; none if the file has none.
    `inputs`: its inputs. Several of one value each, as skl2onnx writes them for a table, are columns.
    """
    if names and len(inputs) == 1 and math.prod(inputs[0].shape) == len(names):
        found = tuple(names)
    elif len(inputs) > 1 and all(math.prod(spec.shape) == 1 for spec in inputs):
        found = tuple(spec.name for spec in inputs)
    else:
        return ()
    usable = len(set(found)) == len(found) <= MAX_COLUMNS and all(map(is_column_name, found))
    return found if usable else ()


def declare_columns(
    names: Sequence[str],
    inputs: Sequence[TensorSpec],
    nan: Collection[str] = (),
    texts: Mapping[str, Sequence[Texts]] | None = None,
) -> tuple[InputColumns, ...]:
    """Declare the columns of a model's inputs.

    `names`: the columns, in the order of the inputs and of each input's values.
    `inputs`: the inputs of the smallest request, without states.
    `nan`: inputs in which NaN is a missing value.
    `texts`: inputs whose columns have texts, and these.
    Raises `ModelError` if there are more or fewer names than values, or a name is used twice.
    """
    counts = [math.prod(spec.shape) for spec in inputs]
    if sum(counts) != len(names):
        shapes = ", ".join(map(str, inputs))
        listed = ", ".join(names[:_SHOWN]) + (" ..." if len(names) > _SHOWN else "")
        raise ModelError(
            f"--columns: expected {sum(counts)} names for {shapes:.200}, got {len(names)}: {listed:.300}",
            hint=_HINT,
        )
    declared, begin = [], 0
    for spec, count in zip(inputs, counts, strict=True):
        own = names[begin : begin + count]
        columns = tuple(map(Column, own))
        if texts and spec.name in texts:
            columns = tuple(
                Column(name, each.categories, each.unknown)
                for name, each in zip(own, texts[spec.name], strict=True)
            )
        declared.append(InputColumns(spec.name, columns, missing=spec.name in nan))
        begin += count
    try:
        check_columns(declared, inputs)
    except ValueError as error:
        raise ModelError(f"--columns: {str(error).removeprefix('columns: ')}", hint=_HINT) from error
    return tuple(declared)
