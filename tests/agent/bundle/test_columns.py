"""Declarations of columns: names are bounded, and fit the model's inputs."""

from __future__ import annotations

import pytest

from agent.bundle.columns import MAX_COLUMNS, Column, InputColumns, check_columns, row_datatypes
from agent.bundle.manifest import Manifest
from agent.bundle.processing import Preprocess
from agent.bundle.tensor_spec import TensorSpec
from tests.bundles import make_manifest

X = TensorSpec("x", "FP32", (1, 2))
COLOUR = TensorSpec("colour", "INT64", (1, 1))


def columns(*names: str, missing: bool = False) -> InputColumns:
    return InputColumns("x", tuple(map(Column, names)), missing)


def test_columns_of_several_inputs() -> None:
    colour = InputColumns("colour", (Column("farbe", ("rot", "grün"), -1),))
    declared = (columns("temperature", "Luftfeuchte ü"), colour)
    check_columns(declared, (X, COLOUR))
    assert list(row_datatypes(declared, (X, COLOUR))) == [
        ("temperature", "FP32"), ("Luftfeuchte ü", "FP32"), ("farbe", "BYTES"),
    ]  # fmt: skip
    assert list(row_datatypes(None, (X,))) == []


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ((), "expected columns for input 'x', got none"),
        ((columns("a", "b"), columns("c", "d")), "each input once"),
        ((columns("a"),), "expected 2 for input x FP32"),
        ((columns("a", "b", "c"),), "expected 2 for input x FP32"),
        ((columns("a", "a"),), "'a' twice"),
        ((InputColumns("z", (Column("a"), Column("b"))),), "'z', which does not exist"),
    ],
)
def test_columns_that_do_not_fit(declared: tuple[InputColumns, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_columns(declared, (X,))


def test_limits() -> None:
    many = tuple(Column(str(place)) for place in range(MAX_COLUMNS + 1))
    with pytest.raises(ValueError, match=f"1 to {MAX_COLUMNS}"):
        check_columns((InputColumns("x", many),), (TensorSpec("x", "FP32", (1, len(many))),))
    with pytest.raises(ValueError, match="missing values"):
        check_columns((InputColumns("colour", (Column("a"),), missing=True),), (COLOUR,))
    categories = tuple(map(str, range(129)))
    for spec in (TensorSpec("x", "INT8", (1,)), TensorSpec("x", "BOOL", (1,))):
        with pytest.raises(ValueError, match=r"categories at places up to (127|1) .*, got 128"):
            check_columns((InputColumns("x", (Column("a", categories),)),), (spec,))
    with pytest.raises(ValueError, match="signed"):
        unsigned = TensorSpec("x", "UINT8", (1,))
        check_columns((InputColumns("x", (Column("a", ("b",), -1),)),), (unsigned,))
    half = tuple(map(str, range(10_000)))
    with pytest.raises(ValueError, match="categories in all"):
        check_columns((InputColumns("x", (Column("a", half), Column("b", half))),), (X,))


@pytest.mark.parametrize(("datatype", "most"), [("BOOL", 1), ("INT8", 127), ("UINT8", 255), ("FP16", 2048)])
def test_an_unknown_text_has_a_place_that_the_input_holds(datatype: str, most: int) -> None:
    spec = TensorSpec("x", datatype, (1,))
    check_columns((InputColumns("x", (Column("a", ("b",), most),)),), (spec,))
    with pytest.raises(ValueError, match=f"up to {most} for input x {datatype}.*, got {most + 1}"):
        check_columns((InputColumns("x", (Column("a", ("b",), most + 1),)),), (spec,))


@pytest.mark.parametrize("name", ["", " a", "a ", "a\n", "\0", "x" * 129])
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="a column's name"):
        Column(name)


@pytest.mark.parametrize(
    ("categories", "unknown"), [(None, 0), ((), None), (("a", "a"), None), (("\n",), None), (("a",), -2)]
)
def test_categories_that_are_refused(categories: tuple[str, ...] | None, unknown: int | None) -> None:
    with pytest.raises(ValueError, match=r"column|categor|unknown"):
        Column("a", categories, unknown)


def test_manifest_has_columns_or_a_picture() -> None:
    members = dict.fromkeys(("mod.so", "mod.json", "mod.params"), b"")
    specs = (TensorSpec("x", "FP32", (1, 3, 1, 1)),)
    declared = (columns("a", "b", "ç"),)
    made = make_manifest(members, inputs=specs, columns=declared)
    assert Manifest.from_bytes(made.to_bytes()).columns == declared
    assert b'"columns":[{"columns":[{"name":"a"}' in made.to_bytes()
    picture = Preprocess("x", "RGB", None, "stretch", "bilinear", None, 1.0, (0.0,), (1.0,), "NCHW")
    with pytest.raises(ValueError, match="got two of them"):
        make_manifest(members, inputs=specs, columns=declared, preprocess=picture)
    with pytest.raises(ValueError, match="expected 3 for input"):
        make_manifest(members, inputs=specs, columns=(columns("a"),))
