from __future__ import annotations

import gzip
import io
import os
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.bundle import archive
from agent.bundle.archive import Member, encode_header, pack, read_index, read_member, write_archive
from agent.errors import BundleError, EndlessDataError, FormatError, StoreError

FILES = {"mod.so": b"code", "mod.json": b"{}", "manifest.json": b"x" * 512, "samples/inputs.params": b""}


def index(raw: bytes) -> tuple[Member, ...]:
    fd = os.memfd_create("bundle")
    try:
        os.write(fd, raw)
        return read_index(fd)
    finally:
        os.close(fd)


def header(name: bytes, size: int = 0, kind: bytes = b"0", **fields: bytes) -> bytes:
    """Return a tar header with any field replaced and a correct checksum."""
    places = {
        "mode": 100,
        "uid": 108,
        "size_field": 124,
        "mtime": 136,
        "link": 157,
        "uname": 265,
        "prefix": 345,
        "magic": 257,
    }
    raw = bytearray(encode_header("mod.so", size))
    raw[0:100] = name.ljust(100, b"\0")
    raw[156:157] = kind
    for field, value in fields.items():
        raw[places[field] : places[field] + len(value)] = value
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(raw)
    return bytes(raw)


def test_index_finds_every_member_sorted_by_name(tmp_path: Path) -> None:
    raw = pack(FILES)
    members = index(raw)
    assert [member.name for member in members] == sorted(FILES)
    path = tmp_path / "x.bundle"
    path.write_bytes(raw)
    with path.open("rb") as file:
        assert {m.name: read_member(file.fileno(), m) for m in read_index(file.fileno())} == FILES
        assert file.tell() == 0


def test_tar_reads_a_bundle_and_sees_plain_files_without_owner_or_time() -> None:
    with tarfile.open(fileobj=io.BytesIO(pack(FILES)), mode="r:") as tar:
        for info in tar:
            assert (info.isreg(), info.mode, info.uid, info.gid, info.mtime) == (True, 0o644, 0, 0, 0)
            file = tar.extractfile(info)
            assert file is not None
            assert file.read() == FILES[info.name]
        assert tar.getnames() == sorted(FILES)


def test_order_of_members_does_not_change_the_bytes() -> None:
    assert pack(FILES) == pack(dict(reversed(FILES.items())))


def test_archive_is_written_from_files_and_replaces_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"w" * 1000)
    target = tmp_path / "x.bundle"
    target.write_bytes(b"old")
    write_archive(target, {**FILES, "mod.params": tmp_path / "weights"})
    assert target.read_bytes() == pack({**FILES, "mod.params": b"w" * 1000})
    assert stat.S_IMODE(target.stat().st_mode) == 0o644
    assert sorted(p.name for p in tmp_path.iterdir()) == ["weights", "x.bundle"]


def test_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "x.bundle"
    target.write_bytes(b"old")
    with pytest.raises(FileNotFoundError):
        write_archive(target, {**FILES, "mod.params": tmp_path / "missing"})
    with pytest.raises(FormatError):
        write_archive(target, {"../evil": b""})
    assert target.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["x.bundle"]


END = bytes(1024)
HOSTILE_NAMES = [
    b"../mod.so",
    b"/mod.so",
    b"./mod.so",
    b"samples/../../x.bin",
    b"samples/..",
    b"samples/",
    b"samples/a/b.bin",
    b"samples/.hidden",
    b"samples/x.bin\0y",
    b"samples\\x.bin",
    b"MOD.SO",
    b"mod.so ",
    b"mod.so/",
    b"extra.bin",
    b"mod.s\xc3\xb6",
    b"mod.s\xff",
    b"",
    b"samples/" + b"a" * 49 + b".bin",
    b"a" * 100,
]


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_name_that_no_member_has_is_refused(name: bytes) -> None:
    with pytest.raises(FormatError):
        index(header(name) + END)


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (b"1", "hard link"),
        (b"2", "symbolic link"),
        (b"3", "character device"),
        (b"4", "block device"),
        (b"5", "folder"),
        (b"6", "FIFO"),
        (b"7", "header"),
        (b"\0", "header"),
        (b"x", "pax"),
        (b"g", "pax"),
        (b"L", "long name"),
        (b"K", "long link"),
        (b"S", "sparse"),
        (b"V", "header"),
    ],
)
def test_anything_but_a_regular_file_is_refused(kind: bytes, what: str) -> None:
    with pytest.raises(FormatError, match=what):
        index(header(b"mod.so", kind=kind, link=b"/etc/passwd") + END)


