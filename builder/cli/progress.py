"""Progress of a verb on stderr: one step at a time, shown when it begins."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from builder.cli.interruption import ending_at_once


@contextmanager
def show_steps(*, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Show steps on stderr while the block runs.

    On a terminal the current step has a spinner, and finished steps stay with their durations. Elsewhere each
    step is a line. When an error ends the block, the step that failed is the last one shown. Ctrl-C ends the
    process (`interruption`).

    Parameters
    ----------
    quiet
        Whether to show nothing.

    Yields
    ------
    Callable[[str], None]
        Call it with the name of each step as the step begins.
    """
    if quiet or not sys.stderr.isatty():
        with ending_at_once(lambda: None):
            yield (lambda _step: None) if quiet else print_line
        return
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    started: list[tuple[str, float]] = []

    def end() -> None:
        if started:
            step, since = started.pop()
            console.print(f"[green]✓[/] {step} [dim]{time.monotonic() - since:.1f} s[/]")

    with console.status("") as status, ending_at_once(status.stop):

        def begin(step: str) -> None:
            end()
            started.append((step, time.monotonic()))
            status.update(step)

        yield begin
        end()


def clear_line() -> None:
    """Clear an unfinished line of progress if stderr is a terminal."""
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def print_line(text: str) -> None:
    """Print one line to stderr at once."""
    print(text, file=sys.stderr, flush=True)
