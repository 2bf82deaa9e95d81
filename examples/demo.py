"""From an ONNX file to an answer over MQTT, on this machine: what `make demo` runs.

A broker and an agent are started as processes of their own, with everything they write in one temporary
folder; the rest is the commands that a user types, printed as they are run. Whatever happens, the processes
are stopped and the folder is removed. `EDGEBUNDLE_DEMO_BROKER` chooses `mosquitto` or `amqtt`.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil

EXAMPLES = Path(__file__).resolve().parent
DEVICE = "demo"
# Generous for a small board under load; where nothing is wrong each takes a second or two.
START_LIMIT_S = 30.0
STOP_LIMIT_S = 10.0
METRICS_INTERVAL_S = 2
METRICS = "requests_total|quantile|resident|ready"  # the few that a first look is for

MOSQUITTO = """\
listener {port} 127.0.0.1
allow_anonymous true
persistence false
set_tcp_nodelay true
"""

AMQTT = """\
listeners:
  default:
    type: tcp
    bind: 127.0.0.1:{port}
plugins:
  amqtt.plugins.authentication.AnonymousAuthPlugin:
    allow_anonymous: true
"""

AGENT = """\
device = "{device}"
state_dir = "state"

[broker]
url = "mqtt://127.0.0.1:{port}"

[trust]
dir = "trust"

[metrics]
interval_s = {interval}
"""


class DemoFailedError(Exception):
    """A step did not do what it should; the message says which."""


def main() -> int:
    """Run the demo; the exit code is 0 when a picture was recognised over MQTT."""
    os.environ["PYTHONUNBUFFERED"] = "1"  # or what a command says on stdout and on stderr would change places
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # stopping from outside is Ctrl-C too
    started = time.monotonic()
    try:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="edgebundle-demo-")))
            stack.callback(stop_what_is_left)
            run_demo(folder, stack)
        say(f"everything is stopped and removed again; that took {time.monotonic() - started:.0f} s")
    except KeyboardInterrupt:
        print("\ndemo: interrupted; everything is stopped and removed", file=sys.stderr)
        return 130
    except DemoFailedError as error:
        print(f"demo: failed: {error}", file=sys.stderr)
        return 1
    return 0


def run_demo(folder: Path, stack: contextlib.ExitStack) -> None:
    """Show each step, in the order of a user's day."""
    kind, port = choose_broker(), free_port()
    broker = ("--broker", f"mqtt://127.0.0.1:{port}")
    stack.enter_context(contextlib.chdir(folder))
    Path("examples").symlink_to(EXAMPLES)
    print(f"$ cd {folder}")

    say("a key that signs bundles, and its public half that devices trust")
    edgebundle("keygen", "keys")

    say("compile the model for this machine, check it against the reference, sign it")
    edgebundle(
        *("compile", "examples/digits/digits.onnx", "--target", "host"),
        *("--preprocess", "examples/digits/preprocess.toml", "--postprocess", "softmax,top3"),
        *("--labels", "examples/digits/labels.txt", "--sign-key", "keys/signing.key", "-o", "digits.bundle"),
    )
    edgebundle("verify", "digits.bundle", "--trust", "keys/signing.pub")

    say(f"a broker ({kind}) and an agent that trusts the key, each a process of its own")
    Path("trust").mkdir()
    shutil.copy("keys/signing.pub", "trust/demo.pub")
    Path("agent.toml").write_text(AGENT.format(device=DEVICE, port=port, interval=METRICS_INTERVAL_S))
    stack.enter_context(background(broker_command(kind, port)))
    wait_until("the broker to listen", lambda: listening(port))
    stack.enter_context(background(["edge-agent", "run", "--config", "agent.toml"]))
    wait_until("the agent to be online", lambda: DEVICE in quietly("agents", *broker, "--json"))
    edgebundle("agents", *broker)

    say("deploy: the agent pulls the bundle over MQTT, verifies it, tests it, and activates it")
    edgebundle("deploy", "digits.bundle", "--agent", DEVICE, *broker, "--wait", "30")

    say("infer: a picture goes in, what the device saw comes back")
    for name in ("seven", "zero"):
        picture = f"examples/digits/{name}.png"
        output = edgebundle("infer", "--agent", DEVICE, "--model", "digits", "--input", picture, *broker)
        if name not in output:
            raise DemoFailedError(f"expected the device to see {name}")

    say("metrics: what the agent publishes about itself")
    edgebundle("metrics", "--agent", DEVICE, *broker, "--match", METRICS)


