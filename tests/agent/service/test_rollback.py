"""A version that fails on trial, with a real broker, real processes and real signatures."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.agent.service.conftest import StartService, keep_active, status_of
from tests.agent.service.test_service import Watcher
from tests.bundles import Signer, sha256
from tests.conftest import BrokerProcess
from tests.patience import until


def states(samples: dict[str, float]) -> dict[str, float]:
    """Return the gauge of each state of the model `echo`."""
    begin = 'edge_model_state{model="echo",state="'
    return {key.removeprefix(begin)[:-2]: value for key, value in samples.items() if key.startswith(begin)}


@pytest.mark.slow
async def test_version_whose_worker_dies_is_rolled_back_and_the_old_one_answers(
    mosquitto: BrokerProcess, start_service: StartService, signer: Signer, tmp_path: Path
) -> None:
    state_dir, new = tmp_path / "state-kitchen", signer.packed(version="2.0.0")
    keep_active(state_dir, signer.packed())
    async with Watcher(mosquitto.port) as watcher, start_service(mosquitto.port) as rig:

        def reported() -> dict[str, Any]:
            models: dict[str, Any] = (watcher.latest("reported") or {}).get("models", {})
            return models.get("echo", {})

        client = await rig.client()
        await until(lambda: reported().get("state") == "active")
        assert [state for state, value in states(rig.service.samples()).items() if value] == ["active"]
        (state_dir / "inbox" / f"{sha256(new)}.bundle").write_bytes(new)
        await until(lambda: reported().get("version") == "2.0.0")
        assert (await client.ask(b"new")).payload == b"2.0.0:new"
        model = rig.service.models.get("echo")
        assert model is not None
        for deaths in range(1, 4):
            assert status_of(await client.ask(b"alive?")) == 200
            os.kill(model.worker_pid or 0, signal.SIGKILL)
            await until(lambda deaths=deaths: model.status().restarts == deaths)  # type: ignore[misc, union-attr]
        await until(lambda: reported().get("state") == "rolled_back")
        assert states(rig.service.samples()) == {
            "starting": 0,
            "active": 0,
            "degraded": 0,
            "rolled_back": 1,
            "failed": 0,
        }
        assert reported()["version"] == "1.0.0"
        assert reported()["rolled_back"] == f"sha256:{sha256(new)}"
        answer = await client.ask(b"old")
        assert (status_of(answer), answer.payload) == (200, b"1.0.0:old")
