"""Tests that read source code work while objects end that report tracebacks: see `tests/conftest.py`."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest


class Reporting:
    """Parses when it ends, as a traceback does that is shown; only a garbage collection ends it."""

    def __init__(self) -> None:
        self._cycle = self

    def __del__(self) -> None:
        ast.parse("a + (b * c)")


@pytest.mark.usefixtures("often_collected")
def test_source_code_is_parsed_while_objects_end() -> None:
    source = Path(ast.__file__).read_text()
    for _ in range(20):
        Reporting()
    assert isinstance(ast.parse(source), ast.Module)


@pytest.fixture
def often_collected() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(50, 2, 2)
    yield
    gc.set_threshold(*before)
