"""The check of the service, with systemd's answers given by the test."""

from __future__ import annotations

import subprocess

import pytest

from agent.errors import ConfigError
from agent.provision.checks import service
from agent.provision.finding import Level
from tests.agent.provision.checks.rig import one

LOADED = {"LoadState": "loaded", "ActiveState": "active", "SubState": "running", "NRestarts": "0"}


@pytest.fixture
def systemd(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The properties that `systemctl show` prints; a test changes them."""
    properties = dict(LOADED)

    def systemctl(*words: str, limit_s: float) -> subprocess.CompletedProcess[str]:
        text = "".join(f"{name}={value}\n" for name, value in properties.items())
        return subprocess.CompletedProcess(words, int(properties.get("exit", "0")), text, "it broke\n")

    monkeypatch.setattr(service, "systemd_runs", lambda: True)
    monkeypatch.setattr(service, "_systemctl", systemctl)
    return properties


@pytest.mark.parametrize(
    ("changes", "level", "part"),
    [
        ({}, Level.OK, "active (running)"),
        ({"NRestarts": "3"}, Level.WARN, "restarted 3 times"),
        ({"LoadState": "not-found"}, Level.WARN, "is not installed"),
        ({"ActiveState": "failed", "ExecMainStatus": "78"}, Level.FAIL, "the configuration is wrong"),
        ({"ActiveState": "inactive", "ConditionResult": "no"}, Level.FAIL, "no trusted key"),
        ({"ActiveState": "failed", "Result": "oom-kill"}, Level.FAIL, "result oom-kill"),
    ],
)
def test_state_of_the_unit_is_reported(
    systemd: dict[str, str], changes: dict[str, str], level: Level, part: str
) -> None:
    systemd |= changes
    found = one(service.check_service())
    assert (found.level, part in found.message) == (level, True), found


def test_machine_without_systemd_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "systemd_runs", lambda: False)
    assert one(service.check_service()).level is Level.OK
    assert service.state() == {}
    with pytest.raises(ConfigError, match="systemd is not running"):
        service.restart()


def test_service_that_does_not_start_is_an_error_with_its_last_line(systemd: dict[str, str]) -> None:
    service.restart()
    systemd["exit"] = "1"
    with pytest.raises(ConfigError, match="did not start: it broke"):
        service.restart()
