"""Files are written whole, with their modes, and never over another file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agent.errors import ConfigError
from agent.provision import files
from agent.provision.files import Owner, free_name, make_folder, write_file
from tests.patience import PATIENCE_S

MINE = Owner(-1, -1)


def test_file_is_replaced_with_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    for data in (b"first", b"second"):
        write_file(path, data, MINE, MINE.mode(secret=True))
        assert path.read_bytes() == data
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_failed_write_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "agent.toml"
    write_file(path, b"old", MINE, 0o644)

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left"):
        write_file(path, b"new", MINE, 0o644)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_secret_is_never_readable_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int] = []
    change = os.fchmod

    def record(descriptor: int, mode: int) -> None:
        modes.append(os.fstat(descriptor).st_mode & 0o777)
        change(descriptor, mode)

    monkeypatch.setattr(os, "fchmod", record)
    write_file(tmp_path / "secret", b"x", MINE, MINE.mode(secret=True))
    assert modes == [0o600]


def test_free_name_never_names_another_file(tmp_path: Path) -> None:
    assert free_name(tmp_path, "key.pem", b"a") == tmp_path / "key.pem"
    (tmp_path / "key.pem").write_bytes(b"a")
    assert free_name(tmp_path, "key.pem", b"a") == tmp_path / "key.pem"
    assert free_name(tmp_path, "key.pem", b"b") == tmp_path / "key-2.pem"
    (tmp_path / "key-2.pem").write_bytes(b"c")
    assert free_name(tmp_path, "key.pem", b"b") == tmp_path / "key-3.pem"


def test_existing_folder_keeps_its_mode(tmp_path: Path) -> None:
    make_folder(tmp_path / "a/b", MINE)
    assert (tmp_path / "a/b").stat().st_mode & 0o777 == 0o700
    (tmp_path / "a/b").chmod(0o755)
    make_folder(tmp_path / "a/b", MINE)
    assert (tmp_path / "a/b").stat().st_mode & 0o777 == 0o755


def test_service_reads_secrets_through_its_group() -> None:
    assert files.Owner(0, 105).mode(secret=True) == 0o640
    assert files.Owner(0, 105).mode(secret=False) == 0o644


def test_user_who_may_not_write_is_refused_at_once(tmp_path: Path, trust: Path) -> None:
    folder = tmp_path / "etc"
    folder.mkdir()
    folder.chmod(0o555)
    tmp_path.chmod(0o755)
    # Root may write everywhere, so the child gives up root; the checkout may be readable by this user only.
    script = f"""
import os, sys
if os.geteuid() == 0:
    os.setgid(65534); os.setuid(65534)
from pathlib import Path
from agent.errors import ConfigError
from agent.provision.files import require_writable
try:
    require_writable(Path({str(folder)!r}) / "agent.toml")
except ConfigError as error:
    print(error, "|", error.hint)
"""
    preload = "import agent.errors, agent.provision.files\n"
    for parent in (folder, *folder.parents[:3]):
        if parent.stat().st_uid == os.geteuid() and parent != folder:
            parent.chmod(parent.stat().st_mode | 0o111)
    done = subprocess.run(
        [sys.executable, "-c", preload + script],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert done.stdout == (
        f"cannot write {folder}/agent.toml: Permission denied | "
        "run it with sudo, or give a folder of your own with --config\n"
    )
