"""Any core that a device may have, for properties that must not depend on it."""

from __future__ import annotations

from typing import Final

from hypothesis import strategies as st

from builder.target.core import Core

_KIB: Final = 1 << 10
CORE_COUNTS: Final = st.sampled_from([1, 2, 3, 4, 6, 8, 16, 32, 64, 96, 128])
# Sizes that real caches have, those of virtual machines among them, and parts of caches that cores share.
_L1: Final = st.sampled_from([24, 32, 48, 64, 128]).map(lambda kib: kib * _KIB)
_L2: Final = st.sampled_from([128, 192, 256, 320, 512, 768, 1024, 1280, 2048, 3072, 4096]).map(
    lambda kib: kib * _KIB
)
# Bytes in a nanosecond from beyond L2: without an L3 cache they come from memory.
_BEYOND: Final = st.sampled_from([1.0, 2.0, 4.0, 8.0, 16.0])

CORES: Final = st.builds(
    Core,
    products_per_ns=st.sampled_from([0.25, 0.7, 1.5, 4.8, 6.0, 12.0]),
    l1_bytes=_L1,
    l2_bytes=_L2,
    cache_bytes_per_ns=_BEYOND,
    memory_bytes_per_ns=st.sampled_from([1.0, 2.0, 9.0, 24.0]),
    prefetches=st.booleans(),
    l2_cores=st.sampled_from([1, 2, 4]),
    in_order=st.booleans(),
)
