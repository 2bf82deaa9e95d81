"""The order in which models are loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.deploy.store.last_use import LAST_USE_FILE, LastUse


def loaded(root: Path) -> LastUse:
    last_use = LastUse(root)
    last_use.load()
    return last_use


def test_models_are_loaded_in_the_order_of_their_last_use_and_others_by_name(tmp_path: Path) -> None:
    assert loaded(tmp_path).order(["c", "a", "b"]) == ["a", "b", "c"]
    loaded(tmp_path).record(["c", "gone", "a"])
    assert loaded(tmp_path).order(["a", "b", "c", "aa"]) == ["c", "a", "aa", "b"]


def test_unchanged_order_is_not_written_again(tmp_path: Path) -> None:
    last_use = loaded(tmp_path)
    assert last_use.record(["a", "b"])
    (tmp_path / LAST_USE_FILE).unlink()
    assert not last_use.record(["a", "b"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"{", b'{"sha256":"","body":["a"]}', b"\xff" * 100])
def test_damaged_file_costs_only_the_order(tmp_path: Path, content: bytes) -> None:
    (tmp_path / LAST_USE_FILE).write_bytes(content)
    assert loaded(tmp_path).order(["b", "a"]) == ["a", "b"]
