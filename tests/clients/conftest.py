"""A real broker with a WebSockets listener, a real agent, and an odd one, for the tests of all clients."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
import pytest

from agent.mqtt.message import Message
from agent.mqtt.settings import BrokerSettings
from builder import Options, cli
from builder.bundles import key_files
from builder.bundles.package import Package
from builder.compiler import compile
from builder.compiling.identity import Identity
from builder.importer import import_onnx
from edgebundle import Broker
from tests.agent.service.authority import Authority
from tests.conftest import BrokerProcess
from tests.edgebundle.rig import TOP, Reply, Responder
from tests.needs import needed
from tests.patience import PATIENCE_S, PROGRAM_PATIENCE_S
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
DIGITS = ROOT / "examples" / "digits"
# Those of the sample access list; another agent, whose block is a copy as the list's first line says; and who
# plays the sensors of a house.
USERS = ("kitchen", "odd", "alice", "fleet", "dashboard", "homeassistant", "house")
HOUSE = """
user homeassistant
topic readwrite house/#
user house
topic readwrite house/#
"""
# It heats if the water comes back more than 5 degrees colder.
HEATING = """<ir_version: 8, opset_import: ["" : 17]> g (float[1,3] x) => (float[1,2] y) {
    weights = Constant<value = float[3,2] {1, 0, -1, 0, 0, 0}>() least = Constant<value = float[2] {5, 0}>()
    product = MatMul(x, weights) y = Sub(product, least)
}"""


@dataclass(frozen=True, slots=True)
class Site:
    """A broker, an agent `kitchen` with `digits`, and an agent `odd` that a test wrote.

    `ports` are those of the broker by the scheme of their URL; `authority` issued its certificate. If it
    `has_users`, it wants their passwords, and they may do what the sample access list says.
    """

    ports: Mapping[str, int]
    authority: str
    folder: Path
    has_users: bool = False

    def infer(self, agent: str, *arguments: object) -> int:
        """Run `edgebundle infer` on the model `digits` of an agent; return the exit code."""
        command = ["infer", "--agent", agent, "--model", "digits", "--broker", self.url]
        return cli.main([*command, *map(str, arguments)])

    @property
    def key(self) -> Path:
        """The key that the agent trusts."""
        return self.folder / "keys" / "signing.key"

    @property
    def port(self) -> int:
        return self.ports["mqtt"]

    @property
    def url(self) -> str:
        return self.url_of("mqtt")

    def url_of(self, scheme: str) -> str:
        return f"{scheme}://127.0.0.1:{self.ports[scheme]}"

    def seen_by(self, user: str) -> Broker:
        """Return the broker as this user reaches it; over TLS if it has users."""
        if not self.has_users:
            return Broker(self.url)
        url = f"mqtts://{user}@127.0.0.1:{self.ports['mqtts']}"
        return Broker(url, cafile=self.folder / "ca.pem", password_file=self.folder / f"{user}.password")

    def flags(self, user: str) -> list[str]:
        """Return the flags of `edgebundle` for `seen_by`."""
        broker = self.seen_by(user)
        named = {"--broker": broker.url, "--cafile": broker.cafile, "--password-file": broker.password_file}
        return [word for flag, value in named.items() if value is not None for word in (flag, str(value))]


def odd(message: Message) -> Reply:
    """Boxes for a PNG; for a JPEG what its fourth byte asks for; tensors are answered with themselves."""
    if message.properties.content_type == "image/png":
        tensors = ("boxes;FP32;2,4", "scores;FP32;2", "classes;INT64;2", "labels;BYTES;2")
        numbers = struct.pack("<10f2q", 1, 2, 3, 4, 5, 6, 7, 8, 0.75, 0.5, 3, 4)
        return tensors, numbers + b"\x03\0\0\0cat\x03\0\0\0dog"
    if message.properties.content_type != "image/jpeg":
        return ("image;FP32;1,1,2,3",), message.payload
    match message.payload[3]:
        case 2:
            return ("y;FP32;4294967295",), b""
        case 5:
            return ("indices;FP32;2", "scores;FP32;2"), struct.pack("<4f", math.nan, 1, 0.5, 0.25)
        case 4:
            return 413, {"error": "too much", "hint": "send less"}
        case _:
            return None


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory, digits_bundle: Path) -> Iterator[Site]:
    yield from run_site(tmp_path_factory.mktemp("site"), digits_bundle)


def password_of(user: str) -> str:
    return f"password of {user}"


def write_users(folder: Path) -> str:
    """Write access list and passwords; return what mosquitto's configuration says of them."""
    sample = (ROOT / "docs" / "mosquitto" / "edge.acl").read_text()
    [block] = re.findall(r"^user garage\n(?:topic .*\n)+", sample, re.MULTILINE)
    (folder / "edge.acl").write_text(f"{sample}\n{block.replace('garage', 'odd')}{HOUSE}")
    passwords = folder / "passwords"
    passwords.touch()
    for user in USERS:
        subprocess.run([needed("mosquitto_passwd"), "-b", passwords, user, password_of(user)], check=True)
        (folder / f"{user}.password").write_text(password_of(user))
        (folder / f"{user}.password").chmod(0o600)
    return f"allow_anonymous false\npassword_file {passwords}\nacl_file {folder / 'edge.acl'}\n"


