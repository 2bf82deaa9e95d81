"""The passes from scheduled kernels to machine code: TVM's for a processor, and ours."""

from __future__ import annotations

from typing import Final

import tvm
from tvm.s_tir import transform as s
from tvm.tirx import transform as t

from builder.codegen.bodies import with_bodies
from builder.codegen.byte_rounding import write_byte_rounding
from builder.codegen.byte_tables import write_byte_tables
from builder.codegen.carried_nan import carry_nan
from builder.codegen.conditions import write_choices
from builder.codegen.dot_products import write_dot_products
from builder.codegen.joined_bytes import join_byte_stores
from builder.codegen.linear_indices import simplify_indices
from builder.codegen.loop_tails import split_loop_tails
from builder.codegen.named_values import expand_functions
from builder.codegen.register_tiles import keep_on_stack
from builder.codegen.row_bases import separate_rows
from builder.codegen.tile_products import write_tile_products
from builder.codegen.wrapped_indices import hide_remainders, split_wrapping_loops
from builder.kernels.real_numbers import keep_floats
from builder.target.device_target import arch_of, dot_of, features_of

# TVM's `tvm.s_tir.pipeline` without the passes for GPUs, in three parts.
_TO_LOOPS: Final = (
    s.CanonicalizeLoop,
    s.LowerInitBlock,
    s.PlanAndUpdateBufferAllocationLocation,
    s.ConvertBlocksToOpaque,
    s.CompactBufferAllocation,
    s.LowerMatchBuffer,
    s.StmtSimplify,
    s.LowerOpaqueBlock,
    t.FlattenBuffer,
    t.BF16ComputeLegalize,
    lambda: t.NarrowDataType(32),
)
_TO_VECTORS: Final = (s.LoopPartition, t.VectorizeLoop)
_TO_FUNCTIONS: Final = (
    t.StorageRewrite,
    s.HoistIfThenElse,
    t.UnrollLoop,
    s.RenormalizeSplitPattern,
    t.StmtSimplify,
    t.RemoveNoOp,
    s.RewriteUnsafeSelect,
    t.CommonSubexprElim,
    t.FP8ComputeLegalize,
    t.VerifyMemory,
    t.AnnotateEntryFunc,
    t.MakePackedAPI,
    t.SkipAssert,  # docs/decisions/0025: the executor has checked the arguments
    t.FP8StorageLegalize,
    t.BF16StorageLegalize,
    t.LowerTVMBuiltin,
)


def to_loops(kernels: tvm.IRModule) -> tvm.IRModule:
    """Lower the blocks of scheduled kernels to loops over flat buffers, without incomplete tiles.

    This comes before loops are vectorised, because a vector loop with a condition, or over an index with
    quotients, becomes a loop over single elements.
    """
    loops = tvm.transform.Sequential([make() for make in _TO_LOOPS])(with_bodies(kernels, keep_floats))
    return simplify_indices(split_loop_tails(loops))


def lower_kernels(kernels: tvm.IRModule, target: tvm.target.Target) -> tvm.IRModule:
    """Lower scheduled kernels to functions that LLVM can compile.

    `kernels`: functions, each with a `global_symbol`.
    """
    bound = t.BindTarget(target.with_host(target))(kernels)
    dot = dot_of(target)
    loops = write_dot_products(write_tile_products(to_loops(bound), dot), dot)
    vectors = tvm.transform.Sequential([make() for make in _TO_VECTORS])(loops)
    apart = separate_rows(split_wrapping_loops(vectors), arch_of(target))
    features = features_of(target)
    tables = write_byte_tables(join_byte_stores(apart, features), features)
    rounded = write_byte_rounding(tables, arch_of(target))
    functions = keep_on_stack(tvm.transform.Sequential([make() for make in _TO_FUNCTIONS])(rounded))
    final = carry_nan(expand_functions(write_choices(functions)), arch_of(target))
    return t.LowerIntrin()(hide_remainders(final))


def build_kernels(kernels: tvm.IRModule, target: tvm.target.Target) -> tvm.runtime.Module:
    """Compile scheduled kernels to a module of machine code; the parameters are those of `lower_kernels`."""
    return tvm.get_global_func("target.build.llvm")(lower_kernels(kernels, target), target)
