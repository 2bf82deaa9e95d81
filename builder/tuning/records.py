"""Tuning records: a folder of MetaSchedule's JSON database and ``meta.json``.

Promises: every measured candidate is there once, failed ones too; what was appended is on disk when `append`
returns; a line torn by a crash is cut off when the folder is next opened for writing, and ignored by readers;
there is one writer at a time; records that do not fit are refused by name. TVM's own ``JSONDatabase`` reads
the folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from tvm import tirx
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.schedule import Trace

from builder.errors import RecordsError
from builder.target import DeviceTarget
from builder.tuning.meta import Meta, Operator
from builder.tuning.space import Decisions, Point, workload_of
from builder.tuning.tasks import Task

WORKLOADS = "database_workload.json"
RECORDS = "database_tuning_record.json"
META = "meta.json"
LOCK = "lock"
FAILED_S = 1e10  # what MetaSchedule writes for a candidate that did not run

MAX_LINE_BYTES = 64 << 20  # a workload's module in base64: one with a megabyte of code would be a mistake
MAX_RECORDS_BYTES = 4 << 30  # some 2 KB a record: a million of them


@dataclass(frozen=True)
class Record:
    """One measured candidate.

    Attributes
    ----------
    key
        Of its workload.
    decisions
        The point.
    seconds
        Median time of a call, None where it did not run.
    raw
        The database's line.
    """

    key: str
    decisions: Decisions
    seconds: float | None
    raw: tuple[Any, ...]


class Records:
    """A records folder."""

    def __init__(
        self,
        path: Path,
        meta: Meta,
        workloads: list[tuple[str, Any]],
        records: list[Record],
        lock: int | None,
    ) -> None:
        self.path = path
        self.meta = meta
        self._workloads = workloads
        self._records = records
        self._lock = lock

    @classmethod
    def read(cls, path: str | os.PathLike[str], target: DeviceTarget | None = None) -> Self:
        """Read a folder.

        Raises
        ------
        RecordsError
            It cannot be read, or is for another TVM, target or design space.
        """
        return cls._load(Path(path), target, None)

    @classmethod
    def write(
        cls,
        path: str | os.PathLike[str],
        target: DeviceTarget,
        notes: Callable[[str], None] | None = None,
    ) -> Self:
        """Open a folder for appending, alone; made where it is not there yet.

        Raises
        ------
        RecordsError
            As `read`, or somebody else is writing to it.
        """
        folder = Path(path)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as e:
            raise RecordsError(f"{folder}: cannot be written ({e.strerror})") from e
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as e:
                raise RecordsError(
                    f"{folder}: another tuning run is writing there",
                    hint="wait for it, or tune into another folder",
                ) from e
            if not (folder / META).exists():
                foreign = [name for name in (WORKLOADS, RECORDS) if (folder / name).exists()]
                if foreign:
                    raise RecordsError(f"{folder}: expected {META} beside {foreign[0]}")  # noqa: TRY301
                _replace(folder / META, Meta.new(target).to_text().encode())
            for name in (WORKLOADS, RECORDS):
                if (cut := _repair(folder / name)) and notes is not None:
                    notes(f"{name}: cut off a last line of {cut} bytes that a crash had torn")
            return cls._load(folder, target, lock)
        except BaseException:
            os.close(lock)
            raise

    @classmethod
    def _load(cls, folder: Path, target: DeviceTarget | None, lock: int | None) -> Self:
        try:
            text = (folder / META).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            reason = e.strerror if isinstance(e, OSError) else "not text"
            raise RecordsError(
                f"{folder / META}: cannot be read ({reason})",
                hint="tuning records are a folder that `edgebundle tune -o FOLDER` wrote",
            ) from e
        meta = Meta.from_text(text, str(folder / META))
        meta.check_version(str(folder))
        if target is not None:
            meta.check_target(target, str(folder))
        workloads = [(str(line[0]), line) for _, line in _lines(folder / WORKLOADS)]
        records = [_record(line, workloads, folder, number) for number, line in _lines(folder / RECORDS)]
        return cls(folder, meta, workloads, records, lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let others write."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def all(self) -> Sequence[Record]:
        """Every record, in the order of measuring."""
        return self._records

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the workloads, in the order of their first record."""
        return tuple(dict.fromkeys(record.key for record in self._records))

    def measured(self, key: str) -> dict[Decisions, float | None]:
        """Seconds of each point of a workload, in the order of measuring; None where it did not run."""
        return {r.decisions: r.seconds for r in self._records if r.key == key}

    def best(self, key: str, count: int = 1) -> list[Record]:
        """The fastest records of a workload, fastest first."""
        ran = [r for r in self._records if r.key == key and r.seconds is not None]
        return sorted(ran, key=lambda r: r.seconds or 0.0)[:count]

    def trace(self, record: Record) -> Trace:
        """A record's schedule."""
        workload = next(raw for key, raw in self._workloads if key == record.key)
        database_record = ms.database.TuningRecord.from_json(
            record.raw[1], ms.database.Workload.from_json(workload)
        )
        return database_record.trace

    def append(self, task: Task, results: Iterable[tuple[Point, Sequence[float] | None]]) -> None:
        """Add what was measured of a task; on disk when this returns.

        Parameters
        ----------
        task
            The task.
        results
            Points, each with the seconds of a call in each repeat, or None where it did not run.
        """
        workload = ms.database.Workload(task.workload)
        index = next((i for i, (key, _) in enumerate(self._workloads) if key == task.key), None)
        if index is None:
            index = len(self._workloads)
            line = workload.as_json()
            _append(self.path / WORKLOADS, [line])
            self._workloads.append((task.key, line))
            info = Operator(task.name, task.kind, task.flops, task.space.values, task.space.default)
            self.update(replace(self.meta, operators={**self.meta.operators, task.key: info}))
        lines, records = [], []
        for point, seconds in results:
            entry = ms.database.TuningRecord(
                point.trace,
                workload,
                list(seconds) if seconds is not None else [FAILED_S],
                task.space.target.tvm_target,
                ms.arg_info.ArgInfo.from_entry_func(task.workload, False),
            )
            line = [index, entry.as_json()]
            lines.append(line)
            records.append(_record(line, self._workloads, self.path, 0))
        _append(self.path / RECORDS, lines)
        self._records.extend(records)

    def copy(self, others: Iterable[tuple[Record, Any]]) -> None:
        """Add records of other folders, each with its workload's line; points that are there already stay."""
        lines, records = [], []
        known = {(r.key, r.decisions) for r in self._records}
        for record, workload in others:
            if (record.key, record.decisions) in known:
                continue
            known.add((record.key, record.decisions))
            keys = [key for key, _ in self._workloads]
            if record.key not in keys:
                _append(self.path / WORKLOADS, [workload])
                self._workloads.append((record.key, workload))
                keys.append(record.key)
            line = [keys.index(record.key), record.raw[1]]
            lines.append(line)
            records.append(_record(line, self._workloads, self.path, 0))
        _append(self.path / RECORDS, lines)
        self._records.extend(records)

    def workload(self, key: str) -> Any:  # noqa: ANN401 - the database's own JSON
        """The database's line of a workload."""
        return next(raw for known, raw in self._workloads if known == key)

    def update(self, meta: Meta) -> None:
        """Replace ``meta.json``, crash-safe."""
        _replace(self.path / META, meta.to_text().encode())
        self.meta = meta

    def digest(self) -> str:
        """SHA-256 over the folder, as bundles name the records they were compiled with."""
        whole = hashlib.sha256()
        for name in (META, RECORDS, WORKLOADS):
            path = self.path / name
            whole.update(hashlib.sha256(path.read_bytes() if path.exists() else b"").digest())
        return whole.hexdigest()


