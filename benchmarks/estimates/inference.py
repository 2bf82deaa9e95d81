"""Estimates one inference of an engine on a board, with one thread and with one for each core."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from benchmarks.estimates.board import Board
from benchmarks.estimates.estimate import Estimate, by_label, cycles
from benchmarks.instructions.emulator import Emulator
from benchmarks.instructions.traffic import Traffic, watch


def recorded(emulator: Emulator, board: Board, program: str, *words: str) -> Traffic:
    """Run a program of `benchmarks/instructions` with a board's caches: those of one thread, then of all."""
    variants = [board.caches(1), board.caches(board.cores)]
    command = emulator.command(program, words, board.cpu)
    return watch(command, board.first, variants, read_allocate=board.read_allocate)


def estimated(traffic: Traffic, board: Board) -> dict[int, dict[int, Estimate]]:
    """Return threads -> mark -> estimate of what `recorded` returned.

    Threads read the same weights and different rows. So the time of all threads is the mean of two: that with
    all data in common, when each uses the whole of a shared cache, and that with none, when it has a part.
    """
    known = cycles(traffic, board)
    common, apart = (by_label(traffic, board, board.cores, variant, known) for variant in (0, 1))
    return {
        1: by_label(traffic, board, 1, 0, known),
        board.cores: {mark: each.between(apart[mark]) for mark, each in common.items()},
    }


def of_engine(
    emulator: Emulator, engine: str, place: Path, board: Board, *, keep: bool
) -> Mapping[int, Estimate]:
    """Return threads -> estimate of an inference.

    Parameters
    ----------
    emulator
        The emulator.
    engine
        A name that `guest.py` knows.
    place
        The folder with the model's files.
    board
        The board.
    keep
        Whether to write the estimates to `place`, and to read them if they are those of this board.
    """
    kept = place / f"time-{engine}-{emulator.version(engine)}-{board.cpu}.json"
    figures = repr(board)
    if keep and kept.exists():
        document = json.loads(kept.read_text())
        if document["board"] == figures:
            return {int(threads): Estimate(**each) for threads, each in document["estimates"].items()}
    traffic = recorded(emulator, board, "guest.py", engine, str(place))
    found = {threads: marks[0] for threads, marks in estimated(traffic, board).items()}
    if keep:
        estimates = {threads: asdict(each) for threads, each in found.items()}
        kept.write_text(json.dumps({"board": figures, "estimates": estimates}) + "\n")
    return found
