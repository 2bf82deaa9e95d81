"""The interface between `tune` and the boards that measure candidates.

`builder.boards.local_board` implements it for this machine, `builder.boards.rpc_boards` for the boards of an
RPC tracker. `builder.tune(boards=...)` accepts any other implementation, such as a simulator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from builder.boards.measuring_process import BuiltKernel, MeasuringProcess
from builder.records.meta_json import BoardTime

INVALID_ATTEMPTS: Final = 3  # discarded measurements before a run gives up on a candidate
COOL_S: Final = 5.0  # pause for a throttled board to cool down


@dataclass(frozen=True, slots=True)
class Measurement:
    """The result of measuring one candidate.

    Attributes
    ----------
    seconds
        Seconds per call in each repeat; None if there is no result.
    error
        Why there is no result; None if there is one.
    board
        Name of the board that measured; empty if the candidate did not compile.
    spoilt
        Whether the boards were at fault; then nothing is known about the candidate, and nothing is recorded.
    """

    seconds: tuple[float, ...] | None
    error: str | None
    board: str
    spoilt: bool = False


@dataclass(frozen=True, slots=True)
class BoardStatus:
    """A board in the live view.

    Attributes
    ----------
    name
        The board's name.
    doing
        `measuring`, `idle` or `dropped`.
    time
        Its work so far.
    """

    name: str
    doing: str
    time: BoardTime


class Boards(Protocol):
    """Boards that measure candidates.

    Attributes
    ----------
    elsewhere
        Whether the boards are other machines, so that building here does not disturb their measurements.
    """

    elsewhere: bool

    def measure(
        self, kernels: Sequence[BuiltKernel], done: Callable[[int, Measurement], None] | None = None
    ) -> list[Measurement]:
        """Measure candidates; `done` is called with index and result as each one ends."""

    def session(self) -> contextlib.AbstractContextManager[tuple[str, MeasuringProcess]]:
        """Reserve one board; yield its name, and a process with an open session."""

    def status(self) -> tuple[BoardStatus, ...]:
        """Return the state of every board."""

    def take_times(self) -> dict[str, BoardTime]:
        """Return the work of each board since the last call, by the board's name."""

    def close(self) -> None:
        """End all sessions and processes."""
