"""The client is light: what it loads, and what it works without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import edgebundle
from tests.edgebundle.rig import PNG
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]

# Names without the compiler's and the device's packages, as in an environment with only the base.
WITHOUT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""


def python(script: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_client_loads_neither_arrays_nor_mqtt() -> None:
    names = "Client, AsyncClient, ClientError"
    script = f"import json, sys; from edgebundle import {names}; print(json.dumps([*sys.modules]))"
    loaded = set(json.loads(python(script)))
    assert loaded & {"numpy", "paho", "tvm", "tvm_ffi", "onnx", "PIL", "cryptography", "builder"} == set()


@pytest.mark.parametrize(("name", "most_modules"), [("Client", 125), ("AsyncClient", 125)])
def test_importing_the_client_is_light(name: str, most_modules: int) -> None:
    """Most of them are asyncio's. A module more than that costs every program that asks."""
    script = (
        "import sys\n"
        "before = {*sys.modules}\n"
        f"from edgebundle import {name}\n"
        "print(len({*sys.modules} - before))\n"
    )
    assert int(python(script)) <= most_modules


@pytest.mark.parametrize("name", ["Client", "AsyncClient"])
def test_importing_the_client_takes_at_most_twice_as_long_as_asyncio(name: str, tmp_path: Path) -> None:
    """Twice asyncio is the tenth of a second that is promised, on a core that imports asyncio in 50 ms.

    Of processor time, at best, in turn, and compiled: neither other programs nor cold caches count.
    """
    compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}

    def import_s(statement: str) -> float:
        timed = f"import time\nbegan = time.process_time()\n{statement}\nprint(time.process_time() - began)\n"
        return float(python(timed, **compiled))

    pairs = [(import_s(f"from edgebundle import {name}"), import_s("import asyncio")) for _ in range(6)][1:]
    assert min(ours for ours, _ in pairs) <= 2 * min(bare for _, bare in pairs)


def test_every_name_is_there_and_no_other() -> None:
    for name in edgebundle.__all__:
        assert getattr(edgebundle, name).__name__ == name
    assert sorted(edgebundle.__all__) == edgebundle.__all__ == dir(edgebundle)
    assert not hasattr(edgebundle, "connect")


def test_pictures_labels_and_boxes_need_neither_numpy_nor_the_device_packages() -> None:
    names = ("numpy", "tvm_ffi", "tvm", "onnx", "PIL", "cryptography", "rich", "psutil")
    script = WITHOUT.format(names=names) + (
        "from agent.mqtt.connection import Connection\n"
        "from agent.mqtt.message import Message\n"
        "from agent.mqtt.properties import Properties\n"
        "from edgebundle.answer import read_answer\n"
        "from edgebundle.request import Request\n"
        "import struct\n"
        "Request.image(b'\\xff\\xd8\\xff')\n"
        "user = (('__stat', '200'), ('tensor', 'boxes;FP32;1,4'), ('tensor', 'scores;FP32;1'),\n"
        "        ('tensor', 'classes;INT64;1'))\n"
        "payload = struct.pack('<5fq', 1, 2, 3, 4, 0.5, 7)\n"
        "message = Message('t', payload, properties=Properties('application/octet-stream', user=user))\n"
        "print(read_answer(message, agent='a', model='m', total_s=1.0, attempts=1).boxes[0])\n"
    )
    assert python(script).strip() == "Box(label='7', score=0.5, index=7, x0=1.0, y0=2.0, x1=3.0, y1=4.0)"


def test_command_line_asks_with_the_base_only_and_names_the_extra_for_the_rest(tmp_path: Path) -> None:
    names = ("tvm_ffi", "tvm", "onnx", "onnxruntime", "onnxslim", "PIL", "cryptography", "rich", "psutil")
    (tmp_path / "a.png").write_bytes(PNG)
    (tmp_path / "a.onnx").write_bytes(b"")
    infer = ["infer", "--agent", "a", "--model", "m", "--input", f"{tmp_path}/a.png"]
    for main, arguments, words in (
        ("builder.cli", [*infer, "--broker", "mqtt://127.0.0.1:1"], "cannot reach the broker"),
        ("builder.cli", ["compile", f"{tmp_path}/a.onnx"], "pip install 'edgebundle[builder]'"),
        ("agent.cli", ["enroll"], ""),
    ):
        script = WITHOUT.format(names=names) + (
            "import contextlib, io\n"
            f"from {main} import main\n"
            "said = io.StringIO()\n"
            "with contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):\n"
            f"    main({arguments!r})\n"
            "print(said.getvalue())\n"
        )
        said = python(script)
        assert words in said, said
        assert "Traceback" not in said


def test_base_dependencies_are_the_clients() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [line.split(">")[0].split("~")[0] for line in project["dependencies"]]
    assert names == ["numpy", "paho-mqtt"]
    assert "edgebundle[agent]" in project["optional-dependencies"]["builder"]
