"""An agent's deployment side."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent.deploy.rig import Agent
from tests.agent.disk_guard import disk_guard

__all__ = ["agent", "disk_guard"]


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    return Agent(tmp_path / "state")
