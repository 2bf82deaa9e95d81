"""`edgebundle dashboard`, as a user runs it: the address, Ctrl-C, and mistakes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.terminal import Edgebundle
from tests.conftest import BrokerProcess
from tests.patience import PATIENCE_S


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_prints_the_address_and_ends_cleanly(
    mosquitto: BrokerProcess, number: signal.Signals, tmp_path: Path
) -> None:
    command = [str(Path(sys.executable).parent / "edgebundle"), "dashboard", "--broker", mosquitto.url]
    listen = "0" if number is signal.SIGINT else "0.0.0.0:0"
    process = subprocess.Popen(
        [*command, "--listen", listen],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert process.stdout is not None
    address = process.stdout.readline()
    process.send_signal(number)
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, stderr
    assert address.startswith("open http://")
    assert "#" in address
    assert ("warning: other machines can reach this page" in stderr) is (listen != "0")
    assert list(tmp_path.iterdir()) == [], "uploads are deleted"


def test_mistakes(edgebundle: Edgebundle) -> None:
    done = edgebundle("dashboard", "--broker", "mqtt://127.0.0.1:1", "--listen", "0")
    assert done.returncode == 4
    assert done.stderr.startswith("edgebundle: error: cannot reach the broker at mqtt://127.0.0.1:1")
    for address in ("host", "h:99999", "::1:80", "h:-1"):
        done = edgebundle("dashboard", "--broker", "mqtt://127.0.0.1:1", "--listen", address)
        assert done.returncode == 2
        assert "expected HOST:PORT" in done.stderr
    done = edgebundle("dashboard", "--broker", "localhost", "--listen", "0")
    assert (done.returncode, "mqtt://HOST" in done.stderr) == (4, True)
