"""The bundle file: a USTAR archive with exactly one encoding for the same members.

Promises that a file it reads is, byte for byte, what `write_archive` would have written: every header is
encoded again and compared, padding is zero, members are sorted, and nothing follows the end. So tar's links,
devices, folders and absolute paths are refused. Leaves it to `verify` whether the members belong together.

The headers are those of POSIX.1-1988 (IEEE Std 1003.1, pax, "ustar Interchange Format").
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, Final

from agent.durable import replacing
from agent.errors import EndlessDataError, FormatError, StoreError

BLOCK_BYTES: Final = 512
# Only two blocks of zeros: no signature would cover tar's usual padding to 10240 bytes.
END_BYTES: Final = 2 * BLOCK_BYTES
# Large enough for disk speed, small enough to stay in a Pi's L2 cache.
CHUNK_BYTES: Final = 1 << 20

MANIFEST: Final = "manifest.json"
SIGNATURE: Final = "model.sig"
# A bundle is unpacked into memory, on boards with 1 to 16 GiB.
MAX_BUNDLE_BYTES: Final = 1 << 31
# Today's eight are manifest, code, graph, weights, labels, signature and two files of samples.
MAX_MEMBERS: Final = 64
# Manifest and signature are small, since they are read whole before they can be checked.
MAX_MEMBER_BYTES: Final = MappingProxyType(
    {
        MANIFEST: 512 << 10,
        SIGNATURE: 64 << 10,
        "labels.txt": 4 << 20,
        "mod.json": 8 << 20,
        "mod.params": MAX_BUNDLE_BYTES,
        "mod.so": 256 << 20,
    }
)
MAX_SAMPLE_BYTES: Final = 256 << 20
# An ASCII name without "..", which cannot lead out of a folder; at most 73 of ustar's 100 characters.
_SAMPLE: Final = re.compile(r"samples/[a-z0-9][a-z0-9_-]{0,47}\.[a-z0-9]{1,16}")
_BUCKET: Final = re.compile(r"buckets/[0-9]{2}\.json")

_NAME_FIELD: Final = 100
_SIZE_FIELD: Final = slice(124, 136)
_SIZE: Final = re.compile(rb"[0-7]{11}\0")
_TYPE_AT: Final = 156
_TYPES: Final = MappingProxyType(
    {
        b"1": "a hard link",
        b"2": "a symbolic link",
        b"3": "a character device",
        b"4": "a block device",
        b"5": "a folder",
        b"6": "a FIFO",
        b"g": "a pax header",
        b"x": "a pax header",
        b"L": "a GNU long name",
        b"K": "a GNU long link",
        b"S": "a sparse file",
    }
)
# A constant: in a literal, a digit after a NUL escape would turn it into another octal escape.
_NUL: Final = bytes(1)
_ZEROS: Final = bytes(END_BYTES)


@dataclass(frozen=True, slots=True)
class Member:
    """One file in the archive: `size` bytes of data, `offset` bytes from the archive's start."""

    name: str
    offset: int
    size: int

    @property
    def padding(self) -> int:
        """Number of zero bytes between the data and the next header."""
        return -self.size % BLOCK_BYTES


def max_member_bytes(name: str) -> int:
    """Return the largest size of a member, in bytes; another name raises FormatError."""
    limit = MAX_MEMBER_BYTES.get(name)
    if limit is not None:
        return limit
    if _SAMPLE.fullmatch(name):
        return MAX_SAMPLE_BYTES
    if _BUCKET.fullmatch(name):
        return MAX_MEMBER_BYTES["mod.json"]
    raise FormatError(f"a bundle has no member {name!r:.120}")


def encode_header(name: str, size: int) -> bytes:
    """Return the only valid header of a member: 512 bytes for a regular file, mode 0644, user 0, time 0.

    A name that no member can have raises FormatError, and a `size` over the member's limit EndlessDataError.
    """
    limit = max_member_bytes(name)
    if not 0 <= size <= limit:
        raise EndlessDataError(f"{name}: expected at most {limit} bytes, got {size}")
    fields = b"".join(
        (
            name.encode("ascii").ljust(_NAME_FIELD, _NUL),
            b"0000644" + _NUL,  # mode
            b"0000000" + _NUL,  # user
            b"0000000" + _NUL,  # group
            b"%011o" % size + _NUL,
            b"00000000000" + _NUL,  # time
            b"        ",  # the checksum is taken over spaces
            b"0",  # a regular file
            bytes(100),  # link target
            b"ustar" + _NUL + b"00",
            bytes(64),  # user's and group's names
            b"0000000" + _NUL,  # device numbers
            b"0000000" + _NUL,
            bytes(155 + 12),  # prefix, rest of the block
        )
    )
    return fields[:148] + b"%06o" % sum(fields) + _NUL + b" " + fields[156:]


