"""From an untrusted file to a bundle that may be loaded: signature, manifest, then every byte.

Promises that a `VerifiedBundle` comes from nowhere else, that every byte of the file was accounted for
(signed, or the only one possible at its place), and that what it holds cannot change any more: data are
hashed while they are copied into memory files, which are then sealed. Leaves to `admission` whether this
machine may run it, and to the executor what is inside graph, weights and code.

In this order, so that a stranger's file costs little: the headers (a few KiB); model.sig (64 KiB at most);
the manifest, against its signed digest, and only then parsed; sizes and digests of all members, against both;
and only then the data. That last pass reads the whole file once more from its start and decides alone: a file
that changes meanwhile is refused.
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

if TYPE_CHECKING:
    from hashlib import _Hash

_TOKEN: Final = object()
_SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
# linux/memfd.h, since 6.3: not to be run as a program. dlopen maps it all the same.
_MFD_NOEXEC_SEAL: Final = 0x0008


@dataclass(frozen=True, eq=False)
class VerifiedBundle:
    """A bundle whose every byte is vouched for; `verify` alone makes one.

    Attributes
    ----------
    manifest
        What was signed.
    digest
        `sha256:` and the SHA-256 of the whole file.
    key_id
        Which trusted key signed it.
    files
        Name -> descriptor of a sealed memory file, for every member but manifest.json and model.sig. They are
        closed by `close` or at the end of a `with` block; who keeps one longer duplicates it.
    """

    manifest: Manifest
    digest: str
    key_id: str
    files: Mapping[str, int]
    token: InitVar[object]

    def __post_init__(self, token: object) -> None:
        if token is not _TOKEN:
            raise TypeError("a VerifiedBundle is made by agent.bundle.verify.verify alone")

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
        A path, or a descriptor of a regular file open for reading, which stays open and where it is.
    keyring
        The keys that are trusted.

    Raises
    ------
    SignatureError, KeyRevokedError
        If no trusted key signed it, or one that was revoked.
    FormatError, EndlessDataError
        If it is not the encoding that our writer produces, or over a limit.
    MixAndMatchError
        If its members are not those that were signed.
    NoSpaceError
        If there is no memory for its files.
    StoreError
        If it cannot be read.
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
            fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, _SEALS)
        undo.pop_all()
        return VerifiedBundle(
            checked.manifest, digest, checked.statement.key_id, MappingProxyType(files), _TOKEN
        )


def verify_only(source: str | os.PathLike[str] | int, keyring: Keyring) -> tuple[Manifest, str]:
    """Verify a bundle and keep nothing of it; parameters and errors are those of `verify`.

    Returns
    -------
    Manifest, str
        What was signed, and `sha256:` with the SHA-256 of the whole file.
    """
    with _opened(source) as fd:
        checked = _check(fd, keyring)
        return checked.manifest, _read_through(fd, checked, {})


@dataclass(frozen=True, slots=True)
class _Checked:
    """What is known before the data are read: it agrees with itself, and with a trusted key."""

    members: tuple[Member, ...]
    signature: bytes
    statement: Statement
    manifest: Manifest


def _check(fd: int, keyring: Keyring) -> _Checked:
    members = read_index(fd)
    by_name = {member.name: member for member in members}
    if SIGNATURE not in by_name:
        raise SignatureError("the bundle is not signed", hint="edgebundle sign signs it")
    raw_signature = read_member(fd, by_name[SIGNATURE])
    statement = verify_signature(raw_signature, keyring)
    _same_names("the signature", statement.resources.keys(), by_name.keys() - {SIGNATURE})
    if MANIFEST not in by_name:
        raise MixAndMatchError(f"the bundle has no {MANIFEST}")
    raw_manifest = read_member(fd, by_name[MANIFEST])
    if hashlib.sha256(raw_manifest).hexdigest() != statement.resources[MANIFEST]:
        raise MixAndMatchError(f"{MANIFEST} is not the one that was signed")
    manifest = Manifest.from_bytes(raw_manifest)
    _same_names("the manifest", manifest.files.keys(), by_name.keys() - {SIGNATURE, MANIFEST})
    for name, file in manifest.files.items():
        if file.size != by_name[name].size:
            raise MixAndMatchError(f"{name} has {by_name[name].size} bytes, the manifest says {file.size}")
        if file.sha256 != statement.resources[name]:
            raise MixAndMatchError(f"manifest and signature disagree on the digest of {name}")
    return _Checked(members, raw_signature, statement, manifest)


def _same_names(where: str, listed: AbstractSet[str], present: AbstractSet[str]) -> None:
    if extra := sorted(present - listed):
        raise MixAndMatchError(f"the bundle has {extra[0]}, which {where} does not list")
    if missing := sorted(listed - present):
        raise MixAndMatchError(f"the bundle has no {missing[0]}, which {where} lists")


def _read_through(fd: int, checked: _Checked, files: Mapping[str, int]) -> str:
    """Read the whole file once, from start to end; check and hash all of it, copy what `files` asks for."""
    whole = hashlib.sha256()
    buffer = memoryview(bytearray(min(CHUNK_BYTES, max(member.size for member in checked.members))))
    for member in checked.members:
        # What was read before decides what must stand here now; nothing is parsed a second time.
        _expect(fd, member.offset - BLOCK_BYTES, encode_header(member.name, member.size), whole)
        if member.name == SIGNATURE:
            _expect(fd, member.offset, checked.signature, whole)
        else:
            found = _copy(fd, member, buffer, whole, files.get(member.name))
            if found != checked.statement.resources[member.name]:
                raise MixAndMatchError(f"{member.name} is not the one that was signed")
        _expect(fd, member.offset + member.size, bytes(member.padding), whole)
    end = checked.members[-1].offset + checked.members[-1].size + checked.members[-1].padding
    _expect(fd, end, bytes(END_BYTES), whole)
    return f"sha256:{whole.hexdigest()}"


def _expect(fd: int, offset: int, expected: bytes, whole: _Hash) -> None:
    if read_exactly(fd, len(expected), offset) != expected:
        raise FormatError("the bundle changed while it was verified")
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
            raise FormatError(f"the bundle ends within {member.name}")
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
    # A kernel before 6.3 does not know the flag.
    try:
        return os.memfd_create(name, flags)
    except OSError as error:
        raise _no_memory(error) from error


def _no_memory(error: OSError) -> StoreError:
    if error.errno in (errno.ENOMEM, errno.ENOSPC):
        return NoSpaceError("there is no memory left for the bundle's files")
    return StoreError(f"a memory file for the bundle cannot be written: {error.strerror}")


@contextlib.contextmanager
def _opened(source: str | os.PathLike[str] | int) -> Iterator[int]:
    if isinstance(source, int):
        yield source
        return
    try:
        # Without O_NONBLOCK, opening a FIFO would wait for somebody to write into it.
        fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise StoreError(f"{os.fspath(source)} cannot be opened: {error.strerror}") from error
    try:
        yield fd
    finally:
        os.close(fd)
