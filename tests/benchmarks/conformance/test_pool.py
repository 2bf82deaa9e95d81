"""Workers that die, hang or fail cost one case each."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.conformance import pool
from benchmarks.conformance.case import Case, write
from benchmarks.conformance.verdict import Verdict

# Does what a case's name says, and counts the cases that it had.
WORKER = """
import json, os, sys, time
print("ready", flush=True)
for count, line in enumerate(sys.stdin):
    name = line.rstrip().rpartition("/")[2]
    if "die" in name and ("second" not in name or count):
        os.abort()
    while "spin" in name:
        pass
    print(json.dumps({"name": name, "operator": "Add", "kind": "right"}), flush=True)
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    return [sys.executable, str(script)]


def cases(folder: Path, *names: str) -> list[Path]:
    for name in names:
        (folder / "made.onnx").write_bytes(b"model")
        one = np.ones(2, np.float32)
        write(folder / name, Case("onnx_nodes", name, "Add", folder / "made.onnx", {"x": one}, [one]))
    return [folder / name for name in names]


def tried(folders: list[Path], command: list[str], jobs: int = 1) -> dict[str, Verdict]:
    found: list[Verdict] = []
    pool.try_all(folders, found.append, jobs, command)
    return {verdict.name: verdict for verdict in found}


def test_a_death_costs_one_case(tmp_path: Path, command: list[str]) -> None:
    found = tried(cases(tmp_path, "a", "die", "b", "c"), command)
    assert {name: verdict.kind for name, verdict in found.items()} == {
        "a": "right", "die": "dead", "b": "right", "c": "right"
    }  # fmt: skip
    assert found["die"].reason == "status -6"


def test_a_death_that_needs_earlier_cases_says_so(tmp_path: Path, command: list[str]) -> None:
    found = tried(cases(tmp_path, "a", "die_second", "b"), command)
    assert found["die_second"].kind == "dead"
    assert found["die_second"].reason == "only after others in the same process: status -6"
    assert found["b"].kind == "right"


def test_a_slow_case_is_ended(tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "SLOW_S", 0.2)
    monkeypatch.setattr(pool, "_POLL_S", 0.05)
    found = tried(cases(tmp_path, "spin", "a"), command)
    assert [found[name].kind for name in ("spin", "a")] == ["slow", "right"]


def test_two_processes_share_the_cases(tmp_path: Path, command: list[str]) -> None:
    names = [f"case{number}" for number in range(9)]
    assert set(tried(cases(tmp_path, *names), command, jobs=2)) == set(names)


def test_a_worker_is_replaced_after_some_cases(
    tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "CASES_OF_A_WORKER", 1)
    found = tried(cases(tmp_path, "a", "die_second", "b"), command)
    assert {verdict.kind for verdict in found.values()} == {"right"}
