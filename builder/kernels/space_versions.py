"""The version of each kind of design space, by which tuning records are known to mean the same.

A record stores a point as a trace over the space of its operator. Raise the version of a kind when its traces
come to mean something else: decisions in another order, other values, other loops. Records of that kind are
then skipped, and those of all other kinds stay valid. After a change that concerns every kind, such as one of
`builder.kernels.postprocessing`, raise all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

SPACE_VERSIONS: Final[Mapping[str, int]] = {
    "attention": 1,
    "batch_matmul": 10,
    "blocked_matmul": 1,
    "columns": 10,
    "conv2d": 12,
    "depthwise": 11,
    "group_norm": 1,
    "half_conv2d": 1,
    "half_matmul": 1,
    "half_winograd": 1,
    "integer_conv2d": 3,
    "integer_depthwise": 2,
    "integer_matmul": 1,
    "integer_winograd": 1,
    "integer_winograd_weights": 1,
    "matmul": 12,
    "pixels": 1,
    "planes": 1,
    "pool": 10,
    "resize": 1,
    "rows": 10,
    "separable": 1,
    "strassen_weights": 10,
    "tile_conv2d": 2,
    "tile_matmul": 2,
    "tiled_matmul": 11,
    "transpose": 10,
    "unpack": 1,
    "winograd": 13,
    "winograd_weights": 12,
}
