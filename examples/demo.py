"""From an ONNX file to an answer over MQTT, on this machine: what ``make demo`` runs.

A broker and an agent are started as processes of their own, with everything they write in one temporary
folder; the rest is the commands that a user types, printed as they are run. Whatever happens, the processes
are stopped and the folder is removed. ``EDGEBUNDLE_DEMO_BROKER`` chooses ``mosquitto`` or ``amqtt``.
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
import time
from collections.abc import Callable, Iterator
from pathlib import Path

DIGITS = Path(__file__).resolve().parent / "digits"
PICTURE = DIGITS / "seven.png"
DEVICE = "demo"
# Generous for a small board under load; where nothing is wrong each takes a second or two.
START_LIMIT_S = 30.0
COMMAND_LIMIT_S = 300.0
STOP_LIMIT_S = 10.0
METRICS_INTERVAL_S = 2

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
state_dir = "{folder}/state"

[broker]
url = "mqtt://127.0.0.1:{port}"

[trust]
dir = "{folder}/trust"

[metrics]
interval_s = {interval}
"""


class DemoFailedError(Exception):
    """A step did not do what it should; the message says which."""


def main() -> int:
    """Run the demo; the exit code is 0 when a picture was recognised over MQTT."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # stopping from outside is Ctrl-C too
    started = time.monotonic()
    try:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="edgebundle-demo-")))
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
    bundle, port = folder / "digits.bundle", free_port()
    broker = ["--broker", f"mqtt://127.0.0.1:{port}"]

    say("a key that signs bundles, and its public half that devices trust")
    edgebundle("keygen", folder / "keys")

    say("compile the model for this machine, check it against the reference, sign it")
    edgebundle(
        *("compile", DIGITS / "digits.onnx", "--target", "host"),
        *("--preprocess", DIGITS / "preprocess.toml", "--postprocess", "softmax,top3"),
        *("--labels", DIGITS / "labels.txt", "--sign-key", folder / "keys" / "signing.key", "-o", bundle),
    )
    edgebundle("verify", bundle, "--trust", folder / "keys" / "signing.pub")

    kind = choose_broker()
    say(f"a broker ({kind}) and an agent, each a process of its own, in {folder}")
    (folder / "trust").mkdir()
    shutil.copy(folder / "keys" / "signing.pub", folder / "trust" / "demo.pub")
    stack.enter_context(process(broker_command(kind, port, folder), folder / "broker.log"))
    wait_until("the broker to listen", lambda: listening(port))
    config = folder / "agent.toml"
    config.write_text(AGENT.format(device=DEVICE, folder=folder, port=port, interval=METRICS_INTERVAL_S))
    stack.enter_context(
        process([program("edge-agent"), "run", "--config", str(config)], folder / "agent.log")
    )
    edgebundle("agents", *broker, "--wait", "10")

    say("deploy: the agent pulls the bundle over MQTT, verifies it, tests it, and activates it")
    edgebundle("deploy", bundle, "--agent", DEVICE, *broker)

    say(f"infer: {PICTURE.name} goes in, what the device saw comes back")
    output = edgebundle("infer", "--agent", DEVICE, "--model", "digits", "--input", PICTURE, *broker)
    if PICTURE.stem not in output:
        raise DemoFailedError(f"expected the device to see {PICTURE.stem}")

    say("metrics: what the agent publishes about itself")
    edgebundle("metrics", "--agent", DEVICE, *broker)


def say(text: str) -> None:
    """Tell the user what happens now."""
    print(f"\n== {text}", flush=True)


def edgebundle(*arguments: str | Path) -> str:
    """Run one command of the user's, shown as it would be typed, and give what it printed."""
    words = [
        os.path.relpath(word) if isinstance(word, Path) and word.is_relative_to(Path.cwd()) else str(word)
        for word in arguments
    ]
    print(f"$ edgebundle {shlex.join(words)}", flush=True)
    with subprocess.Popen([program("edgebundle"), *words], stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        lines = []
        for line in command.stdout:
            print(f"  {line}", end="", flush=True)
            lines.append(line)
    if command.returncode:
        raise DemoFailedError(f"edgebundle {arguments[0]} gave exit code {command.returncode}")
    return "".join(lines)


def program(name: str) -> str:
    """Find a command of this environment."""
    return str(Path(sys.executable).parent / name)


def choose_broker() -> str:
    """Give the broker that was asked for, or mosquitto where it is installed."""
    wanted = os.environ.get("EDGEBUNDLE_DEMO_BROKER", "")
    if wanted not in {"", "amqtt", "mosquitto"}:
        raise DemoFailedError(f"EDGEBUNDLE_DEMO_BROKER is amqtt or mosquitto, not {wanted}")
    if wanted == "mosquitto" and not mosquitto():
        raise DemoFailedError("EDGEBUNDLE_DEMO_BROKER is mosquitto, which is not installed")
    return wanted or ("mosquitto" if mosquitto() else "amqtt")


def mosquitto() -> str | None:
    """Find mosquitto, which Debian installs where only root looks."""
    return shutil.which("mosquitto", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


def broker_command(kind: str, port: int, folder: Path) -> list[str]:
    """Write the broker's configuration, and give the command that starts it."""
    config = folder / f"{kind}.conf"
    if kind == "mosquitto":
        # As root mosquitto would become a user who cannot read this folder.
        user = "user root\n" if os.geteuid() == 0 else ""
        config.write_text(MOSQUITTO.format(port=port) + user)
        return [str(mosquitto()), "-c", str(config)]
    config.write_text(AMQTT.format(port=port))
    return [program("amqtt"), "-c", str(config)]


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
def process(command: list[str], log: Path) -> Iterator[None]:
    """Keep a process running, in a session of its own, and stop all of it at the end."""
    with log.open("wb") as output:
        running = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield
    except BaseException:
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
