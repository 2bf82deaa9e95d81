"""A network to build a model with."""

from __future__ import annotations

import pytest

from tests.builder.quantising.networks import Network


@pytest.fixture
def network() -> Network:
    return Network()
