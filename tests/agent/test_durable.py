"""Files that are replaced whole or not at all."""

from __future__ import annotations

import ast
import errno
import os
import stat
from pathlib import Path

import pytest

from agent import durable
from agent.durable import replacing, write_durably
from agent.errors import DiskError, NoSpaceError, StoreError

ROOT = Path(__file__).parents[2]


def content(folder: Path) -> list[tuple[str, bytes]]:
    return [(path.name, path.read_bytes()) for path in folder.iterdir()]


def test_file_is_replaced(tmp_path: Path) -> None:
    write_durably(tmp_path / "a", b"old")
    write_durably(tmp_path / "a", b"new")
    assert content(tmp_path) == [("a", b"new")]


def test_reader_sees_the_old_content_until_the_block_ends(tmp_path: Path) -> None:
    write_durably(tmp_path / "a", b"old")
    with replacing(tmp_path / "a") as file:
        file.write(b"new")
        file.flush()
        assert (tmp_path / "a").read_bytes() == b"old"
    assert content(tmp_path) == [("a", b"new")]


def test_mode_is_subject_to_the_umask_and_may_be_set_exactly(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_durably(tmp_path / "a", b"", mode=0o644)
        with replacing(tmp_path / "b") as file:
            os.fchmod(file.fileno(), 0o644)
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a", "b")]
    assert modes == [0o600, 0o644]


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
def test_block_that_raises_leaves_the_old_file_and_nothing_else(tmp_path: Path, error: BaseException) -> None:
    write_durably(tmp_path / "a", b"old")
    with pytest.raises(type(error)), replacing(tmp_path / "a") as file:
        file.write(b"new")
        raise error
    assert content(tmp_path) == [("a", b"old")]


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, NoSpaceError), (errno.EDQUOT, NoSpaceError), (errno.EIO, DiskError)]
)
def test_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[StoreError]
) -> None:
    write_durably(tmp_path / "a", b"old")

    def fail(_descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StoreError, match=f"writing a: {os.strerror(number)}") as caught:
        write_durably(tmp_path / "a", b"new")
    monkeypatch.undo()
    assert type(caught.value) is kind
    assert content(tmp_path) == [("a", b"old")]


def test_content_is_on_disk_before_the_name_and_the_name_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        steps.append(f"{'folder' if is_folder else 'file'} {(tmp_path / 'a').exists()}")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    write_durably(tmp_path / "a", b"new")
    assert steps == ["file False", "folder True"]


def test_folder_that_cannot_be_synced_does_not_make_the_caller_believe_in_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_durably(tmp_path / "a", b"old")
    fsync = os.fsync

    def fail(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    write_durably(tmp_path / "a", b"new")
    assert content(tmp_path) == [("a", b"new")]
    assert "a power cut may undo that" in caplog.text


def test_link_in_place_of_the_folder_is_followed_only_on_request(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    with pytest.raises(OSError, match="Not a directory"), replacing(tmp_path / "link/a", follow=False):
        pass
    assert content(tmp_path / "elsewhere") == []
    with replacing(tmp_path / "link/a") as file:
        file.write(b"x")
    assert content(tmp_path / "elsewhere") == [("a", b"x")]


def test_missing_folder_is_an_error_of_the_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="writing a: No such file"):
        write_durably(tmp_path / "nowhere/a", b"")


def test_no_other_module_syncs_and_renames_a_temporary_file() -> None:
    found = []
    for path in sorted(
        p for package in ("agent", "builder", "dashboard") for p in (ROOT / package).rglob("*.py")
    ):
        text = path.read_text()
        if "fsync" not in text:
            continue  # parsing is slow
        nodes = ast.walk(ast.parse(text))
        called = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        if {"fsync", "replace", "with_name"} <= called or {"fsync", "mkstemp"} <= called:
            found.append(path)
    assert found == [Path(durable.__file__)]
