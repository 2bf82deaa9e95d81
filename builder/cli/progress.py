"""Progress of a verb on stderr: one step at a time, shown when it begins."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from agent.terminal import note, printable
from builder.cli.interruption import ending_at_once


@contextmanager
def show_steps(*, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Show steps on stderr while the block runs.

    On a terminal the current step has a spinner, and finished steps stay with their durations. Elsewhere each
    step is a line. When an error ends the block, the step that failed is the last one shown. Ctrl-C ends the
    process (`interruption`).

    `quiet`: whether to show nothing.
    Result: call it with the name of each step as the step begins.
    """
    if quiet or not sys.stderr.isatty():
        with ending_at_once(lambda: None):
            yield (lambda _step: None) if quiet else note
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    started: list[tuple[str, float]] = []

    def end() -> None:
        if started:
            step, since = started.pop()
            line = (("✓", "green"), f" {step} ", (f"{time.monotonic() - since:.1f} s", "dim"))
            console.print(Text.assemble(*line))

    with console.status("") as status, ending_at_once(status.stop):

        def begin(step: str) -> None:
            end()
            started.append((printable(step), time.monotonic()))
            status.update(Text(started[-1][0]))

        yield begin
        end()