@pytest.mark.parametrize(
    "block",
    {
        "other mode": header(b"mod.so", mode=b"0000755\0"),
        "an owner": header(b"mod.so", uid=b"0001750\0"),
        "a time": header(b"mod.so", mtime=b"14000000000\0"),
        "a user's name": header(b"mod.so", uname=b"root"),
        "a prefix": header(b"mod.so", prefix=b"usr/lib"),
        "a link target": header(b"mod.so", link=b"x"),
        "GNU's magic": header(b"mod.so", magic=b"ustar  \0"),
        "rest of the name after NUL": header(b"mod.so\0evil"),
        "size in base 256": header(b"mod.so", size_field=b"\x80" + bytes(11)),
        "size with spaces": header(b"mod.so", size_field=b"          0\0"),
        "wrong checksum": header(b"mod.so")[:148] + b"007777\0 " + header(b"mod.so")[156:],
        "checksum in another form": header(b"mod.so")[:154] + b" \0" + header(b"mod.so")[156:],
    }.items(),
    ids=lambda item: item[0],
)
def test_header_that_we_would_write_differently_is_refused(block: tuple[str, bytes]) -> None:
    assert index(header(b"mod.so") + END) == (Member("mod.so", 512, 0),)
    with pytest.raises(FormatError):
        index(block[1] + END)


def _swap_first_two(raw: bytes) -> bytes:
    # manifest.json: header and one block; mod.json: header and one block.
    return raw[1024:2048] + raw[:1024] + raw[2048:]


@pytest.mark.parametrize(
    "change",
    {
        "trailing zero byte": lambda raw: raw + b"\0",
        "trailing zero block": lambda raw: raw + bytes(512),
        "trailing padding of tar": lambda raw: raw.ljust(10240, b"\0"),
        "trailing member": lambda raw: raw + raw,
        "one end block": lambda raw: raw[:-512],
        "no end": lambda raw: raw[:-1024],
        "data after the first end block": lambda raw: raw[:-512] + b"\1" + raw[-511:],
        "cut within data": lambda raw: raw[:1536],
        "members swapped": _swap_first_two,
        "member twice": lambda raw: raw[:1024] + raw,
        "padding not zero": lambda raw: raw[:2047] + b"\1" + raw[2048:],
        "leading zero block": lambda raw: bytes(512) + raw,
        "compressed": lambda raw: gzip.compress(raw).ljust(4096, b"\0"),
        "empty": lambda _: b"",
        "only an end": lambda _: END,
        "zeros": lambda _: bytes(8192),
    }.items(),
    ids=lambda item: item[0],
)
def test_arrangement_that_we_would_not_write_is_refused(change: tuple[str, Callable[[bytes], bytes]]) -> None:
    raw = pack(FILES)
    with pytest.raises(FormatError):
        index(change[1](raw))


def test_member_over_its_limit_is_refused_from_its_header() -> None:
    for name in (b"model.sig", b"manifest.json", b"mod.so", b"mod.json", b"labels.txt", b"samples/x.bin"):
        with pytest.raises(EndlessDataError, match=name.decode()):
            index(header(name, size_field=b"77777777777\0") + END)


def test_member_that_reaches_beyond_the_end_is_refused() -> None:
    with pytest.raises(FormatError, match="beyond the end"):
        index(header(b"mod.params", size_field=b"%011o\0" % (1 << 30)) + END)


def test_file_over_the_limit_is_refused_from_its_size(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(archive.MAX_BUNDLE_BYTES + 512)
    with path.open("rb") as file, pytest.raises(EndlessDataError):
        read_index(file.fileno())


def test_too_many_members_are_neither_read_nor_written() -> None:
    raw = b"".join(encode_header(f"samples/{i:03}.bin", 0) for i in range(65)) + END
    with pytest.raises(EndlessDataError, match="64"):
        index(raw)
    with pytest.raises(EndlessDataError, match="64"):
        pack({f"samples/{i:03}.bin": b"" for i in range(65)})


def test_member_over_its_limit_is_not_written() -> None:
    with pytest.raises(EndlessDataError, match=r"model\.sig"):
        pack({"model.sig": bytes(65537)})


def test_file_that_is_not_regular_is_refused(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    read_end, write_end = os.pipe()
    try:
        for fd in (folder, read_end):
            with pytest.raises(BundleError):
                read_index(fd)
    finally:
        for fd in (folder, read_end, write_end):
            os.close(fd)
    with pytest.raises(StoreError):
        read_index(folder)
