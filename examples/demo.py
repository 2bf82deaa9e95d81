"""`make demo`: from an ONNX file to an answer over MQTT, on this machine.

The demo starts a broker and an agent as separate processes that write only to one temporary folder. Then it
runs the commands that a user would type, and prints each of them. At the end, or after an error or Ctrl-C, it
stops the processes and removes the folder. `EDGEBUNDLE_DEMO_BROKER` selects `mosquitto` or `amqtt`.
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
from typing import Final

import psutil

EXAMPLES: Final = Path(__file__).resolve().parent
DEVICE: Final = "demo"
# Generous, for a small board under load: normally each takes a second or two.
START_LIMIT_S: Final = 30.0
STOP_LIMIT_S: Final = 10.0
METRICS_INTERVAL_S: Final = 2
STAGES: Final = "inference_(queue|decode|compute|encode)_seconds_(sum|count)"
NEXT: Final = """\
== what to do next
your own model    edgebundle compile MODEL.onnx --target rpi4 --sign-key keys/signing.key
its layers        edgebundle profile MODEL.bundle --html profile.html
a Raspberry Pi    docs/install.md: from a package to the first answer
your own client   docs/clients.md: three lines of Python or JavaScript, and any MQTT client"""
METRICS: Final = "requests_total|quantile|resident|ready"  # a regular expression of names to print

MOSQUITTO: Final = """\
listener {port} 127.0.0.1
allow_anonymous true
persistence false
set_tcp_nodelay true
"""

AMQTT: Final = """\
listeners:
  default:
    type: tcp
    bind: 127.0.0.1:{port}
plugins:
  amqtt.plugins.authentication.AnonymousAuthPlugin:
    allow_anonymous: true
"""

AGENT: Final = """\
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
    """A step failed; the message says which one."""


def main() -> int:
    """Run the demo and return the exit code: 0 if the pictures were recognised over MQTT."""
    os.environ["PYTHONUNBUFFERED"] = "1"  # keeps the order of what a command prints to stdout and stderr
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # handle these like Ctrl-C
    started = time.monotonic()
    try:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="edgebundle-demo-")))
            stack.callback(stop_remaining_processes)
            run_demo(folder, stack)
        announce(
            f"stopped the processes and removed the folder; the demo took {time.monotonic() - started:.0f} s"
        )
        print(f"\n{NEXT}")
    except KeyboardInterrupt:
        print("\ndemo: interrupted; stopped the processes and removed the folder", file=sys.stderr)
        return 130
    except DemoFailedError as error:
        print(f"demo: failed: {error}", file=sys.stderr)
        return 1
    return 0


def run_demo(folder: Path, stack: contextlib.ExitStack) -> None:
    """Run all steps in the order in which a user would."""
    kind, port = choose_broker(), free_port()
    broker = ("--broker", f"mqtt://127.0.0.1:{port}")
    stack.enter_context(contextlib.chdir(folder))
    Path("examples").symlink_to(EXAMPLES)
    print(f"$ cd {folder}")

    announce("make a private key that signs bundles, and a public key that devices trust")
    edgebundle("keygen", "keys")

    announce("compile the model for this machine, compare it with the reference, sign it")
    edgebundle(
        *("compile", "examples/digits/digits.onnx", "--target", "host"),
        *("--preprocess", "examples/digits/preprocess.toml", "--postprocess", "softmax,top3"),
        *("--labels", "examples/digits/labels.txt", "--sign-key", "keys/signing.key", "-o", "digits.bundle"),
    )
    edgebundle("verify", "digits.bundle", "--trust", "keys/signing.pub")

    announce(f"start a broker ({kind}) and an agent that trusts the key, each in its own process")
    Path("trust").mkdir()
    shutil.copy("keys/signing.pub", "trust/demo.pub")
    Path("agent.toml").write_text(AGENT.format(device=DEVICE, port=port, interval=METRICS_INTERVAL_S))
    stack.enter_context(background(broker_command(kind, port)))
    wait_until("the broker to listen", lambda: listening(port))
    stack.enter_context(background(["edge-agent", "run", "--config", "agent.toml"]))
    wait_until("the agent to be online", lambda: DEVICE in quietly("agents", *broker, "--json"))
    edgebundle("agents", *broker)

    announce("deploy: the agent downloads the bundle over MQTT, verifies, tests and activates it")
    edgebundle("deploy", "digits.bundle", "--agent", DEVICE, *broker, "--wait", "30")

    announce("infer: send a picture, get the label that the model recognised")
    for name in ("seven", "zero"):
        picture = f"examples/digits/{name}.png"
        output = edgebundle("infer", "--agent", DEVICE, "--model", "digits", "--input", picture, *broker)
        if name not in output:
            raise DemoFailedError(f"expected the label {name}, got another answer")

    announce("metrics: print what the agent publishes about itself")
    edgebundle("metrics", "--agent", DEVICE, *broker, "--match", METRICS)
    print(f"  {where_time_went(quietly('metrics', '--agent', DEVICE, *broker, '--match', STAGES))}")

    announce("the kernels: print the layers of the model that each one computes, and its time")
    edgebundle("profile", "digits.bundle", "--number", "50")


