"""Our signatures and the reference implementation's: each verifies the other's, and we are stricter."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives import serialization

from agent.bundle import archive
from agent.bundle.signature import verify_signature
from agent.bundle.verify import verify_only
from agent.errors import FormatError, MixAndMatchError, SignatureError
from tests.bundles import public_pem
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")


def model_signing(*arguments: str | Path) -> Result:
    """Run its command in this process: to load it takes a second."""
    from model_signing._cli import main

    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def model_signing_process(*arguments: str | Path, seed: int) -> subprocess.CompletedProcess[str]:
    # Among other things, the hash seed decides in which order it writes JSON keys and ignored paths.
    environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
    command = [sys.executable, "-m", "model_signing", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment, check=False
    )


@pytest.fixture
def keys(kit: Any, tmp_path: Path) -> tuple[Path, Path]:
    private, public = tmp_path / "signing.key", tmp_path / "signing.pub"
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    private.write_bytes(kit.key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    public.write_bytes(public_pem(kit.key))
    return private, public


def unpack(raw: bytes, folder: Path) -> Path:
    (folder / "pets.bundle").write_bytes(raw)
    with tarfile.open(folder / "pets.bundle") as tar:
        tar.extractall(folder / "pets")  # Python 3.11.2 has no filters
    return folder / "pets"


def packed(folder: Path, target: Path) -> Path:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    archive.write_archive(target, {str(path.relative_to(folder)): path for path in paths})
    return target


def test_reference_verifier_accepts_our_bundle(kit: Any, keys: tuple[Path, Path], tmp_path: Path) -> None:
    folder = unpack(kit.bundle(), tmp_path)
    check = ("verify", "key", folder, "--signature", folder / "model.sig", "--public_key", keys[1])
    result = model_signing(*check)
    assert result.exit_code == 0, result.output
    assert "Verification succeeded" in result.output
    (folder / "mod.so").write_bytes(b"other code")
    assert model_signing(*check).exit_code != 0


@pytest.mark.parametrize("seed", [1, 2])
def test_we_accept_the_reference_signers_signature(
    kit: Any, keys: tuple[Path, Path], tmp_path: Path, seed: int
) -> None:
    folder = unpack(kit.bundle(), tmp_path)
    ours = (folder / "model.sig").read_bytes()
    signing = ("sign", "key", folder, "--signature", folder / "model.sig", "--private_key", keys[0])
    result = model_signing_process(*signing, seed=seed)
    assert result.returncode == 0, result.stderr
    assert (folder / "model.sig").read_bytes() != ours
    manifest, _ = verify_only(packed(folder, tmp_path / "theirs.bundle"), kit.keyring)
    assert manifest == kit.manifest()
    (folder / "mod.so").write_bytes(b"\x7fELF no code in HERE")
    with pytest.raises(MixAndMatchError):
        verify_only(packed(folder, tmp_path / "theirs.bundle"), kit.keyring)


def test_reference_signature_that_leaves_a_member_out_is_refused(
    kit: Any, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = unpack(kit.bundle(), tmp_path)
    signing = ("sign", "key", folder, "--signature", folder / "model.sig", "--private_key", keys[0])
    assert model_signing(*signing, "--ignore-paths", folder / "mod.so").exit_code == 0
    # Their own verifier accepts any content in the files that it ignores.
    (folder / "mod.so").write_bytes(b"other code")
    check = ("verify", "key", folder, "--signature", folder / "model.sig", "--public_key", keys[1])
    assert model_signing(*check).exit_code == 0
    with pytest.raises(SignatureError, match=r"leaves out 'mod\.so'"):
        verify_only(packed(folder, tmp_path / "theirs.bundle"), kit.keyring)


def test_reference_signature_that_follows_links_is_refused(
    kit: Any, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = unpack(kit.bundle(), tmp_path)
    signing = ("sign", "key", folder, "--signature", folder / "model.sig", "--private_key", keys[0])
    assert model_signing(*signing, "--allow_symlinks").exit_code == 0
    with pytest.raises(FormatError, match="no links"):
        verify_only(packed(folder, tmp_path / "theirs.bundle"), kit.keyring)


def test_reference_verifier_accepts_loose_envelopes_and_we_do_not(
    kit: Any, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = unpack(kit.bundle(), tmp_path)
    loose = (folder / "model.sig").read_bytes().replace(b'"keyid":""', b'"keyid":"", "keyid":""') + b"\n"
    (folder / "model.sig").write_bytes(loose)
    check = ("verify", "key", folder, "--signature", folder / "model.sig", "--public_key", keys[1])
    assert model_signing(*check).exit_code == 0
    with pytest.raises(FormatError):
        verify_signature(loose, kit.keyring)
