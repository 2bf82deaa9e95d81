"""A machine, a configuration and a shorthand for the tests of the report."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from agent.bundle.machine import Machine
from agent.provision.finding import Finding, Level

HERE = Machine("x86_64", "", frozenset({"avx2"}), "2.36", "tvm-ffi-0.1", frozenset({"linux-x86_64"}))


def one(findings: Iterable[Finding]) -> Finding:
    """Return the only finding; a warning or failure has a hint."""
    [finding] = findings
    if finding.level is not Level.OK:
        assert finding.hint
    return finding


def configuration(folder: Path, trust: Path, port: int) -> Path:
    """Write what `enroll` would write; return the configuration's path."""
    (folder / "keyring").mkdir(parents=True)
    (folder / "keyring/signing.pub").write_bytes(trust.read_bytes())
    path = folder / "agent.toml"
    path.write_text(
        f'device = "kitchen"\nstate_dir = "state"\n[broker]\nurl = "mqtt://127.0.0.1:{port}"\n'
        '[trust]\ndir = "keyring"\n'
    )
    path.chmod(0o600)
    return path
