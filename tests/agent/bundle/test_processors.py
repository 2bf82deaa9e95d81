"""Processors are grouped by core, and a quota bounds the threads."""

from __future__ import annotations

import os
from pathlib import Path

from agent.bundle.processors import Processors, cores_of


def test_processors_of_one_core_are_found_together(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(["0,4", "1,5", "2,6", "3,7"] * 2):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    assert cores_of(range(8), tmp_path) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert cores_of({1, 4, 5}, tmp_path) == ((1, 5), (4,))


def test_processor_of_unknown_topology_is_a_core(tmp_path: Path) -> None:
    assert cores_of({2, 3}, tmp_path) == ((2,), (3,))


def test_quota_is_rounded_to_the_nearest_number_of_threads() -> None:
    cores = tuple((cpu,) for cpu in range(4))
    expected = {0.01: 1, 1.0: 1, 1.4: 1, 1.5: 2, 2.4: 2, 3.5: 4, 64.0: 4}
    assert {quota: Processors(cores, quota).threads for quota in expected} == expected
    assert Processors(cores).threads == 4


def test_this_machine_has_a_thread_for_each_core_at_most() -> None:
    found = Processors.detect()
    assert {cpu for core in found.cores for cpu in core} == os.sched_getaffinity(0)
    assert 1 <= found.threads <= len(found.cores)