class BestRecords:
    """What lowering asks: the schedule of a function that measuring found best.

    A verdict of the final comparison decides; without one (a run that was stopped) the fastest record, which
    is
    the heuristic's own where nothing beat it.
    """

    def __init__(self, records: Records) -> None:
        self._records = records
        self.used: set[str] = set()

    def trace(self, func: tirx.PrimFunc) -> Trace | None:
        """The schedule for `func`, None where the heuristic's stays."""
        key = workload_of(func)[1]
        record = chosen(self._records, key)
        if record is None:
            return None
        self.used.add(key)
        return self._records.trace(record)


def chosen(records: Records, key: str) -> Record | None:
    """The record that replaces the heuristic's point, None where that one stays."""
    best = records.best(key)
    if not best:
        return None
    operator, verdict = records.meta.operators.get(key), records.meta.verdicts.get(key)
    record: Record | None = best[0]
    if verdict is not None:
        record = next((r for r in records.all if r.key == key and r.decisions == verdict.decisions), None)
        if not verdict.use:
            return None
    if record is None or (operator is not None and record.decisions == operator.default):
        return None
    return record


def merge(
    out: str | os.PathLike[str], inputs: Sequence[str | os.PathLike[str]], target: DeviceTarget
) -> Records:
    """Write the records of several folders, of one target, into a new one or add them to one.

    Raises
    ------
    RecordsError
        They do not fit each other.
    """
    sources = [Records.read(path, target) for path in inputs]
    merged = Records.write(out, target)
    for source in sources:
        merged.copy((r, source.workload(r.key)) for r in source.all)
        meta, other = merged.meta, source.meta
        for name, time in other.boards.items():
            meta = meta.with_board(name, time)
        merged.update(
            replace(
                meta,
                peak_gflops=meta.peak_gflops if meta.peak_gflops is not None else other.peak_gflops,
                operators={**other.operators, **meta.operators},
                verdicts={**other.verdicts, **meta.verdicts},
                models={**other.models, **meta.models},
            )
        )
    return merged


