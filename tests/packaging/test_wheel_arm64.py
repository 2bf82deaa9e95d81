"""The agent installed from the wheel in an arm64 user space: its answers over MQTT against this machine's."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest

from builder import run
from builder.fleet.deploy import deploy
from edgebundle import Broker
from tests.asking import ask
from tests.conftest import BrokerProcess
from tests.packaging.conftest import (
    Root,
    RunningAgent,
    running,
    wait_for,
    wait_until_online,
)
from tests.patience import PROGRAM_PATIENCE_S

pytestmark = pytest.mark.arm

CONFIG = """\
device = "board"
state_dir = "/var/lib/edge-agent"

[broker]
url = "{url}"

[trust]
dir = "/etc/edge-agent/keyring"

[inference]
compute_limit_s = 120

[metrics]
interval_s = 2
"""


@dataclass(frozen=True)
class Board:
    """A running agent and its broker."""

    broker: Broker
    agent: RunningAgent


@pytest.fixture(scope="module")
def installed(
    make_root: Callable[[str, str], Root], wheel: Path, locked_wheels: Callable[[str, str], Path]
) -> Root:
    """An arm64 root with the wheel and its locked dependencies in a virtual environment."""
    root = make_root("arm64", "bookworm")
    for file in [wheel, *locked_wheels("bookworm", "arm64").glob("*.whl")]:
        shutil.copy(file, root.path / "tmp")
    root.run("python3", "-m", "venv", "/opt/agent")
    root.run("/opt/agent/bin/pip", "install", "-q", "--no-index", "--find-links=/tmp", "edgebundle[agent]")
    return root


@pytest.fixture(scope="module")
def board(
    installed: Root, keys: Path, own_broker: BrokerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Board]:
    etc = installed.path / "etc/edge-agent"
    (etc / "keyring").mkdir(parents=True)
    shutil.copy(keys / "signing.pub", etc / "keyring")
    (etc / "agent.toml").write_text(CONFIG.format(url=own_broker.url))
    (installed.path / "var/lib/edge-agent").mkdir(parents=True)
    command = installed.command("/opt/agent/bin/edge-agent", "run", "--config", "/etc/edge-agent/agent.toml")
    with running(command, tmp_path_factory.mktemp("log") / "agent.log") as agent:
        wait_for("the agent to serve", lambda: "serves as" in agent.log, PROGRAM_PATIENCE_S)
        wait_until_online("board", Broker(own_broker.url))
        yield Board(Broker(own_broker.url), agent)


def test_the_agents_dependencies_import_and_the_builders_are_absent(installed: Root) -> None:
    program = """
import importlib.util, platform, sys
import tvm_ffi, numpy, PIL.Image, cryptography.hazmat.primitives.asymmetric.ec, paho.mqtt.client
import agent.worker.codec, agent.runtime.graph_executor
absent = [name for name in ("tvm", "onnx", "onnxruntime", "tornado") if importlib.util.find_spec(name)]
print(platform.machine(), *sys.version_info[:2], absent)
"""
    assert installed.run("/opt/agent/bin/python", "-c", program).split("\n")[0] == "aarch64 3 11 []"


def test_an_rpi4_bundle_deployed_over_mqtt_gives_this_machines_outputs(
    board: Board, compiled: Callable[..., Path], digits_onnx: Path
) -> None:
    result = deploy(compiled("rpi4", plain=True), "board", board.broker, wait_s=240)
    assert (result.status, result.code, result.message) == ("SUCCEEDED", "", ""), board.agent.log

    (tensor,) = onnx.load(digits_onnx).graph.input
    shape = [dim.dim_value or 1 for dim in tensor.type.tensor_type.shape.dim]
    for value in np.random.default_rng(0).random((5, *shape), dtype=np.float32):
        here = run(compiled("host", plain=True), {tensor.name: value}).get_output("output_0")
        there = ask("board", "digits", {tensor.name: value}, board.broker, deadline_s=120)
        (output,) = there.outputs
        assert output.values.shape == here.shape
        error = np.abs(output.values - here).max() / np.abs(here).max()
        assert error < 1e-5


@pytest.mark.parametrize("picture", ["three", "seven"])
def test_a_picture_is_recognised_with_this_machines_score(
    board: Board, compiled: Callable[..., Path], digits_onnx: Path, picture: str
) -> None:
    file = digits_onnx.parent / f"{picture}.png"
    here = run(compiled("host"), file).answers
    assert here is not None
    assert deploy(compiled("rpi4"), "board", board.broker, wait_s=240).status == "SUCCEEDED"
    there = ask("board", "digits", file, board.broker, deadline_s=120)
    assert there.labels[0].label == picture
    # Both sides decode the picture with pillow; their kernels are for different architectures.
    mine = np.asarray(here["scores"], dtype=np.float64)
    theirs = np.array([row.score for row in there.labels])
    assert theirs.shape == mine.shape
    assert np.allclose(theirs, mine, rtol=1e-4, atol=1e-6)


def test_a_bundle_for_another_processor_is_refused_and_nothing_changes(
    board: Board, compiled: Callable[..., Path], digits_onnx: Path
) -> None:
    assert deploy(compiled("rpi4"), "board", board.broker, wait_s=240).status == "SUCCEEDED"
    refused = deploy(compiled("host", version="2.0.0"), "board", board.broker, wait_s=240)
    assert (refused.status, refused.code) == ("REJECTED", "ERR_INCOMPATIBLE")
    answer = ask("board", "digits", digits_onnx.parent / "seven.png", board.broker, deadline_s=120)
    assert answer.version == "1.0.0"
