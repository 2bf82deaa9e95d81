"""Non-maximum suppression of many boxes; `test_postprocess` compares it with its definition."""

from __future__ import annotations

import numpy as np

from agent.runtime.suppression import non_maximum_suppression


def test_suppression_of_thousands_of_boxes_is_bounded() -> None:
    corners = (
        np.tile(np.array([[0, 0, 1, 1]], np.float32), (4096, 1))
        + np.arange(4096)[:, None].astype(np.float32) * 2
    )
    assert len(non_maximum_suppression(corners, np.zeros(4096), 0.5, 100)) == 100
