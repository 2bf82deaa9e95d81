"""A program that signs: what it is asked, and each of its wrong answers in one line."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.bundle.keyring import Keyring
from agent.bundle.verify import verify
from builder.bundles import key_files
from builder.bundles.package import Package
from builder.bundles.signers import open_signer
from builder.errors import KeyFileError
from tests.bundles import FILES, make_manifest
from tests.needs import needed

PAGE = Path(__file__).parents[3] / "docs" / "signing.md"
_PROGRAM = """
import sys
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from builder.bundles.key_files import read_private

key = read_private({key!r})
PEM = key.public_key().public_bytes(
    serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
)


def main(verb):
    if verb == "public-key":
        return PEM
    return key.sign(sys.stdin.buffer.read(), ec.ECDSA(hashes.SHA256()))


{change}
sys.stdout.buffer.write(main(sys.argv[-1]))
"""


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], str]:
    """Return the name of a key that a program signs with; the program can be changed."""
    pair = key_files.generate(tmp_path / "keys")

    def make(change: str = "") -> str:
        path = tmp_path / "a signer.py"
        path.write_text(_PROGRAM.format(key=str(pair.private), change=change))
        return f"exec:{sys.executable} {shlex.quote(str(path))} --profile 'the shop'"

    return make


def test_program_signs_a_bundle_that_a_device_accepts(program: Callable[[str], str], tmp_path: Path) -> None:
    Package(make_manifest(), FILES).sign(open_signer(program(""))).save(tmp_path / "model.bundle")
    keyring = Keyring.from_files([tmp_path / "keys" / "signing.pub"])
    with verify(tmp_path / "model.bundle", keyring) as bundle:
        assert [bundle.key_id] == list(keyring.keys)


def test_a_name_without_exec_is_a_key_file(tmp_path: Path) -> None:
    pair = key_files.generate(tmp_path)
    assert open_signer(str(pair.private)).public_key() == key_files.read_private(pair.private).public_key()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("sys.exit(3)", "public-key: ended with status 3"),
        ("import os; os.kill(os.getpid(), 9)", "public-key: ended with status -9"),
        ("import time; time.sleep(600)", "public-key: no answer within 2 s"),
        ("PEM = b''", "public-key: expected a public key in PEM"),
        ("PEM = PEM[:90]", "public-key: expected a public key in PEM"),
        ("PEM = PEM * 100", "public-key: expected at most 16384 bytes, got 17800"),
        (
            "PEM = ec.generate_private_key(ec.SECP384R1()).public_key().public_bytes("
            "serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)",
            "public-key: expected an EC P-256 key, got another kind",
        ),
    ],
)
def test_program_without_a_public_key_is_refused_before_anything_is_signed(
    program: Callable[[str], str], change: str, message: str
) -> None:
    with pytest.raises(KeyFileError) as caught:
        open_signer(program(change), limit_s=2)
    assert str(caught.value) == f"{sys.executable} {message}"
    assert "docs/signing.md" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("if sys.argv[-1] == 'sign': sys.exit(1)", "sign: ended with status 1"),
        ("key = ec.generate_private_key(ec.SECP256R1())", "sign: expected an ECDSA signature with SHA-256"),
        ("if sys.argv[-1] == 'sign': main = lambda _: b''", "sign: expected an ECDSA signature"),
        ("if sys.argv[-1] == 'sign': main = lambda _: bytes(64)", "sign: expected an ECDSA signature"),
        ("if sys.argv[-1] == 'sign': main = lambda _: bytes(20_000)", "sign: expected at most 16384 bytes"),
    ],
)
def test_signature_that_its_public_key_does_not_verify_is_refused(
    program: Callable[[str], str], change: str, message: str
) -> None:
    signer = open_signer(program(change))
    with pytest.raises(KeyFileError, match=message):
        Package(make_manifest(), FILES).sign(signer)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exec:", "expected a program behind exec:, got nothing"),
        ("exec:  ", "expected a program behind exec:, got nothing"),
        ("exec:sign 'it", "exec:sign 'it: expected words as a shell reads them: No closing quotation"),
        ("exec:./no-such-program", "./no-such-program public-key: cannot be run: No such file or directory"),
        ("exec:/", "/ public-key: cannot be run: Permission denied"),
        ("exec:a\0b", "a\0b public-key: cannot be run: embedded null byte"),
        ("exec:true", "true public-key: expected a public key in PEM"),
    ],
)
def test_what_is_no_program_is_one_line(name: str, message: str) -> None:
    with pytest.raises(KeyFileError) as caught:
        open_signer(name)
    assert str(caught.value) == message


def test_script_of_the_page_signs(tmp_path: Path) -> None:
    needed("openssl")
    pair = key_files.generate(tmp_path / "keys")
    (text,) = re.findall(r"```sh\n(#!/bin/sh\n.*?)```", PAGE.read_text(), re.DOTALL)
    script = tmp_path / "sign-with-openssl"
    script.write_text(text)
    script.chmod(0o755)
    signer = open_signer(f"exec:{script} {pair.private}")
    Package(make_manifest(), FILES).sign(signer).save(tmp_path / "model.bundle")
    with verify(tmp_path / "model.bundle", Keyring.from_files([pair.public])) as bundle:
        assert bundle.key_id == pair.key_id
