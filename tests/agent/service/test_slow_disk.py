"""A disk that does not respond while the agent serves."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from agent.deploy.store.outbox_file import OutboxFile
from agent.service import notify
from tests.agent.service.conftest import StartService, keep_active, status_of
from tests.agent.service.test_service import Watcher
from tests.bundles import Signer, sha256
from tests.conftest import BrokerProcess
from tests.patience import until


@pytest.mark.slow
async def test_disk_that_hangs_holds_up_neither_requests_nor_the_watchdog(
    mosquitto: BrokerProcess,
    start_service: StartService,
    signer: Signer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notify, "_PULSE_S", 0.01)
    back, hanging = threading.Event(), threading.Semaphore(0)
    fsync, write = os.fsync, OutboxFile.write

    def wait_fsync(descriptor: int) -> None:
        hanging.release()
        back.wait()
        fsync(descriptor)

    def wait_write(file: OutboxFile, *arguments: Any) -> None:
        hanging.release()
        back.wait()
        write(file, *arguments)

    keep_active(tmp_path / "state-kitchen", signer.packed())
    new = signer.packed(version="2.0.0")
    pulses: list[str] = []
    async with Watcher(mosquitto.port) as watcher, start_service(mosquitto.port) as rig:
        client = await rig.client()
        await until(lambda: (watcher.latest("models/echo/state") or {}).get("ready"))
        rig.service._notifier.watchdog_s = 1.0
        monkeypatch.setattr(rig.service._notifier, "notify", pulses.append)
        monkeypatch.setattr(os, "fsync", wait_fsync)
        monkeypatch.setattr(OutboxFile, "write", wait_write)
        entry = {"digest": f"sha256:{sha256(new)}", "size": len(new), "version": "2.0.0", "job": "job-2"}
        desired = {"version": 1, "models": {"echo": {**entry, "sources": ["mqtt"]}}}
        client.connection.publish("edge/v1/kitchen/desired", json.dumps(desired).encode(), retain=True)
        await until(lambda: hanging.acquire(blocking=False))
        before = len(pulses)
        for _ in range(5):
            assert status_of(await client.ask(b"still there?")) == 200
        await until(lambda: len(pulses) > before + 5)
        for connection in rig.service.connections:
            connection.renew()
        await until(lambda: rig.service.online)
        assert status_of(await client.ask(b"and now?")) == 200
        rig.stop.set()
        await until(lambda: notify.STOPPING in pulses)
    back.set()
