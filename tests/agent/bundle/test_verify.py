from __future__ import annotations

import ctypes
import dataclasses
import errno
import fcntl
import hashlib
import mmap
import os
import sysconfig
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from agent.bundle import archive
from agent.bundle import verify as verify_module
from agent.bundle.keyring import Keyring, key_id
from agent.bundle.manifest import Manifest
from agent.bundle.signature import Statement, make_signature, verify_signature
from agent.bundle.verify import VerifiedBundle, verify, verify_only
from agent.errors import (
    BundleError,
    EndlessDataError,
    FormatError,
    KeyRevokedError,
    MixAndMatchError,
    NoSpaceError,
    SignatureError,
    StoreError,
)


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def write(folder: Path, members: dict[str, bytes]) -> Path:
    path = folder / "pets.bundle"
    path.write_bytes(archive.pack(members))
    return path


def refuse(kit: Any, path: Path, expected: type[Exception], message: str = ".") -> None:
    """Check that `verify` and `verify_only` both refuse a bundle with this error and leak no descriptor."""
    before = open_descriptors()
    for way in (verify, verify_only):
        with pytest.raises(expected, match=message) as error:
            way(path, kit.keyring)
        assert type(error.value) is expected
    assert open_descriptors() == before


def test_verified_bundle_holds_the_files_that_were_signed(kit: Any, tmp_path: Path) -> None:
    path = write(tmp_path, kit.members())
    with verify(path, kit.keyring) as bundle:
        assert {name: os.pread(fd, 1 << 16, 0) for name, fd in bundle.files.items()} == kit.files
        assert bundle.manifest == kit.manifest()
        assert bundle.key_id == key_id(kit.key.public_key())
        assert bundle.digest == "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()
        assert verify_only(path, kit.keyring) == (bundle.manifest, bundle.digest)


def test_callers_descriptor_stays_open_at_its_position(kit: Any, tmp_path: Path) -> None:
    with write(tmp_path, kit.members()).open("rb") as file:
        file.seek(7)
        verify(file.fileno(), kit.keyring).close()
        assert file.tell() == 7


def test_files_are_closed_once(kit: Any, tmp_path: Path) -> None:
    before = open_descriptors()
    bundle = verify(write(tmp_path, kit.members()), kit.keyring)
    assert open_descriptors() == before + len(kit.files)
    bundle.close()
    bundle.close()
    assert open_descriptors() == before
    assert not bundle.files


def test_files_cannot_be_changed_after_verification(kit: Any, tmp_path: Path) -> None:
    with verify(write(tmp_path, kit.members()), kit.keyring) as bundle:
        fd = bundle.files["mod.so"]
        for change in (
            lambda: os.pwrite(fd, b"x", 0),
            lambda: os.ftruncate(fd, 0),
            lambda: os.ftruncate(fd, 1 << 20),
            lambda: mmap.mmap(fd, 4, prot=mmap.PROT_READ | mmap.PROT_WRITE),
        ):
            with pytest.raises(PermissionError):
                change()
        # It cannot be changed through another descriptor of the same file either.
        with pytest.raises(PermissionError):
            again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
            os.pwrite(again, b"x", 0)


