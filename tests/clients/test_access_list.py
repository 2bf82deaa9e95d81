"""Each client as a program at a broker with TLS, passwords and the sample access list, with a real agent.

The programs of other makers are in test_recipes.py, the page of the dashboard in tests/dashboard, and
what each user may publish and read in tests/agent/service/test_access_list.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from builder import cli
from edgebundle import AsyncClient, BrokerError, Client, InputError, UnknownAgentError, UnknownModelError
from tests.clients.conftest import DIGITS, Site, password_of
from tests.clients.test_javascript import check, folder, node

__all__ = ["folder"]

pytestmark = pytest.mark.slow

SEVEN = DIGITS / "seven.png"
ROW = {"flow": 41.5, "return": 30, "outside": 4}


def test_python(guarded: Site) -> None:
    with Client(guarded.seen_by("alice")) as client:
        digits = client.model("kitchen", "digits")
        assert digits(image=SEVEN).labels[0].label == "seven"
        assert [answer.labels[0].label for answer in digits.map([SEVEN] * 5, in_flight=3)] == ["seven"] * 5
        assert client.model("kitchen", "heating")(row=ROW).labels[0].label == "heating"
        assert client.group_model("door", "digits")(image=SEVEN).labels[0].label == "seven"
        assert client.group_model("door", "heating")(row=ROW).labels[0].label == "heating"
        assert digits.info().inputs[0].datatype == "FP32"
        assert client.agents() == ("kitchen", "odd")
        with pytest.raises(InputError, match="session"), digits.session("cam") as session:
            session(image=SEVEN)
        with pytest.raises(UnknownModelError, match="digits, heating"):
            client.model("kitchen", "digit")(image=SEVEN)
        with pytest.raises(UnknownAgentError, match="kitchen, odd"):
            client.model("kitchne", "digits")(image=SEVEN)


async def test_python_with_asyncio_and_a_role_that_may_not_ask(guarded: Site) -> None:
    async with AsyncClient(guarded.seen_by("dashboard")) as client:
        assert (await client.model("kitchen", "digits")(image=SEVEN)).labels[0].label == "seven"
        # Its block names no groups.
        with pytest.raises(BrokerError, match="Not authorized"):
            await client.group_model("door", "digits")(image=SEVEN)
    async with AsyncClient(guarded.seen_by("fleet")) as client:
        assert await client.agents() == ("kitchen", "odd")
        with pytest.raises(BrokerError, match="Not authorized"):
            await client.model("kitchen", "digits")(image=SEVEN)


@pytest.mark.parametrize("scheme", ["mqtts", "wss"])
def test_node(guarded: Site, folder: Path, scheme: str) -> None:
    options = {"ca": guarded.authority, "username": "alice", "password": password_of("alice")}
    result = json.loads(node(folder, "main.js", guarded.url_of(scheme), json.dumps(options), SEVEN))
    check(result, models="digits, heating", groups="use one of the groups at this broker: door")


def test_rows_and_groups_of_node(guarded: Site, folder: Path) -> None:
    (folder / "rows.js").write_text(
        'import { Client } from "./edgebundle.js";\n'
        "const [url, options, image] = process.argv.slice(2);\n"
        "const row = { flow: 41.5, return: 30, outside: 4 };\n"
        'for (const mqttVersion of [undefined, "3.1.1"]) {\n'
        "  const client = new Client(url, { ...JSON.parse(options), ...(mqttVersion && { mqttVersion }) });\n"
        '  for (const of of [client.model("kitchen", "heating"), client.groupModel("door", "heating")])\n'
        "    console.log((await of({ row })).labels[0].label);\n"
        '  console.log((await client.groupModel("door", "digits")({ image })).labels[0].label);\n'
        "  await client.close();\n"
        "}\n"
    )
    options = {"ca": guarded.authority, "username": "alice", "password": password_of("alice")}
    said = node(folder, "rows.js", guarded.url_of("mqtts"), json.dumps(options), SEVEN)
    assert said.split() == ["heating", "heating", "seven"] * 2


def test_command_line(guarded: Site, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows, answers = tmp_path / "readings.csv", tmp_path / "answers.json"
    rows.write_text("flow,return,outside\n41.5,30,4\n41.5,40,4\n")
    command = ["infer", "--agent", "kitchen", "--model", "heating", "--inputs", str(rows)]
    assert cli.main([*command, "--outputs", str(answers), *guarded.flags("alice")]) == 0
    assert [row["label"] for row in json.loads(answers.read_text())] == ["heating", "idle"]
    for user in ("alice", "fleet"):
        capfd.readouterr()
        assert cli.main(["agents", *guarded.flags(user)]) == 0
        assert "heating 1.0.0" in capfd.readouterr().out
