"""Child processes of tests."""

from __future__ import annotations

from subprocess import Popen


def complaint(process: Popen[str]) -> str:
    """Return what a process that has ended, or is about to, wrote to its standard error."""
    assert process.stderr is not None
    return process.stderr.read()
