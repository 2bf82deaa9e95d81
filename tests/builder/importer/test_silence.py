"""Foreign libraries are kept quiet, and their errors become one line."""

from __future__ import annotations

import logging
import os
import sys
import warnings

import pytest

from builder.importer.silence import first_line, quiet, quiet_native


def test_python_output_is_suppressed_only_inside_the_block(capfd: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("onnxslim")
    level = logger.level
    with quiet():
        print("noise")
        print("noise", file=sys.stderr)
        warnings.warn("noise", stacklevel=1)
        logger.error("noise")
    print("after")
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("after\n", "")
    assert logger.level == level


def test_native_output_is_suppressed_even_if_the_block_raises(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError), quiet_native():
        os.write(2, b"noise")
        raise RuntimeError
    os.write(2, b"after")
    assert capfd.readouterr().err == "after"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the reason\nmore", "the reason"),
        ("\n\n  the reason\n", "the reason"),
        ("Traceback (most recent call last):\n  File x\n[12:34:56] /src/a.cc:12: the reason", "the reason"),
        ("", "ValueError"),
        ("x" * 1000, "x" * 240),
    ],
)
def test_an_error_becomes_one_short_line(text: str, expected: str) -> None:
    assert first_line(ValueError(text)) == expected
