"""What all tests share: which of them run, real brokers on free ports, coroutines, signals.

Which tests run: everything but those that need root (an ARM root, a booted system) or the real models.
`--needs-root`, `--needs-models` and `--needs-frameworks` (PyTorch, Keras) each run only those; `--fast`
leaves out those marked `slow`. All add to pytest's own `-m` and `-k`.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import fcntl
import gc
import inspect
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.needs import needed
from tests.patience import PATIENCE_S
from tests.ports import free_port
from tests.stalls import stalling

# Syntax trees and schedules are many objects that stay for a while. Python's default, a search for cycles
# after every 700 new ones, takes a fifth of the tests' time.
gc.set_threshold(20_000, 10, 10)

# Python 3.11 cannot parse while it parses: SystemError. A garbage collection meanwhile may end an object that
# reports a traceback, and tracebacks parse the lines that they show.
if sys.version_info < (3, 12):
    _parse = ast.parse

    def _parse_undisturbed(*arguments: Any, **options: Any) -> ast.AST:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return _parse(*arguments, **options)
        finally:
            if was_enabled:
                gc.enable()

    ast.parse = _parse_undisturbed  # type: ignore[assignment]

# The machine that targets take their cores and caches from, in place of this one.
if os.environ.get("EDGEBUNDLE_TEST_HOST"):
    from tests.foreign_hosts import replace_host

    replace_host(os.environ["EDGEBUNDLE_TEST_HOST"])

# An example of hypothesis may take as long as it takes: by default one over 200 ms is an error, and a machine
# that stands still for half a second makes one of any example.
hypothesis.settings.register_profile(
    "patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("patient")

# A shell that starts pytest in the background makes it ignore SIGINT, and children inherit that: a test could
# not interrupt them. A handler, unlike "ignore", is not inherited.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# amqtt speaks MQTT 3.1.1 only, and is what `make demo` runs where no mosquitto is installed.
AMQTT_SCRIPT = """
import asyncio, logging, sys
from amqtt.broker import Broker
logging.disable(logging.CRITICAL)
config = {
    "listeners": {"default": {"type": "tcp", "bind": f"127.0.0.1:{sys.argv[1]}", "max_connections": 100}},
    "plugins": {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}},
}
async def main():
    broker = Broker(config)
    await broker.start()
    await asyncio.Event().wait()
asyncio.run(main())
"""


# Reasons that CI accepts: models that are no part of the project.
ACCEPTED_IN_CI = ("EDGEBUNDLE_MODELS",)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let a skipped test fail where CI runs: it installs what the tests need."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        _refuse_in_ci(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for a file that is skipped as a whole, as `importorskip` at its beginning does."""
    report = yield
    if report.skipped:
        _refuse_in_ci(report)
    return report


def _refuse_in_ci(report: pytest.TestReport | pytest.CollectReport) -> None:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if os.environ.get("CI") and not any(accepted in reason for accepted in ACCEPTED_IN_CI):
        report.outcome = "failed"
        report.longrepr = f"CI accepts no skipped tests: {reason}"


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in wanted}))
    return True


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("edgebundle")
    group.addoption(
        "--stalls",
        type=int,
        nargs="?",
        const=0,
        metavar="SEED",
        help="let the processes of the run stand still now and then (tests/stalls.py)",
    )
    group.addoption("--fast", action="store_true", help="leave out the tests marked slow (make test-fast)")
    group.addoption(
        "--needs-root", action="store_true", help="run only the tests marked arm or systemd (make test-arm)"
    )
    group.addoption(
        "--needs-models", action="store_true", help="run only the tests marked models (make test-models)"
    )
    group.addoption(
        "--needs-frameworks",
        action="store_true",
        help="run only the tests marked frameworks (make test-frameworks)",
    )
    group.addoption(
        "--needs-home-assistant",
        action="store_true",
        help="run only the tests marked home_assistant (make test-home)",
    )


_stalls = contextlib.ExitStack()
_seeds: list[int] = []


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--stalls") is not None and not hasattr(config, "workerinput"):
        _seeds.append(config.getoption("--stalls"))


def pytest_runtest_logstart() -> None:
    """Begin to let the processes of this run stand still, if that was asked for: not while it collects."""
    while _seeds:
        _stalls.enter_context(stalling(_seeds.pop()))


def pytest_unconfigure() -> None:
    _stalls.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests that were asked for."""

    lanes = {
        option
        for option in ("--needs-root", "--needs-models", "--needs-frameworks", "--needs-home-assistant")
        if config.getoption(option)
    }

    def wanted(item: pytest.Item) -> bool:
        marks = {mark.name for mark in item.iter_markers()}
        if config.getoption("--fast") and "slow" in marks:
            return False
        if marks & {"arm", "systemd"}:
            return "--needs-root" in lanes
        if "frameworks" in marks:
            return "--needs-frameworks" in lanes
        if "home_assistant" in marks:
            return "--needs-home-assistant" in lanes
        return "--needs-models" in lanes if "models" in marks else not lanes

    config.hook.pytest_deselected(items=[item for item in items if not wanted(item)])
    items[:] = [item for item in items if wanted(item)]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Repeat at the end what `make test` said at the start: what was left out, and how to install it."""
    if os.environ.get("CI") or not terminalreporter.stats.get("skipped"):
        return
    folder = Path(__file__).parents[1] / "packaging"
    needs = [str(folder / "install-needs.sh"), "--list", "test"]
    said = subprocess.run(needs, capture_output=True, text=True, check=False).stdout
    for suite in ("bookworm", "trixie"):
        broker = [str(folder / "debian-mosquitto.sh"), "--kept", suite]
        if subprocess.run(broker, capture_output=True, check=False).returncode:
            said += f"make: left out: tests with the broker of Debian {suite}\n"
    if said:
        terminalreporter.section("left out")
        terminalreporter.write(said)


