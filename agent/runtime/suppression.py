"""Non-maximum suppression: of boxes that overlap, only the best one is kept.

Promises the greedy algorithm's result, and a bounded time for any boxes. Callers rank the boxes and pass at
most `MAX_CANDIDATES`.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from agent.runtime.storage import Array

# Candidates for non-maximum suppression, best first: its time grows with their square, and more candidates
# than this above the threshold are noise.
MAX_CANDIDATES: Final = 4096


def non_maximum_suppression(
    corners: Array, classes: Array | None, iou_threshold: float, limit: int
) -> list[int]:
    """Return the indices of the boxes to keep, chosen greedily, best first, within each class.

    `corners`: float32, shape (n, 4), best first. `classes`: integers, shape (n,), or None if boxes of
    different classes suppress each other too. A box is dropped if its intersection over union with a better
    box of its class is larger than `iou_threshold`; at most `limit` are kept.
    """
    if iou_threshold >= 1:  # no intersection is larger than the union
        return list(range(min(limit, len(corners))))
    areas = (corners[:, 2] - corners[:, 0]).clip(0) * (corners[:, 3] - corners[:, 1]).clip(0)
    alive = np.ones(len(corners), dtype=bool)
    kept: list[int] = []
    for i in range(len(corners)):
        if not alive[i]:
            continue
        kept.append(i)
        if len(kept) == limit:
            break
        low = np.maximum(corners[i, :2], corners[i + 1 :, :2])
        high = np.minimum(corners[i, 2:], corners[i + 1 :, 2:])
        shared = (high - low).clip(0).prod(axis=1)
        # Compared without a division, so that boxes without area need no special case.
        overlaps = shared > iou_threshold * (areas[i] + areas[i + 1 :] - shared)
        if classes is not None:
            overlaps &= classes[i + 1 :] == classes[i]
        alive[i + 1 :] &= ~overlaps
    return kept
