"""paho's private names that the agent replaces or uses: it cannot run on a release without one of them."""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion

from agent.mqtt import engine, paho_client

ROOT = Path(__file__).parents[3]

REPLACED = {
    "_create_socket",
    "_packet_read",
    "_packet_write",
    "_mid_generate",
    "_packet_queue",
}
CALLED = {"_packet_handle", "_sock_send", "_send_pubrec", "_send_pubcomp"}
ATTRIBUTES = {
    "_sock",
    "_in_packet",
    "_out_packet",
    "_keepalive",
    "_last_bytes_received",
    "_last_msg_out",
    "_registered_write",
}
IN_PACKET = {"command", "remaining_length", "packet", "pos"}
OUT_PACKET = {"command", "packet", "pos", "to_process"}


def private_names(source: str, owners: set[str]) -> set[str]:
    """Return the private names that a source reads, writes or calls on any of these objects."""
    return {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and ast.unparse(node.value) in owners
    }


def imported_modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return [name.name for name in node.names] if isinstance(node, ast.Import) else []


def test_paho_has_every_private_name_that_is_replaced_or_used() -> None:
    client = paho.Client(CallbackAPIVersion.VERSION2)
    missing = {name for name in REPLACED | CALLED | ATTRIBUTES if not hasattr(client, name)}
    assert not missing, (
        f"paho {version('paho-mqtt')} has no {', '.join(sorted(missing))}: port agent/mqtt/paho_client.py to "
        "it, or pin the last minor that has them (docs/decisions/0003)"
    )
    packet = client._in_packet
    assert packet.keys() >= IN_PACKET, f"paho's _in_packet lacks {IN_PACKET - packet.keys()}"


@pytest.mark.parametrize("name", sorted(REPLACED))
def test_replaced_method_takes_what_pahos_own_takes(name: str) -> None:
    ours = inspect.signature(getattr(paho_client.PahoClient, name))
    theirs = inspect.signature(getattr(paho.Client, name))
    assert list(ours.parameters) == list(theirs.parameters), f"paho changed the parameters of {name}"


def test_packets_that_wait_have_the_keys_that_are_used() -> None:
    client = paho.Client(CallbackAPIVersion.VERSION2)
    queue = client._out_packet
    client._packet_queue(0x40, b"packet", 1, 1)
    assert queue[0].keys() >= OUT_PACKET, f"paho's _out_packet lacks {OUT_PACKET - queue[0].keys()}"


def test_lists_are_complete() -> None:
    own = {name for name in vars(paho_client.PahoClient) if name.startswith("_")}
    used = private_names(inspect.getsource(paho_client), {"self", "super()"})
    assert {name for name in own if hasattr(paho.Client, name) and not name.startswith("__")} == REPLACED
    assert used - own == CALLED | ATTRIBUTES
    assert not private_names(inspect.getsource(engine), {"client", "self._client"})


def test_decision_names_nothing_that_is_not_used() -> None:
    [record] = (ROOT / "docs/decisions").glob("0003-*.md")
    names = set(re.findall(r"`(_[a-z_]+)`", record.read_text()))
    assert names <= REPLACED | CALLED | ATTRIBUTES


def test_installed_minor_is_the_pinned_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (pinned,) = (line for line in project["dependencies"] if line.startswith("paho-mqtt"))
    minor = ".".join(version("paho-mqtt").split(".")[:2])
    assert pinned == f"paho-mqtt~={minor}.0"


def test_only_two_files_import_paho() -> None:
    found = {
        str(path.relative_to(ROOT))
        for folder in ("agent", "builder", "dashboard")
        for path in (ROOT / folder).rglob("*.py")
        if "paho" in path.read_text()  # parsing is slow
        for node in ast.walk(ast.parse(path.read_text()))
        for module in imported_modules(node)
        if module.partition(".")[0] == "paho"
    }
    assert found == {"agent/mqtt/engine.py", "agent/mqtt/paho_client.py"}
