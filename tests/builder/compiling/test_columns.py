"""Columns are declared from the user's names or the model's own, and fit the model's inputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.bundle.tensor_spec import TensorSpec
from builder.compiling.columns import declare_columns, own_columns, read_names
from builder.errors import ModelError

X = TensorSpec("X", "FP32", (1, 3))
SCALARS = tuple(TensorSpec(name, "FP32", (1, 1)) for name in ("age", "height"))


def test_names(tmp_path: Path) -> None:
    assert read_names(" a, b ,c") == ("a", "b", "c")
    assert read_names('"a,b",c') == ("a,b", "c")
    assert read_names(["a"]) == ("a",)
    (tmp_path / "train.csv").write_text("a;b\n1;2\n")
    assert read_names(str(tmp_path / "train.csv")) == ("a", "b")
    for text in ("", "a,,b", ",", "a,\nb", '"a', ",".join(map(str, range(5000)))):
        with pytest.raises(ModelError, match="--columns: expected"):
            read_names(text)
    with pytest.raises(ModelError, match="cannot be read"):
        read_names(str(tmp_path / "none.csv"))


def test_own_names() -> None:
    assert own_columns(("a", "b", "c"), (X,)) == ("a", "b", "c")
    assert own_columns(("a", "b"), (X,)) == ()
    assert own_columns((), (X,)) == ()
    assert own_columns((), SCALARS) == ("age", "height")
    assert own_columns((), SCALARS[:1]) == ()
    assert own_columns((), (*SCALARS, X)) == ()
    assert own_columns(("a", "a", "b"), (X,)) == ()
    assert own_columns(("a", "b", " "), (X,)) == ()


def test_names_over_several_inputs() -> None:
    declared = declare_columns(("a", "b", "c", "d", "e"), (X, *SCALARS), {"X"})
    assert [(each.input, len(each.columns), each.missing) for each in declared] == [
        ("X", 3, True), ("age", 1, False), ("height", 1, False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("a", "b"), r"--columns: expected 3 names for X FP32\[1,3\], got 2: a, b"),
        (tuple(map(str, range(100))), "got 100: 0, 1, 2, 3, 4, 5, 6, 7 ..."),
        (("a", "a", "b"), "--columns: expected different names, got 'a' twice"),
    ],
)
def test_names_that_do_not_fit(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        declare_columns(names, (X,))
