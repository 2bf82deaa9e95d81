from __future__ import annotations

import pytest

from builder.compiling.bucket_options import parse_pads
from builder.errors import ShapeError


def test_numbers_and_edges() -> None:
    assert parse_pads("ids=1 x:0=-0.5 audio=edge") == {
        "ids": ("constant", 1.0),
        "x:0": ("constant", -0.5),
        "audio": ("edge", 0.0),
    }


@pytest.mark.parametrize("text", ["ids", "=1", "ids=", "ids=nan", "ids=inf", "a=1 a=2", "a=1e9", "a=mirror"])
def test_paddings_without_sense(text: str) -> None:
    with pytest.raises(ShapeError, match="NAME=NUMBER or NAME=edge"):
        parse_pads(text)