def say(text: str) -> None:
    """Tell the user what happens now."""
    print(f"\n== {text}", flush=True)


def show(command: Iterable[str], end: str = "") -> None:
    """Print a command as one would type it."""
    lines = textwrap.wrap(shlex.join(command) + end, 100, break_long_words=False, break_on_hyphens=False)
    print("$ " + " \\\n      ".join(lines), flush=True)


def edgebundle(*arguments: str) -> str:
    """Run one command of the user's, and give what it printed."""
    show(["edgebundle", *arguments])
    with subprocess.Popen(
        [program("edgebundle"), *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as command:
        assert command.stdout is not None
        lines = []
        try:
            for line in command.stdout:
                print(f"  {line}", end="", flush=True)
                lines.append(line)
        except BaseException:
            command.terminate()  # what stopped the demo may not have reached its commands
            raise
    if command.returncode:
        raise DemoFailedError(f"edgebundle {arguments[0]} gave exit code {command.returncode}")
    return "".join(lines)


def quietly(*arguments: str) -> str:
    """Run a command of the user's without showing it, and give what it printed."""
    command = [program("edgebundle"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=START_LIMIT_S, check=False).stdout


def stop_what_is_left() -> None:
    """Stop commands that were being started at the very moment of an interruption: nobody held them yet."""
    left = psutil.Process().children(recursive=True)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    for process in psutil.wait_procs(left, STOP_LIMIT_S)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def program(name: str) -> str:
    """Find a command of this environment, or else of the system; mosquitto stands where only root looks."""
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}:/usr/sbin"
    found = shutil.which(name, path=path)
    if found is None:
        raise DemoFailedError(f"{name} is not installed")
    return found


def choose_broker() -> str:
    """Give the broker that was asked for, or mosquitto where it is installed."""
    wanted = os.environ.get("EDGEBUNDLE_DEMO_BROKER", "")
    if wanted not in {"", "amqtt", "mosquitto"}:
        raise DemoFailedError(f"EDGEBUNDLE_DEMO_BROKER is amqtt or mosquitto, not {wanted}")
    if wanted:
        program(wanted)
        return wanted
    try:
        program("mosquitto")
    except DemoFailedError:
        return "amqtt"
    return "mosquitto"


def broker_command(kind: str, port: int) -> list[str]:
    """Write the broker's configuration, and give the command that starts it."""
    config = Path(f"{kind}.conf")
    if kind == "mosquitto":
        # As root mosquitto would become a user who cannot read this folder.
        user = "user root\n" if os.geteuid() == 0 else ""
        config.write_text(MOSQUITTO.format(port=port) + user)
    else:
        config.write_text(AMQTT.format(port=port))
    return [kind, "-c", str(config)]


def free_port() -> int:
    """Give a port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listening(port: int) -> bool:
    """Say whether somebody listens on the port."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_until(what: str, happened: Callable[[], bool]) -> None:
    """Wait, and fail with a line when it takes too long."""
    give_up = time.monotonic() + START_LIMIT_S
    while not happened():
        if time.monotonic() > give_up:
            raise DemoFailedError(f"waited {START_LIMIT_S:.0f} s for {what}")
        time.sleep(0.05)


@contextlib.contextmanager
def background(command: list[str]) -> Iterator[None]:
    """Keep a process running, in a session of its own, and stop all of it at the end."""
    show(command, end=" &")
    log = Path(f"{command[0]}.log").absolute()
    with log.open("wb") as output:
        running = subprocess.Popen(
            [program(command[0]), *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield
    except DemoFailedError:
        print(f"-- the last lines of {log.name}:", file=sys.stderr)
        print(*log.read_text(errors="replace").splitlines()[-15:], sep="\n", file=sys.stderr)
        raise
    finally:
        running.terminate()
        try:
            running.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            print(f"demo: {command[0]} did not stop in {STOP_LIMIT_S:.0f} s and is killed", file=sys.stderr)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)  # what it may have left behind
        running.wait()


if __name__ == "__main__":
    sys.exit(main())
