from __future__ import annotations

from builder.boards.ledger import Ledger
from builder.boards.remote_functions import BoardState


def test_a_board_that_throttles_or_slows_down_is_detected() -> None:
    ledger = Ledger()
    assert ledger.is_valid("pi", BoardState((1500000, 600000), throttled=False))
    assert ledger.is_valid("pi", BoardState((600000, 1490000)))
    assert not ledger.is_valid("pi", BoardState((600000, 600000)))
    assert not ledger.is_valid("pi", BoardState((1500000, 1500000), throttled=True))
    assert ledger.is_valid("silent", BoardState())
