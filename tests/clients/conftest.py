"""A real broker with a WebSockets listener, a real agent, and an odd one, for the tests of all clients."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx
import pytest

from agent.mqtt.message import Message
from builder import cli
from builder.bundles import key_files
from builder.bundles.package import Package
from builder.compiling.compilation import compile
from builder.compiling.identity import Identity
from builder.importer import import_onnx
from tests.agent.service.authority import Authority
from tests.conftest import BrokerProcess
from tests.edgebundle.rig import TOP, Reply, Responder
from tests.needs import needed
from tests.patience import PATIENCE_S, PROGRAM_PATIENCE_S
from tests.ports import free_port

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits"
# It heats if the water comes back more than 5 degrees colder.
HEATING = """<ir_version: 8, opset_import: ["" : 17]> g (float[1,3] x) => (float[1,2] y) {
    weights = Constant<value = float[3,2] {1, 0, -1, 0, 0, 0}>() least = Constant<value = float[2] {5, 0}>()
    product = MatMul(x, weights) y = Sub(product, least)
}"""


@dataclass(frozen=True, slots=True)
class Site:
    """A broker, an agent `kitchen` with `digits`, and an agent `odd` that a test wrote.

    `ports` are those of the broker by the scheme of their URL; `authority` issued its certificate.
    """

    ports: Mapping[str, int]
    authority: str
    folder: Path

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


def run_site(folder: Path, digits_bundle: Path) -> Iterator[Site]:
    pair = key_files.generate(folder / "keys")
    (folder / "keyring").mkdir()
    shutil.copy(pair.public, folder / "keyring" / "test.pub")
    authority = Authority(folder)
    authority.issue("broker")
    tls = f"certfile {folder}/broker.pem\nkeyfile {folder}/broker.key\n"
    listeners = {"ws": "protocol websockets\n", "mqtts": tls, "wss": f"{tls}protocol websockets\n"}
    ports = {scheme: free_port() for scheme in listeners}
    broker = BrokerProcess(
        "mosquitto",
        folder,
        extra="".join(f"listener {ports[scheme]} 127.0.0.1\n{more}" for scheme, more in listeners.items()),
    )
    broker.start()
    command = [sys.executable, "-m", "agent", "run", "--broker", broker.url, "--device", "kitchen"]
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

    responder = Responder(broker, reply, device="odd")
    try:
        asyncio.run_coroutine_threadsafe(responder.__aenter__(), loop).result(PROGRAM_PATIENCE_S)
        signed = folder / "digits.bundle"
        package = Package.load(digits_bundle)
        package.sign(key_files.read_private(pair.private)).save(signed)
        give_up = time.monotonic() + PROGRAM_PATIENCE_S
        while cli.main(["deploy", str(signed), "--agent", "kitchen", "--broker", broker.url]):
            assert time.monotonic() < give_up, (folder / "agent.log").read_text()
        yield Site({"mqtt": broker.port, **ports}, authority.path.read_text(), folder)
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
    for site in run_site(tmp_path_factory.mktemp("house"), digits_bundle):
        model = import_onnx(onnx.parser.parse_model(HEATING))
        columns, labels = ("flow", "return", "outside"), ("heating", "idle")
        package = compile(
            model, identity=Identity("heating"), columns=columns, postprocess="softmax,top1", labels=labels
        )
        deploy(site, package, "heating")
        yield site


def deploy(site: Site, package: Package, name: str) -> Path:
    """Sign a package, deploy it to `kitchen`, and return its file."""
    path = site.folder / f"{name}-{package.manifest.version}.bundle"
    package.sign(key_files.read_private(site.key)).save(path)
    assert cli.main(["deploy", str(path), "--agent", "kitchen", "--broker", site.url]) == 0
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
