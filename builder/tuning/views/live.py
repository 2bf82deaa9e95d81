"""Views of a tuning run: a live table on a terminal, one line per batch elsewhere, JSON lines for scripts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import IO, TYPE_CHECKING, Final

from agent.terminal import printable, say, say_json
from builder.tuning.views.progress import Progress, Silent, View

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

MAX_ROWS: Final = 16  # tasks shown: those with the largest share of the time
BAR: Final = 12  # width of a full bar, in characters


@contextmanager
def watch(*, quiet: bool, as_json: bool, stream: IO[str] | None = None) -> Iterator[View]:
    """Yield a view: silent, JSON lines on stdout, a live table on a terminal, or lines elsewhere."""
    out = stream if stream is not None else sys.stderr
    if as_json:
        yield JsonLines(stream if stream is not None else sys.stdout)
    elif quiet:
        yield Silent()
    elif not out.isatty():
        yield Lines(out)
    else:
        from rich.console import Console
        from rich.live import Live

        console = Console(file=out, highlight=False)
        with Live(console=console, refresh_per_second=4, transient=False) as live:
            yield Table(live, console)


class Lines:
    """Prints one line per batch."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._last = ""

    def update(self, progress: Progress) -> None:
        """Print a line, if it differs from the last one in more than the time."""
        planned = sum(task.planned for task in progress.tasks)
        parts = [progress.phase]
        if progress.active is not None:
            task = next(t for t in progress.tasks if t.index == progress.active)
            rate = f", {rate_text(task.gflops, progress.peak_gflops)}" if task.gflops else ""
            parts.append(f"task {task.index} {task.trials}/{task.planned}{rate}")
        parts.append(f"{progress.trials}/{planned} trials")
        if progress.default_s:
            parts.append(total_text(progress))
        line = "; ".join(parts)
        if line != self._last:
            self._last = line
            left = f", {duration(progress.left_s)} left" if progress.left_s else ""
            say(f"[{duration(progress.elapsed_s)}{left}] {line}", file=self._out, flush=True)

    def note(self, text: str) -> None:
        """Print a note."""
        say(text, file=self._out, flush=True)


class JsonLines:
    """Prints one JSON object per line: `{"progress": ...}` or `{"note": ...}`."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out

    def update(self, progress: Progress) -> None:
        """Print the whole state."""
        say_json({"progress": asdict(progress)}, file=self._out)

    def note(self, text: str) -> None:
        """Print a note."""
        say_json({"note": text}, file=self._out)


class Table:
    """A table that is redrawn in place."""

    def __init__(self, live: Live, console: Console) -> None:
        self._live, self._console = live, console

    def update(self, progress: Progress) -> None:
        """Redraw the table."""
        self._live.update(render(progress))

    def note(self, text: str) -> None:
        """Print a note above the table."""
        self._console.print(printable(text), style="dim", markup=False)


def render(progress: Progress) -> RenderableType:
    """Return the table: tasks by their share of the time, the boards, and the time left."""
    from rich import box
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

    table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for name, justify in (
        ("task", "right"), ("operator", "left"), ("calls", "right"), ("trials", "right"),
        ("untuned us", "right"), ("confirmed", "right"), ("GFLOP/s", "right"),
        ("of peak", "left"), ("point", "left"),
    ):  # fmt: skip
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    ordered = sorted(progress.tasks, key=lambda t: -(t.default_s or 0.0) * t.calls)
    for task in ordered[:MAX_ROWS]:
        share = min(1.0, task.gflops / progress.peak_gflops) if task.gflops and progress.peak_gflops else None
        style = "bold cyan" if task.index == progress.active else ("dim" if task.finished else "")
        table.add_row(
            str(task.index),
            Text(printable(shortened(task.name, 34))),
            str(task.calls),
            f"{task.trials}/{task.planned}",
            micros(task.default_s),
            f"{task.gain:.2f}x" if task.gain else "",
            f"{task.gflops:.1f}" if task.gflops else "",
            f"{'█' * round(share * BAR):<{BAR}} {share:4.0%}" if share is not None else "",
            Text(printable(task.point)),
            style=style,
        )
    if len(ordered) > MAX_ROWS:
        table.add_row("", f"and {len(ordered) - MAX_ROWS} more", style="dim")
    planned = sum(task.planned for task in progress.tasks)
    left = f", about {duration(progress.left_s)} left" if progress.left_s else ""
    head = Text.assemble(
        (progress.phase, "bold"),
        f"   {progress.trials} of {planned} trials, {duration(progress.elapsed_s)}{left}",
    )
    total = Text(f"{total_text(progress)}; peak {progress.peak_gflops or 0:.0f} GFLOP/s")
    colours = {"measuring": "green", "idle": "", "dropped": "red"}
    boards = [
        Text(
            printable(f"board {b.name}: {b.doing}, {b.time.describe()}"),
            style=colours.get(b.doing, ""),
        )
        for b in progress.boards
    ]
    return Group(head, table, total, *boards)


def total_text(progress: Progress) -> str:
    """Describe the time of the operators, and what is confirmed to be saved; the model is compared later."""
    confirmed = sum(task.gain is not None for task in progress.tasks)
    text = f"operators {progress.default_s * 1e3:.3f} ms untuned, "
    if not confirmed:
        return text + "no gain confirmed yet"
    return text + f"at least {progress.saved_s * 1e6:.0f} us less by {confirmed} confirmed"


def micros(seconds: float | None) -> str:
    """Format seconds as microseconds, with at least three digits; empty for None."""
    if seconds is None:
        return ""
    return f"{seconds * 1e6:.1f}" if seconds < 1e-3 else f"{seconds * 1e6:.0f}"


def duration(seconds: float | None) -> str:
    """Format seconds, such as `42 s`, `3 min 5 s` or `2 h 10 min`."""
    whole = round(seconds or 0)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def rate_text(gflops: float | None, peak: float | None) -> str:
    """Format a rate in GFLOP/s and its share of the peak."""
    if gflops is None:
        return ""
    return f"{gflops:.1f} GFLOP/s" + (f" ({gflops / peak:.0%} of peak)" if peak else "")


def shortened(text: str, most: int) -> str:
    """Shorten a name to `most` characters by cutting its middle."""
    if len(text) <= most:
        return text
    half = (most - 1) // 2
    return f"{text[:half]}…{text[-(most - 1 - half) :]}"
