"""docs/broker.md: its commands make a broker that an agent and the roles of the access list can use."""

from __future__ import annotations

import asyncio
import re
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from edgebundle import AsyncClient, Broker, BrokerError
from tests.agent.service.conftest import StartService
from tests.agent.service.test_access_list import ask
from tests.conftest import BrokerProcess, debian_mosquitto
from tests.needs import needed
from tests.patience import PATIENCE_S

DOCS = Path(__file__).parents[3] / "docs"
PASSWORD = "a password of {name}"


def commands(folder: Path, port: int) -> str:
    """Return the page's commands for this machine, and without the passwords that a person types."""
    text = "".join(re.findall(r"^```\n(.*?)^```\n", (DOCS / "broker.md").read_text(), re.M | re.S))
    text = text.replace("broker.lan", "localhost").replace("8883", str(port))
    text = text.replace("/etc/mosquitto", str(folder / "etc")).replace("sudo ", "")
    text = re.sub(r"^(apt install|systemctl|chown|mosquitto_sub) .*\n", "", text, flags=re.M)
    text = re.sub(r"^edge(-agent|bundle) (.*\\\n)*.*\n", "", text, flags=re.M)
    password = PASSWORD.format(name=r"\2")
    return re.sub(
        r"^mosquitto_passwd (\S+) (\w+)$", rf'mosquitto_passwd -b \1 \2 "{password}"', text, flags=re.M
    )


@pytest.mark.parametrize("suite", ["bookworm", "trixie"])
async def test_commands_of_the_page_make_a_broker_for_every_role(
    tmp_path: Path, start_service: StartService, suite: str
) -> None:
    for program in ("openssl", "mosquitto_passwd"):
        needed(program)
    for name in ("edge.acl", "mosquitto.conf"):
        shutil.copy(DOCS / "mosquitto" / name, tmp_path)
    (tmp_path / "etc" / "conf.d").mkdir(parents=True)
    broker = BrokerProcess("mosquitto", tmp_path / "etc", program=debian_mosquitto(suite))
    done = subprocess.run(
        ["bash", "-ec", commands(tmp_path, broker.port)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # As Debian's own configuration has it.
    etc = broker.folder
    made = etc / "conf.d" / "edge.conf"
    made.write_text(made.read_text().replace("8883", str(broker.port)).replace("/etc/mosquitto", str(etc)))
    broker.configuration = (
        f"persistence true\npersistence_location {etc}/\nlog_dest none\ninclude_dir {etc}/conf.d"
    )

    def seen_by(name: str, password: str | None = None) -> Broker:
        file = tmp_path / f"{name}.password"
        file.write_text(password or PASSWORD.format(name=name))
        file.chmod(0o600)
        url = f"mqtts://{name}@localhost:{broker.port}"
        return Broker(url, cafile=tmp_path / "ca.pem", password_file=file)

    broker.start()
    try:
        strict = ssl.create_default_context(cafile=tmp_path / "ca.pem")
        strict.verify_flags |= ssl.VERIFY_X509_STRICT  # as Python 3.13 does by itself
        _, stream = await asyncio.open_connection(
            "127.0.0.1", broker.port, ssl=strict, server_hostname="localhost"
        )
        stream.close()
        kitchen = seen_by("kitchen")
        settings = {
            "broker_url": f"mqtts://localhost:{broker.port}",
            "broker_ca": str(kitchen.cafile),
            "broker_username": "kitchen",
            "broker_password_file": str(kitchen.password_file),
        }
        async with start_service(0, **settings) as rig:
            await rig.service.models.activate(rig.signer.bundle())
            for name in ("alice", "dashboard", "homeassistant"):
                assert await ask("kitchen", seen_by(name)) == 200
            with pytest.raises(BrokerError, match="refused the request"):
                await ask("kitchen", seen_by("fleet"))
            async with AsyncClient(seen_by("fleet")) as client:
                assert await client.agents() == ("kitchen",)
            with pytest.raises(BrokerError):
                await ask("kitchen", seen_by("alice", "wrong"))
    finally:
        broker.stop()