def run_site(folder: Path, digits_bundle: Path, *, has_users: bool = False) -> Iterator[Site]:
    pair = key_files.generate(folder / "keys")
    (folder / "keyring").mkdir()
    shutil.copy(pair.public, folder / "keyring" / "test.pub")
    authority = Authority(folder)
    authority.issue("broker")
    tls = f"certfile {folder}/broker.pem\nkeyfile {folder}/broker.key\n"
    listeners = {"ws": "protocol websockets\n", "mqtts": tls, "wss": f"{tls}protocol websockets\n"}
    ports = {scheme: free_port() for scheme in listeners}
    lines = [f"listener {ports[scheme]} 127.0.0.1\n{more}" for scheme, more in listeners.items()]
    broker = BrokerProcess(
        "mosquitto", folder, extra="".join([write_users(folder) if has_users else "", *lines])
    )
    broker.start()
    site = Site({"mqtt": broker.port, **ports}, authority.path.read_text(), folder, has_users)
    keys = 'groups = ["door"]\n[home_assistant]\nenabled = true\n' if has_users else ""
    kitchen = site.seen_by("kitchen")
    if kitchen.password_file is not None:
        keys += f'[broker]\nca = "{kitchen.cafile}"\npassword_file = "{kitchen.password_file}"\n'
    (folder / "agent.toml").write_text(keys)
    command = [sys.executable, "-m", "agent", "run", "--config", str(folder / "agent.toml")]
    command += ["--broker", kitchen.url, "--device", "kitchen"]
    with (folder / "agent.log").open("wb") as log:
        agent = subprocess.Popen(
            [*command, "--trust", str(folder / "keyring"), "--state-dir", str(folder / "state")],
            stdout=log,
            stderr=log,
        )
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def reply(_count: int, message: Message) -> Reply:
        if message.properties.content_type == "image/jpeg" and message.payload[3] == 3:
            for version in ("1.0.0", "2.0.0"):
                responder.answer(message, (200, {**TOP, "model_version": version}))
            return None
        return odd(message)

    settings = BrokerSettings(broker.host, broker.port)
    if has_users:
        settings = replace(settings, username="odd", password=password_of("odd"))
    responder = Responder(broker, reply, device="odd", settings=settings)
    try:
        asyncio.run_coroutine_threadsafe(responder.__aenter__(), loop).result(PROGRAM_PATIENCE_S)
        signed = folder / "digits.bundle"
        package = Package.load(digits_bundle)
        package.sign(key_files.read_private(pair.private)).save(signed)
        give_up = time.monotonic() + PROGRAM_PATIENCE_S
        while cli.main(["deploy", str(signed), "--agent", "kitchen", *site.flags("fleet")]):
            assert time.monotonic() < give_up, (folder / "agent.log").read_text()
        yield site
    finally:
        with contextlib.suppress(Exception):  # what failed may be the reason: all else must still end
            asyncio.run_coroutine_threadsafe(responder.__aexit__(), loop).result(PATIENCE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        agent.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(PATIENCE_S)
        agent.kill()
        broker.stop()


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, digits_bundle: Path) -> Iterator[Site]:
    """A site of its own whose agent also has `heating`, a model that takes rows."""
    yield from run_house(tmp_path_factory.mktemp("house"), digits_bundle)


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory, digits_bundle: Path) -> Iterator[Site]:
    """A house at a broker with passwords and the sample access list; its agent is in the group `door`."""
    yield from run_house(tmp_path_factory.mktemp("guarded"), digits_bundle, has_users=True)


def run_house(folder: Path, digits_bundle: Path, *, has_users: bool = False) -> Iterator[Site]:
    for site in run_site(folder, digits_bundle, has_users=has_users):
        model = import_onnx(onnx.parser.parse_model(HEATING))
        columns, labels = ("flow", "return", "outside"), ("heating", "idle")
        package = compile(
            model,
            options=Options(columns=columns, postprocess="softmax,top1", labels=labels),
            identity=Identity("heating"),
        )
        deploy(site, package, "heating")
        yield site


def deploy(site: Site, package: Package, name: str) -> Path:
    """Sign a package, deploy it to `kitchen`, and return its file."""
    path = site.folder / f"{name}-{package.manifest.version}.bundle"
    package.sign(key_files.read_private(site.key)).save(path)
    assert cli.main(["deploy", str(path), "--agent", "kitchen", *site.flags("fleet")]) == 0
    return path


@pytest.fixture(scope="session")
def npm(shared_file: Callable[[str, Callable[[Path], None]], Path]) -> Callable[[str], Path]:
    """Install a package of npm once, and return its `node_modules`: `npm("mqtt@5.16.0")`."""
    program = needed("npm")
    kept = Path(os.environ.get("EDGEBUNDLE_CACHE") or Path.home() / ".cache" / "edgebundle")

    def install(package: str) -> Path:
        folder = kept / f"npm-{package.replace('@', '-')}"

        def write(done: Path) -> None:
            if not (folder / "node_modules").is_dir():
                unfinished = folder.with_name(f".{folder.name}-{os.getpid()}")
                unfinished.mkdir(parents=True)
                command = [
                    program,
                    "install",
                    "--prefix",
                    str(unfinished),
                    "--no-audit",
                    "--no-fund",
                    package,
                ]
                installed = subprocess.run(
                    command, capture_output=True, text=True, timeout=PROGRAM_PATIENCE_S, check=False
                )
                if installed.returncode:
                    shutil.rmtree(unfinished)
                    pytest.skip(f"npm could not install {package}: {installed.stderr[-300:]}")
                unfinished.rename(folder)
            done.touch()

        shared_file(folder.name, write)
        return folder / "node_modules"

    return install
