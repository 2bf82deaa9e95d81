"""From an untrusted file to a bundle that may be loaded: signature, manifest, then every byte.

Promises that only `verify` makes a `VerifiedBundle`, that every byte of the file is accounted for (it is
signed, or is the only byte possible at its place), and that its contents cannot change afterwards: data is
hashed while it is copied into memory files, which are then sealed. Leaves to `admission` whether this machine
may run the bundle, and to the executor the contents of graph, weights and code.

The order of the checks makes an untrusted file cheap to refuse: the headers (a few KiB); model.sig (at most
64 KiB); the manifest, which is parsed only after it matched its signed digest; sizes and digests of all
members, against archive and signature; and only then the data. That last pass reads the whole file again from
its start, and only its result counts: a file that changes meanwhile is refused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import InitVar, dataclass
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Final

from agent.bundle.archive import (
    BLOCK_BYTES,
    CHUNK_BYTES,
    END_BYTES,
    MANIFEST,
    SIGNATURE,
    Member,
    encode_header,
    read_exactly,
    read_index,
    read_member,
)
from agent.bundle.keyring import Keyring
from agent.bundle.manifest import Manifest
from agent.bundle.signature import Statement, verify_signature
from agent.errors import FormatError, MixAndMatchError, NoSpaceError, SignatureError, StoreError
from agent.reading import open_at_once

if TYPE_CHECKING:
    from hashlib import _Hash

_TOKEN: Final = object()
_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
# While the kernel holds a page of a file, to move or to scan it, it refuses to seal the file. Each try waits
# for 150 ms by itself (mm/memfd.c, memfd_wait_for_pins); a machine short of time or memory needs several.
# Forty take six seconds for a file, longer than any wait that was seen, while only the new bundle waits.
_SEAL_TRIES: Final = 40
# linux/memfd.h, since 6.3: the file cannot be executed as a program, but dlopen can map it.
_MFD_NOEXEC_SEAL: Final = 0x0008


@dataclass(frozen=True, slots=True, eq=False)
class VerifiedBundle:
    """A bundle of which every byte is accounted for; only `verify` makes one.

    Attributes
    ----------
    manifest
        The signed manifest.
    digest
        `sha256:` and the SHA-256 of the whole file in hexadecimal.
    key_id
        Id of the trusted key that signed it.
    files
        Name -> descriptor of a sealed memory file, for every member except manifest.json and model.sig.
        `close` or the end of a `with` block closes them: duplicate a descriptor to keep it longer.
    token
        Proof that `verify` is the caller.
    """

    manifest: Manifest
    digest: str
    key_id: str
    files: Mapping[str, int]
    token: InitVar[object]

    def __post_init__(self, token: object) -> None:
        if token is not _TOKEN:
            raise TypeError("only agent.bundle.verify.verify makes a VerifiedBundle")

    def close(self) -> None:
        """Close the descriptors; a second call does nothing."""
        files = dict(self.files)
        object.__setattr__(self, "files", MappingProxyType({}))
        for fd in files.values():
            os.close(fd)

    def __enter__(self) -> VerifiedBundle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def verify(source: str | os.PathLike[str] | int, keyring: Keyring) -> VerifiedBundle:
    """Verify a bundle and keep its files in sealed memory.

    Parameters
    ----------
    source
        A path, or the descriptor of a regular file open for reading, which stays open at its position.
    keyring
        The trusted and the revoked keys.

    Raises
    ------
    SignatureError
        If no trusted key signed it.
    KeyRevokedError
        If a revoked key signed it.
    FormatError
        If our writer would have written any byte differently.
    EndlessDataError
        If it is over a limit.
    MixAndMatchError
        If its members are not those that were signed.
    NoSpaceError
        If there is not enough memory for its files.
    StoreError
        If the file cannot be read, or the kernel does not seal its memory.
    """
    with _opened(source) as fd, contextlib.ExitStack() as undo:
        checked = _check(fd, keyring)
        files: dict[str, int] = {}
        for member in checked.members:
            if member.name in checked.manifest.files:
                files[member.name] = memfd = _memory_file(member.name)
                undo.callback(os.close, memfd)
        digest = _read_through(fd, checked, files)
        for memfd in files.values():
            _seal(memfd)
        undo.pop_all()
        return VerifiedBundle(
            checked.manifest, digest, checked.statement.key_id, MappingProxyType(files), _TOKEN
        )


def verify_only(source: str | os.PathLike[str] | int, keyring: Keyring) -> tuple[Manifest, str]:
    """Verify a bundle without keeping its files; parameters and errors are those of `verify`.

    Returns
    -------
    Manifest, str
        The signed manifest, and `sha256:` with the SHA-256 of the whole file in hexadecimal.
    """
    with _opened(source) as fd:
        checked = _check(fd, keyring)
        return checked.manifest, _read_through(fd, checked, {})


@dataclass(frozen=True, slots=True)
class _Checked:
    """Everything but the data, checked: the parts agree with each other and with a trusted key."""

    members: tuple[Member, ...]
    signature: bytes
    statement: Statement
    manifest: Manifest


def _check(fd: int, keyring: Keyring) -> _Checked:
    members = read_index(fd)
    by_name = {member.name: member for member in members}
    if SIGNATURE not in by_name:
        raise SignatureError("the bundle is not signed", hint="sign it with `edgebundle sign`")
    raw_signature = read_member(fd, by_name[SIGNATURE])
    statement = verify_signature(raw_signature, keyring)
    _same_names("the signature", statement.resources.keys(), by_name.keys() - {SIGNATURE})
    if MANIFEST not in by_name:
        raise MixAndMatchError(f"the bundle has no {MANIFEST}")
    raw_manifest = read_member(fd, by_name[MANIFEST])
    if hashlib.sha256(raw_manifest).hexdigest() != statement.resources[MANIFEST]:
        raise MixAndMatchError(f"{MANIFEST} is not the file that was signed")
    manifest = Manifest.from_bytes(raw_manifest)
    _same_names("the manifest", manifest.files.keys(), by_name.keys() - {SIGNATURE, MANIFEST})
    for name, file in manifest.files.items():
        if file.size != by_name[name].size:
            raise MixAndMatchError(
                f"{name}: expected {file.size} bytes, as in the manifest, got {by_name[name].size}"
            )
        if file.sha256 != statement.resources[name]:
            raise MixAndMatchError(f"{name}: manifest and signature disagree on its digest")
    return _Checked(members, raw_signature, statement, manifest)


def _same_names(where: str, listed: AbstractSet[str], present: AbstractSet[str]) -> None:
    if extra := sorted(present - listed):
        raise MixAndMatchError(f"the bundle has {extra[0]}, which {where} does not list")
    if missing := sorted(listed - present):
        raise MixAndMatchError(f"the bundle has no {missing[0]}, which {where} lists")


def _read_through(fd: int, checked: _Checked, files: Mapping[str, int]) -> str:
    """Read the whole file once: check and hash all of it, and copy members to the descriptors in `files`.

    Return its digest, `sha256:<hex>`.
    """
    whole = hashlib.sha256()
    buffer = memoryview(bytearray(min(CHUNK_BYTES, max(member.size for member in checked.members))))
    for member in checked.members:
        # All of it must be what was checked before: nothing is parsed a second time.
        _expect(fd, member.offset - BLOCK_BYTES, encode_header(member.name, member.size), whole)
        if member.name == SIGNATURE:
            _expect(fd, member.offset, checked.signature, whole)
        else:
            found = _copy(fd, member, buffer, whole, files.get(member.name))
            if found != checked.statement.resources[member.name]:
                raise MixAndMatchError(f"{member.name} is not the file that was signed")
        _expect(fd, member.offset + member.size, bytes(member.padding), whole)
    end = checked.members[-1].offset + checked.members[-1].size + checked.members[-1].padding
    _expect(fd, end, bytes(END_BYTES), whole)
    return f"sha256:{whole.hexdigest()}"


def _expect(fd: int, offset: int, expected: bytes, whole: _Hash) -> None:
    if read_exactly(fd, len(expected), offset) != expected:
        raise FormatError("the bundle changed while it was being verified")
    whole.update(expected)


def _copy(fd: int, member: Member, buffer: memoryview, whole: _Hash, target: int | None) -> str:
    own = hashlib.sha256()
    done = 0
    while done < member.size:
        want = buffer[: min(len(buffer), member.size - done)]
        try:
            count = os.preadv(fd, [want], member.offset + done)
        except OSError as error:
            raise StoreError(f"the bundle cannot be read: {error.strerror}") from error
        if not count:
            raise FormatError(f"the bundle ends inside {member.name}")
        chunk = want[:count]
        own.update(chunk)
        whole.update(chunk)
        if target is not None:
            _write_all(target, chunk)
        done += count
    return own.hexdigest()


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        try:
            data = data[os.write(fd, data) :]
        except OSError as error:
            raise _no_memory(error) from error


def _memory_file(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise _no_memory(error) from error
    # Kernels before 6.3 refuse the flag.
    try:
        return os.memfd_create(name, flags)
    except OSError as error:
        raise _no_memory(error) from error


def _seal(memfd: int) -> None:
    for left in reversed(range(_SEAL_TRIES)):
        try:
            fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            if error.errno != errno.EBUSY or not left:
                raise StoreError(f"cannot seal the bundle's memory: {error.strerror}") from error
        else:
            return


def _no_memory(error: OSError) -> StoreError:
    if error.errno in (errno.ENOMEM, errno.ENOSPC):
        return NoSpaceError("not enough memory for the bundle's files")
    return StoreError(f"a memory file for the bundle cannot be written: {error.strerror}")


@contextlib.contextmanager
def _opened(source: str | os.PathLike[str] | int) -> Iterator[int]:
    if isinstance(source, int):
        yield source
        return
    try:
        fd = open_at_once(source)
    except OSError as error:
        raise StoreError(f"{os.fspath(source)} cannot be opened: {error.strerror}") from error
    try:
        yield fd
    finally:
        os.close(fd)
