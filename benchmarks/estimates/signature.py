"""A kernel's signature: what the decisions of its design space depend on, and nothing else.

Two functions with the same anchor have the same signature, whatever is fused around it.
"""

from __future__ import annotations

import tvm
from tvm import s_tir as st

from builder.kernels.decisions import SPACE_MARK
from builder.kernels.schedule import anchor_of


def signature_for(workload: tvm.IRModule) -> str:
    """Return the signature of an unscheduled workload with a design space."""
    sch = st.Schedule(workload)
    anchor = anchor_of(sch)
    assert anchor is not None
    return signature_of(sch, *anchor)


def signature_of(sch: st.Schedule, block: st.schedule.SBlockRV, kind: str) -> str:
    """Return the signature of an anchor whose loops have not been ordered yet.

    Parameters
    ----------
    sch, block
        The schedule, and the anchor in it.
    kind
        The kind of its design space.

    Returns
    -------
    str
        Such as `conv2d 1x4x56x56x16x4x3x3x16 of 1x4x58x58x16 4x4x3x3x16x1x16 float32 dilation=1 stride=1`:
        the design space, the extents of the loops, the shapes that are read, the result's dtype, and the
        anchor's other marks.
    """
    anchor = sch.get(block)
    loops = [int(sch.get(loop).extent) for loop in sch.get_loops(block)]
    reads = [[int(d) for d in region.source.shape] for region in anchor.reads]
    dtype = str(anchor.writes[0].source.dtype)
    marks = sorted(
        f"{str(name).removeprefix('edge.')}={value}"
        for name, value in anchor.annotations.items()
        if str(name).startswith("edge.") and str(name) != SPACE_MARK
    )
    return " ".join([kind, _text(loops), "of", *map(_text, reads), dtype, *marks])


def _text(extents: list[int]) -> str:
    return "x".join(map(str, extents))
