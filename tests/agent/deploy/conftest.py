"""An agent's deployment side."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent.deploy.rig import Agent


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    return Agent(tmp_path / "state")
