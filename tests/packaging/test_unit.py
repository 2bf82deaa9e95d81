"""The service's unit, checked without starting it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.systemd

UNIT = Path(__file__).resolve().parents[2] / "systemd/edge-agent.service"
MAX_EXPOSURE = 1.5
# No agent is installed here, and systemd before 254 ignores two keys.
EXPECTED = re.compile(
    r"/usr/bin/edge-agent is not executable|Unknown key (name )?'(RestartSteps|RestartMaxDelaySec)'"
)


def test_exposure_is_at_most_1_5() -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(UNIT)]
    report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    exposure = re.search(r"Overall exposure level for edge-agent.service: ([\d.]+)", report)
    assert exposure is not None, report
    print(exposure[0])
    assert float(exposure[1]) <= MAX_EXPOSURE


def test_systemd_knows_every_setting() -> None:
    command = ["systemd-analyze", "verify", "--man=no", str(UNIT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert [line for line in done.stderr.splitlines() if not EXPECTED.search(line)] == []


def test_no_number_of_failures_and_no_exit_status_leaves_the_device_dark() -> None:
    lines = UNIT.read_text().splitlines()
    assert "StartLimitIntervalSec=0" in lines
    assert "Restart=on-failure" in lines
    assert not [line for line in lines if line.startswith(("StartLimitBurst", "RestartPreventExitStatus"))]
