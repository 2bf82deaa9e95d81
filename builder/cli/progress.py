"""Progress of a verb: its steps on stderr, as they begin."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Steps(Protocol):
    """Told each step."""

    def __call__(self, step: str) -> None:
        """Say what begins now."""


@contextmanager
def steps(*, quiet: bool = False) -> Iterator[Steps]:
    """Show steps while the block runs.

    On a terminal the current one spins and those done stay with their time; elsewhere each is a line. Errors
    that pass through leave the last step standing, so that one sees where it was.

    Parameters
    ----------
    quiet
        Show nothing.
    """
    if quiet:
        yield _nothing
        return
    if not sys.stderr.isatty():
        yield _line
        return
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    started: list[tuple[str, float]] = []

    def finish() -> None:
        if started:
            step, since = started.pop()
            console.print(f"[green]✓[/] {step} [dim]{time.monotonic() - since:.1f} s[/]")

    with console.status("") as status:

        def begin(step: str) -> None:
            finish()
            started.append((step, time.monotonic()))
            status.update(step)

        yield begin
        finish()


def _nothing(step: str) -> None:
    """Say nothing."""


def _line(step: str) -> None:
    print(step, file=sys.stderr, flush=True)
