"""The agent as its own process, with real workers and compiled kernels, against a real broker."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import agent.cli
from agent.bundle.manifest import Target
from agent.bundle.tensor_spec import TensorSpec
from agent.mqtt.connection import Connection
from agent.mqtt.message import Message
from agent.mqtt.session import Owner
from agent.mqtt.settings import BrokerSettings
from agent.wire.topics import ModelState, State, format_topic
from tests.agent.launching import workers_of
from tests.agent.service.conftest import Client, connected_client, status_of
from tests.agent.worker.conftest import one_kernel, processor_s, shared_kernels
from tests.bundles import Signer, build
from tests.conftest import BrokerProcess
from tests.fake_module import params
from tests.patience import PATIENCE_S, least_s, until

pytestmark = pytest.mark.slow

KERNELS = Path(__file__).parent / "worker" / "kernels.c"
# The promises of docs/mqtt.md about an agent without a model.
IDLE_RSS_BYTES = 36 << 20
READY_LIMIT_S = 1.5


@dataclass
class Device:
    """A state directory, trusted keys, and an agent that is started and ended."""

    folder: Path
    signer: Signer
    port: int
    broker: BrokerProcess | None = None
    process: subprocess.Popen[bytes] | None = None
    # Where its log goes; the terminal's otherwise.
    log: Path | None = None
    # How it is started.
    program: Sequence[str] = (sys.executable, "-m", "agent")

    def arguments(self) -> list[str]:
        return [
            *("--broker", f"mqtt://127.0.0.1:{self.port}"),
            *("--device", "kitchen"),
            *("--trust", str(self.signer.trust)),
            *("--state-dir", str(self.folder / "state")),
        ]

    def start(self, *, environment: dict[str, str] | None = None, config: str = "") -> None:
        command = [*self.program, "run", *self.arguments()]
        if config:
            path = self.folder / "agent.toml"
            path.write_text(config)
            command += ["--config", str(path)]
        with contextlib.ExitStack() as stack:
            log = None if self.log is None else stack.enter_context(self.log.open("ab"))
            self.process = subprocess.Popen(command, env={**os.environ, **(environment or {})}, stderr=log)

    def end(self, number: int = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        status = self.process.wait(PATIENCE_S)
        self.process = None
        return status

    def install(self, kernel: str, library: Path) -> None:
        path = self.folder / f"{kernel}.bundle"
        path.write_bytes(pack(self.signer, kernel, library.read_bytes()))
        # Not a process, which takes longer to start than the installation does.
        with contextlib.redirect_stdout(io.StringIO()):
            assert agent.cli.main(["install", str(path), *self.arguments()]) == 0

    def children(self) -> list[int]:
        assert self.process is not None
        return workers_of(self.process.pid)


def pack(signer: Signer, kernel: str, library: bytes, name: str = "", version: str = "1.0.0") -> bytes:
    """Make the bundle of a model of one kernel, by default named after it."""
    files = {"mod.so": library, "mod.json": one_kernel(kernel).to_json(), "mod.params": params()}
    machine = {"aarch64": "aarch64", "x86_64": "x86_64"}[os.uname().machine]
    return build(
        files,
        key=signer.key,
        name=name or kernel,
        version=version,
        compatible=(f"linux-{machine}",),
        target=Target(f"{machine}-linux-gnu", "generic", ()),
        inputs=(TensorSpec("x", "FP32", (4,)),),
        outputs=(TensorSpec("y", "FP32", (4,)),),
    )


@pytest.fixture(scope="session")
def kernels(shared_file: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    return shared_kernels(shared_file)


@pytest.fixture
def device(mosquitto: BrokerProcess, tmp_path: Path, signer: Signer) -> Iterator[Device]:
    device = Device(tmp_path, signer, mosquitto.port, mosquitto)
    yield device
    if device.process is not None:
        device.process.kill()
        device.process.wait()


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    return Signer(tmp_path / "trust")


async def model_is_ready(port: int, model: str) -> None:
    states: list[bytes] = []

    def take(message: Message) -> None:
        states.append(message.payload)

    connection = Connection(BrokerSettings("127.0.0.1", port), Owner(take), client_id="watcher")
    await connection.connect()
    await connection.subscribe(format_topic(ModelState("kitchen", model)), qos=0)
    await until(lambda: any(b'"ready":true' in state for state in states), PATIENCE_S)
    await connection.close()


def numbers(*values: float) -> bytes:
    return struct.pack("<4f", *values)


async def ask(client: Client, model: str, payload: bytes) -> Message:
    return await client.ask(payload, model=model)


async def test_installed_model_answers_and_the_agent_ends_cleanly(device: Device, kernels: Path) -> None:
    device.start()
    device.install("twice", kernels)
    await model_is_ready(device.port, "twice")
    async with connected_client(device.port) as client:
        answer = await ask(client, "twice", numbers(1, 2, 3, 4))
        assert status_of(answer) == 200
        assert answer.payload == numbers(2, 4, 6, 8)
        wrong = await ask(client, "twice", b"123")
        assert status_of(wrong) == 400
    [worker] = device.children()
    assert device.end() == 0
    assert not Path(f"/proc/{worker}").exists()


@pytest.mark.parametrize("kernel", ["segfault", "abort"])
async def test_model_that_kills_its_worker_costs_one_answer(
    device: Device, kernels: Path, kernel: str
) -> None:
    device.start()
    device.install(kernel, kernels)
    await model_is_ready(device.port, kernel)
    async with connected_client(device.port) as client:
        assert status_of(await ask(client, kernel, numbers(13, 0, 0, 0))) == 500
        assert (await ask(client, kernel, numbers(1, 1, 1, 1))).payload == numbers(2, 2, 2, 2)


async def test_model_that_loops_for_ever_is_ended_at_the_compute_limit(device: Device, kernels: Path) -> None:
    device.start(config="[inference]\ncompute_limit_s = 2.0\n")
    device.install("loop", kernels)
    await model_is_ready(device.port, "loop")
    async with connected_client(device.port) as client:
        assert status_of(await ask(client, "loop", numbers(13, 0, 0, 0))) == 408
        assert (await ask(client, "loop", numbers(1, 1, 1, 1))).payload == numbers(2, 2, 2, 2)


async def test_model_that_allocates_endlessly_costs_one_answer(device: Device, kernels: Path) -> None:
    # Under the default limit.
    device.start()
    device.install("gorge", kernels)
    await model_is_ready(device.port, "gorge")
    async with connected_client(device.port) as client:
        assert status_of(await ask(client, "gorge", numbers(13, 0, 0, 0))) == 500
        assert (await ask(client, "gorge", numbers(1, 1, 1, 1))).payload == numbers(2, 2, 2, 2)
    assert device.end() == 0


@pytest.mark.parametrize("kernel", ["open_socket", "read_file"])
async def test_model_that_opens_a_socket_or_reads_a_file_is_refused_by_the_kernel(
    device: Device, kernels: Path, kernel: str
) -> None:
    device.start()
    device.install(kernel, kernels)
    await model_is_ready(device.port, kernel)
    async with connected_client(device.port) as client:
        answer = await ask(client, kernel, numbers(1, 2, 3, 4))
        assert struct.unpack_from("<f", answer.payload) == (errno.EPERM,)
    assert device.end() == 0


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is nothing to share out")
async def test_two_models_have_different_processors(device: Device, kernels: Path) -> None:
    whole = os.sched_getaffinity(0)
    device.start()
    device.install("threaded", kernels)
    await model_is_ready(device.port, "threaded")
    [first] = device.children()
    assert os.sched_getaffinity(first) == whole
    device.install("twice", kernels)
    await model_is_ready(device.port, "twice")
    [second] = set(device.children()) - {first}
    async with connected_client(device.port) as client:
        # A request sent after the change is computed after it.
        assert (await ask(client, "threaded", numbers(1, 2, 3, 4))).payload == numbers(2, 4, 6, 8)
        assert os.sched_getaffinity(first) | os.sched_getaffinity(second) == whole
        assert not os.sched_getaffinity(first) & os.sched_getaffinity(second)


async def test_request_in_the_hands_of_a_killed_agent_is_answered_by_its_successor(
    device: Device, kernels: Path
) -> None:
    device.start()
    device.install("loop", kernels)
    await model_is_ready(device.port, "loop")
    async with connected_client(device.port) as client:
        workers = device.children()
        before_s = processor_s(workers[0])
        stuck = client.send(numbers(13, 0, 0, 0), model="loop")
        behind = client.send(numbers(1, 2, 3, 4), model="loop")
        await until(lambda: processor_s(workers[0]) > before_s + 0.2)  # it is in the loop
        device.end(signal.SIGKILL)
        for worker in workers:  # systemd would end what is left of a service
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
        device.start(config="[inference]\ncompute_limit_s = 2.0\n")
        assert status_of(await client.answer(stuck, PATIENCE_S)) == 408
        assert (await client.answer(behind, PATIENCE_S)).payload == numbers(2, 4, 6, 8)
        assert len(await client.answers(behind, 1)) == 1


def children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_gone(pid: int) -> bool:
    # Its new parent may not have reaped it.
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


async def test_workers_and_their_template_end_with_an_agent_that_is_killed(
    device: Device, kernels: Path
) -> None:
    device.start()
    for kernel in ("twice", "threaded"):
        device.install(kernel, kernels)
        await model_is_ready(device.port, kernel)
    assert device.process is not None
    children = children_of(device.process.pid)
    assert len(children) == 3
    assert len(device.children()) == 2
    # One that cannot notice the end of its channel.
    os.kill(device.children()[0], signal.SIGSTOP)
    device.end(signal.SIGKILL)
    await until(lambda: all(map(is_gone, children)), PATIENCE_S)


async def test_a_killed_template_costs_no_answer_and_the_next_model_starts(
    device: Device, kernels: Path
) -> None:
    device.start()
    device.install("twice", kernels)
    await model_is_ready(device.port, "twice")
    assert device.process is not None
    [template] = set(children_of(device.process.pid)) - set(device.children())
    os.kill(template, signal.SIGKILL)
    await until(lambda: is_gone(template), PATIENCE_S)
    device.install("threaded", kernels)
    await model_is_ready(device.port, "threaded")
    async with connected_client(device.port) as client:
        for model in ("twice", "threaded"):
            assert (await ask(client, model, numbers(1, 2, 3, 4))).payload == numbers(2, 4, 6, 8)
    assert device.end() == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="what the agent's processes hold is shown to root only")
async def test_main_process_holds_neither_numpy_nor_tvm_and_the_worker_no_broker(
    device: Device, kernels: Path
) -> None:
    device.start()
    device.install("twice", kernels)
    await model_is_ready(device.port, "twice")
    assert device.process is not None
    main = Path(f"/proc/{device.process.pid}/maps").read_text()
    assert "numpy" not in main
    assert "tvm" not in main
    assert "mod.so" not in main
    [worker] = device.children()
    assert "numpy" in Path(f"/proc/{worker}/maps").read_text()
    sockets = [str(link.readlink()) for link in Path(f"/proc/{worker}/fd").iterdir()]
    assert sum(target.startswith("socket:") for target in sockets) == 1


def test_modules_of_the_main_process_are_those_that_the_design_allows() -> None:
    # What is imported lazily while serving is loaded here too.
    script = """
