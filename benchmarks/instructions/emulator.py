"""Counts the instructions that a program executes under qemu's user mode, exactly and repeatably.

Needs root (for a mount namespace), gcc, Debian's ``qemu-user`` (the static one loads no plugins) and the
arm64 root that ``packaging/debian-root.sh`` makes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]
# What the engines need in the emulated machine, next to the agent; wheels of the root's Python.
PACKAGES = ("numpy", "apache-tvm-ffi==0.1.14.post1", "onnxruntime", "ncnn")
PLATFORMS = (
    "manylinux_2_28_aarch64",
    "manylinux_2_27_aarch64",
    "manylinux_2_17_aarch64",
    "manylinux2014_aarch64",
)
TIMEOUT_S = 1800


@dataclass(frozen=True)
class Emulator:
    """An arm64 root in which programs are counted.

    Attributes
    ----------
    root
        The root folder.
    plugin
        The compiled counter.
    packages
        Folder inside the root with what the engines need.
    """

    root: Path
    plugin: Path
    packages: Path

    @classmethod
    def prepare(cls) -> Emulator:
        """Make the root, the counter and the packages; what is there already is kept."""
        script = PROJECT / "packaging" / "debian-root.sh"
        done = subprocess.run([str(script), "arm64", "bookworm"], capture_output=True, text=True, check=True)
        root = Path(done.stdout.strip().splitlines()[-1])
        packages = root / "opt" / "bench"
        if not (packages / ".complete").exists():
            platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
            command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(packages), "--upgrade"]
            command += [
                "--only-binary=:all:",
                "--python-version",
                "3.11",
                "--implementation",
                "cp",
                *platforms,
            ]
            subprocess.run([*command, *PACKAGES], check=True, timeout=TIMEOUT_S)
            (packages / ".complete").touch()
        plugin = Path(tempfile.gettempdir()) / f"edgebundle-counter-{os.getuid()}.so"
        subprocess.run(
            ["gcc", "-O2", "-fPIC", "-shared", str(HERE / "counter.c"), "-o", str(plugin),
             "-Wl,--unresolved-symbols=ignore-all"], check=True,
        )  # fmt: skip
        return cls(root, plugin, packages)

    def version(self, engine: str) -> str:
        """The installed version of an engine, empty for ours."""
        found = [path.name for path in self.packages.glob(f"{engine}-*.dist-info")]
        return found[0].removesuffix(".dist-info").removeprefix(f"{engine}-") if found else ""

    def instructions_of_an_inference(self, engine: str, place: Path, cpu: str) -> int:
        """Guest instructions of one inference on one thread, after one to warm up: exact."""
        with tempfile.NamedTemporaryFile() as out:
            # An empty /sys in a mount namespace of its own: some engines crash on the host's CPU description.
            shell = 'mount -t tmpfs none /sys && exec qemu-aarch64 -cpu "$0" -L "$1" -plugin "$2" "${@:3}"'
            python = self.root / "usr" / "bin" / "python3.11"
            command = ["unshare", "-m", "bash", "-c", shell, cpu, str(self.root), str(self.plugin)]
            command += [str(python), str(HERE / "guest.py"), engine, str(place)]
            environment = {
                **os.environ,
                "ICOUNT_OUT": out.name,
                "EDGE_NUM_THREADS": "1",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": f"{self.packages}:{PROJECT}",
                "PYTHONHASHSEED": "0",
            }
            try:
                subprocess.run(
                    command, env=environment, check=True, timeout=TIMEOUT_S, capture_output=True, text=True
                )
            except subprocess.CalledProcessError as e:
                last = (e.stderr.strip().splitlines() or [""])[-1]
                raise RuntimeError(f"{engine} under qemu ended with {e.returncode}: {last[:300]}") from e
            return between_marks(Path(out.name).read_text())


def between_marks(text: str) -> int:
    """Instructions from mark 0 to mark 1, of what counter.c wrote."""
    marks = {int(line.split()[0]): int(line.split()[1]) for line in text.splitlines() if " " in line}
    return marks[1] - marks[0]
