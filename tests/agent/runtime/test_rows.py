"""Rows become tensors: by name, by place, in any order; an error says in one line what does not fit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from agent.bundle.columns import Column, InputColumns
from agent.bundle.quantisation import Quantised
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import InputError
from agent.runtime.rows import RowReader

SPECS = (
    TensorSpec("x", "FP32", (1, 2)),
    TensorSpec("n", "INT8", (1, 1)),
    TensorSpec("colour", "INT64", (1, 2)),
)
READER = RowReader(
    (
        InputColumns("x", (Column("temperature"), Column("humidity")), missing=True),
        InputColumns("n", (Column("count"),)),
        InputColumns("colour", (Column("wall", ("red", "blue")), Column("door", ("blue", "red"), -1))),
    ),
    SPECS,
)
ROW: dict[str, Any] = {"door": "red", "count": 3, "wall": "blue", "humidity": 40, "temperature": 21.5}


def read(row: object) -> dict[str, Any]:
    return {name: array.tolist() for name, array in READER.arrays([row]).items()}


def test_order_does_not_matter_and_other_keys_are_ignored() -> None:
    expected = {"x": [[21.5, 40]], "n": [[3]], "colour": [[1, 1]]}
    assert read(ROW) == expected
    assert read({**dict(reversed(ROW.items())), "linkquality": 120, "nested": {"a": [1]}}) == expected
    assert read([21.5, 40, 3.0, "blue", "red"]) == expected
    arrays = READER.arrays([ROW])
    assert [array.dtype for array in arrays.values()] == [np.float32, np.int8, np.int64]


def test_missing_values_are_nan_where_the_model_takes_them() -> None:
    for missing in (None, math.nan):
        assert math.isnan(read({**ROW, "temperature": missing})["x"][0][0])
        with pytest.raises(InputError, match="column 'count': expected a value, got none"):
            read({**ROW, "count": missing})


def test_unknown_texts() -> None:
    assert read({**ROW, "door": "green"})["colour"] == [[1, -1]]
    with pytest.raises(InputError, match="column 'wall': expected one of 'red', 'blue', got 'green'"):
        read({**ROW, "wall": "green"})


def test_several_rows() -> None:
    arrays = READER.arrays([ROW, {**ROW, "count": 4}])
    assert arrays["n"].tolist() == [[3], [4]]
    assert arrays["x"].shape == (2, 2)
    with pytest.raises(InputError, match="row 2: column 'count'"):
        READER.arrays([ROW, {**ROW, "count": "4"}])
    flat = RowReader((InputColumns("y", (Column("a"), Column("b"))),), (TensorSpec("y", "FP32", (2,)),))
    assert flat.arrays([[1, 2]])["y"].tolist() == [1, 2]
    with pytest.raises(InputError, match="expected one row"):
        flat.arrays([[1, 2], [3, 4]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": "warm"}, "column 'temperature': expected a number, got 'warm'"),
        ({"temperature": "x" * 10_000}, "column 'temperature': expected a number, got 'xxx"),
        ({"temperature": [1]}, "column 'temperature': expected a number, got an array"),
        ({"temperature": {"a": 1}}, "column 'temperature': expected a number, got an object"),
        ({"temperature": math.inf}, "expected a number of FP32, got inf"),
        ({"temperature": 1e39}, r"expected a number of FP32, got 1e\+39"),
        ({"temperature": 10**5000}, "expected a number of FP32, got a number of many digits"),
        ({"count": 1.5}, "column 'count': expected a whole number, got 1.5"),
        ({"count": 128}, "column 'count': expected -128 to 127, got 128"),
        ({"count": 10**5000}, "column 'count': expected -128 to 127, got a number of many digits"),
        ({"wall": 1}, "column 'wall': expected a text, got 1"),
    ],
)
def test_values_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read({**ROW, **change})
    assert len(str(caught.value)) < 200
    assert "\n" not in str(caught.value)


def test_keys_of_cbor_that_are_not_texts_are_not_in_messages() -> None:
    row: dict[Any, object] = {10**5000: 1, None: 2, "humid": 3}
    with pytest.raises(InputError, match=r"not a column of the model: 'humid'$"):
        read(row)


def test_a_missing_column_is_named_with_what_may_be_meant() -> None:
    given = {"temprature": 1, **{key: value for key, value in ROW.items() if key != "temperature"}}
    with pytest.raises(InputError) as caught:
        read(given)
    assert str(caught.value) == (
        "expected 5 columns, missing 'temperature'; not a column of the model: 'temprature' "
        "('temprature' may be 'temperature')"
    )
    with pytest.raises(InputError, match=r"missing 'temperature', 'humidity'.*'k5' and 9994 more") as caught:
        read({f"k{place}": 1 for place in range(10_000)})
    assert len(str(caught.value)) < 600
    with pytest.raises(InputError, match=r"expected 5 values, 'temperature'.*; got 4"):
        read([1, 2, 3, 4])
    for row in (1, "x", None):
        with pytest.raises(InputError, match="expected a row"):
            read(row)
    assert READER.check_names(["time", *ROW]) == ("time",)


def test_which_documents_are_rows() -> None:
    assert READER.rows_of({"inputs": [1]}) is None
    assert READER.rows_of(7) is None
    assert READER.rows_of(ROW) == [ROW]
    assert READER.rows_of([1, 2]) == [[1, 2]]
    assert READER.rows_of([ROW, ROW]) == [ROW, ROW]
    assert READER.rows_of({"row": ROW, "id": "x"}) == [ROW]
    assert READER.rows_of({"rows": [ROW]}) == [ROW]
    # Columns with these names are no tables.
    assert READER.rows_of({"row": 1, "rows": 2, "inputs": 3}) == [{"row": 1, "rows": 2, "inputs": 3}]
    documents: list[object] = [[], {"rows": []}]
    for rows in documents:
        found = READER.rows_of(rows)
        assert found is not None
        with pytest.raises(InputError, match=r"expected a row, got none|expected 5 values"):
            READER.arrays(found)


@pytest.mark.parametrize("datatype", ["BOOL", "UINT8", "INT64", "UINT64", "FP16", "FP64"])
def test_every_datatype_keeps_its_largest_value(datatype: str) -> None:
    spec = TensorSpec("y", datatype, (1,))
    reader = RowReader((InputColumns("y", (Column("a"),)),), (spec,))
    dtype = np.dtype(spec.dtype)
    largest: Any = 1
    if dtype.kind != "b":
        largest = np.finfo(dtype).max if dtype.kind == "f" else np.iinfo(dtype).max
    assert reader.arrays([[largest.item() if dtype.kind == "f" else int(largest)]])["y"][0] == largest
    assert reader.arrays([[True]])["y"][0] == 1
    with pytest.raises(InputError, match="expected"):
        reader.arrays([[1 << 1100]])


def test_a_quantised_input_takes_real_numbers() -> None:
    specs = (TensorSpec("x", "INT8", (1, 2)),)
    columns = (InputColumns("x", (Column("temperature"), Column("humidity"))),)
    reader = RowReader(columns, specs, {"x": Quantised("x", 0.25, -7)})
    assert reader.arrays([[21.5, 40]])["x"].tolist() == [[79, 127]]
    assert reader.arrays([{"temperature": -0.3, "humidity": True}])["x"].tolist() == [[-8, -3]]
    with pytest.raises(InputError, match="whole number"):
        RowReader(columns, specs).arrays([[21.5, 40]])
