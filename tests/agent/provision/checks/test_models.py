"""The checks of active bundles: each is verified completely, and checked for admission again."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from agent.bundle.keyring import Keyring
from agent.bundle.machine import Machine
from agent.deploy.store.active import ActiveModel, RolledBack
from agent.deploy.store.store import Store
from agent.provision.checks import models
from agent.provision.finding import Finding, Level
from agent.wire.reported import Origin
from tests.agent.provision.checks.rig import HERE, one
from tests.bundles import Signer


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    return Signer(tmp_path / "trust")


def installed(state: Path, raw: bytes, name: str = "echo") -> Path:
    """Make a bundle the active one; return its path."""
    store = Store(state)
    digest = f"sha256:{hashlib.sha256(raw).hexdigest()}"
    store.bundle_path(digest).write_bytes(raw)
    store.switch(ActiveModel(name, digest, "1.0.0", Origin.LOCAL, "job", None))
    return store.bundle_path(digest)


def found_in(state: Path, signer: Signer, this: Machine = HERE) -> Finding:
    return one(models.check_models(state, Keyring.from_dir(signer.trust), this, lambda _line: None))


def test_bundle_is_verified_to_its_last_byte(tmp_path: Path, signer: Signer) -> None:
    path = installed(tmp_path / "state", signer.packed())
    assert found_in(tmp_path / "state", signer).level is Level.OK

    raw = bytearray(path.read_bytes())
    raw[raw.index(b"\x7fELF") + 5] ^= 1
    path.write_bytes(raw)
    found = found_in(tmp_path / "state", signer)
    assert (found.level, "ERR_MIX_AND_MATCH" in found.message) == (Level.FAIL, True)

    path.unlink()
    assert "its bundle is missing" in found_in(tmp_path / "state", signer).message


def test_predecessor_that_came_back_is_shown_with_the_reason(tmp_path: Path, signer: Signer) -> None:
    state = tmp_path / "state"
    installed(state, signer.packed())
    store = Store(state)
    store.commit_counter("echo", 5)
    assert "is a downgrade" in found_in(state, signer).message
    back = RolledBack("sha256:" + "a" * 64, "2.0.0", "job-2", "3 workers died within 60 s")
    store.record(replace(store.active()["echo"], counter_floor=1, rolled_back=back))
    found = found_in(state, signer)
    assert found.level is Level.WARN
    assert "2.0.0 was rolled back: 3 workers died within 60 s" in found.message


def test_bundle_with_an_unknown_key_another_machine_or_an_old_counter_is_found(
    tmp_path: Path, signer: Signer
) -> None:
    stranger = Signer(tmp_path / "stranger")
    installed(tmp_path / "a", stranger.packed())
    assert "ERR_ARBITRARY_SOFTWARE" in found_in(tmp_path / "a", signer).message

    installed(tmp_path / "b", signer.packed())
    pi = replace(HERE, arch="aarch64", compatible=frozenset({"linux-aarch64"}))
    assert "ERR_INCOMPATIBLE" in found_in(tmp_path / "b", signer, pi).message
    Store(tmp_path / "b").commit_counter("echo", 7)
    assert "ERR_ROLLBACK" in found_in(tmp_path / "b", signer).message


def test_state_of_a_newer_agent_is_found_and_an_empty_one_is_fine(tmp_path: Path, signer: Signer) -> None:
    assert found_in(tmp_path / "none", signer).level is Level.OK
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer/format").write_text("9\n")
    assert "written by a newer agent" in found_in(tmp_path / "newer", signer).message
