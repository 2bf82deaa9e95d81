"""The rig of a soak: a broker, an agent with one model, and a folder for both."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.agent.test_agent_process import KERNELS, Device
from tests.agent.worker.conftest import compile_c
from tests.bundles import Signer
from tests.conftest import BrokerProcess


@contextmanager
def device_and_broker(log: Path, *, persistent: bool = True) -> Iterator[tuple[Device, BrokerProcess, Path]]:
    """Start a broker; yield an agent that is not started yet, the broker, and the model's library.

    Parameters
    ----------
    log
        The file that the agent's log is appended to.
    persistent
        Whether the broker stores its sessions in a file.
    """
    with tempfile.TemporaryDirectory(prefix="edgebundle-soak-") as name:
        folder = Path(name)
        (folder / "broker").mkdir()
        broker = BrokerProcess("mosquitto", folder / "broker", persistent=persistent)
        broker.start()
        device = Device(folder, Signer(folder / "trust"), broker.port, broker, log=log)
        try:
            yield device, broker, compile_c(KERNELS, folder / "mod.so")
        finally:
            if device.process is not None:
                device.end()
            broker.stop()
