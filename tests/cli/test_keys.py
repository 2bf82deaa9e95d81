"""`edgebundle keygen`, `sign`, `verify` and `inspect`."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agent.bundle.archive import read_index, read_member, write_archive
from builder.bundles.key_files import KeyPair, generate
from builder.bundles.package import Package
from tests.cli.terminal import Edgebundle
from tests.patience import PATIENCE_S


def fails(done: subprocess.CompletedProcess[str], *words: str, hint: str | None = None) -> None:
    """Assert exit code 4, nothing on stdout, one error line with these words, at most one hint line."""
    assert done.returncode == 4, done
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[0].startswith("edgebundle: error: ")
    for word in words:
        assert word in lines[0]
    assert len(lines) <= 2
    if hint is not None:
        assert lines[1].startswith("edgebundle: hint: ")
        assert hint in lines[1]


def members(path: Path) -> dict[str, bytes]:
    with path.open("rb") as file:
        return {member.name: read_member(file.fileno(), member) for member in read_index(file.fileno())}


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(bytes(data))


# keygen


def test_keygen_writes_two_files_and_prints_the_next_steps(
    edgebundle_process: Edgebundle, tmp_path: Path
) -> None:
    done = edgebundle_process("keygen", "keys/", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    private, public = tmp_path / "keys" / "signing.key", tmp_path / "keys" / "signing.pub"
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert public.read_text().startswith("-----BEGIN PUBLIC KEY-----")
    assert "next:" in done.stdout
    assert "edgebundle compile" in done.stdout
    assert "BEGIN" not in done.stdout


def test_keygen_json_names_the_files(edgebundle: Edgebundle, tmp_path: Path) -> None:
    result = json.loads(edgebundle("keygen", tmp_path / "k", "--json").stdout)
    assert set(result) == {"private", "public", "key_id"}
    assert Path(result["private"]).exists()


def test_keygen_twice_keeps_the_first_keys(edgebundle: Edgebundle, tmp_path: Path) -> None:
    edgebundle("keygen", tmp_path / "keys")
    before = (tmp_path / "keys" / "signing.key").read_bytes()
    fails(edgebundle("keygen", tmp_path / "keys"), "already has keys", hint="another folder")
    assert (tmp_path / "keys" / "signing.key").read_bytes() == before


def test_keygen_below_a_file(edgebundle: Edgebundle, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    fails(edgebundle("keygen", tmp_path / "file" / "keys"), "cannot write keys", "Not a directory")


def test_keygen_without_a_folder_is_a_usage_error(edgebundle: Edgebundle) -> None:
    done = edgebundle("keygen")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "edgebundle: error: the following arguments are required: DIR",
        "edgebundle: hint: see `edgebundle keygen --help`",
    ]


# verify


def test_verify_prints_name_version_digest_and_key(
    edgebundle_process: Edgebundle, bundle: Path, pair: KeyPair
) -> None:
    done = edgebundle_process("verify", bundle, "--trust", pair.public)
    assert (done.returncode, done.stderr) == (0, "")
    digest = hashlib.sha256(bundle.read_bytes()).hexdigest()
    assert done.stdout.splitlines() == [
        "verified tiny 1.2.3",
        f"digest   sha256:{digest}",
        f"key id   {pair.key_id}",
    ]


def test_verify_json(edgebundle: Edgebundle, bundle: Path, pair: KeyPair) -> None:
    result = json.loads(edgebundle("verify", bundle, "--trust", pair.public, "--json").stdout)
    assert (result["name"], result["version"], result["key_id"]) == ("tiny", "1.2.3", pair.key_id)


def test_verify_takes_a_folder_of_keys_and_several_of_them(
    edgebundle: Edgebundle, bundle: Path, pair: KeyPair, tmp_path: Path
) -> None:
    other = generate(tmp_path / "other")
    folder = pair.public.parent
    assert edgebundle("verify", bundle, "--trust", folder).returncode == 0
    assert edgebundle("verify", bundle, "--trust", other.public, "--trust", folder).returncode == 0


def test_verify_with_another_key(edgebundle: Edgebundle, bundle: Path, tmp_path: Path) -> None:
    other = generate(tmp_path / "other")
    fails(edgebundle("verify", bundle, "--trust", other.public), "(ERR_ARBITRARY_SOFTWARE)")


def test_verify_with_a_revoked_key(edgebundle: Edgebundle, bundle: Path, pair: KeyPair) -> None:
    (pair.public.parent / "revoked").write_text(f"{pair.key_id}\n")
    fails(edgebundle("verify", bundle, "--trust", pair.public.parent), "(ERR_KEY_REVOKED)")


def test_verify_needs_a_key(edgebundle: Edgebundle, bundle: Path) -> None:
    assert edgebundle("verify", bundle).returncode == 2


@pytest.mark.parametrize(
    "content", ["", "hello", "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"]
)
def test_verify_with_a_file_that_is_not_a_key(
    edgebundle: Edgebundle, bundle: Path, tmp_path: Path, content: str
) -> None:
    (tmp_path / "bad.pub").write_text(content)
    fails(edgebundle("verify", bundle, "--trust", tmp_path / "bad.pub"), "bad.pub")


def test_verify_with_the_private_key(edgebundle: Edgebundle, bundle: Path, pair: KeyPair) -> None:
    fails(edgebundle("verify", bundle, "--trust", pair.private), "signing.key")


def test_verify_with_a_missing_key(edgebundle: Edgebundle, bundle: Path, tmp_path: Path) -> None:
    fails(edgebundle("verify", bundle, "--trust", tmp_path / "absent.pub"), "absent.pub")


def test_verify_with_a_folder_without_keys(edgebundle: Edgebundle, bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    fails(edgebundle("verify", bundle, "--trust", tmp_path / "empty"), "expected 1 to 256 keys, got 0")


def test_verify_a_missing_file(edgebundle: Edgebundle, pair: KeyPair, tmp_path: Path) -> None:
    fails(edgebundle("verify", tmp_path / "absent.bundle", "--trust", pair.public), "absent.bundle")


def test_verify_a_folder(edgebundle: Edgebundle, pair: KeyPair, tmp_path: Path) -> None:
    fails(edgebundle("verify", tmp_path, "--trust", pair.public))


def test_verify_a_file_that_is_not_a_bundle(edgebundle: Edgebundle, pair: KeyPair, tmp_path: Path) -> None:
    for content in (b"", b"hello", bytes(10240), os.urandom(10240)):
        (tmp_path / "no.bundle").write_bytes(content)
        done = edgebundle("verify", tmp_path / "no.bundle", "--trust", pair.public)
        fails(done, "no.bundle: ", "(ERR_ARBITRARY_SOFTWARE)", hint="expected the .bundle")


def test_verify_a_truncated_bundle(edgebundle: Edgebundle, bundle: Path, pair: KeyPair) -> None:
    bundle.write_bytes(bundle.read_bytes()[:-512])
    fails(edgebundle("verify", bundle, "--trust", pair.public), "(ERR_ARBITRARY_SOFTWARE)")


def test_verify_a_changed_weight(edgebundle: Edgebundle, bundle: Path, pair: KeyPair) -> None:
    with bundle.open("rb") as file:
        [params] = [member for member in read_index(file.fileno()) if member.name == "mod.params"]
    flip(bundle, params.offset + 1000)
    fails(edgebundle("verify", bundle, "--trust", pair.public), "mod.params", "(ERR_MIX_AND_MATCH)")


def test_verify_an_unsigned_bundle_explains_how_to_sign(
    edgebundle: Edgebundle, unsigned: Package, pair: KeyPair, tmp_path: Path
) -> None:
    unsigned.save(tmp_path / "u.bundle")
    fails(
        edgebundle("verify", tmp_path / "u.bundle", "--trust", pair.public),
        "not signed",
        hint="edgebundle sign",
    )


# sign


def test_signing_in_place_gives_the_same_bytes_as_compiling_with_the_key(
    edgebundle: Edgebundle, unsigned: Package, bundle: Path, pair: KeyPair, tmp_path: Path
) -> None:
    path = tmp_path / "u.bundle"
    unsigned.save(path)
    done = edgebundle("sign", path, "--sign-key", pair.private)
    assert (done.returncode, done.stderr) == (0, "")
    assert "signed tiny 1.2.3" in done.stdout
    assert pair.key_id in done.stdout
    assert path.read_bytes() == bundle.read_bytes()


def test_signing_with_another_key_replaces_the_signature(
    edgebundle: Edgebundle, bundle: Path, pair: KeyPair, tmp_path: Path
) -> None:
    other, before = generate(tmp_path / "other"), bundle.read_bytes()
    output = tmp_path / "again.bundle"
    assert edgebundle("sign", bundle, "--sign-key", other.private, "-o", output).returncode == 0
    assert bundle.read_bytes() == before
    assert edgebundle("verify", output, "--trust", other.public).returncode == 0
    fails(edgebundle("verify", output, "--trust", pair.public), "(ERR_ARBITRARY_SOFTWARE)")


def test_a_program_signs_and_one_that_fails_leaves_the_file(
    edgebundle: Edgebundle, bundle: Path, tmp_path: Path
) -> None:
    other, before = generate(tmp_path / "other"), bundle.read_bytes()
    program = tmp_path / "signer"
    program.write_text(
        "#!/bin/sh\n"
        f'[ "$1" = public-key ] && exec cat {other.public}\n'
        f"exec openssl dgst -sha256 -sign {other.private}\n"
    )
    program.chmod(0o755)
    output = tmp_path / "again.bundle"
    done = edgebundle("sign", bundle, "--sign-key", f"exec:{program}", "-o", output)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"key id {other.key_id}" in done.stdout
    assert edgebundle("verify", output, "--trust", other.public).returncode == 0
    fails(
        edgebundle("sign", bundle, "--sign-key", "exec:false"),
        "false public-key: ended with status 1",
        hint="docs/signing.md",
    )
    assert bundle.read_bytes() == before


def test_sign_refuses_members_that_do_not_match_the_manifest(
    edgebundle: Edgebundle, bundle: Path, pair: KeyPair
) -> None:
    write_archive(bundle, members(bundle) | {"mod.so": b"something else"})
    before = bundle.read_bytes()
    fails(
        edgebundle("sign", bundle, "--sign-key", pair.private),
        "mod.so",
        "(ERR_MIX_AND_MATCH)",
        hint="compile",
    )
    assert bundle.read_bytes() == before


def test_sign_with_the_public_key(edgebundle: Edgebundle, bundle: Path, pair: KeyPair) -> None:
    pair.public.chmod(0o600)
    fails(edgebundle("sign", bundle, "--sign-key", pair.public), "got a public key", hint="signing.key")


def test_sign_with_a_key_that_others_can_read(edgebundle: Edgebundle, bundle: Path, pair: KeyPair) -> None:
    pair.private.chmod(0o644)
    before = bundle.read_bytes()
    fails(edgebundle("sign", bundle, "--sign-key", pair.private), "0644", hint="chmod 600")
    assert bundle.read_bytes() == before


def test_sign_with_a_missing_key(edgebundle: Edgebundle, bundle: Path, tmp_path: Path) -> None:
    fails(edgebundle("sign", bundle, "--sign-key", tmp_path / "absent"), "absent", hint="keygen")


def test_sign_a_file_that_is_not_a_bundle(edgebundle: Edgebundle, pair: KeyPair, tmp_path: Path) -> None:
    (tmp_path / "no.bundle").write_text("hello")
    fails(edgebundle("sign", tmp_path / "no.bundle", "--sign-key", pair.private), "no.bundle")


def test_sign_into_a_missing_folder(
    edgebundle: Edgebundle, bundle: Path, pair: KeyPair, tmp_path: Path
) -> None:
    fails(
        edgebundle("sign", bundle, "--sign-key", pair.private, "-o", tmp_path / "no" / "o.bundle"),
        "No such file",
    )


def test_sign_on_a_full_disk_keeps_the_bundle_and_leaves_no_incomplete_file(
    bundle: Path, pair: KeyPair, unsigned: Package, tmp_path: Path
) -> None:
    # A limit on the size of files replaces the full disk: writing fails halfway with EFBIG.
    unsigned.save(bundle)
    before = bundle.read_bytes()
    script = (
        "import resource, sys\n"
        "from builder.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "sign", str(bundle), "--sign-key", str(pair.private)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    fails(done, "File too large")
    assert bundle.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["keys", "tiny.bundle"]


def test_counter_in_milliseconds_is_not_signed_unless_it_is_meant(
    edgebundle: Edgebundle, unsigned: Package, pair: KeyPair, tmp_path: Path
) -> None:
    path = tmp_path / "late.bundle"
    late = replace(unsigned.manifest, security_counter=1_796_000_000_000)
    replace(unsigned, manifest=late).save(path)
    before = path.read_bytes()
    done = edgebundle("sign", path, "--sign-key", pair.private)
    fails(done, "would lock out later builds", hint="--security-counter 1796000000")
    assert path.read_bytes() == before
    replace(unsigned, manifest=replace(late, counter_ahead_of_time=True)).save(path)
    assert edgebundle("sign", path, "--sign-key", pair.private).returncode == 0
    assert "1796000000000 (security_counter, ahead of time)" in edgebundle("inspect", path).stdout


# inspect


def test_inspect_without_a_key_says_that_nothing_was_verified(
    edgebundle: Edgebundle, bundle: Path, pair: KeyPair
) -> None:
    done = edgebundle("inspect", bundle)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("tiny 1.2.3\n")
    assert "signature   not checked; it names key" in done.stdout
    assert pair.key_id in done.stdout


def test_an_untrusted_bundle_is_refused_with_the_key_id_that_keygen_shows(
    edgebundle: Edgebundle, bundle: Path, pair: KeyPair, tmp_path: Path
) -> None:
    edgebundle("keygen", tmp_path / "other")
    done = edgebundle("verify", bundle, "--trust", tmp_path / "other" / "signing.pub")
    assert done.returncode == 4
    assert f"signed by key {pair.key_id}, which is not trusted" in done.stderr


def test_inspect_shows_manifest_members_sizes_parity_and_target(
    edgebundle: Edgebundle, bundle: Path, pair: KeyPair
) -> None:
    out = edgebundle("inspect", bundle, "--trust", pair.public).stdout
    assert f"verified, by key {pair.key_id}" in out
    assert f"sha256:{hashlib.sha256(bundle.read_bytes()).hexdigest()}" in out
    for words in (
        "x86_64-linux-gnu, znver3, needs avx2 fma",
        "tvm-ffi-0.1, glibc 2.28 or newer",
        "x FP32 [1, 4]",
        "y FP32 [1, 2]",
        "relative error 2.5e-07 against onnxruntime 1.31",
        "2.0 KiB for weights, 4.0 KiB for the rest",
        "4 (security_counter)",
        "model.sig",
    ):
        assert words in out
    assert [line.split() for line in out.splitlines() if "mod.so" in line] == [["mod.so", "1.5", "KiB"]]


def test_inspect_with_the_wrong_key_shows_the_bundle_and_fails(
    edgebundle: Edgebundle, bundle: Path, tmp_path: Path
) -> None:
    other = generate(tmp_path / "other")
    done = edgebundle("inspect", bundle, "--trust", other.public)
    assert done.returncode == 4
    assert "DOES NOT VERIFY (ERR_ARBITRARY_SOFTWARE)" in done.stdout
    assert done.stderr.startswith("edgebundle: error: ")


def test_inspect_an_unsigned_bundle(edgebundle: Edgebundle, unsigned: Package, tmp_path: Path) -> None:
    unsigned.save(tmp_path / "u.bundle")
    done = edgebundle("inspect", tmp_path / "u.bundle")
    assert done.returncode == 0
    assert "none: devices refuse this bundle" in done.stdout


def test_inspect_json_has_the_manifest(edgebundle: Edgebundle, bundle: Path, pair: KeyPair) -> None:
    unchecked = json.loads(edgebundle("inspect", bundle, "--json").stdout)
    assert (unchecked["verified"], unchecked["signed"], unchecked["key_id"]) == (False, True, None)
    assert unchecked["manifest"] == json.loads(members(bundle)["manifest.json"])
    assert unchecked["members"]["mod.params"] == 2048
    checked = json.loads(edgebundle("inspect", bundle, "--json", "--trust", pair.public).stdout)
    assert (checked["verified"], checked["key_id"]) == (True, pair.key_id)


def test_inspect_files_that_are_not_bundles(edgebundle: Edgebundle, tmp_path: Path) -> None:
    (tmp_path / "no.bundle").write_text("hello")
    os.mkfifo(tmp_path / "pipe.bundle")
    fails(edgebundle("inspect", tmp_path / "no.bundle"), "(ERR_ARBITRARY_SOFTWARE)")
    fails(edgebundle("inspect", tmp_path / "absent.bundle"), "absent.bundle")
    fails(edgebundle("inspect", tmp_path / "pipe.bundle"), "regular file")


def test_verify_loads_nothing_heavy(bundle: Path, pair: KeyPair) -> None:
    script = (
        "import sys\n"
        "from builder.cli import main\n"
        "code = main(sys.argv[1:])\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "sys.exit(code or sorted(loaded & {'tvm', 'tvm_ffi', 'numpy', 'onnx', 'paho'}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "verify", str(bundle), "--trust", str(pair.public)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.stderr == "[]\n"