def test_only_verification_makes_a_verified_bundle(kit: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        VerifiedBundle(kit.manifest(), "sha256:" + "0" * 64, "0" * 64, {}, object())
    with verify(write(tmp_path, kit.members()), kit.keyring) as bundle:
        with pytest.raises((TypeError, ValueError)):
            dataclasses.replace(bundle, digest="sha256:" + "0" * 64)  # type: ignore[call-arg]
        with pytest.raises(dataclasses.FrozenInstanceError):
            bundle.digest = "sha256:" + "0" * 64  # type: ignore[misc]


def test_memory_that_the_kernel_holds_for_a_while_is_sealed_later(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seal, tries = write(tmp_path, kit.members()), fcntl.fcntl, 0

    def held(fd: int, command: int, argument: int = 0) -> int:
        nonlocal tries
        tries += command == fcntl.F_ADD_SEALS
        if command == fcntl.F_ADD_SEALS and tries < free_at:
            raise OSError(errno.EBUSY, "Device or resource busy")
        return int(seal(fd, command, argument))

    monkeypatch.setattr(fcntl, "fcntl", held)
    free_at = 5
    with verify(path, kit.keyring) as bundle:
        for fd in bundle.files.values():
            assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & verify_module._SEALS == verify_module._SEALS
    free_at, before = 10_000, open_descriptors()
    with pytest.raises(StoreError, match="cannot seal the bundle's memory: Device or resource busy"):
        verify(path, kit.keyring)
    assert open_descriptors() == before


def test_sealed_code_can_be_loaded(kit: Any, tmp_path: Path) -> None:
    # Any shared object will do: this one is the interpreter's.
    library = min(Path(sysconfig.get_config_var("DESTSHARED")).glob("_*.so"))
    members = kit.members({**kit.files, "mod.so": library.read_bytes()})
    with verify(write(tmp_path, members), kit.keyring) as bundle:
        loaded = ctypes.PyDLL(f"/proc/self/fd/{bundle.files['mod.so']}")
        assert hasattr(loaded, f"PyInit_{library.name.partition('.')[0]}")


def test_unsigned_bundle_is_refused(kit: Any, tmp_path: Path) -> None:
    members = kit.members()
    del members["model.sig"]
    refuse(kit, write(tmp_path, members), SignatureError, "not signed")


def test_unknown_and_revoked_keys_are_refused(kit: Any, tmp_path: Path) -> None:
    path = write(tmp_path, kit.members())
    stranger = Keyring.of([ec.derive_private_key(99, ec.SECP256R1()).public_key()])
    with pytest.raises(SignatureError):
        verify(path, stranger)
    with pytest.raises(KeyRevokedError):
        verify(path, Keyring(kit.keyring.keys, frozenset({key_id(kit.key.public_key())})))


def _without(name: str) -> Callable[[dict[str, bytes]], dict[str, bytes]]:
    return lambda members: {key: value for key, value in members.items() if key != name}


def _with(name: str, data: bytes) -> Callable[[dict[str, bytes]], dict[str, bytes]]:
    return lambda members: {**members, name: data}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_with("samples/extra.bin", b"x"), "samples/extra.bin, which the signature does not list"),
        (_without("samples/outputs.params"), "no samples/outputs.params"),
        (_without("labels.txt"), "no labels.txt"),
        (_without("mod.so"), "no mod.so"),
        (_without("manifest.json"), "no manifest.json"),
        (_with("mod.so", b"\x7fELF other code here!"), "mod.so"),
        (_with("mod.so", b"\x7fELF no code in HERE"), "mod.so is not the file that was signed"),
        (_with("labels.txt", b""), "labels.txt: expected 16 bytes, as in the manifest, got 0"),
        (_with("manifest.json", b"{}"), "manifest.json is not the file that was signed"),
    ],
)
def test_members_other_than_those_that_were_signed_are_refused(
    kit: Any, tmp_path: Path, change: Callable[[dict[str, bytes]], dict[str, bytes]], message: str
) -> None:
    refuse(kit, write(tmp_path, change(kit.members())), MixAndMatchError, message)


def test_parts_of_two_signed_bundles_do_not_mix(kit: Any, tmp_path: Path) -> None:
    old, new = (
        kit.members(),
        kit.members({**kit.files, "mod.so": b"\x7fELF newer code here."}, version="1.3.0"),
    )
    for name in ("mod.so", "manifest.json", "model.sig"):
        refuse(kit, write(tmp_path, {**new, name: old[name]}), MixAndMatchError)


def test_manifest_that_disagrees_with_the_signature_is_refused_even_if_signed(
    kit: Any, tmp_path: Path
) -> None:
    other = {**kit.files, "mod.so": b"\x7fELF no code in HERE"}
    wrong_digest = kit.sign({**kit.files, "manifest.json": kit.manifest(other).to_bytes()})
    refuse(kit, write(tmp_path, wrong_digest), MixAndMatchError, "mod.so: manifest and signature disagree")
    wrong_size = kit.sign(
        {**kit.files, "manifest.json": kit.manifest({**kit.files, "mod.so": b""}).to_bytes()}
    )
    refuse(kit, write(tmp_path, wrong_size), MixAndMatchError, "mod.so: expected 0 bytes, as in the manifest")
    fewer = {name: data for name, data in kit.files.items() if name != "labels.txt"}
    unlisted = kit.sign({**kit.files, "manifest.json": kit.manifest(fewer).to_bytes()})
    refuse(kit, write(tmp_path, unlisted), MixAndMatchError, "labels.txt, which the manifest does not list")
    missing = kit.sign({**fewer, "manifest.json": kit.manifest().to_bytes()})
    refuse(kit, write(tmp_path, missing), MixAndMatchError, "no labels.txt, which the manifest lists")


def test_manifest_in_another_encoding_is_refused_even_if_signed(kit: Any, tmp_path: Path) -> None:
    raw = kit.manifest().to_bytes()
    for loose in (
        raw + b"\n",
        raw.replace(b":", b": ", 1),
        raw.replace(b'"pets"', b'"pets","name":"pets"', 1),
    ):
        refuse(kit, write(tmp_path, kit.sign({**kit.files, "manifest.json": loose})), FormatError)


