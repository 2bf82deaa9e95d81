"""The syntax of --input-shapes and --input-values."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder.errors import ShapeError
from builder.importer import parse_input_shapes, parse_input_values
from builder.importer.bounded_shapes import parse_bounded_shapes

names = st.from_regex(r"[A-Za-z_/][A-Za-z0-9_./:\-]{0,20}[A-Za-z0-9]", fullmatch=True)
shapes = st.lists(st.integers(1, 2**31), max_size=6).map(tuple)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data:[1,3,224,224]", {"data": (1, 3, 224, 224)}),
        ("data:[1,3,224,224] mask:[1,128]", {"data": (1, 3, 224, 224), "mask": (1, 128)}),
        (" data : [ 1 , 3 ] ,mask:[7]", {"data": (1, 3), "mask": (7,)}),
        ("sr:[]", {"sr": ()}),
        ("serving_default_x:0:[1,5]", {"serving_default_x:0": (1, 5)}),
        ("a:[1]b:[2]", {"a": (1,), "b": (2,)}),
        ("/model/in.1:[1]\n/model/in.2:[2]", {"/model/in.1": (1,), "/model/in.2": (2,)}),
    ],
)
def test_shapes_are_read(text: str, expected: dict[str, tuple[int, ...]]) -> None:
    assert parse_input_shapes(text) == expected


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("", "got nothing"),
        ("   ", "got nothing"),
        ("data", "'data'"),
        ("data:1,3", "'data:1,3'"),
        ("data:[1,3", "'data:[1,3'"),
        ("data:[1,3]]", "']'"),
        (":[1]", "':[1]'"),
        ("data:[1,-3]", "'-3'"),
        ("data:[0]", "'0'"),
        ("data:[1,N]", "'N'"),
        ("data:[1.5]", "'1.5'"),
        ("data:[1,,2]", "''"),
        ("data:[99999999999]", "'99999999999'"),
        ("data:[1] data:[2]", "two for 'data'"),
        ("data:[1] and more", "'and more'"),
        ("data:[" + ",".join("1" * 40) + "]", "at most 32 dimensions"),
        ("data:[²]", "'²'"),
    ],
)
def test_malformed_shapes_are_refused_in_one_line(text: str, fragment: str) -> None:
    with pytest.raises(ShapeError) as caught:
        parse_input_shapes(text)
    assert fragment in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@given(st.dictionaries(names, shapes, min_size=1, max_size=5), st.sampled_from([" ", ", ", "\n", " ,  "]))
def test_what_is_written_is_read(given_shapes: dict[str, tuple[int, ...]], separator: str) -> None:
    text = separator.join(f"{name}:[{','.join(map(str, dims))}]" for name, dims in given_shapes.items())
    assert parse_input_shapes(text) == given_shapes


@given(st.text(max_size=80))
def test_any_text_is_read_or_refused_with_a_shape_error(text: str) -> None:
    try:
        shapes = parse_input_shapes(text)
    except ShapeError as error:
        assert "\n" not in str(error)
    else:
        assert shapes
        assert all(0 < dim <= 2**31 for dims in shapes.values() for dim in dims)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sr=16000", {"sr": 16000}),
        ("a=1 b=2.5 c=true d=False", {"a": 1, "b": 2.5, "c": True, "d": False}),
        ("axes=[1, -2]", {"axes": (1, -2)}),
        ("roi=[]", {"roi": ()}),
        (["sr=1", "x=1e-3"], {"sr": 1, "x": 0.001}),
        ("a=b=3", {"a=b": 3}),
    ],
)
def test_values_are_read(text: str | list[str], expected: dict[str, object]) -> None:
    assert parse_input_values(text) == expected


@pytest.mark.parametrize("text", ["", "sr", "sr=", "=3", "sr=fast", "sr=1 sr=2", "sr=[1,x]", "sr=[[1]]"])
def test_malformed_values_are_refused(text: str) -> None:
    with pytest.raises(ShapeError):
        parse_input_values(text)


@given(st.text(max_size=60))
def test_any_text_is_a_value_or_a_shape_error(text: str) -> None:
    try:
        assert parse_input_values(text)
    except ShapeError as error:
        assert "\n" not in str(error)


def test_the_shapes_that_the_pages_show_can_be_given() -> None:
    pages = [*(Path(__file__).parents[3] / "docs").rglob("*.md"), Path(__file__).parents[3] / "README.md"]
    shown = [
        (page.name, quoted or plain)
        for page in pages
        for quoted, plain in re.findall(
            r'--input-shapes (?:"([^"]+)"|([^\s`"]*[:=][^\s`"]*))', page.read_text()
        )
    ]
    assert {name for name, _ in shown} >= {"your-detector.md", "importing.md", "from-tvmc.md"}
    for name, text in shown:
        assert parse_bounded_shapes(text), name
