"""A mosquitto with the access list of docs/mosquitto, and an agent with three models in its own process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.bundle.manifest import Target
from agent.bundle.processing import Preprocess
from agent.bundle.tensor_spec import TensorSpec
from agent.deploy.store.store import Store
from agent.mqtt.connection import Connection
from agent.mqtt.message import Message
from agent.mqtt.session import Owner
from agent.mqtt.settings import BrokerSettings
from agent.wire.model_state import ModelState
from agent.wire.topics import ModelState as ModelStateTopic
from agent.wire.topics import parse_topic
from tests.agent.test_agent_process import KERNELS, Device
from tests.agent.worker.conftest import compile_c, one_kernel
from tests.bundles import Signer, build, sha256
from tests.conftest import BrokerProcess
from tests.fake_module import params
from tests.nightly.hostile.strategies import DEVICE, MODELS, NO_USERS

ROOT: Final = Path(__file__).parents[3]
READY_LIMIT_S: Final = 60.0
# The honest client asks as this user; `mallory` has the same rights, and may ask as one of `NO_USERS`.
HONEST: Final = "honest"
_CLIENTS: Final = "".join(
    f"""
user {name}
topic write edge/v1/+/models/+/infer/{name}
topic write edge/v1/groups/+/models/+/infer/{name}
topic read edge/v1/replies/{name}/#
topic read edge/v1/+/state
topic read edge/v1/+/info
topic read edge/v1/+/metrics
topic read edge/v1/+/models/+/state
"""
    for name in (HONEST, "mallory")
) + "".join(
    f"topic write edge/v1/{place}/models/+/infer{name}\n" for place in ("+", "groups/+") for name in NO_USERS
)
CONFIG: Final = """
groups = ["door"]
[metrics]
interval_s = 1.0
"""
# A picture of any size becomes two rows of two grey pixels.
_PICTURE: Final = Preprocess(
    "x", "GRAY", (2, 2), "stretch", "bilinear", None, 1.0, (0.0,), (1.0,), "NCHW", invert=False
)


class UserDevice(Device):
    """A device that has a user name at the broker."""

    def arguments(self) -> list[str]:
        """Return the agent's arguments."""
        url = f"mqtt://127.0.0.1:{self.port}"
        return [url.replace("//", f"//{DEVICE}@") if word == url else word for word in super().arguments()]


@dataclass(frozen=True, slots=True)
class Stage:
    """A running agent and its broker.

    Attributes
    ----------
    device, broker
        The agent and the broker.
    """

    device: Device
    broker: BrokerProcess

    @property
    def pid(self) -> int:
        """The agent's process."""
        assert self.device.process is not None
        return self.device.process.pid


def pack(signer: Signer, model: str, library: Path, version: str = "1.0.0", kernel: str = "") -> bytes:
    """Return the bundle of a model of one kernel; `picture` doubles the pixels of a picture."""
    kernel, shape = ("twice", (1, 1, 2, 2)) if model == "picture" else (kernel or model, (4,))
    files = {
        "mod.so": library.read_bytes(),
        "mod.json": one_kernel(kernel, shape).to_json(),
        "mod.params": params(),
    }
    machine = {"aarch64": "aarch64", "x86_64": "x86_64"}[os.uname().machine]
    return build(
        files,
        key=signer.key,
        name=model,
        version=version,
        compatible=(f"linux-{machine}",),
        target=Target(f"{machine}-linux-gnu", "generic", ()),
        inputs=(TensorSpec("x", "FP32", shape),),
        outputs=(TensorSpec("y", "FP32", shape),),
        preprocess=_PICTURE if model == "picture" else None,
    )


@contextlib.asynccontextmanager
async def stage(
    folder: Path,
    log: Path,
    *,
    through: Callable[[int], int] = lambda port: port,
    program: Sequence[str] | None = None,
) -> AsyncIterator[Stage]:
    """Start a broker and an agent with the models; both end with the block.

    Parameters
    ----------
    folder
        An empty folder for both.
    log
        The file that the agent's log is appended to.
    through
        Starts a proxy in front of the broker's port for the agent, and returns its port.
    program
        How to start the agent.
    """
    (folder / "broker").mkdir()
    acl = folder / "broker" / "edge.acl"
    acl.write_text((ROOT / "docs" / "mosquitto" / "edge.acl").read_text() + _CLIENTS)
    broker = BrokerProcess("mosquitto", folder / "broker", extra=f"acl_file {acl}\n")
    broker.start()
    device = UserDevice(folder, Signer(folder / "trust"), through(broker.port), broker, log=log)
    if program is not None:
        device.program = program
    stack = contextlib.ExitStack()
    try:
        library = compile_c(KERNELS, folder / "mod.so")
        inbox = Store(folder / "state").inbox
        for model in MODELS:
            bundle = pack(device.signer, model, library)
            (inbox / f"{sha256(bundle)}.bundle").write_bytes(bundle)
        # Answers are kept in memory, as the service keeps them.
        runtime = stack.enter_context(tempfile.TemporaryDirectory(prefix="edgebundle-", dir="/dev/shm"))
        device.start(config=CONFIG, environment={"RUNTIME_DIRECTORY": runtime})
        await _wait_until_ready(broker.port)
        yield Stage(device, broker)
    finally:
        if device.process is not None:
            device.end()
        broker.stop()
        stack.close()


async def _wait_until_ready(port: int) -> None:
    ready: set[str] = set()
    all_ready = asyncio.Event()

    def take(message: Message) -> None:
        topic = parse_topic(message.topic)
        if isinstance(topic, ModelStateTopic) and message.payload:
            if ModelState.from_bytes(message.payload).ready:
                ready.add(topic.model)
            if ready >= set(MODELS):
                all_ready.set()

    settings = BrokerSettings("127.0.0.1", port, username=HONEST)
    connection = Connection(settings, Owner(take), client_id="hostile-watch")
    await connection.connect()
    try:
        await connection.subscribe(f"edge/v1/{DEVICE}/models/+/state", 0)
        async with asyncio.timeout(READY_LIMIT_S):
            await all_ready.wait()
    finally:
        await connection.close()
