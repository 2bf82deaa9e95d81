"""The register tile: accumulators that stay in registers while a reduction runs, and how to size it.

Each step of the reduction multiplies vectors of one operand by single values of the other. x86 broadcasts
such a value from memory as part of the load. ARM multiplies by one element of a vector register, so on ARM it
pays to load the values of four steps as one vector, and to hold it in a register.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import s_tir as st

from builder.target.device_target import DeviceTarget


def divisors(n: int, most: int) -> tuple[int, ...]:
    """Return the divisors of `n` up to `most`, ascending: the extents of a tile that leave no remainder."""
    return tuple(d for d in range(1, min(n, most) + 1) if n % d == 0)


def multiplies_by_element(target: DeviceTarget) -> bool:
    """Whether a multiply-add of `target` can take one element of a vector register as a factor."""
    return target.arch in ("aarch64", "armv7l") and target.simd.fma


def hold_operand(sch: st.Schedule, block: st.schedule.SBlockRV, loop: st.schedule.LoopRV) -> None:
    """Load the part of its first operand that `block` reads in a round of `loop` into vector registers."""
    copy = sch.cache_read(block, 0, "local")
    sch.compute_at(copy, loop, preserve_unit_loops=True)
    loops = sch.get_loops(copy)[-len(sch.get(copy).iter_vars) :]
    long = [q for q in loops if int(sch.get(q).extent) > 1]
    for rest in long[:-1]:
        sch.unroll(rest)
    if long:
        sch.vectorize(long[-1])


def unroll_rounds(sch: st.Schedule, loop: st.schedule.LoopRV) -> st.schedule.LoopRV:
    """Unroll `loop` by 4, 3 or 2 if that divides its extent.

    With a held operand its rounds are short. Four steps of 14 products are 66 instructions on ARM, of which
    four only update the loop counter.

    Returns
    -------
    loop
        The loop around the unrolled one, or `loop` itself if it was not unrolled.
    """
    extent = int(sch.get(loop).extent)
    rounds = next(n for n in (4, 3, 2, 1) if extent % n == 0)
    if rounds == 1:
        return loop
    outer, inner = sch.split(loop, [None, rounds])
    sch.unroll(inner)
    return outer


def best_row_tile(
    vectors: tuple[int, ...],
    columns: tuple[int, ...],
    target: DeviceTarget,
    *,
    window: int,
    reach: Callable[[int], int],
) -> tuple[int, int]:
    """Choose the tile for an input of single channels, a row of which is held in registers.

    Parameters
    ----------
    vectors, columns, target
        As in `best_tile`.
    window
        Columns of the convolution's window.
    reach
        Columns of the output -> columns of the input that they read.

    Returns
    -------
    vectors, columns
        The tile's extents.
    """
    lanes, registers = target.simd.lanes, target.simd.registers
    pairs = [(v, c, -(-reach(c) // lanes)) for v in vectors for c in columns]
    fits = [(v, c, held) for v, c, held in pairs if v * c + held + min(v, 2) + 2 <= registers]
    cost = {(v, c): (window * v / 2 + held / 2 + 4) / (window * v * c) for v, c, held in fits}
    return min(cost, key=lambda t: (cost[t], t[0])) if cost else (1, 1)


def best_tile(
    vectors: tuple[int, ...], columns: tuple[int, ...], target: DeviceTarget, *, held: bool
) -> tuple[int, int]:
    """Choose the tile with the fewest loads per multiply-add, of those that fit the registers.

    A step loads `v` vectors and broadcasts `c` values for `v * c` multiply-adds. Values that are held occupy
    registers too, but four steps share one load of them, and vectors are loaded in pairs.

    Parameters
    ----------
    vectors, columns
        The extents to choose from, those that divide the problem: output vectors, and output columns.
    target
        Its registers bound the tile.
    held
        Whether the values are held in registers (`hold_operand`).

    Returns
    -------
    vectors, columns
        The tile's extents.
    """
    registers = target.simd.registers
    pairs = [(v, c) for v in vectors for c in columns]
    if held:
        fits = [(v, c) for v, c in pairs if v * c + c + min(v, 2) + 2 <= registers]
        cost = {(v, c): (2 * v + c / 2 + 4) / (4 * v * c) for v, c in fits}
    else:
        # Measured: LLVM spills beyond half of 32 registers, and beyond three quarters of 16.
        most = registers // 2 if registers >= 32 else max(1, registers * 3 // 4)
        fits = [(v, c) for v, c in pairs if v * c <= most]
        # A vector of weights costs more: it comes from the L2 cache, values come from the L1 cache.
        cost = {(v, c): (3 * v + c + 1) / (v * c) for v, c in fits}
    return min(fits, key=lambda t: (cost[t], t[0])) if fits else (1, 1)
