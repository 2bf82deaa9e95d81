"""Ways to run the command line, and a small bundle made without a compiler."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

import builder.cli as cli
from agent.bundle.manifest import Resources, Samples, Target
from agent.bundle.provenance import Provenance
from agent.bundle.tensor_spec import TensorSpec
from builder.bundles import key_files
from builder.bundles.package import Package
from tests.bundles import make_manifest
from tests.cli.terminal import Edgebundle, Result, Terminal
from tests.patience import PROGRAM_PATIENCE_S


@pytest.fixture(scope="session")
def edgebundle_process() -> Edgebundle:
    """Run `edgebundle ARGUMENTS...` in a new process, as a shell does."""
    command = str(Path(sys.executable).parent / "edgebundle")

    def run(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [command, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=PROGRAM_PATIENCE_S,
            check=False,
            cwd=cwd,
        )

    return run


@pytest.fixture
def edgebundle(capfd: pytest.CaptureFixture[str]) -> Edgebundle:
    """Run `edgebundle ARGUMENTS...` in this process, which takes a tenth of a process of its own."""

    def run(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        words = [str(argument) for argument in arguments]
        capfd.readouterr()
        with contextlib.chdir(cwd) if cwd else contextlib.nullcontext():
            code = cli.main(words)
        return subprocess.CompletedProcess(words, code, *capfd.readouterr())

    return run


@pytest.fixture
def terminal(capfd: pytest.CaptureFixture[str]) -> Terminal:
    """Run a command in this process, which has already loaded the compiler and the executor."""

    def run(*arguments: object) -> Result:
        capfd.readouterr()
        code = cli.main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return Result(code, out, err.splitlines())

    return run


@pytest.fixture
def pair(tmp_path: Path) -> key_files.KeyPair:
    return key_files.generate(tmp_path / "keys")


@pytest.fixture
def unsigned() -> Package:
    """Every member that a bundle must have, with contents that nothing here executes."""
    members = {
        "mod.so": b"\x7fELF" + bytes(1500),
        "mod.json": b"{}",
        "mod.params": bytes(2048),
        "samples/inputs.params": b"i" * 100,
        "samples/outputs.params": b"o" * 100,
    }
    manifest = make_manifest(
        members,
        name="tiny",
        version="1.2.3",
        security_counter=4,
        target=Target("x86_64-linux-gnu", "znver3", ("avx2", "fma")),
        outputs=(TensorSpec("y", "FP32", (1, 2)),),
        samples=Samples(1, 1e-4, 1e-5),
        resources=Resources(4096, 2048),
        provenance=Provenance(
            "a" * 64, "edgebundle 0.1.0", parity_error=2.5e-7, reference="onnxruntime 1.31"
        ),
    )
    return Package(manifest, members)


@pytest.fixture
def bundle(tmp_path: Path, unsigned: Package, pair: key_files.KeyPair) -> Path:
    """The file of `unsigned`, signed by `pair`."""
    path = tmp_path / "tiny.bundle"
    unsigned.sign(key_files.read_private(pair.private)).save(path)
    return path
