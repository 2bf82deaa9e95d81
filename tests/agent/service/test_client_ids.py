"""Client identifiers: the same after a restart, different on each device, and never missing."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import pytest

from agent.service.client_ids import CLIENT_ID_FILE, ClientIds


def test_identifiers_are_the_same_after_a_restart(tmp_path: Path) -> None:
    first = ClientIds("kitchen", tmp_path)
    again = ClientIds("kitchen", tmp_path)
    assert first.of("control") == again.of("control")
    assert first.of("control") != first.of("inference")
    assert first.of("control").startswith("kitchen-")
    assert first.of("control").endswith("-control")


def test_identifiers_cannot_be_guessed_from_the_name(tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in range(20)]
    for folder in folders:
        folder.mkdir()
    assert len({ClientIds("kitchen", folder).of("control") for folder in folders}) == len(folders)
    for folder in folders:
        assert stat.S_IMODE((folder / CLIENT_ID_FILE).stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "damage", [b"", b"kitchen", b"0" * 15, b"0" * 1000, b"\xff" * 16, b"../../etc/passwd"]
)
def test_damaged_secret_is_replaced(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / CLIENT_ID_FILE).write_bytes(damage)
    made = ClientIds("kitchen", tmp_path).of("control")
    assert re.fullmatch(r"kitchen-[0-9a-f]{16}-control", made)
    assert made != f"kitchen-{'0' * 16}-control"
    assert ClientIds("kitchen", tmp_path).of("control") == made


def test_state_directory_that_cannot_be_written_gives_identifiers_for_this_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    missing = tmp_path / "missing"
    first = ClientIds("kitchen", missing).of("control")
    assert first != ClientIds("kitchen", missing).of("control")
    assert "requests that arrive while the agent restarts will be lost: writing client_id" in caplog.text


def test_secret_that_cannot_be_read_is_replaced_for_this_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / CLIENT_ID_FILE).mkdir()
    assert ClientIds("kitchen", tmp_path).of("control").startswith("kitchen-")
    assert "cannot read" in caplog.text