def test_manifest_is_not_parsed_before_its_digest_is_checked(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(raw: bytes) -> None:
        raise AssertionError("an unsigned manifest was parsed")

    monkeypatch.setattr(Manifest, "from_bytes", never)
    refuse(kit, write(tmp_path, {**kit.members(), "manifest.json": b"{}"}), MixAndMatchError)


def test_no_data_is_copied_before_the_signature_is_checked(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(name: str) -> int:
        raise AssertionError("memory was allocated for an unsigned bundle")

    monkeypatch.setattr(verify_module, "_memory_file", never)
    members = kit.members()
    with pytest.raises(SignatureError):
        verify(write(tmp_path, members), Keyring.of([ec.derive_private_key(99, ec.SECP256R1()).public_key()]))


def test_bundle_over_a_limit_is_refused(kit: Any, tmp_path: Path) -> None:
    path = tmp_path / "sparse.bundle"
    with path.open("wb") as file:
        file.truncate(archive.MAX_BUNDLE_BYTES + 512)
    refuse(kit, path, EndlessDataError)


def test_source_that_is_not_a_file_is_refused(kit: Any, tmp_path: Path) -> None:
    refuse(kit, tmp_path / "missing", StoreError, "cannot be opened")
    os.mkfifo(tmp_path / "fifo")
    refuse(kit, tmp_path / "fifo", FormatError, "regular file")
    refuse(kit, tmp_path, FormatError, "regular file")


CHANGES_MEANWHILE: dict[str, Callable[[Any, archive.Member], object]] = {
    "data": lambda file, member: os.pwrite(file, b"X", member.offset),
    "header": lambda file, member: os.pwrite(file, b"X", member.offset - 512),
    "padding": lambda file, member: os.pwrite(file, b"X", member.offset + member.size),
    "end": lambda file, _: os.pwrite(file, b"X", os.fstat(file).st_size - 1),
    "cut": lambda file, member: os.ftruncate(file, member.offset + 1),
}


@pytest.mark.parametrize("what", CHANGES_MEANWHILE)
@pytest.mark.parametrize("name", ["manifest.json", "mod.so", "model.sig"])
def test_file_that_changes_after_its_signature_was_checked_is_refused(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, what: str
) -> None:
    path = write(tmp_path, kit.members())
    real = verify_signature

    def check_and_change(raw: bytes, keyring: Keyring) -> Statement:
        statement = real(raw, keyring)
        fd = os.open(path, os.O_RDWR)
        member = next(m for m in archive.read_index(fd) if m.name == name)
        CHANGES_MEANWHILE[what](fd, member)
        os.close(fd)
        return statement

    monkeypatch.setattr(verify_module, "verify_signature", check_and_change)
    before = open_descriptors()
    with pytest.raises(BundleError):
        verify(path, kit.keyring)
    assert open_descriptors() == before


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM])
def test_running_out_of_memory_is_not_blamed_on_the_bundle(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path = write(tmp_path, kit.members())

    def full(fd: int, data: bytes) -> int:
        raise OSError(number, os.strerror(number))

    before = open_descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(NoSpaceError) as error:
            verify(path, kit.keyring)
    assert error.value.code == "ERR_NO_SPACE"
    assert open_descriptors() == before


def test_kernel_without_noexec_memory_files_is_supported(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.memfd_create

    def old_kernel(name: str, flags: int) -> int:
        if flags & ~(os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(name, flags)

    monkeypatch.setattr(os, "memfd_create", old_kernel)
    with verify(write(tmp_path, kit.members()), kit.keyring) as bundle, pytest.raises(PermissionError):
        os.pwrite(bundle.files["mod.so"], b"x", 0)


def test_bytes_of_a_bundle_never_change(kit: Any) -> None:
    # Devices identify bundles by this digest: if it changes, the format has changed and needs a new number.
    assert (
        hashlib.sha256(kit.bundle()).hexdigest()
        == "3f83d97238334c1b20942de3488321691b406ef2261a1c2445c755ba95ee00dd"
    )


@pytest.mark.slow
def test_large_bundle_is_verified_without_holding_it_in_memory(kit: Any, tmp_path: Path) -> None:
    weights = tmp_path / "mod.params"
    with weights.open("wb") as file:
        file.truncate(64 << 20)
    digest = hashlib.sha256(bytes(64 << 20)).hexdigest()
    files = kit.manifest().files
    large = dataclasses.replace(files["mod.params"], sha256=digest, size=64 << 20)
    manifest = dataclasses.replace(kit.manifest(), files={**files, "mod.params": large}).to_bytes()
    small = {name: data for name, data in kit.files.items() if name != "mod.params"} | {
        "manifest.json": manifest
    }
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in small.items()} | {
        "mod.params": digest
    }
    path = tmp_path / "large.bundle"
    archive.write_archive(
        path, {**small, "mod.params": weights, "model.sig": make_signature(digests, kit.key)}
    )
    for way in (verify_only, lambda *a: verify(*a).close()):
        tracemalloc.start()
        try:
            way(path, kit.keyring)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 4 << 20
