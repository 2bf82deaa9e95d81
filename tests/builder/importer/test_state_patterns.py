"""Patterns of states stand for all pairs of names that fit."""

from __future__ import annotations

import pytest

from builder.errors import ModelError
from builder.importer.state_patterns import expand_states


@pytest.mark.parametrize("state", ["*:*", "past.*:future.*", "nothing.*:present.*"])
def test_patterns_that_fit_nothing(state: str) -> None:
    with pytest.raises(ModelError, match="expected inputs and outputs of the model"):
        expand_states([state], ["past.key"], ["present.key"])


def test_patterns_and_names_stand_side_by_side() -> None:
    found = expand_states(
        ["past.*.k:now.*.k h:hn"], ["past.0.k", "past.10.k", "past.k"], ["now.0.k", "now.10.k"]
    )
    assert found == ["past.0.k:now.0.k", "past.10.k:now.10.k", "h:hn"]
