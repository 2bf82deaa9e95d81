"""The operand that a register tile broadcasts: from memory, or from vectors that are held in registers.

x86 multiplies by a value it broadcasts from memory as part of the load. ARM multiplies by one element of a
vector register, so there it pays to load four values of the reduction at once and to name them one by one.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import s_tir as st

from builder.target.device_target import DeviceTarget


def multiplies_by_element(target: DeviceTarget) -> bool:
    """Whether a multiply-add can take one element of a vector register as a factor."""
    return target.arch in ("aarch64", "armv7l") and target.simd.fma


def hold(sch: st.Schedule, block: st.schedule.SBlockRV, loop: st.schedule.LoopRV) -> None:
    """Load what `block` reads of its first operand under `loop` as vectors, before the products."""
    copy = sch.cache_read(block, 0, "local")
    sch.compute_at(copy, loop, preserve_unit_loops=True)
    loops = sch.get_loops(copy)[-len(sch.get(copy).iter_vars) :]
    long = [q for q in loops if int(sch.get(q).extent) > 1]
    for rest in long[:-1]:
        sch.unroll(rest)
    if long:
        sch.vectorize(long[-1])


def repeat(sch: st.Schedule, loop: st.schedule.LoopRV) -> st.schedule.LoopRV:
    """Up to four rounds of `loop` in one, where their number divides: a held operand leaves short rounds.

    Four steps of 14 products are 66 instructions on ARM, and four of them only count.

    Returns
    -------
    loop
        What remains to be repeated.
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
    """As `best_tile`, where what is held is the row of the input that a window's row reads: single channels.

    Parameters
    ----------
    window
        Columns of the window.
    reach
        Columns of the input that so many columns of the output read.
    """
    lanes, registers = target.simd.lanes, target.simd.registers
    pairs = [(v, c, -(-reach(c) // lanes)) for v in vectors for c in columns]
    fits = [(v, c, held) for v, c, held in pairs if v * c + held + min(v, 2) + 2 <= registers]
    cost = {(v, c): (window * v / 2 + held / 2 + 4) / (window * v * c) for v, c, held in fits}
    return min(cost, key=lambda t: (cost[t], t[0])) if cost else (1, 1)


def best_tile(
    vectors: tuple[int, ...], columns: tuple[int, ...], target: DeviceTarget, *, held: bool
) -> tuple[int, int]:
    """The register tile, of those that fit, with the fewest loads for its products.

    A step loads `v` vectors and broadcasts `c` values for `v * c` multiply-adds. Where values are held in
    registers they need some of their own, but four steps share one load, and vectors are loaded in pairs.

    Parameters
    ----------
    vectors, columns
        The extents that divide the problem.
    held
        Whether the values to broadcast are in vectors; see `hold`.
    """
    registers = target.simd.registers
    pairs = [(v, c) for v in vectors for c in columns]
    if held:
        fits = [(v, c) for v, c in pairs if v * c + c + min(v, 2) + 2 <= registers]
        cost = {(v, c): (2 * v + c / 2 + 4) / (4 * v * c) for v, c in fits}
    else:
        # LLVM was measured to spill beyond half of 32 registers, and beyond three quarters of 16.
        most = registers // 2 if registers >= 32 else max(1, registers * 3 // 4)
        fits = [(v, c) for v, c in pairs if v * c <= most]
        # Weights come from the second cache, values from the first.
        cost = {(v, c): (3 * v + c + 1) / (v * c) for v, c in fits}
    return min(fits, key=lambda t: (cost[t], t[0])) if fits else (1, 1)