def read_index(fd: int) -> tuple[Member, ...]:
    """Read and check everything in an archive except its members' data.

    Parameters
    ----------
    fd
        A regular file, open for reading; its position is neither used nor moved.

    Returns
    -------
    tuple of Member
        Sorted by name, each name once.

    Raises
    ------
    FormatError
        If `write_archive` would have written any header, padding or end differently.
    EndlessDataError
        If the file, a member or the number of members is over its limit.
    StoreError
        If the file cannot be read.
    """
    with _reading():
        status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise FormatError("expected a bundle, got something that is not a regular file")
    if status.st_size > MAX_BUNDLE_BYTES:
        raise EndlessDataError(f"expected a bundle of at most {MAX_BUNDLE_BYTES} bytes, got {status.st_size}")
    if status.st_size % BLOCK_BYTES or status.st_size < BLOCK_BYTES + END_BYTES:
        raise FormatError(
            f"expected a bundle of whole {BLOCK_BYTES}-byte blocks, got {status.st_size} bytes: "
            "it was cut short, or is not a bundle"
        )
    members: list[Member] = []
    at = 0
    while (header := read_exactly(fd, BLOCK_BYTES, at)) != _ZEROS[:BLOCK_BYTES]:
        if len(members) == MAX_MEMBERS:
            raise EndlessDataError(f"expected a bundle of at most {MAX_MEMBERS} members")
        member = _decode_header(header, at)
        if members and not members[-1].name < member.name:
            raise FormatError(
                f"expected members sorted by name, each once, got {member.name} after {members[-1].name}"
            )
        at = member.offset + member.size
        if at + member.padding + END_BYTES > status.st_size:
            raise FormatError(f"{member.name}: its {member.size} bytes reach beyond the end of the bundle")
        if member.padding and read_exactly(fd, member.padding, at) != _ZEROS[: member.padding]:
            raise FormatError(f"{member.name}: expected zeros as padding after it")
        at += member.padding
        members.append(member)
    if at + END_BYTES != status.st_size or read_exactly(fd, END_BYTES, at) != _ZEROS:
        raise FormatError(
            f"expected two zero blocks and the end of the bundle at byte {at}, got {status.st_size} bytes"
        )
    return tuple(members)


def read_member(fd: int, member: Member) -> bytes:
    """Return a member's data, unchecked.

    Raises
    ------
    FormatError, StoreError
        If the file ends before them, or cannot be read.
    """
    return read_exactly(fd, member.size, member.offset)


def read_exactly(fd: int, size: int, offset: int) -> bytes:
    """Read exactly `size` bytes at `offset`, whatever the file's position.

    A file that ends earlier raises FormatError, and one that the system cannot read StoreError.
    """
    with _reading():
        data = os.pread(fd, size, offset)
        # Linux returns at most 0x7ffff000 bytes, and fewer than asked for only at the end or on a signal.
        while len(data) < size and (more := os.pread(fd, size - len(data), offset + len(data))):
            data += more
    if len(data) != size:
        raise FormatError(f"expected {size} bytes of the bundle at {offset}, got {len(data)}")
    return data


def pack(members: Mapping[str, bytes]) -> bytes:
    """Return the archive of these members; see `write_archive`."""
    out = io.BytesIO()
    write_archive(out, members)
    return out.getvalue()


def write_archive(target: str | os.PathLike[str] | BinaryIO, members: Mapping[str, bytes | Path]) -> None:
    """Write the archive of these members.

    Parameters
    ----------
    target
        A file that is open for writing, or a path; if writing fails, the path holds what it held before.
    members
        Name -> data, or the path of a file with the data. Their order does not matter.

    Raises
    ------
    FormatError
        If a bundle cannot have a member of that name, or a file changes while it is read.
    EndlessDataError
        If a member, their number or the whole archive is over its limit.
    OSError
        If a file cannot be read or written.
    """
    if len(members) > MAX_MEMBERS:
        raise EndlessDataError(f"expected a bundle of at most {MAX_MEMBERS} members, got {len(members)}")
    if not isinstance(target, str | os.PathLike):
        _write(target, members)
        return
    with replacing(Path(target)) as file:
        os.fchmod(file.fileno(), 0o644)
        _write(file, members)


def _write(out: BinaryIO, members: Mapping[str, bytes | Path]) -> None:
    total = END_BYTES
    # Names are ASCII (others are refused), so code points sort as bytes do.
    for name, data in sorted(members.items()):
        with io.BytesIO(data) if isinstance(data, bytes) else data.open("rb") as source:
            size = source.seek(0, os.SEEK_END)
            source.seek(0)
            out.write(encode_header(name, size))
            left = size
            while left and (chunk := source.read(min(left, CHUNK_BYTES))):
                out.write(chunk)
                left -= len(chunk)
            if left or source.read(1):
                raise FormatError(f"{name} changed while it was being packed")
        out.write(_ZEROS[: -size % BLOCK_BYTES])
        total += BLOCK_BYTES + size + -size % BLOCK_BYTES
        if total > MAX_BUNDLE_BYTES:
            raise EndlessDataError(f"expected a bundle of at most {MAX_BUNDLE_BYTES} bytes, got more")
    out.write(_ZEROS)


def _decode_header(header: bytes, at: int) -> Member:
    raw_name = header[:_NAME_FIELD].partition(_NUL)[0]
    kind = header[_TYPE_AT : _TYPE_AT + 1]
    if kind in _TYPES:
        raise FormatError(f"expected only regular files in a bundle, got {_TYPES[kind]}, {raw_name!r:.120}")
    if not _SIZE.fullmatch(header[_SIZE_FIELD]):
        raise FormatError(f"header at {at}: expected 11 octal digits as size, got {header[_SIZE_FIELD]!r}")
    try:
        name = raw_name.decode("ascii")
    except UnicodeDecodeError as error:
        raise FormatError(f"a bundle has no member {raw_name!r:.120}") from error
    size = int(header[_SIZE_FIELD][:11], 8)
    if encode_header(name, size) != header:
        raise FormatError(f"header at {at}: expected exactly what our writer writes for {name}")
    return Member(name, at + BLOCK_BYTES, size)


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"the bundle cannot be read: {error.strerror}") from error
