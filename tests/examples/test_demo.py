"""`make demo` gets a prediction over MQTT, and leaves no process and no file, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PROGRAM_PATIENCE_S

DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo.py"
# The demo promises 60 s on two idle cores; other tests may run at the same time.


def start(tmp_path: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(DEMO)],
        env=os.environ | {"TMPDIR": str(tmp_path)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def processes(tmp_path: Path) -> dict[int, str]:
    """Return the processes of the demo by id, found by their TMPDIR, each with its command line."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"TMPDIR={tmp_path}".encode() in (process / "environ").read_bytes().split(b"\0"):
                command = (process / "cmdline").read_bytes()
                found[int(process.name)] = command.replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has ended, or belongs to another user
    return found


def left_behind(tmp_path: Path) -> list[str]:
    return [path.name for path in tmp_path.iterdir()] + list(processes(tmp_path).values())


def recognised(out: str) -> bool:
    answer = out.partition("$ edgebundle infer")[2].partition("\n== ")[0]
    return "seven" in answer and "zero" in answer and "ms" in answer


@pytest.mark.slow
def test_picture_is_recognised_over_mqtt(tmp_path: Path) -> None:
    process = start(tmp_path, EDGEBUNDLE_DEMO_BROKER="mosquitto")
    out, err = process.communicate(timeout=PROGRAM_PATIENCE_S)
    assert process.returncode == 0, out + err
    assert "a broker (mosquitto)" in out
    commands = [line.split()[2] for line in out.splitlines() if line.startswith("$ edgebundle ")]
    assert commands == [
        "keygen",
        "compile",
        "verify",
        "agents",
        "deploy",
        "infer",
        "infer",
        "metrics",
        "profile",
    ]
    assert recognised(out)
    assert "edge_inference_requests_total" in out.partition("$ edgebundle metrics")[2]
    for stage in ("queue", "decode", "compute", "encode"):
        assert f"{stage} " in out.partition("an answer on the device takes")[2].partition("\n")[0]
    assert "Conv_0" in out.partition("$ edgebundle profile")[2]
    assert "what to do next" in out.splitlines()[-5]
    assert left_behind(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "step"),
    [
        (signal.SIGHUP, "keygen"),
        (signal.SIGTERM, "compile"),
        (signal.SIGINT, "deploy"),  # by now broker and agent are running
    ],
)
def test_interrupted_demo_stops_everything(tmp_path: Path, number: signal.Signals, step: str) -> None:
    process = start(tmp_path)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(f"$ edgebundle {step}"):
            break
    process.send_signal(number)
    out, err = process.communicate(timeout=PROGRAM_PATIENCE_S)
    assert process.returncode == 130, out + err
    assert "Traceback" not in err
    assert left_behind(tmp_path) == []


@pytest.mark.slow
def test_with_another_broker_whose_end_is_reported_and_everything_stopped(tmp_path: Path) -> None:
    process = start(tmp_path, EDGEBUNDLE_DEMO_BROKER="amqtt")
    assert process.stdout is not None
    out = ""
    for line in process.stdout:
        out += line
        if line.startswith("$ edgebundle metrics"):
            break
    assert "a broker (amqtt)" in out
    assert recognised(out)
    # Kill the broker: this last command cannot connect, and the agent is left to be stopped.
    [broker] = [pid for pid, command in processes(tmp_path).items() if "amqtt" in command]
    os.kill(broker, signal.SIGKILL)
    out, err = process.communicate(timeout=PROGRAM_PATIENCE_S)
    assert process.returncode == 1, out + err
    assert "demo: failed: edgebundle metrics" in err
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("broker", ["kafka", "Mosquitto"])
def test_unknown_broker_is_refused(tmp_path: Path, broker: str) -> None:
    process = start(tmp_path, EDGEBUNDLE_DEMO_BROKER=broker)
    _, err = process.communicate(timeout=PROGRAM_PATIENCE_S)
    assert process.returncode == 1
    assert err == f"demo: failed: EDGEBUNDLE_DEMO_BROKER: expected amqtt or mosquitto, got {broker}\n"


def test_missing_mosquitto_is_reported(tmp_path: Path) -> None:
    # demo.py also searches /usr/sbin, so an empty PATH does not hide mosquitto.
    script = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); import demo, shutil;"
        "shutil.which = lambda *a, **k: None; sys.exit(demo.main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(DEMO.parent)],
        env=os.environ | {"TMPDIR": str(tmp_path), "EDGEBUNDLE_DEMO_BROKER": "mosquitto"},
        capture_output=True,
        text=True,
        timeout=PROGRAM_PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == "demo: failed: mosquitto is not installed\n"