def pick_best(records: Records, out: str | os.PathLike[str], target: DeviceTarget) -> Records:
    """Write the records that compiling uses, one a workload, into a new folder."""
    picked = Records.write(out, target)
    wanted = [r for key in records.keys if (r := chosen(records, key)) is not None]
    picked.copy((r, records.workload(r.key)) for r in wanted)
    keys = {r.key for r in wanted}
    meta = records.meta
    picked.update(
        replace(
            meta,
            operators={k: v for k, v in meta.operators.items() if k in keys},
            verdicts={k: v for k, v in meta.verdicts.items() if k in keys},
        )
    )
    return picked


def _record(line: Any, workloads: Sequence[tuple[str, Any]], folder: Path, number: int) -> Record:  # noqa: ANN401
    try:
        index, (trace, seconds, *_) = line
        decisions = tuple(int(decision) for _, decision in sorted(trace[1], key=lambda d: int(d[0])))
        key = workloads[index if index >= 0 else len(workloads)][0]
        times = sorted(float(s) for s in seconds)
    except (TypeError, ValueError, IndexError, KeyError) as e:
        raise RecordsError(f"{folder / RECORDS}: line {number} is no tuning record ({e})") from e
    middle = times[len(times) // 2] if times else FAILED_S
    return Record(key, decisions, middle if middle < FAILED_S else None, tuple(line))


def _lines(path: Path) -> list[tuple[int, Any]]:
    """The JSON lines of a file with their numbers, without a torn last one."""
    try:
        if path.stat().st_size > MAX_RECORDS_BYTES:
            raise RecordsError(f"{path}: expected at most {MAX_RECORDS_BYTES >> 30} GiB of records")
        raw = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as e:
        raise RecordsError(f"{path}: cannot be read ({e.strerror})") from e
    lines = raw.split(b"\n")
    parsed = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            parsed.append((number, json.loads(line)))
        except ValueError as e:
            if number >= len(lines) - 1:  # the last one: torn by a crash
                continue
            raise RecordsError(
                f"{path}: line {number} is not JSON", hint="restore the file, or delete that line"
            ) from e
    return parsed


def _repair(path: Path) -> int:
    """Cut a torn last line off; how many bytes that was."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return 0
    keep = raw.rfind(b"\n") + 1
    last = raw[:keep].rstrip(b"\n").rpartition(b"\n")[2]
    try:
        if last:
            json.loads(last)
    except ValueError:
        keep = raw.rfind(b"\n", 0, keep - 1) + 1
    if keep == len(raw):
        return 0
    with path.open("r+b") as file:
        file.truncate(keep)
        os.fsync(file.fileno())
    return len(raw) - keep


def _append(path: Path, lines: Sequence[Any]) -> None:
    if not lines:
        return
    data = "".join(json.dumps(line, separators=(", ", ": ")) + "\n" for line in lines).encode()
    is_new = not path.exists()
    with path.open("ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    if is_new:
        _sync_folder(path.parent)


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
