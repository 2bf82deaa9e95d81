"""Boards: whatever measures candidates, and what becomes of a candidate there.

`builder.boards.local_board` is this machine, `builder.boards.rpc_boards` are those of an RPC tracker. `tune`
takes any other: one that counts instructions, or asks a simulator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from builder.boards.measuring_process import BuiltKernel, MeasuringProcess
from builder.records.meta_json import BoardTime

INVALID_ATTEMPTS: Final = 3  # measurements spoilt by throttling before the candidate is left for another day
COOL_S: Final = 5.0  # what a board that throttled is given to cool down


@dataclass(frozen=True, slots=True)
class Measurement:
    """What became of a candidate.

    Attributes
    ----------
    seconds
        Of a call in each repeat, None where there is no result.
    error
        Why there is none.
    board
        Who measured it.
    spoilt
        Whether nothing is known about the candidate: the boards, and not it, were at fault.
    """

    seconds: tuple[float, ...] | None
    error: str | None
    board: str
    spoilt: bool = False


@dataclass(frozen=True, slots=True)
class BoardStatus:
    """A board as the live view shows it: `measuring`, `idle` or `dropped`."""

    name: str
    doing: str
    time: BoardTime


class Boards(Protocol):
    """Whatever measures candidates.

    Attributes
    ----------
    elsewhere
        Whether what is done here meanwhile leaves the measurements alone.
    """

    elsewhere: bool

    def measure(
        self, codes: Sequence[BuiltKernel], done: Callable[[int, Measurement], None] | None = None
    ) -> list[Measurement]:
        """Measure candidates; `done` hears of each as it comes."""

    def session(self) -> contextlib.AbstractContextManager[tuple[str, MeasuringProcess]]:
        """One board for oneself, and its name."""

    def status(self) -> tuple[BoardStatus, ...]:
        """How the boards fare."""

    def take_times(self) -> dict[str, BoardTime]:
        """What each board did since this was last asked."""

    def close(self) -> None:
        """Let the boards go."""
