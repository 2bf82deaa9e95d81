"""Products of matrices of bytes on tiles, as AMX has them.

A design space marks three parts of a product (`tile_loops.start_tiles`):

    for ...: sums[...] = 0                              # zeros
    for ...:                                            # reduction
        for t in unrolled(...):                         # tiles of the sums
            for m in range(rows):                       # a tile
                for q in range(steps):              # at most 16
                    for v in range(16):
                        for g in range(4):
                            sums[s + m * pitch + v] += (
                                int32(x[a + m * stride + q * 4 + g]) * int32(weights[b + q * 64 + v * 4 + g])
                            )

On a core with tiles, the sums are in tile registers from the first step of the reduction to the last, and are
then stored once. On another core the loops stay as they are, with a dot product inside.

A core has eight tile registers, whose rows are configured once in each round of a parallel loop, and released
at its end: a thread with tiles in use has 8 KiB more to save at a switch to another thread.

What the instructions compute: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2
(LDTILECFG, TILELOADD, TDPBUSD, TILESTORED, TILERELEASE).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Final

import numpy as np
import tvm
import tvm_ffi
from tvm import sym, tirx
from tvm.ir import TensorLoad
from tvm_ffi import WalkResult

from builder.codegen.bodies import with_bodies
from builder.codegen.dot_products import factors_of
from builder.errors import BuildError
from builder.kernels.instructions import number_of
from builder.kernels.spaces.tile_loops import GROUP, MOST_SUMS, STEPS, SUMS_MARK, TILE_MARK, ZEROS_MARK
from builder.target.dot import TILE, Dot

# The instruction, and the types of the factors and the sums.
_INSTRUCTION: Final = "tdpbusd"
_DTYPES: Final = ("uint8", "int8", "int32")
_GROUP_BYTES: Final = TILE.bytes // STEPS
# Tile registers by what they hold. The first are sums, and stay; the others take turns.
_LEFT: Final = (MOST_SUMS, MOST_SUMS + 1)
_RIGHT: Final = (MOST_SUMS + 2, MOST_SUMS + 3)


def write_tile_products(mod: tvm.IRModule, dot: Dot) -> tvm.IRModule:
    """Write the marked products of all functions of `mod`, whose buffers are flat, on tiles.

    `dot`: the instruction of the processor; without tiles, `mod` is returned.
    Raises `BuildError` if a marked product has another form than described above: a fault of the design
        space.
    """
    return with_bodies(mod, _on_tiles) if dot.tiles else mod


def _on_tiles(body: tirx.Stmt) -> tirx.Stmt:
    """Return the body of a function with its products on tiles."""
    for loop in _holders(body):
        body = _replaced(body, loop, _written(loop))
    body = _without_zeros(body)
    if _has_tile(body):
        raise BuildError("expected all tiles of a function in a marked reduction, got others")
    return body


def _holders(body: tirx.Stmt) -> list[tirx.For]:
    """Return the loops in `body` that hold products: parallel ones, else the outermost."""
    found: list[tirx.For] = []

    def visit(loop: tirx.For) -> WalkResult:
        if loop.kind != tirx.ForKind.PARALLEL and _parallel(loop.body):
            return WalkResult.ADVANCE
        if _products(loop):
            found.append(loop)
        return WalkResult.SKIP

    tvm_ffi.structural_walk(body, (tirx.For, visit), order="pre")
    return found


def _has(loop: tirx.For, mark: str) -> bool:
    return mark in loop.annotations


def _loops(body: tirx.Stmt) -> list[tirx.For]:
    found: list[tirx.For] = []
    tvm_ffi.structural_walk(body, (tirx.For, found.append))
    return found


def _products(body: tirx.Stmt) -> list[tirx.For]:
    """Return the marked reductions in `body`; not those of tiles beyond the last row, which only prefetch."""
    return [loop for loop in _loops(body) if _has(loop, SUMS_MARK) and _has_tile(loop.body)]


def _has_tile(body: tirx.Stmt) -> bool:
    return any(_has(loop, TILE_MARK) for loop in _loops(body))


def _parallel(body: tirx.Stmt) -> list[tirx.For]:
    """Return the parallel loops in `body` that hold products."""
    return [loop for loop in _loops(body) if loop.kind == tirx.ForKind.PARALLEL and _products(loop)]


def _replaced(body: tirx.Stmt, old: tirx.For, new: tirx.Stmt) -> tirx.Stmt:
    def loop(stmt: tirx.For) -> tirx.Stmt:
        return new if stmt.loop_var.same_as(old.loop_var) else stmt

    result: tirx.Stmt = tvm_ffi.structural_map(body, (tirx.For, loop))
    return result


def _without_zeros(body: tirx.Stmt) -> tirx.Stmt:
    """Return `body` without the loops that set sums to zero: registers begin with zeros."""

    def loop(stmt: tirx.For) -> tirx.Stmt:
        return tirx.Evaluate(0) if _has(stmt, ZEROS_MARK) else stmt

    result: tirx.Stmt = tvm_ffi.structural_map(body, (tirx.For, loop))
    return result


def _written(loop: tirx.For) -> tirx.Stmt:
    """Return a loop with its products on tiles, which are configured in each round if it is parallel.

    Products of different shapes are each configured by themselves.
    """
    products = [_Product.of(each) for each in _products(loop)]
    shapes = {product.shape for product in products}
    body: tirx.Stmt = loop
    for product in products:
        written = product.write()
        body = _replaced(
            body, product.loop, written if len(shapes) == 1 else _configured(product.shape, written)
        )
    if len(shapes) > 1:
        return body
    if loop.kind != tirx.ForKind.PARALLEL:
        return _configured(shapes.pop(), body)
    inner = _configured(shapes.pop(), body.body)
    return tirx.For(body.loop_var, body.min, body.extent, body.kind, inner, None, body.annotations)


def _configured(shape: tuple[int, int], body: tirx.Stmt) -> tirx.Stmt:
    """Return `body` between the configuration of tiles and their release.

    `shape` has the rows of a left factor, and the groups in each: the rows of a right one.

    The configuration is 64 bytes: the palette, 15 zeros, the bytes in a row of each register, 16 zeros, and
    the rows of each.
    """
    buffer = tirx.decl_buffer((8,), "int64", "tile_shapes", scope="local")
    rows, steps = shape
    shapes = bytearray(64)
    shapes[0] = 1
    for register in range(8):
        shapes[16 + 2 * register] = steps * _GROUP_BYTES if register in _LEFT else TILE.bytes
        shapes[48 + register] = steps if register in _RIGHT else rows
    words = [int.from_bytes(shapes[8 * k : 8 * k + 8], "little", signed=True) for k in range(8)]
    stores = [tirx.BufferStore(buffer, tirx.const(word, "int64"), [_int(k)]) for k, word in enumerate(words)]
    load = _call("ldtilecfg", tirx.address_of(tirx.BufferLoad(buffer, [_int(0)])))
    return tirx.SeqStmt([tirx.AllocBuffer(buffer), *stores, load, body, _call("tilerelease")])


@dataclass(frozen=True, slots=True)
class _Product:
    """A marked product.

    `loop`: its reduction.
    `reduction`: the loops of the reduction outside the tiles, the outermost first, each with what a round of
        it does before the loop inside: prefetches.
    `shape`: the rows of a tile of sums, and the groups in a row of the left factor.
    `left`, `right`, `sums`: for each tile of sums, in pairs of equal length: where its left factor, its right
        one and the sums themselves begin.
    `strides`: bytes from a row to the next: of the left factor, the right one and the sums.
    """

    loop: tirx.For
    reduction: tuple[tuple[tirx.For, tuple[tirx.Stmt, ...]], ...]
    shape: tuple[int, int]
    left: tuple[TensorLoad, ...]
    right: tuple[TensorLoad, ...]
    sums: tuple[TensorLoad, ...]
    strides: tuple[int, int, int]

    @classmethod
    def of(cls, loop: tirx.For) -> _Product:
        """Read a marked product."""
        reduction: list[tuple[tirx.For, tuple[tirx.Stmt, ...]]] = []
        tiles: list[tirx.For] = []
        stmt: tirx.Stmt = loop
        while isinstance(stmt, tirx.For) and not _has(stmt, TILE_MARK):
            loop_body = list(stmt.body.seq) if isinstance(stmt.body, tirx.SeqStmt) else [stmt.body]
            if stmt.kind == tirx.ForKind.UNROLLED:
                tiles.append(stmt)
            else:
                reduction.append((stmt, tuple(loop_body[:-1])))
            stmt = loop_body[-1]
        inner: list[tirx.For] = []
        while isinstance(stmt, tirx.For):
            inner.append(stmt)
            stmt = stmt.body
        found = factors_of(stmt) if isinstance(stmt, tirx.BufferStore) else None
        extents = [int(each.extent) for each in inner]
        group = extents[-1] if extents else 0
        if found is None or extents[2:-1] != [TILE.columns] or group != GROUP:
            raise BuildError(f"expected a product on tiles, got loops of {extents} around {stmt}")
        if not 1 <= extents[0] <= TILE.rows:
            raise BuildError(f"expected a tile of at most {TILE.rows} rows, got {extents[0]}")
        if not 1 <= extents[1] <= STEPS:
            raise BuildError(f"expected at most {STEPS} groups in a row of a tile, got {extents[1]}")
        loads = (*found, tirx.BufferLoad(stmt.buffer, stmt.indices))
        dtypes = tuple(str(load.source.dtype) for load in loads)
        if dtypes != _DTYPES:
            raise BuildError(f"expected a product of {_DTYPES} on tiles, got {stmt}")
        variables = [each.loop_var for each in inner]
        wanted = ((None, group, 0, 1), (0, None, group, 1), (None, 0, 1, 0))
        places, strides = [], []
        for load, steps in zip(loads, wanted, strict=True):
            (index,) = load.indices
            parts = sym.detect_linear_equation(index, variables)
            known = [int(p) if isinstance(p, tirx.IntImm) else -1 for p in parts[:-1]]
            if not parts or any(w not in (None, k) for w, k in zip(steps, known, strict=True)):
                raise BuildError(f"expected rows of a tile in {load.source.name}, got the index {index}")
            places.append((load.source, parts[-1]))
            strides.append(known[steps.index(None)] * np.dtype(str(load.source.dtype)).itemsize)
        corners = list(itertools.product(*(range(int(tile.extent)) for tile in tiles)))
        if len(corners) > MOST_SUMS:
            raise BuildError(f"expected at most {MOST_SUMS} tiles of sums, got {len(corners)}")
        analyzer = sym.Analyzer()

        def at(source: tirx.Buffer, place: tirx.Expr, corner: tuple[int, ...]) -> TensorLoad:
            known = {tile.loop_var: _int(k) for tile, k in zip(tiles, corner, strict=True)}
            index = tvm_ffi.structural_map(place, (tirx.Var, lambda var: known.get(var, var)))
            return tirx.BufferLoad(source, [analyzer.simplify(index)])

        left, right, sums = (tuple(at(*place, corner) for corner in corners) for place in places)
        return cls(
            loop,
            tuple(reduction),
            (extents[0], extents[1]),
            left,
            right,
            sums,
            (strides[0], strides[1], strides[2]),
        )

    def write(self) -> tirx.Stmt:
        """Return the product on tiles: zeros, the steps of the reduction, and the stores."""
        left, right = _different(self.left), _different(self.right)
        if len(left) > len(_LEFT) and len(right) > len(_RIGHT):
            raise BuildError(f"expected few tiles on one side, got {len(left)} and {len(right)}")
        steps: list[tirx.Stmt] = []
        held: dict[int, int] = {}  # register -> number of the operand that it holds

        def register(side: tuple[int, int], operands: list[TensorLoad], number: int, stride: int) -> int:
            place = side[number % 2]
            if held.get(place) != number:
                held[place] = number
                address = tirx.address_of(operands[number])
                steps.append(_call("tileloadd64", _tile(place), address, tirx.const(stride, "int64")))
            return place

        pairs = [(_number(a, left), _number(b, right)) for a, b in zip(self.left, self.right, strict=True)]
        order = sorted(
            range(len(pairs)), key=lambda k: pairs[k] if len(left) > len(right) else pairs[k][::-1]
        )
        for k in order:
            a, b = pairs[k]
            right_tile = register(_RIGHT, right, b, self.strides[1])
            left_tile = register(_LEFT, left, a, self.strides[0])
            steps.append(_call(_INSTRUCTION, _tile(k), _tile(left_tile), _tile(right_tile)))
        body: tirx.Stmt = tirx.SeqStmt(steps)
        for each, before in reversed(self.reduction):
            body = tirx.SeqStmt([*before, body]) if before else body
            body = tirx.For(each.loop_var, each.min, each.extent, each.kind, body)
        stores = [
            _call("tilestored64", _tile(k), tirx.address_of(place), tirx.const(self.strides[2], "int64"))
            for k, place in enumerate(self.sums)
        ]
        zeros = [_call("tilezero", _tile(k)) for k in range(len(self.sums))]
        return tirx.SeqStmt([*zeros, body, *stores])


def _different(loads: tuple[TensorLoad, ...]) -> list[TensorLoad]:
    """Return the loads without repetitions."""
    kept: list[TensorLoad] = []
    for load in loads:
        if not any(tvm_ffi.structural_equal(load, other) for other in kept):
            kept.append(load)
    return kept


def _number(load: TensorLoad, among: list[TensorLoad]) -> int:
    return next(k for k, other in enumerate(among) if tvm_ffi.structural_equal(load, other))


def _int(value: int) -> tirx.Expr:
    return tirx.const(value, "int32")


def _tile(number: int) -> tirx.Expr:
    return tirx.const(number, "uint8")


def _call(name: str, *operands: tirx.Expr) -> tirx.Stmt:
    """Return a call of an instruction for tiles."""
    return tirx.Evaluate(tirx.call_llvm_intrin("void", number_of(f"x86.{name}"), *operands))
