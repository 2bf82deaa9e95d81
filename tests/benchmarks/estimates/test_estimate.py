"""Estimates: work is divided among cores, memory is not; and the cycles of blocks are those of the core."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from benchmarks.bench_arm import time_rows
from benchmarks.estimates.block_cycles import cycles_of, disassembled
from benchmarks.estimates.board import boards
from benchmarks.estimates.estimate import NOTHING, by_label
from benchmarks.estimates.inference import estimated
from benchmarks.hot_loops import tool
from benchmarks.instructions.traffic import Beyond, Block, Stretch, Traffic
from benchmarks.requirements import RequirementError

MB = 10**6


def has_llvm() -> bool:
    try:
        tool("llvm-mca")
    except RequirementError:
        return False
    return True


needs_llvm = pytest.mark.skipif(not has_llvm() and "CI" not in os.environ, reason="needs llvm-19")


def traffic(read_bytes: int, instructions: int) -> Traffic:
    lines = read_bytes // 64
    beyond = Beyond(waiting=(0,), streamed=(lines,), read_bytes=read_bytes, written_bytes=0)
    stretch = Stretch(0, instructions, 0, 0, lines, 0, (beyond, beyond), {1: instructions})
    return Traffic((stretch,), {1: Block(1, b"")})


def milliseconds(read_bytes: int, instructions: int, threads: int, overlap: float) -> float:
    board = replace(boards()["rpi4"], overlap=overlap)
    variant = 0 if threads == 1 else 1
    found = by_label(traffic(read_bytes, instructions), board, threads, variant, {1: 1.0})
    return found[0].ns / 1e6


def test_work_is_divided_among_the_cores() -> None:
    one = milliseconds(0, 180 * MB, 1, 0.0)
    assert one == pytest.approx(100)  # 1.8 GHz, a cycle for each
    assert milliseconds(0, 180 * MB, 4, 0.0) == pytest.approx(one / 4)


def test_memory_is_not_divided_among_the_cores() -> None:
    one, four = (milliseconds(51 * MB, 0, threads, 1.0) for threads in (1, 4))
    assert four > 10  # 5.1 bytes in a nanosecond
    assert 0.8 * one < four < one  # what the L2 cache delivers is divided


def test_overlap_hides_the_shorter_part() -> None:
    work, both = milliseconds(0, 180 * MB, 1, 1.0), milliseconds(51 * MB, 180 * MB, 1, 1.0)
    assert both == pytest.approx(work)
    moved = milliseconds(51 * MB, 0, 1, 0.0)
    assert milliseconds(51 * MB, 180 * MB, 1, 0.0) == pytest.approx(work + moved)


def test_a_miss_that_nothing_announced_costs_its_latency() -> None:
    board = boards()["rpi4"]
    beyond = Beyond(waiting=(1000,), streamed=(0,), read_bytes=0, written_bytes=0)
    stretch = Stretch(3, 1, 1, 5000, 0, 0, (beyond,), {})
    found = by_label(Traffic((stretch,), {}), board, 1, 0, {})[3]
    expected = (4000 * board.levels[0].latency_ns + 1000 * board.memory_ns) / board.misses_at_once
    assert found.waiting_ns == pytest.approx(expected)


def test_four_threads_share_a_common_cache_only() -> None:
    rpi4, rpi5 = boards()["rpi4"], boards()["rpi5"]
    assert rpi4.caches(4)[0].size_bytes * 4 == rpi4.caches(1)[0].size_bytes == 1 << 20
    assert [c.size_bytes >> 10 for c in rpi5.caches(4)] == [512, 512]
    assert [c.size_bytes >> 10 for c in rpi5.caches(1)] == [512, 2048]


@needs_llvm
def test_threads_have_a_part_of_their_data_in_common() -> None:
    board = boards()["rpi4"]
    whole = Beyond(waiting=(0,), streamed=(0,), read_bytes=0, written_bytes=0)
    part = Beyond(waiting=(0,), streamed=(0,), read_bytes=51 * MB, written_bytes=0)
    stretch = Stretch(0, 1, 0, 0, 0, 0, (whole, part), {})
    found = estimated(Traffic((stretch,), {}), board)
    assert found[1][0].ns == 0
    assert found[4][0].ns / 1e6 == pytest.approx(5)
    assert found[4][0].memory_bytes == 51 * MB // 2


@needs_llvm
def test_independent_multiply_adds_take_a_cycle_each_on_an_a72_and_dependent_ones_wait() -> None:
    # fmla v<n>.4s, v30.4s, v31.4s for 16 registers, and 16 times for v0
    independent = b"".join((0x4E3FCFC0 | n).to_bytes(4, "little") for n in range(16))
    dependent = 16 * 0x4E3FCFC0.to_bytes(4, "little")
    fast, slow = cycles_of([independent, dependent], "aarch64", "cortex-a72")
    assert fast < slow / 2


@needs_llvm
def test_blocks_stay_apart_and_an_instruction_that_qemu_cut_off_does_not_shift_them() -> None:
    add, cut = bytes.fromhex("4801d8"), bytes.fromhex("c4e23d")
    texts = disassembled([add, add + cut, add], "x86_64")
    assert texts[0] == texts[2] == "addq\t%rbx, %rax"
    assert texts[1].startswith(texts[0])


def test_estimated_times_have_a_row_for_each_number_of_threads() -> None:
    one, four = replace(NOTHING, ns=8e6), replace(NOTHING, ns=4e6)
    slower = {1: replace(NOTHING, ns=10e6), 4: replace(NOTHING, ns=5e6)}
    heads, body = time_rows({"m": {"edgebundle": {1: one, 4: four}, "ncnn": slower}})
    assert heads[:2] == ["model", "threads"]
    assert [row[:2] for row in body] == [["m", "1"], ["m", "4"]]
    assert body[0][-1] == body[1][-1] == "0.80"
    assert "4.0" in body[1]
