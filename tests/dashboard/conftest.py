"""A real broker with the sample access list, a real agent, and bundles for it; a browser."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from builder.bundles import key_files
from builder.bundles.package import Package
from tests.conftest import BrokerProcess
from tests.needs import needed
from tests.patience import PATIENCE_S

ACCESS_LIST = Path(__file__).parents[2] / "docs" / "mosquitto" / "edge.acl"


@dataclass(frozen=True, slots=True)
class Site:
    """A broker, an agent `kitchen` without a model, and what signs bundles for it."""

    broker: BrokerProcess
    folder: Path
    key: ec.EllipticCurvePrivateKey
    package: Package

    def bundle(self, version: str, *, counter: int = 5, is_signed: bool = True) -> Path:
        """Write a bundle of the example model."""
        manifest = replace(self.package.manifest, version=version, security_counter=counter)
        package = replace(self.package, manifest=manifest)
        path = self.folder / f"digits-{version}.bundle"
        (package.sign(self.key) if is_signed else package).save(path)
        return path


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[BrokerProcess]:
    """A mosquitto with the sample access list, which believes a client's user name."""
    acl = tmp_path / "edge.acl"
    shutil.copy(ACCESS_LIST, acl)
    process = BrokerProcess("mosquitto", tmp_path, extra=f"acl_file {acl}\n")
    process.start()
    yield process
    process.stop()


@pytest.fixture
def site(tmp_path: Path, guarded: BrokerProcess, digits_bundle: Path) -> Iterator[Site]:
    pair = key_files.generate(tmp_path / "keys")
    (tmp_path / "keyring").mkdir()
    shutil.copy(pair.public, tmp_path / "keyring" / "test.pub")
    (tmp_path / "agent.toml").write_text("[metrics]\ninterval_s = 0.5\n")
    command = [
        sys.executable,
        "-m",
        "agent",
        "run",
        "--config",
        str(tmp_path / "agent.toml"),
        "--device",
        "kitchen",
    ]
    command += [
        "--broker",
        f"mqtt://kitchen@{guarded.host}:{guarded.port}",
        "--trust",
        str(tmp_path / "keyring"),
        "--state-dir",
        str(tmp_path / "state"),
    ]
    with (tmp_path / "agent.log").open("wb") as log:
        agent = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield Site(guarded, tmp_path, key_files.read_private(pair.private), Package.load(digits_bundle))
    finally:
        agent.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(PATIENCE_S)
        agent.kill()


@pytest.fixture(scope="session")
def chromium() -> str:
    return needed("chromium", "chromium-browser", "google-chrome")
