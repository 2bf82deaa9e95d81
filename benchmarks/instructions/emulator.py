"""Counts the instructions that a program executes under qemu's user mode, exactly and repeatably.

Needs gcc and Debian's `qemu-user` (the static emulators load no plugins). ARM programs also need root (for a
mount namespace) and the arm64 root folder that `packaging/debian-root.sh` makes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.requirements import RequirementError, require_programs, require_root

HERE: Final = Path(__file__).parent
PROJECT: Final = HERE.parents[1]
# Program -> Debian package.
PROGRAMS: Final = {"gcc": "gcc", "qemu-aarch64": "qemu-user", "debootstrap": "debootstrap"}
X86_PROGRAMS: Final = {"gcc": "gcc", "qemu-x86_64": "qemu-user"}
# The kernel opens the static emulator when it is registered; afterwards it does not need the file.
STATIC_EMULATOR: Final = {"qemu-aarch64-static": "qemu-user-static"}
REGISTERED: Final = Path("/proc/sys/fs/binfmt_misc/qemu-aarch64")
# Wheels for the root folder's Python: those of the engines, and those that the agent needs.
PACKAGES: Final = ("numpy", "apache-tvm-ffi==0.1.14.post1", "onnxruntime", "ncnn", "ai-edge-litert")
# Engines whose package has another name.
_PACKAGE_NAMES: Final = {"litert": "ai_edge_litert"}
PLATFORMS: Final = (
    "manylinux_2_28_aarch64",
    "manylinux_2_27_aarch64",
    "manylinux_2_17_aarch64",
    "manylinux2014_aarch64",
)
AGENT_PACKAGES: Final = PACKAGES[:2]
TIMEOUT_S: Final = 1800


@dataclass(frozen=True, slots=True)
class Emulator:
    """An arm64 root folder whose programs run under the emulator, with their instructions counted.

    Attributes
    ----------
    root
        The root folder.
    packages
        The folder inside it that holds the engines' Python packages.
    """

    root: Path
    packages: Path

    @classmethod
    def prepare(cls, needs: Sequence[str] = PACKAGES) -> Emulator:
        """Make the root folder and install packages in it, unless they exist already.

        Parameters
        ----------
        needs
            Requirements as pip takes them.

        Raises
        ------
        RequirementError
            If a program is missing, this process is not root, or the root folder cannot be made.
        """
        require_programs(PROGRAMS if REGISTERED.exists() else {**PROGRAMS, **STATIC_EMULATOR})
        require_root("counting the instructions of ARM programs")
        script = PROJECT / "packaging" / "debian-root.sh"
        command = [str(script), "arm64", "bookworm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RequirementError(f"{script.name} failed: {_last_line(done.stderr)}")
        root = Path(done.stdout.strip().splitlines()[-1])
        packages = root / "opt" / ("bench" if needs == PACKAGES else "bench-agent")
        complete = packages / ".complete"
        if not complete.exists() or complete.read_text() != "\n".join(needs):
            platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
            command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(packages), "--upgrade"]
            command += ["--only-binary=:all:", "--python-version", "3.11", "--implementation", "cp"]
            subprocess.run([*command, *platforms, *needs], check=True, timeout=TIMEOUT_S)
            complete.write_text("\n".join(needs))
        return cls(root, packages)

    def version(self, engine: str) -> str:
        """Return the installed version of `engine`; an empty string for ours, which is not installed."""
        package = _PACKAGE_NAMES.get(engine, engine)
        found = [path.name for path in self.packages.glob(f"{package}-*.dist-info")]
        return found[0].removesuffix(".dist-info").removeprefix(f"{package}-") if found else ""

    def instructions_of_an_inference(self, engine: str, place: Path, cpu: str) -> int:
        """Count the guest instructions of one inference on one thread, after a warm-up run.

        Parameters
        ----------
        engine
            A name that `guest.py` knows.
        place
            The folder with the model's files.
        cpu
            A processor that qemu knows, such as `cortex-a72`.
        """
        marks = self.marks("guest.py", engine, [place], cpu)
        return marks[1] - marks[0]

    def marks(self, program: str, engine: str, places: Sequence[Path], cpu: str) -> list[int]:
        """Run a program of this folder; return the instructions executed up to each of its marks."""
        return counted(*self.command(program, [engine, *map(str, places)], cpu))

    def command(self, program: str, words: Sequence[str], cpu: str) -> tuple[list[str], list[str], str]:
        """Return the emulator's command line, that of a program of this folder, and its `PYTHONPATH`."""
        # An empty /sys in a separate mount namespace: some engines crash on the host's CPU description.
        shell = 'mount -t tmpfs none /sys && exec "$@"'
        command = ["unshare", "-m", "bash", "-c", shell, "bash"]
        command += ["qemu-aarch64", "-cpu", cpu, "-L", str(self.root)]
        python = self.root / "usr" / "bin" / "python3.11"
        return command, [str(python), str(HERE / program), *words], f"{self.packages}:{PROJECT}"


