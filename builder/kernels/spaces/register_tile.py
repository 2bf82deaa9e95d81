"""The register tile: accumulators that stay in registers while a reduction runs, and how to size it.

Each step of the reduction multiplies vectors of one operand by single values of the other. x86 broadcasts
such a value from memory as part of the load. ARM multiplies by one element of a vector register, so on ARM it
pays to load the values of four steps as one vector, and to hold it in a register.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tvm import s_tir as st
from tvm.s_tir.schedule import LoopRV, SBlockRV

from builder.kernels.spaces.loops import extent_of, longer
from builder.target.device_target import DeviceTarget


def divisors(n: int, most: int) -> tuple[int, ...]:
    """Return the divisors of `n` up to `most`, ascending: the extents of a tile that leave no remainder."""
    return tuple(d for d in range(1, min(n, most) + 1) if n % d == 0)


def tilings(n: int, most: int) -> tuple[int, ...]:
    """Return the extents up to `most` of tiles that divide `n` as evenly as possible, ascending.

    A tile of `ceil(n / count)` leaves the smallest last tile too small by less than `count`. Without a
    remainder, `n / count` is a divisor of `n`, so all divisors are among them.
    """
    return tuple(sorted({size for count in range(1, n + 1) if (size := -(-n // count)) <= most}))


def even_part(n: int, most: int) -> int:
    """Return an extent up to `most` for parts of `n`: a divisor, unless all are less than half of `most`."""
    largest = max(divisors(n, most))
    return largest if 2 * largest > min(n, most) else max(tilings(n, most))


def multiplies_by_element(target: DeviceTarget) -> bool:
    """Whether a multiply-add of `target` can take one element of a vector register as a factor."""
    return target.arch in ("aarch64", "armv7l") and target.simd.fma


def hold_operand(sch: st.Schedule, block: SBlockRV, loop: LoopRV) -> None:
    """Load the part of its first operand that `block` reads in a round of `loop` into vector registers."""
    copy = sch.cache_read(block, 0, "local", consumer_blocks=[block])
    sch.compute_at(copy, loop, preserve_unit_loops=True)
    loops = sch.get_loops(copy)[-len(sch.get(copy).iter_vars) :]
    long = longer(sch, loops)
    for rest in long[:-1]:
        sch.unroll(rest)
    if long:
        sch.vectorize(long[-1])


# The largest offset in a load of a vector on 64-bit ARM: 12 bits, in units of its 16 bytes.
_FARTHEST: Final = 4095 * 16


def unroll_rounds(sch: st.Schedule, loop: LoopRV, bytes_apart: int = 0) -> LoopRV:
    """Unroll `loop` by 4, 3 or 2 if that divides its extent and leaves a loop.

    With a held operand its rounds are short. Four steps of 14 products are 66 instructions on ARM, of which
    four only update the loop counter. Without any loop, LLVM loads the weights before the loop over tiles,
    because all tiles read the same, and then spills what does not fit the registers. With 16 input channels
    that took a quarter more instructions. Nor are rounds unrolled whose loads are too far from those of the
    first: each would need an address of its own.

    `bytes_apart`: from the operand of a round to that of the next.
    Result: the loop around the unrolled one, or `loop` itself if it was not unrolled.
    """
    extent = extent_of(sch, loop)
    near = [n for n in (4, 3, 2) if (n - 1) * bytes_apart <= _FARTHEST]
    rounds = next((n for n in near if extent % n == 0 and n < extent), 1)
    if rounds == 1:
        return loop
    outer, inner = sch.split(loop, [None, rounds])
    sch.unroll(inner)
    return outer


@dataclass(frozen=True, slots=True)
class TileChoices:
    """The extents among which a register tile is chosen.

    `extents`: the problem's output vectors and output columns.
    `vectors`, `columns`: the tile's possible extents.
    """

    extents: tuple[int, int]
    vectors: tuple[int, ...]
    columns: tuple[int, ...]

    def least(self, cost: Callable[[int, int], float | None]) -> tuple[int, int]:
        """Return the tile that is best for the whole problem, (1, 1) if none fits.

        The last tile along an axis may be smaller.

        `cost`: a tile's vectors and columns -> the cost of a step, None if the tile does not fit.
        """

        def whole(v: int, c: int) -> float | None:
            (m, v_left), (n, c_left) = divmod(self.extents[0], v), divmod(self.extents[1], c)
            parts = ((m * n, v, c), (m, v, c_left), (n, v_left, c), (1, v_left, c_left))
            total = 0.0
            for count, height, width in parts:
                if count and height and width:
                    step = cost(height, width)
                    if step is None:
                        return None
                    total += count * step
            return total

        costs = {
            (v, c): total for v in self.vectors for c in self.columns if (total := whole(v, c)) is not None
        }
        return min(costs, key=lambda t: (costs[t], t[0])) if costs else (1, 1)


def best_row_tile(
    choices: TileChoices, target: DeviceTarget, *, window: int, reach: Callable[[int], int]
) -> tuple[int, int]:
    """Choose the tile for an input of single channels, a row of which is held in registers.

    `choices`, `target`: as in `best_tile`.
    `reach`: columns of the output -> columns of the input that they read.
    `vectors`, `columns`: the tile's extents.
    """
    lanes, registers = target.simd.lanes, target.simd.registers

    def cost(v: int, c: int) -> float | None:
        held = -(-reach(c) // lanes)
        return window * v / 2 + held / 2 + 4 if v * c + held + min(v, 2) + 2 <= registers else None

    return choices.least(cost)


def shorter_inside(sch: st.Schedule, *loops: LoopRV) -> tuple[LoopRV, ...]:
    """Return the loops over a tile's vectors and columns, the shorter one last: it is to be the inner one.

    LLVM keeps the operands of the inner loop in registers while the outer one runs. Measured for 16 registers
    and a tile of 2 vectors and 6 columns: in the other order, half of the operands are spilled.
    """
    return tuple(sorted(loops, key=lambda loop: -extent_of(sch, loop)))


def best_tile(
    choices: TileChoices,
    target: DeviceTarget,
    *,
    held: bool,
    crowded: bool = False,
    on_stack: bool = False,
    spare: int = 0,
) -> tuple[int, int]:
    """Choose the tile with the fewest loads per multiply-add, of those that fit the registers.

    A step loads `v` vectors and broadcasts `c` values for `v * c` multiply-adds. Values that are held occupy
    registers too, but four steps share one load of them, and vectors are loaded in pairs.

    `held`: whether the values are held in registers (`hold_operand`).
    `crowded`: whether LLVM keeps values in registers for several steps, because their windows overlap.
    `on_stack`: whether the sums are on the stack (`builder.codegen.register_tiles`). LLVM then spills none of
        them while all registers are enough for the sums, the shorter operand and one value of the other.
    `spare`: registers that stay free beside held values.
    `vectors`, `columns`: the tile's extents.
    """
    registers = target.simd.registers
    full = on_stack and not crowded and registers >= 32

    def held_cost(v: int, c: int) -> float | None:
        return 2 * v + c / 2 + 4 if v * c + c + min(v, 2) + 2 + spare <= registers else None

    # Measured: LLVM spills beyond half of 32 registers, and beyond three quarters of 16.
    most = registers // 2 if registers >= 32 or crowded else registers * 3 // 4

    # A vector of weights costs more: it comes from the L2 cache, values come from the L1 cache; 3 is measured
    # for 8 lanes. With that many sums the multipliers wait only for the L2 cache, whose time is that of the
    # bytes.
    vector = 3 * target.simd.lanes / 8 if full else 3

    def cost(v: int, c: int) -> float | None:
        fits = v * c + min(v, c) < registers if full else v * c <= most
        return vector * v + c + 1 if fits else None

    return choices.least(held_cost if held else cost)
