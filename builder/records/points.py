"""Shipped entries as points of a design space, and the signature of a whole workload."""

from __future__ import annotations

import tvm
from tvm import s_tir as st

from builder.kernels.design_space import Decisions, DesignSpace
from builder.kernels.schedule import anchor_of
from builder.kernels.signature import signature_of
from builder.records.shipped import ShippedEntry


def signature_for(workload: tvm.IRModule) -> str | None:
    """The signature of an unscheduled workload, None where it has no design space."""
    sch = st.Schedule(workload)
    anchor = anchor_of(sch)
    return None if anchor is None else signature_of(sch, *anchor)


def point_of(entry: ShippedEntry, space: DesignSpace) -> Decisions | None:
    """What was chosen, as indices into the values of a space; None where the space does not offer it."""
    if set(entry.chosen) != set(space.names):
        return None
    chosen = [entry.chosen[name] for name in space.names]
    if any(value not in values for value, values in zip(chosen, space.values, strict=True)):
        return None
    return tuple(values.index(value) for value, values in zip(chosen, space.values, strict=True))
