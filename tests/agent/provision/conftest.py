"""Keys, certificates, passwords and brokers to enroll a device with."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.agent.provision.authority import Authority
from tests.bundles import public_pem
from tests.conftest import BrokerProcess

StartBroker = Callable[[str], BrokerProcess]


@pytest.fixture
def trust(tmp_path: Path) -> Path:
    """The public half of a key, as keygen writes it."""
    path = tmp_path / "keys/signing.pub"
    path.parent.mkdir()
    path.write_bytes(public_pem())
    return path


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@pytest.fixture
def start_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartBroker]:
    """Start mosquitto with extra lines of configuration; each is stopped at the end of the test."""
    with ExitStack() as stack:

        def start(extra: str) -> BrokerProcess:
            broker = BrokerProcess("mosquitto", tmp_path_factory.mktemp("mosquitto"), extra=extra)
            broker.start()
            stack.callback(broker.stop)
            return broker

        yield start


@pytest.fixture
def passwords(tmp_path: Path) -> Path:
    """A password file for mosquitto, with the user kitchen and the password hunter2."""
    path = tmp_path / "passwords"
    subprocess.run(["mosquitto_passwd", "-b", "-c", path, "kitchen", "hunter2"], check=True)
    path.chmod(0o644)
    return path