def where_time_went(metrics: str) -> str:
    """Return the mean time of each stage of an answer on the device, in words.

    Raises
    ------
    DemoFailedError
        If the agent has published no such metric.
    """
    values = {line.split()[0]: float(line.split()[-1]) for line in metrics.splitlines()}
    times = []
    for name, total in values.items():
        stage, is_sum, _ = name.partition("_seconds_sum")
        count = values.get(name.replace("_seconds_sum", "_seconds_count"), 0.0)
        if is_sum and count:
            times.append(f"{stage.rpartition('_')[2]} {1000 * total / count:.2f} ms")
    if not times:
        raise DemoFailedError("expected metrics of the stages of an answer, got none")
    return f"an answer on the device takes: {', '.join(times)}; the rest is network and broker"


def announce(text: str) -> None:
    """Print the heading of the next step."""
    print(f"\n== {text}", flush=True)


def show(command: Iterable[str], end: str = "") -> None:
    """Print a command as a user would type it."""
    lines = textwrap.wrap(shlex.join(command) + end, 100, break_long_words=False, break_on_hyphens=False)
    print("$ " + " \\\n      ".join(lines), flush=True)


def edgebundle(*arguments: str) -> str:
    """Print and run an `edgebundle` command, print its output, and return it."""
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
            command.terminate()  # the signal that stopped the demo may not have reached the command
            raise
    if command.returncode:
        raise DemoFailedError(f"edgebundle {arguments[0]}: expected exit code 0, got {command.returncode}")
    return "".join(lines)


def quietly(*arguments: str) -> str:
    """Run an `edgebundle` command without printing it, and return its stdout."""
    command = [program("edgebundle"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=START_LIMIT_S, check=False).stdout


def stop_remaining_processes() -> None:
    """Stop child processes that were being started when the demo was interrupted."""
    left = psutil.Process().children(recursive=True)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    for process in psutil.wait_procs(left, STOP_LIMIT_S)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def program(name: str) -> str:
    """Find a command in this environment, in PATH, or in /usr/sbin, where Debian installs mosquitto."""
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}:/usr/sbin"
    found = shutil.which(name, path=path)
    if found is None:
        raise DemoFailedError(f"{name} is not installed")
    return found


def choose_broker() -> str:
    """Return the kind of broker: the requested one, else mosquitto if it is installed, else amqtt."""
    wanted = os.environ.get("EDGEBUNDLE_DEMO_BROKER", "")
    if wanted not in {"", "amqtt", "mosquitto"}:
        raise DemoFailedError(f"EDGEBUNDLE_DEMO_BROKER: expected amqtt or mosquitto, got {wanted}")
    if wanted:
        program(wanted)
        return wanted
    try:
        program("mosquitto")
    except DemoFailedError:
        return "amqtt"
    return "mosquitto"


def broker_command(kind: str, port: int) -> list[str]:
    """Write the broker's configuration and return the command that starts it."""
    config = Path(f"{kind}.conf")
    if kind == "mosquitto":
        # Started as root, mosquitto changes to a user that cannot read this folder.
        user = "user root\n" if os.geteuid() == 0 else ""
        config.write_text(MOSQUITTO.format(port=port) + user)
    else:
        config.write_text(AMQTT.format(port=port))
    return [kind, "-c", str(config)]


def free_port() -> int:
    """Return a free port on the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listening(port: int) -> bool:
    """Return whether a process listens on the port."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_until(what: str, happened: Callable[[], bool]) -> None:
    """Wait until `happened` returns true, at most `START_LIMIT_S`."""
    give_up = time.monotonic() + START_LIMIT_S
    while not happened():
        if time.monotonic() > give_up:
            raise DemoFailedError(f"waited {START_LIMIT_S:.0f} s for {what}")
        time.sleep(0.05)


@contextlib.contextmanager
def background(command: list[str]) -> Iterator[None]:
    """Run a process in its own session while the block runs, then stop it and its children."""
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
        print(f"-- last lines of {log.name}:", file=sys.stderr)
        print(*log.read_text(errors="replace").splitlines()[-15:], sep="\n", file=sys.stderr)
        raise
    finally:
        running.terminate()
        try:
            running.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            print(f"demo: {command[0]} did not stop within {STOP_LIMIT_S:.0f} s, killing it", file=sys.stderr)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)  # child processes that still run
        running.wait()


if __name__ == "__main__":
    sys.exit(main())