def marks_on_this_machine(program: str, engine: str, places: Sequence[Path]) -> list[int]:
    """Run a program of this folder on an emulated x86-64 core; return the steps up to each of its marks.

    It runs with this Python. The core has AVX2: qemu does not emulate AVX-512. A step is an instruction or an
    access to memory: an x86 multiply-add that reads a factor from memory is still one instruction.

    Raises
    ------
    RequirementError
        If a program is missing.
    """
    require_programs(X86_PROGRAMS)
    return counted(*plain_command(program, [engine, *map(str, places)]), accesses=True)


def plain_command(program: str, words: Sequence[str]) -> tuple[list[str], list[str], str]:
    """Return the command line of qemu for x86-64, that of a program of this folder, and its `PYTHONPATH`."""
    return ["qemu-x86_64", "-cpu", "max"], [sys.executable, str(HERE / program), *words], str(PROJECT)


def counted(
    emulator: Sequence[str], arguments: Sequence[str], python_path: str, *, accesses: bool = False
) -> list[int]:
    """Run a program under an emulator with the counter; return the count at each of its marks.

    Parameters
    ----------
    emulator
        The emulator's command line, without the program's.
    arguments
        The program's command line: Python, script, engine, folders.
    python_path
        Its `PYTHONPATH`.
    accesses
        Count accesses to memory in addition to instructions.

    Raises
    ------
    RuntimeError
        If the program fails.
    """
    variables = {"ICOUNT_ACCESSES": "1"} if accesses else {}
    text = plugged("counter.c", "ICOUNT_OUT", emulator, arguments, python_path, variables)
    lines = [line.split() for line in text.splitlines() if " " in line]
    return [int(count) for _, count in sorted((int(mark), count) for mark, count in lines)]


def plugged(
    plugin: str,
    out_variable: str,
    emulator: Sequence[str],
    arguments: Sequence[str],
    python_path: str,
    variables: Mapping[str, str],
) -> str:
    """Run a program on one thread under an emulator with a plugin; return what the plugin wrote.

    Parameters
    ----------
    plugin
        The plugin's source, a file of this folder.
    out_variable
        The environment variable from which the plugin takes the name of its output file.
    emulator, arguments, python_path
        As for `counted`.
    variables
        Other environment variables that the plugin reads.

    Raises
    ------
    RuntimeError
        If the program fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        library, out = Path(folder, "plugin.so"), Path(folder, "out")
        subprocess.run(
            ["gcc", "-O2", "-fPIC", "-shared", str(HERE / plugin), "-o", str(library),
             "-Wl,--unresolved-symbols=ignore-all"], check=True,
        )  # fmt: skip
        environment = {
            **os.environ,
            "EDGE_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "ORT_DISABLE_TELEMETRY": "1",
            "PYTHONPATH": python_path,
            "PYTHONHASHSEED": "0",
            out_variable: str(out),
            **variables,
        }
        try:
            subprocess.run(
                [*emulator, "-plugin", str(library), *arguments],
                env=environment,
                check=True,
                timeout=TIMEOUT_S,
                capture_output=True,
                text=True,
            )
        except subprocess.CalledProcessError as error:
            raise RuntimeError(
                f"{arguments[1]} under qemu ended with {error.returncode}: {_last_line(error.stderr)}"
            ) from error
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"{arguments[1]} under qemu took more than {TIMEOUT_S} s") from error
        return out.read_text()


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:300]
