"""`edge-agent check`: one report names everything that is wrong, and changes nothing."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import subprocess
from pathlib import Path

import pytest

from agent.cli import main
from agent.config.file import load_config
from agent.deploy.store.store import Store
from agent.mqtt.connection import Connection
from agent.mqtt.session import Owner
from agent.mqtt.settings import BrokerSettings
from agent.provision.checks import doctor, machine
from agent.wire.presence import AgentState, Presence
from agent.wire.topics import State, format_topic
from tests.agent.provision.checks.rig import configuration
from tests.conftest import BrokerProcess
from tests.ports import free_port


async def retain(broker: BrokerProcess, topic: str, payload: bytes) -> None:
    connection = Connection(BrokerSettings("127.0.0.1", broker.port), Owner(lambda _: None), client_id="test")
    await connection.connect()
    assert not (await connection.publish(topic, payload, retain=True)).failed
    await connection.close()


NAMES = {
    *("python", "processor", "clock", "memory", "heat", "sandbox", "service", "disk"),
    *("configuration", "keyring", "models", "broker", "rights", "delay"),
}


def check(config: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the command in this process, which has loaded what it needs."""
    arguments = ["check", "--config", str(config), *words]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def test_healthy_device_has_no_failure_and_the_report_changes_nothing(
    tmp_path: Path, trust: Path, mosquitto: BrokerProcess
) -> None:
    path = configuration(tmp_path / "etc", trust, mosquitto.port)
    before = sorted(tmp_path.rglob("*"))
    done = check(path, "--json")
    assert done.returncode == 0, done.stdout
    report = json.loads(done.stdout)
    assert report["ok"] is True
    assert {finding["subject"] for finding in report["findings"]} == NAMES
    # Debian's mosquitto delays small messages; only clients with other libraries wait for them.
    [delay] = [finding for finding in report["findings"] if finding["subject"] == "delay"]
    assert (delay["level"], "set_tcp_nodelay" in delay["hint"]) == ("warn", True)
    assert report["counts"]["fail"] == 0
    assert sorted(tmp_path.rglob("*")) == before


def test_an_agent_that_a_person_started_is_this_device_and_no_other(
    tmp_path: Path, trust: Path, mosquitto: BrokerProcess
) -> None:
    path = configuration(tmp_path / "etc", trust, mosquitto.port)
    config = load_config(path, {}, {})
    online = Presence(AgentState.ONLINE, 1, "1.0").to_bytes()
    topic = format_topic(State(config.device))
    asyncio.run(retain(mosquitto, topic, online))
    assert "is already online" in check(path).stdout
    store = Store(config.state_dir)
    store.lock()
    try:
        assert "is already online" not in check(path).stdout
    finally:
        store.unlock()
        asyncio.run(retain(mosquitto, topic, b""))


def test_everything_that_is_wrong_is_in_one_report(tmp_path: Path, trust: Path) -> None:
    path = configuration(tmp_path / "etc", trust, free_port())
    (path.parent / "keyring/signing.pub").write_text("no key")
    path.chmod(0o644)
    done = check(path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    lines = done.stdout.splitlines()
    for start, part in (
        ("fail  keyring", "expected a public key in PEM"),
        ("fail  broker", "nothing listens at mqtt://127.0.0.1:"),
        ("warn  configuration", "is readable or writable by others (mode 0644)"),
    ):
        [line] = [line for line in lines if line.startswith(start)]
        assert part in line
        assert lines[lines.index(line) + 1].startswith("      hint: ")
    assert lines[-1].endswith(" fail")


def test_machine_is_checked_without_a_configuration(tmp_path: Path) -> None:
    done = check(tmp_path, "--no-connect")
    assert done.returncode == 1
    assert "fail  configuration  cannot read the configuration" in done.stdout
    assert "ok    python" in done.stdout


def test_configuration_that_may_not_be_read_asks_for_sudo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "agent.toml"
    path.write_text("")
    opened = Path.open

    def refuse(self: Path, *arguments: object, **options: object) -> object:
        if self == path:
            raise PermissionError(13, "Permission denied")
        return opened(self, *arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", refuse)  # root may read every file
    monkeypatch.setattr(machine, "check_python", lambda: iter(()))
    findings = doctor.examine(path, connect=False, progress=lambda _line: None)
    found = next(finding for finding in findings if finding.subject == "configuration")
    assert (found.level.value, found.hint) == ("fail", "run it with sudo")
    assert found.message.endswith("Permission denied")
