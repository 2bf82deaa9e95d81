"""The verbs as a user types them: exit codes, standard output, one line for an error."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path

import pytest

from builder.cli import main
from tests.agent.deploy.rig import DEVICE, make_bundle
from tests.builder.fleet.rig import Device
from tests.conftest import BrokerProcess


async def run(*arguments: str) -> int:
    return await asyncio.to_thread(main, list(arguments))


async def test_deploy_prints_what_is_in_service_and_exits_with_0(
    mosquitto: BrokerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.bundle"
    path.write_bytes(make_bundle().raw)
    async with Device(tmp_path / "state", mosquitto.url):
        assert await run("deploy", str(path), "--agent", DEVICE, "--broker", mosquitto.url) == 0
        said = capsys.readouterr()
        assert said.out.startswith("digits 1.0.0 is in service on kitchen (")
        assert "committing" in said.err.split()
        assert await run("deploy", str(path), "--agent", DEVICE, "--broker", mosquitto.url, "--json") == 0
        document = json.loads(capsys.readouterr().out)
        assert (document["status"], document["message"]) == ("SUCCEEDED", "already installed")


async def test_refused_deploy_exits_with_4_and_a_hint(
    mosquitto: BrokerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.bundle"
    path.write_bytes(make_bundle(abi="tvm-ffi-9.9").raw)
    async with Device(tmp_path / "state", mosquitto.url):
        assert await run("deploy", str(path), "--agent", DEVICE, "--broker", mosquitto.url) == 4
    error, hint = capsys.readouterr().err.splitlines()[-2:]
    assert error.startswith(
        "edgebundle: error: kitchen: digits 1.0.0: REJECTED: the bundle needs tvm-ffi-9.9"
    )
    assert error.endswith("(ERR_INCOMPATIBLE)")
    assert hint.startswith("edgebundle: hint: compile it with the --target of that device")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--broker", "mqtt://127.0.0.1:1"], "cannot reach the broker at mqtt://127.0.0.1:1"),
        (["--broker", "http://127.0.0.1"], "expected a URL with mqtt:// or mqtts://"),
        (
            ["--broker", "mqtt://h", "--cafile", "x"],
            "expected an mqtts:// URL with certificates, got mqtt://",
        ),
        (["--broker", "mqtts://h", "--cert", "x"], "expected a certificate and its key"),
    ],
)
def test_broker_that_cannot_be_used_is_an_error_and_a_hint(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["agents", *arguments]) == 4
    lines = capsys.readouterr().err.splitlines()
    assert words in lines[0]
    assert len(lines) <= 2


def test_a_password_in_the_url_is_never_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["agents", "--broker", "mqtt://me:s%40cret@127.0.0.1:1"]) == 4
    said = capsys.readouterr()
    assert "cret" not in said.err + said.out


def test_usage_errors_exit_with_2() -> None:
    assert main(["deploy"]) == 2
    assert main(["infer", "--agent", "a", "--model", "m", "--input", "x"]) == 2
    assert main(["agents", "--broker", "mqtt://h", "--wait", "-1"]) == 2


async def test_agents_lists_the_agents(
    mosquitto: BrokerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await run("agents", "--broker", mosquitto.url, "--wait", "0.4") == 0
    assert capsys.readouterr().out == ""
    async with Device(tmp_path / "state", mosquitto.url):
        assert await run("agents", "--broker", mosquitto.url) == 0
        assert capsys.readouterr().out == "kitchen  online  edge-agent 0.1.0\n"
        assert await run("agents", "--broker", mosquitto.url, "--json") == 0
    assert json.loads(capsys.readouterr().out)[0]["name"] == "kitchen"


async def test_password_from_the_url_or_a_file_is_accepted_and_a_wrong_one_is_not(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path_factory.mktemp("broker")
    subprocess.run(["mosquitto_passwd", "-b", "-c", folder / "users", "me", "s@cret"], check=True)
    broker = BrokerProcess("mosquitto", folder, extra=f"password_file {folder}/users\n")
    broker.start()
    host = broker.url.removeprefix("mqtt://")
    (folder / "secret").write_text("s@cret\n")
    try:
        listing = ("agents", "--wait", "0.3", "--broker")
        assert await run(*listing, f"mqtt://me:s%40cret@{host}") == 0
        assert await run(*listing, f"mqtt://me@{host}", "--password-file", str(folder / "secret")) == 0
        assert await run(*listing, f"mqtt://me:wrong@{host}") == 4
    finally:
        broker.stop()
    said = capsys.readouterr().err
    assert "refused the connection" in said
    assert "hint: check user name and password at the broker (mosquitto: mosquitto_passwd)" in said
    assert "wrong" not in said


def test_interrupted_deployment_says_that_the_wish_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_arguments: object) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "a.bundle"
    path.write_bytes(make_bundle().raw)
    monkeypatch.setattr("builder.cli.deploy._deploy_to", interrupted)
    assert main(["deploy", str(path), "--agent", "kitchen", "--broker", "mqtt://localhost"]) == 130
    assert "stopped waiting for kitchen: what is wished stays" in capsys.readouterr().err
