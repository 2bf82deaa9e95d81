"""Processors are divided evenly, and are not shared while there are enough."""

from __future__ import annotations

import os
from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from agent.bundle.processors import Processors
from agent.service.models.cores import Cores
from agent.worker.frames import Share

cpu_sets = st.sets(st.integers(0, 63), min_size=1, max_size=16).map(lambda cpus: tuple(sorted(cpus)))
name_lists = st.lists(st.text("abc", min_size=1, max_size=3), unique=True, max_size=20)


def single(*cpus: int, quota: float | None = None) -> Processors:
    """Cores that each appear as one processor."""
    return Processors(tuple((cpu,) for cpu in cpus), quota)


def test_one_model_has_all_processors() -> None:
    assert Cores(single(0, 1, 2, 3)).share_out(["a"]) == {"a": Share((0, 1, 2, 3), 4)}


def test_several_models_have_different_processors_the_earlier_ones_more() -> None:
    assert Cores(single(0, 1, 2, 3)).share_out(["a", "b", "c"]) == {
        "a": Share((0, 1), 2),
        "b": Share((2,), 1),
        "c": Share((3,), 1),
    }


def test_configured_threads_are_the_most_and_never_more_than_processors() -> None:
    assert Cores(single(0, 1, 2, 3), threads=1).share_out(["a"]) == {"a": Share((0, 1, 2, 3), 1)}
    assert Cores(single(0, 1, 2, 3), threads=3).share_out(["a", "b"]) == {
        "a": Share((0, 1), 2),
        "b": Share((2, 3), 2),
    }


def test_models_share_all_processors_if_configured() -> None:
    both = Cores(single(0, 1), apart=False).share_out(["a", "b"])
    assert both == {"a": Share((0, 1), 2), "b": Share((0, 1), 2)}


@given(cpu_sets, name_lists, st.integers(0, 20))
def test_shares_are_even_whole_and_apart(cpus: tuple[int, ...], names: list[str], threads: int) -> None:
    shares = Cores(single(*cpus), threads).share_out(names)
    assert list(shares) == names
    for share in shares.values():
        assert share.cpus
        assert 1 <= share.threads <= len(share.cpus)
        assert share.threads <= (threads or len(cpus))
    used = list(chain.from_iterable(share.cpus for share in shares.values()))
    times = [used.count(cpu) for cpu in cpus]
    if names and len(names) <= len(cpus):
        assert sorted(used) == list(cpus)
    elif names:
        assert max(times) - min(times) <= 1


def test_processors_are_those_of_this_process_and_threads_may_come_from_the_environment() -> None:
    cores = Cores.detect({"EDGE_NUM_THREADS": "3"}, threads=0, apart=True)
    assert cores == Cores(Processors.detect(), 3, True)
    assert {cpu for core in cores.processors.cores for cpu in core} == os.sched_getaffinity(0)
    assert Cores.detect({"EDGE_NUM_THREADS": "3"}, threads=2, apart=True).threads == 2
    assert Cores.detect({"EDGE_NUM_THREADS": "many"}, threads=0, apart=True).threads == 0


def test_processors_of_one_core_stay_together_and_count_once() -> None:
    cores = Cores(Processors(((0, 4), (1, 5), (2, 6), (3, 7))))
    assert cores.share_out(["a"]) == {"a": Share(tuple(range(8)), 4)}
    assert cores.share_out(["a", "b"]) == {"a": Share((0, 1, 4, 5), 2), "b": Share((2, 3, 6, 7), 2)}
    assert Cores(cores.processors, threads=6).share_out(["a"])["a"].threads == 6


def test_threads_are_no_more_than_the_quota_pays_for() -> None:
    def threads(quota: float, *names: str) -> list[int]:
        shares = Cores(single(0, 1, 2, 3, quota=quota)).share_out(names)
        return [share.threads for share in shares.values()]

    assert threads(1.5, "a") == [2]
    assert threads(0.2, "a") == [1]
    assert threads(9.0, "a") == [4]
    assert threads(1.5, "a", "b") == [1, 1]
    assert threads(3.0, "a", "b") == [2, 2]
    assert Cores(single(0, 1, quota=0.5), threads=2).share_out(["a"])["a"].threads == 2
