"""The model of caches under qemu: misses of known patterns of access are exact."""

from __future__ import annotations

import os
import platform
import subprocess
from collections import OrderedDict, defaultdict

import pytest

from benchmarks.instructions.traffic import Cache, Stretch, Traffic, read, watch
from tests.needs import missing_to_count

K = 1 << 10
LINE = 64
L1 = Cache(32 * K, 8)
SMALL, LARGE = Cache(128 * K, 16), Cache(1024 * K, 16)
# A marking system call touches lines of the stack.
OTHERS = 32

PROGRAM = r"""
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>
enum { MARK = 24302, SIDE = 256 };
static float *a;
static volatile float sink;
int main(void) {
  a = aligned_alloc(1 << 20, SIDE * SIDE * sizeof *a);
  for (int i = 0; i < SIDE * SIDE; i++) a[i] = 1.0f;
  float s = 0;
  syscall(MARK, 0);
  for (int i = 0; i < SIDE; i++)
    for (int j = 0; j < SIDE; j++) s += a[i * SIDE + j];
  syscall(MARK, 1);
  for (int j = 0; j < SIDE; j++)
    for (int i = 0; i < SIDE; i++) s += a[i * SIDE + j];
  syscall(MARK, 2);
  for (int i = 0; i < SIDE * SIDE; i++) a[i] = 2.0f;
  syscall(MARK, 3);
  uint32_t at = 1;
  for (int i = 0; i < 20000; i++) at = at * 1664525u + 1013904223u, s += a[at >> (i % 4 ? 20 : 16)];
  syscall(MARK, 4);
  sink = s;
  return 0;
}
"""

MISSING = missing_to_count()
needs_qemu = pytest.mark.skipif(
    platform.machine() != "x86_64" or (bool(MISSING) and "CI" not in os.environ),
    reason=MISSING or "without an x86-64 machine",
)


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str], str]:
    folder = tmp_path_factory.mktemp("walks")
    (folder / "walks.c").write_text(PROGRAM)
    subprocess.run(
        ["gcc", "-O1", "-fno-tree-vectorize", "-static", "walks.c", "-o", "walks"], cwd=folder, check=True
    )
    return ["qemu-x86_64"], [str(folder / "walks"), ""], ""


@pytest.fixture(scope="module")
def traffic(command: tuple[list[str], list[str], str]) -> Traffic:
    return watch(command, L1, [[LARGE], [SMALL]], read_allocate=False, slice_instructions=10**9)


def at_mark(traffic: Traffic, label: int) -> Stretch:
    (found,) = [stretch for stretch in traffic.stretches if stretch.label == label]
    return found


@needs_qemu
def test_a_walk_by_rows_misses_each_line_once(traffic: Traffic) -> None:
    rows = at_mark(traffic, 0)
    lines = 256 * 256 * 4 // LINE
    assert lines <= rows.waiting + rows.streamed <= lines + OTHERS
    assert rows.waiting <= OTHERS  # nearly all continue a stream
    assert 256 * 256 <= rows.accesses <= 256 * 256 + 10 * OTHERS


@needs_qemu
def test_a_walk_by_columns_misses_at_every_access_and_a_small_l2_does_too(traffic: Traffic) -> None:
    columns = at_mark(traffic, 1)
    assert 256 * 256 <= columns.waiting + columns.streamed <= 256 * 256 + OTHERS
    large, small = columns.beyond
    # The first walk is not counted: the caches start empty at the first mark, and then hold the matrix.
    assert large.waiting[0] + large.streamed[0] <= OTHERS
    # Two sets of four of the small cache are not used: a column's lines are a kibibyte apart.
    assert small.waiting[0] + small.streamed[0] >= 256 * 256
    assert small.read_bytes >= 16 * at_mark(traffic, 0).beyond[1].read_bytes * 0.99


@needs_qemu
def test_written_lines_reach_memory_when_they_are_evicted(traffic: Traffic) -> None:
    matrix = 256 * 256 * 4
    large, small = at_mark(traffic, 2).beyond
    assert large.written_bytes <= OTHERS * LINE
    assert matrix - SMALL.size_bytes - L1.size_bytes <= small.written_bytes <= matrix
    assert matrix <= small.read_bytes <= matrix + OTHERS * LINE


@needs_qemu
def test_a_stream_of_writes_is_not_read_if_the_core_stops_to_allocate(
    command: tuple[list[str], list[str], str],
) -> None:
    found = watch(command, L1, [[SMALL]], read_allocate=True, slice_instructions=10**9)
    assert at_mark(found, 2).beyond[0].read_bytes <= OTHERS * LINE
    assert at_mark(found, 0).beyond[0].read_bytes >= 256 * 256 * 4


@needs_qemu
def test_random_reads_miss_as_often_as_in_a_plain_model(traffic: Traffic) -> None:
    def access(cache: Cache, sets: defaultdict[int, OrderedDict[int, None]], line: int) -> bool:
        ways = sets[line % (cache.size_bytes // LINE // cache.ways)]
        hit = line in ways
        ways[line] = None
        ways.move_to_end(line)
        if len(ways) > cache.ways:
            ways.popitem(last=False)
        return hit

    first: defaultdict[int, OrderedDict[int, None]] = defaultdict(OrderedDict)
    second: defaultdict[int, OrderedDict[int, None]] = defaultdict(OrderedDict)
    for line in range(256 * 256 * 4 // LINE):  # as the walk before leaves them
        access(L1, first, line)
        access(SMALL, second, line)
    at, missed, missed_small = 1, 0, 0
    for i in range(20000):  # three of four in half of the L1 cache, so that it matters which line is evicted
        at = (at * 1664525 + 1013904223) % (1 << 32)
        line = (at >> (20 if i % 4 else 16)) * 4 // LINE
        if not access(L1, first, line):
            missed += 1
            missed_small += not access(SMALL, second, line)
    found = at_mark(traffic, 3)
    assert abs(found.waiting + found.streamed - missed) <= OTHERS
    # Evicted modified lines of the L1 also enter the L2 cache.
    small = found.beyond[1].waiting[0] + found.beyond[1].streamed[0]
    assert small == pytest.approx(missed_small, rel=0.02)


@needs_qemu
def test_stretches_end_after_a_number_of_instructions(command: tuple[list[str], list[str], str]) -> None:
    found = watch(command, L1, [[SMALL]], read_allocate=False, slice_instructions=50_000)
    rows = [stretch for stretch in found.stretches if stretch.label == 0]
    assert len(rows) > 3
    assert all(50_000 <= each.instructions < 51_000 for each in rows[:-1])
    for stretch in found.stretches:
        counted = sum(found.blocks[n].instructions * times for n, times in stretch.blocks.items())
        assert counted == stretch.instructions


def test_what_follows_the_last_mark_is_left_out() -> None:
    text = "mark 0\n0 10 3 1 2 0 | 1 0 64 0 | 7:2\nmark 1\n1 900 0 0 0 0 | 0 0 0 0 | 7:180\nblock 7 5 90\n"
    found = read(text)
    assert [stretch.label for stretch in found.stretches] == [0]
    assert found.stretches[0].beyond[0].read_bytes == 64
    assert found.blocks[7].code == b"\x90"


def test_a_program_without_marks_is_an_error() -> None:
    with pytest.raises(ValueError, match="expected instructions between marks, got none"):
        read("")
