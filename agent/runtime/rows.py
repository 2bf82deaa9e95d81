"""From rows of a table to tensors: values by the names of columns, or by their places.

Promises that every tensor is exactly what the model takes, or an `InputError` that names the row, the column
and what is wrong with it. A missing value is refused unless the bundle says that the model takes NaN
for one. What a row has besides the model's columns is ignored: a sensor's message has more than one model
needs. `run` uses the same code on the workstation.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Final

import numpy as np

from agent.bundle.columns import Column, InputColumns, columns_of
from agent.bundle.quantisation import Quantised
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import InputError
from agent.runtime.quantisation import to_input
from agent.runtime.storage import Array

# Names in one message.
_SHOWN: Final = 6
# Unknown names that are compared with a missing one.
_MOST_COMPARED: Final = 64
_SHOWN_CHARACTERS: Final = 60


class RowReader:
    """Turns rows into the inputs of one model.

    Parameters
    ----------
    declared
        The manifest's columns.
    inputs
        The inputs that a request has, in the shapes of the smallest request, which is one row.
    quantised
        How inputs are quantised, by name: their columns take real numbers.
    """

    def __init__(
        self,
        declared: Sequence[InputColumns],
        inputs: Sequence[TensorSpec],
        quantised: Mapping[str, Quantised] = MappingProxyType({}),
    ) -> None:
        self._quantised = quantised
        specs = {spec.name: spec for spec in inputs}
        self._parts = [(each, specs[each.input]) for each in declared]
        self.columns: Final[tuple[Column, ...]] = columns_of(declared)
        self.names: Final = tuple(column.name for column in self.columns)
        self._known: Final = frozenset(self.names)
        self._places = [
            {category: place for place, category in enumerate(column.categories or ())}
            for column in self.columns
        ]

    def rows_of(self, document: object) -> Sequence[object] | None:
        """Return the rows of a request's document; None if it is a request with tensors.

        Parameters
        ----------
        document
            A row as an object or an array; an array of rows; or an object with `row` or `rows`. An object
            with an array `inputs` is a request of the Open Inference Protocol.
        """
        if isinstance(document, list):
            return document if document and isinstance(document[0], dict | list) else [document]
        if not isinstance(document, dict) or isinstance(document.get("inputs"), list):
            return None
        if isinstance(document.get("rows"), list):
            rows: list[object] = document["rows"]
            return rows
        if isinstance(document.get("row"), dict | list):
            return [document["row"]]
        return [document]

    def shapes(self, count: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the inputs for `count` rows, by name; nothing is read or allocated.

        Raises
        ------
        InputError
            If there are no rows, or an input takes only one.
        """
        if not count:
            raise InputError("expected a row, got none")
        for _, spec in self._parts:
            if count > 1 and spec.shape[:1] != (1,):
                raise InputError(f"expected one row for input {spec!s:.120}, got {count}")
        return {spec.name: spec.shape if count == 1 else (count, *spec.shape[1:]) for _, spec in self._parts}

    def arrays(self, rows: Sequence[object]) -> dict[str, Array]:
        """Return the inputs for some rows.

        Parameters
        ----------
        rows
            Each a mapping from names to values, or a sequence of values in the order of the columns. A value
            is a number, a truth value, a text for a column with categories, or None if it is missing.

        Returns
        -------
        dict
            Input name -> array of the input's dtype, whose first axis has the rows. With one row, it has
            the shape of the smallest request.

        Raises
        ------
        InputError
            If there are no rows, or a row does not fit.
        """
        shapes = self.shapes(len(rows))
        table = [self._values(row, _where(index, rows)) for index, row in enumerate(rows)]
        arrays: dict[str, Array] = {}
        begin = 0
        for each, spec in self._parts:
            end = begin + len(each.columns)
            cells = [
                self._number(place, row[place], each, spec, _where(index, rows))
                for index, row in enumerate(table)
                for place in range(begin, end)
            ]
            if (quantised := self._quantised.get(spec.name)) is not None:
                values = to_input(np.array(cells, np.float64), spec.dtype, quantised)
            else:
                wide = np.float64 if spec.datatype.startswith("FP") else spec.dtype
                values = np.array(cells, wide).astype(spec.dtype)
            arrays[spec.name] = values.reshape(shapes[spec.name])
            begin = end
        return arrays

    def check_names(self, names: Collection[str]) -> tuple[str, ...]:
        """Check that a table has all columns, and return the names of those that the model does not have.

        Raises
        ------
        InputError
            If a column is missing; the message also names what may be meant by one.
        """
        given = set(names)
        extra = tuple(name for name in names if name not in self._known)
        missing = [name for name in self.names if name not in given]
        if missing:
            raise InputError(self._missing(missing, extra))
        return extra

    def _missing(self, missing: Sequence[str], extra: Sequence[str]) -> str:
        also = f"; not a column of the model: {_listed(extra)}" if extra else ""
        close = get_close_matches(missing[0], [name[:128] for name in extra[:_MOST_COMPARED]], n=1)
        meant = f" ({close[0][:_SHOWN_CHARACTERS]!r} may be {missing[0]!r})" if close else ""
        count = f"{len(self.names)} columns" if len(self.names) > 1 else "1 column"
        return f"expected {count}, missing {_listed(missing)}{also}{meant}"

    def _values(self, row: object, where: str) -> Sequence[object]:
        if isinstance(row, Mapping):
            if not self._known <= row.keys():
                missing = [name for name in self.names if name not in row]
                # A key of CBOR may be a number of any length, which cannot be printed.
                extra = [name for name in row if isinstance(name, str) and name not in self._known]
                raise InputError(f"{where}{self._missing(missing, extra)}")
            return [row[name] for name in self.names]
        if isinstance(row, list | tuple):
            if len(row) != len(self.names):
                raise InputError(
                    f"{where}expected {len(self.names)} values, {_listed(self.names)}; got {len(row)}"
                )
            return row
        raise InputError(f"{where}expected a row, an object or an array, got {_shown(row)}")

    def _number(
        self, place: int, value: object, declared: InputColumns, spec: TensorSpec, where: str
    ) -> float | int:
        column = self.columns[place]
        if value is None or (isinstance(value, float) and math.isnan(value)):
            if declared.missing:
                return math.nan
            raise InputError(f"{where}column {column.name!r}: expected a value, got none")
        if column.categories is not None:
            if not isinstance(value, str):
                raise InputError(f"{where}column {column.name!r}: expected a text, got {_shown(value)}")
            found = self._places[place].get(value, column.unknown)
            if found is None:
                raise InputError(
                    f"{where}column {column.name!r}: expected one of {_listed(column.categories)}, "
                    f"got {_shown(value)}"
                )
            return found
        if not isinstance(value, int | float):
            raise InputError(f"{where}column {column.name!r}: expected a number, got {_shown(value)}")
        if spec.datatype.startswith("FP"):
            return self._real(column, value, spec.datatype, where)
        if spec.name in self._quantised:
            return self._real(column, value, "FP32", where)
        if isinstance(value, float):
            if not value.is_integer():
                raise InputError(
                    f"{where}column {column.name!r}: expected a whole number, got {_shown(value)}"
                )
            value = int(value)
        low, high = _range(spec.datatype)
        if not low <= value <= high:
            raise InputError(f"{where}column {column.name!r}: expected {low} to {high}, got {_shown(value)}")
        return int(value)

    @staticmethod
    def _real(column: Column, value: float, datatype: str, where: str) -> float:
        try:
            real = float(value)
        except OverflowError:  # an integer of a thousand digits
            real = math.inf
        if abs(real) > _LARGEST[datatype]:
            raise InputError(
                f"{where}column {column.name!r}: expected a number of {datatype}, got {_shown(value)}"
            )
        return real


# The largest finite numbers of IEEE 754's formats.
_LARGEST: Final = {"FP16": 65504.0, "FP32": float(np.finfo(np.float32).max), "FP64": 1.7976931348623157e308}


def _range(datatype: str) -> tuple[int, int]:
    if datatype == "BOOL":
        return 0, 1
    bits = int(datatype.removeprefix("U").removeprefix("INT"))
    return (0, (1 << bits) - 1) if datatype.startswith("U") else (-(1 << bits - 1), (1 << bits - 1) - 1)


def _where(index: int, rows: Sequence[object]) -> str:
    return "" if len(rows) == 1 else f"row {index + 1}: "


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(f"{name[:_SHOWN_CHARACTERS]!r}" for name in names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown


def _shown(value: object) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "an array"
    if isinstance(value, int) and abs(value) >= 1 << 128:  # printing it may take seconds
        return "a number of many digits"
    return f"{value!r:.{_SHOWN_CHARACTERS}}"
