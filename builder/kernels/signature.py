"""A kernel's signature: what its design space's decisions depend on, and nothing else.

Two functions with the same anchor have the same signature, whatever is fused around it. So what was found for
one convolution serves it in every model, and stays found when an epilogue is written in another way.
"""

from __future__ import annotations

from typing import Final

from tvm import s_tir as st

_SPACE: Final = "edge.space"


def signature_of(sch: st.Schedule, block: st.schedule.SBlockRV, kind: str) -> str:
    """The signature of an anchor whose loops nobody has ordered yet.

    Returns
    -------
    str
        Such as `conv2d 1x4x56x56x16x4x3x3x16 of 1x4x58x58x16 4x4x3x3x16x1x16 float32 dilation=1 stride=1`:
        the design space, the loops, what is read, and the anchor's own marks.
    """
    anchor = sch.get(block)
    loops = [int(sch.get(loop).extent) for loop in sch.get_loops(block)]
    reads = [[int(d) for d in region.source.shape] for region in anchor.reads]
    dtype = str(anchor.writes[0].source.dtype)
    marks = sorted(
        f"{str(name).removeprefix('edge.')}={value}"
        for name, value in anchor.annotations.items()
        if str(name).startswith("edge.") and str(name) != _SPACE
    )
    return " ".join([kind, _text(loops), "of", *map(_text, reads), dtype, *marks])


def _text(extents: list[int]) -> str:
    return "x".join(map(str, extents))
