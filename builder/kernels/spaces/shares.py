"""How evenly threads share a parallel loop, by counting its rounds.

Each thread gets as many successive rounds, rounded up, so the thread with the most decides: of two rounds,
the third and the fourth core get none. A bundle is compiled on one machine and runs on others, and the
compiler does not know how many threads it will get there. So the loops are divided for the numbers of cores
that boards and servers have, and not for those of the machine that compiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from builder.kernels.spaces.register_tile import divisors, even_part

# Boards have four cores.
THREADS: Final = (4, 8, 16)
# Part of the time of a row of a depthwise convolution in which its input is copied and padded.
_COPYING: Final = 0.25
# A round has so many times the rows that it copies once more.
_OVER_AGAIN: Final = 2
# An unevenness that is not worth other loops.
_EVEN: Final = 1.1


def most_rounds(rounds: int, threads: int) -> int:
    """Return how many rounds the thread with the most of them gets."""
    return -(-rounds // threads)


def unevenness(rounds: int) -> float:
    """Return the time of a loop over that of one which is shared evenly, in the mean over `THREADS`."""
    return sum(most_rounds(rounds, t) * t / rounds for t in THREADS) / len(THREADS)


def is_even(rounds: int) -> bool:
    """Whether threads share `rounds` well, whatever number of cores a device has."""
    return unevenness(rounds) <= _EVEN


def blocks_of_a_round(blocks: int, options: Sequence[int], most: int) -> int:
    """Return how many of `blocks` a round computes: the most of `options` that threads share evenly.

    If they share none evenly, it is the one that they share best. None is larger than `most`.
    """
    return min(
        (option for option in options if option <= most),
        key=lambda option: (max(unevenness(-(-blocks // option)), _EVEN), -option),
    )


def rows_of_a_round(height: int, others: int, most: int, again: float) -> int:
    """Choose how many rows are computed together in a round, so that all cores get enough rounds.

    `others`: the rounds that one row has: blocks of channels.
    `most`: the most rows that may be computed together.
    `again`: rows of the input, counted in rows of the output, that each round copies once more.
    """

    def cost(rows: int) -> float:
        rounds = others * -(-height // rows)
        longest = sum(rows * most_rounds(rounds, t) * t for t in (1, *THREADS))
        return longest * (1 + _COPYING * again / rows)

    largest = even_part(height, max(1, most))
    fewer = [rows for rows in divisors(height, largest) if rows >= max(2, _OVER_AGAIN * again)]
    return min([largest, *fewer], key=lambda rows: (cost(rows), -rows))


def rows_again(height: int, in_rows: int) -> float:
    """Return the rows that each round of rows copies once more: those under the rest of the window.

    `height`, `in_rows`: rows of the output, and of the padded input.
    """
    stride = max(1, in_rows // height)
    return max(0, in_rows - height * stride) / stride