import sys
import agent.cli, agent.service.service, agent.deploy.deployment, agent.deploy.local, agent.worker.channel
found = {name.partition(".")[0] for name in sys.modules}
found &= {"numpy", "tvm_ffi", "tvm", "onnx", "builder", "PIL"}
print(sorted(found | {"agent.deploy.fetch.https"} & set(sys.modules)))  # only with such a source
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def queued_s(pid: int) -> float:
    """Return the seconds that a process waited for a processor; sched-stats.rst, /proc/<pid>/schedstat."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except OSError:  # a kernel without these statistics
        return 0.0


@pytest.mark.parametrize("hidden", [True, False])
def test_memory_of_the_agent_cannot_be_read_by_its_user(hidden: bool) -> None:
    # Root could read it in any case. A change of the user hides it, too, which prctl undoes.
    become = "import ctypes, os; os.geteuid() or os.setuid(65534); ctypes.CDLL(None).prctl(4, 1, 0, 0, 0); "
    hide = "agent.cli._hide_memory()" if hidden else "pass"
    victim = subprocess.Popen(
        [sys.executable, "-c", f"import agent.cli; {become}{hide}; print(1, flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with victim:
        assert victim.stdout is not None
        victim.stdout.readline()
        read = f"{become} open('/proc/{victim.pid}/mem', 'rb')"
        done = subprocess.run([sys.executable, "-c", read], check=False, capture_output=True)
        victim.kill()
    assert ("PermissionError" in done.stderr.decode()) == hidden, done.stderr


def test_idle_agent_is_ready_soon_and_small(tmp_path: Path, device: Device) -> None:
    address = str(tmp_path / "notify")
    # dnspython is not a dependency, but the MQTT library loads it if it is installed: 4 MB.
    stub = tmp_path / "stub"
    stub.mkdir()
    (stub / "dns.py").write_text("raise ImportError\n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(address)
        sock.settimeout(PATIENCE_S)
        sizes: list[int] = []
        threads = 0

        def ready_s() -> float:
            nonlocal threads
            started = time.monotonic()
            device.start(environment={"NOTIFY_SOCKET": address, "PYTHONPATH": str(stub)})
            while b"READY=1" not in sock.recv(1000):
                pass
            assert device.process is not None
            took_s = time.monotonic() - started - queued_s(device.process.pid)
            time.sleep(0.5)
            fields = Path(f"/proc/{device.process.pid}/statm").read_text().split()
            sizes.append(int(fields[1]) * os.sysconf("SC_PAGE_SIZE"))
            threads = len(list(Path(f"/proc/{device.process.pid}/task").iterdir()))
            assert device.end() == 0
            return took_s

        assert least_s(ready_s, READY_LIMIT_S) <= READY_LIMIT_S
        # The layout of the memory is random, and so are some tens of pages.
        while min(sizes) > IDLE_RSS_BYTES and len(sizes) < 3:
            ready_s()
        assert 0 < min(sizes) <= IDLE_RSS_BYTES
        assert threads == 1


async def test_sighup_makes_the_agent_connect_again_and_not_end(device: Device) -> None:
    said: list[bytes] = []
    watcher = Connection(
        BrokerSettings("127.0.0.1", device.port),
        Owner(lambda message: said.append(message.payload)),
        client_id="watcher",
    )
    await watcher.connect()
    await watcher.subscribe(format_topic(State("kitchen")), qos=0)
    device.start()
    # The connection for requests is a moment later than the one that says so.
    await until(lambda: bool(said) and json.loads(said[-1]).get("inference") == "online", PATIENCE_S)
    assert device.process is not None
    before = len(said)
    device.process.send_signal(signal.SIGHUP)
    await until(lambda: len(said) > before and json.loads(said[-1]).get("inference") == "online", PATIENCE_S)
    # The same session published again that it is online; it was never anything else in between.
    states = [json.loads(payload) for payload in said]
    assert {(state["state"], state["session_seq"]) for state in states} == {
        ("online", states[0]["session_seq"])
    }
    assert device.process.poll() is None
    assert device.end() == 0
    await watcher.close()


def test_watchdog_is_fed_while_the_loop_runs(tmp_path: Path, device: Device) -> None:
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(address)
        sock.settimeout(PATIENCE_S)
        device.start(environment={"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "600000"})
        sent = [sock.recv(1000) for _ in range(4)]
        assert sent[0].startswith(b"READY=1")
        assert sent[1:] == [b"WATCHDOG=1"] * 3
        assert device.process is not None
        # A process whose loop does not run sends nothing, although it lives.
        device.process.send_signal(signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            sock.settimeout(0.1)
            while True:
                sock.recv(1000)
        with pytest.raises(TimeoutError):
            sock.settimeout(0.5)
            sock.recv(1000)
        device.process.send_signal(signal.SIGCONT)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "agent", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_wrong_configuration_ends_with_78_and_a_line_for_each_mistake(tmp_path: Path) -> None:
    path = tmp_path / "agent.toml"
    path.write_text('device = "kitchen"\ncolour = 1\n[broker]\nurl = "mqtt://b"\nport = 1\n')
    done = run("run", "--config", str(path))
    assert done.returncode == 78
    assert done.stderr.splitlines() == [
        "edge-agent: error: the configuration has mistakes:",
        "  colour: no such key",
        "  broker.port: no such key",
        "  trust.dir: expected a path, got nothing",
        "edge-agent: hint: edge-agent config prints every key with an explanation",
    ]


async def test_agent_without_keys_or_a_state_directory_is_seen_and_says_what_is_wrong(
    device: Device, tmp_path: Path
) -> None:
    device.log = tmp_path / "log"
    blocked = tmp_path / "state"
    blocked.write_text("a file in its place")
    for key in device.signer.trust.iterdir():
        key.write_text("no key")
    device.start()
    states: list[dict[str, object]] = []
    settings = BrokerSettings("127.0.0.1", device.port)

    def take(message: Message) -> None:
        states.append(json.loads(message.payload))
        watcher.ack(message)

    watcher = Connection(settings, Owner(take), client_id="watcher")
    await watcher.connect()
    await watcher.subscribe(format_topic(State("kitchen")))
    await until(lambda: bool(states) and states[-1].get("storage") == "unavailable", PATIENCE_S)
    assert states[-1]["state"] == "online"
    blocked.unlink()
    await until(lambda: "storage" not in states[-1], PATIENCE_S)
    await watcher.close()
    assert device.end() == 0
    log = device.log.read_text()
    assert f"cannot keep state in {blocked}" in log
    assert "keyring: " in log
    assert "can be written again" in log
    assert "Traceback" not in log


def test_missing_bundle_ends_with_4_before_the_configuration_is_read(tmp_path: Path) -> None:
    done = run("install", str(tmp_path / "none.bundle"))
    assert done.returncode == 4
    assert done.stderr.splitlines() == [
        f"edge-agent: error: expected a bundle at {tmp_path}/none.bundle, got nothing",
        "edge-agent: hint: give the file NAME.bundle that edgebundle compile wrote",
    ]


def test_bundle_is_installed_without_naming_a_broker(tmp_path: Path, signer: Signer, kernels: Path) -> None:
    bundle = tmp_path / "twice.bundle"
    bundle.write_bytes(pack(signer, "twice", kernels.read_bytes()))
    done = run("install", str(bundle), "--trust", str(signer.trust), "--state-dir", str(tmp_path / "state"))
    assert done.returncode == 0
    assert done.stdout == "twice 1.0.0 is in the inbox: the agent installs it when it starts\n"


def test_bug_is_reported_with_its_traceback_and_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> str:
        raise KeyError("broker")

    monkeypatch.setattr(agent.cli, "sample_config", fail)
    assert agent.cli.main(["config"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-2:] == [
        "edge-agent: error: internal error: KeyError: 'broker'",
        "edge-agent: hint: this is a bug in edge-agent: report it with the traceback above",
    ]


def test_closed_pipe_is_not_an_error() -> None:
    script = f"{sys.executable} -m agent config | true; exit ${{PIPESTATUS[0]}}"
    for _ in range(3):
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) in [(141, ""), (0, "")]


def test_wrong_usage_ends_with_2() -> None:
    assert run("fly").returncode == 2
    assert run().returncode == 2


def test_version_and_sample_configuration_are_printed() -> None:
    assert run("version").stdout.startswith("edge-agent ")
    assert "[broker]" in run("config").stdout


def test_missing_broker_is_logged_once_a_connection_and_the_agent_keeps_trying(
    device: Device, tmp_path: Path
) -> None:
    device.log = tmp_path / "log"
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE_S)
        device.port = server.getsockname()[1]
        # By default a connection tries again in its slot, which may be half a minute away.
        device.start(config="[broker]\nreconnect_spread_s = 0.5\n")
        for _ in range(10):  # attempts of its two connections
            server.accept()[0].close()
    complaint = f"no connection to mqtt://127.0.0.1:{device.port} "
    assert device.process is not None
    assert device.process.poll() is None
    assert device.end() == 0
    lines = (tmp_path / "log").read_text().splitlines()
    assert len([line for line in lines if complaint in line]) == 2  # one for each connection
    assert json.dumps(lines).count("Traceback") == 0
