from __future__ import annotations

from typing import Any

import pytest

from builder.boards.measuring_process import check_plausible
from builder.errors import BoardError


@pytest.mark.parametrize("seconds", [(), (-1e-6,), (0.0,), (float("nan"),), (float("inf"),), (1e-6, 1e5)])
def test_implausible_times_are_refused(seconds: Any) -> None:
    with pytest.raises(BoardError, match="expected a kernel's time"):
        check_plausible(seconds)