def pytest_collection_finish() -> None:
    """Exempt what exists now, some hundred thousand objects, from each later garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _state_of_this_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let commands remember what they were told, such as a yes, for this run only."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.getbasetemp() / "state")


@pytest.fixture(scope="session")
def shared_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], None]], Path]:
    """Return a file or folder that is made once for all processes of this run: `shared_file(name, write)`."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "shared"
    folder.mkdir(exist_ok=True)

    def get(name: str, write: Callable[[Path], None]) -> Path:
        path = folder / name
        with (folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                unfinished = folder / f"unfinished-{name}"
                write(unfinished)
                unfinished.rename(path)
        return path

    return get


@pytest.fixture(scope="session")
def attention_bundle(shared_file: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    """A bundle, unsigned, of `changing_models.attention` for batches from 1 to 3 and 1 to 16 tokens."""

    def write(path: Path) -> None:
        from tests.changing_models import compiled_attention

        compiled_attention(path.parent).save(path)

    return shared_file("attention.bundle", write)


@pytest.fixture(scope="session")
def digits_bundle(shared_file: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    """The example model for this machine with all of its processing, not signed."""
    from builder import Options, compile

    folder = Path(__file__).parents[1] / "examples" / "digits"

    def write(path: Path) -> None:
        compile(
            folder / "digits.onnx",
            options=Options(
                preprocess=str(folder / "preprocess.toml"),
                postprocess="softmax,top3",
                labels=folder / "labels.txt",
            ),
        ).save(path)

    return shared_file("digits.bundle", write)


class BrokerProcess:
    """A broker in a process of its own, which a test may stop, start and restart."""

    host = "127.0.0.1"

    def __init__(
        self,
        kind: str,
        folder: Path,
        *,
        persistent: bool = True,
        extra: str = "",
        program: Sequence[str] = (),
    ) -> None:
        self.kind = kind
        # How to start mosquitto; by default, the one that is installed.
        self._program = program
        self.port = free_port()
        self.folder = folder
        self._persistent = persistent
        self._extra = extra
        # The whole of mosquitto's configuration, in place of ours.
        self.configuration: str | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"mqtt://{self.host}:{self.port}"

    def _command(self) -> list[str]:
        if self.kind == "amqtt":
            return [sys.executable, "-c", AMQTT_SCRIPT, str(self.port)]
        # Debian's own configuration, but for the port, the folder and the log.
        config = self.folder / "mosquitto.conf"
        user = "user root\n" if os.geteuid() == 0 else ""
        persistence = f"persistence true\npersistence_location {self.folder}/\n" if self._persistent else ""
        config.write_text(
            f"{self.configuration}\n{user}"
            if self.configuration is not None
            else f"listener {self.port} 127.0.0.1\nallow_anonymous true\nlog_dest none\n"
            f"{persistence}{user}{self._extra}"
        )
        if self._program:
            return [*self._program, "-c", str(config)]
        return [needed("mosquitto"), "-c", str(config)]

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._command(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        end_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < end_s:
            if self._process.poll() is not None:
                pytest.fail(f"{self.kind} ended with status {self._process.returncode} while starting")
            with socket.socket() as sock:
                if sock.connect_ex((self.host, self.port)) == 0:
                    return
            time.sleep(0.02)
        pytest.fail(f"{self.kind} did not listen within {PATIENCE_S} s")

    def stop(self, signal_number: int = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.send_signal(signal_number)
            try:
                self._process.send_signal(signal.SIGCONT)  # a test may have stopped it
                self._process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Stop it for a while: its connections stay, and nothing is answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def restart(self) -> None:
        self.stop()
        self.start()


@pytest.fixture
def mosquitto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """MQTT 5 and 3.1.1, as Debian installs it."""
    broker = BrokerProcess("mosquitto", tmp_path_factory.mktemp("mosquitto"))
    broker.start()
    yield broker
    broker.stop()


def debian_mosquitto(suite: str) -> list[str]:
    """Return the command that starts the mosquitto of a Debian release; it is downloaded once, and kept."""
    script = Path(__file__).parents[1] / "packaging" / "debian-mosquitto.sh"
    command = [str(script), suite] if os.environ.get("CI") else [str(script), "--kept", suite]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and not os.environ.get("CI"):
        pytest.skip(f"to run this, download a broker once: packaging/debian-mosquitto.sh {suite}")
    if done.returncode:
        pytest.fail(f"{script.name} {suite} failed:\n{done.stderr}")
    return done.stdout.splitlines()


@pytest.fixture
def amqtt_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """MQTT 3.1.1 only."""
    broker = BrokerProcess("amqtt", tmp_path_factory.mktemp("amqtt"))
    broker.start()
    yield broker
    broker.stop()


@pytest.fixture(params=["mosquitto", "amqtt"])
def broker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BrokerProcess]:
    """Each of both."""
    process = BrokerProcess(request.param, tmp_path_factory.mktemp(request.param))
    process.start()
    yield process
    process.stop()
