"""Counts the instructions that a program executes under qemu's user mode, exactly and repeatably.

Needs root (for a mount namespace), gcc, Debian's `qemu-user` (the static one loads no plugins) and the
arm64 root that `packaging/debian-root.sh` makes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
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
AGENT_PACKAGES = PACKAGES[:2]
TIMEOUT_S = 1800


@dataclass(frozen=True)
class Emulator:
    """An arm64 root in which programs are counted.

    Attributes
    ----------
    root
        The root folder.
    packages
        Folder inside the root with what the engines need.
    """

    root: Path
    packages: Path

    @classmethod
    def prepare(cls, needs: Sequence[str] = PACKAGES) -> Emulator:
        """Make the root and the packages; what is there already is kept."""
        script = PROJECT / "packaging" / "debian-root.sh"
        done = subprocess.run([str(script), "arm64", "bookworm"], capture_output=True, text=True, check=True)
        root = Path(done.stdout.strip().splitlines()[-1])
        packages = root / "opt" / ("bench" if needs == PACKAGES else "bench-agent")
        if not (packages / ".complete").exists():
            platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
            command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(packages), "--upgrade"]
            command += ["--only-binary=:all:", "--python-version", "3.11", "--implementation", "cp"]
            subprocess.run([*command, *platforms, *needs], check=True, timeout=TIMEOUT_S)
            (packages / ".complete").touch()
        return cls(root, packages)

    def version(self, engine: str) -> str:
        """The installed version of an engine, empty for ours."""
        found = [path.name for path in self.packages.glob(f"{engine}-*.dist-info")]
        return found[0].removesuffix(".dist-info").removeprefix(f"{engine}-") if found else ""

    def instructions_of_an_inference(self, engine: str, place: Path, cpu: str) -> int:
        """Guest instructions of one inference on one thread, after one to warm up: exact."""
        marks = self.marks("guest.py", engine, place, cpu)
        return marks[1] - marks[0]

    def marks(self, program: str, engine: str, place: Path, cpu: str) -> list[int]:
        """Instructions up to each mark of a program of this folder."""
        # An empty /sys in a mount namespace of its own: some engines crash on the host's CPU description.
        shell = 'mount -t tmpfs none /sys && exec "$@"'
        command = ["unshare", "-m", "bash", "-c", shell, "bash"]
        command += ["qemu-aarch64", "-cpu", cpu, "-L", str(self.root)]
        python = self.root / "usr" / "bin" / "python3.11"
        arguments = [str(python), str(HERE / program), engine, str(place)]
        return counted(command, arguments, f"{self.packages}:{PROJECT}")


def marks_on_this_machine(program: str, engine: str, place: Path) -> list[int]:
    """Steps with this Python, on an emulated x86-64 core with AVX2: qemu has no AVX-512.

    A step is an instruction or an access to memory: a product whose factors all come from memory takes no
    more x86 instructions than one that holds them in registers.
    """
    arguments = [sys.executable, str(HERE / program), engine, str(place)]
    return counted(["qemu-x86_64", "-cpu", "max"], arguments, str(PROJECT), accesses=True)


def counted(
    emulator: Sequence[str], arguments: Sequence[str], python_path: str, *, accesses: bool = False
) -> list[int]:
    """Run a program under an emulator with the counter; return the counts at its marks.

    Parameters
    ----------
    accesses
        Count accesses to memory beside instructions.

    Raises
    ------
    RuntimeError
        If it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        plugin, out = Path(folder, "counter.so"), Path(folder, "marks")
        subprocess.run(
            ["gcc", "-O2", "-fPIC", "-shared", str(HERE / "counter.c"), "-o", str(plugin),
             "-Wl,--unresolved-symbols=ignore-all"], check=True,
        )  # fmt: skip
        environment = {
            **os.environ,
            "ICOUNT_OUT": str(out),
            "EDGE_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "ORT_DISABLE_TELEMETRY": "1",
            "PYTHONPATH": python_path,
            "PYTHONHASHSEED": "0",
        }
        if accesses:
            environment["ICOUNT_ACCESSES"] = "1"
        try:
            subprocess.run(
                [*emulator, "-plugin", str(plugin), *arguments],
                env=environment,
                check=True,
                timeout=TIMEOUT_S,
                capture_output=True,
                text=True,
            )
        except subprocess.CalledProcessError as error:
            last = (error.stderr.strip().splitlines() or [""])[-1]
            raise RuntimeError(
                f"{arguments[2]} under qemu ended with {error.returncode}: {last[:300]}"
            ) from error
        lines = [line.split() for line in out.read_text().splitlines() if " " in line]
    return [int(count) for _, count in sorted((int(mark), count) for mark, count in lines)]
