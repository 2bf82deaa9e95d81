"""A folder of tuning records: MetaSchedule's JSON database and `meta.json`.

Promises: the folder holds every measured candidate once, including those that failed. Records are on disk
when `append` returns. A line that a crash left incomplete is ignored by readers, and cut off when the folder
is next opened for writing. There is one writer at a time. Records that do not fit are refused, and the
message names the reason. TVM's own `JSONDatabase` can read the folder. Records of a kind of design space that
has changed since are skipped and counted; those of other kinds stay valid.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.schedule import Trace

from agent.durable import replacing
from builder.errors import RecordsError
from builder.kernels.design_space import Decisions, Point
from builder.kernels.space_versions import SPACE_VERSIONS
from builder.records.journal import append_lines, read_lines, repair
from builder.records.meta_json import RecordsMeta, TunedOperator
from builder.records.task import Task
from builder.target.device_target import DeviceTarget

_DAMAGED: Final = "restore the file, or delete that line"

WORKLOADS: Final = "database_workload.json"
RECORDS: Final = "database_tuning_record.json"
META: Final = "meta.json"
LOCK: Final = "lock"
FAILED_S: Final = 1e10  # the time that MetaSchedule writes for a candidate that did not run


@dataclass(frozen=True, slots=True)
class Record:
    """One measured candidate.

    `key`: the key of its workload.
    `decisions`: the point, as indices into the values of the design space.
    `seconds`: median seconds per call; None if it did not run.
    `raw`: the parsed line of the database.
    """

    key: str
    decisions: Decisions
    seconds: float | None
    raw: tuple[Any, ...]


class Records:
    """A folder of records, opened with `read` or `write`.

    Attributes
    ----------
    path
        The folder.
    meta
        The contents of `meta.json`, without the verdicts that concern skipped records.
    skipped
        Kind and version of a design space that has changed since -> its number of records, which are skipped.
    """

    def __init__(
        self,
        path: Path,
        meta: RecordsMeta,
        workloads: list[tuple[str, Any]],
        records: list[Record],
        lock: int | None,
        skipped: Mapping[tuple[str, int], int],
    ) -> None:
        self.path = path
        self.meta = meta
        self.skipped = skipped
        self._workloads = workloads
        self._records = records
        self._lock = lock

    @classmethod
    def read(cls, path: str | os.PathLike[str], target: DeviceTarget | None = None) -> Self:
        """Read a folder, and check that it is for `target` if one is given.

        Raises
        ------
        RecordsError
            If it cannot be read, or is for another TVM or target.
        """
        return cls._load(Path(path), target, None)

    @classmethod
    def write(
        cls,
        path: str | os.PathLike[str],
        target: DeviceTarget,
        progress: Callable[[str], None] | None = None,
    ) -> Self:
        """Open a folder for appending and lock it against other writers; create it if it does not exist.

        Parameters
        ----------
        path
            The folder.
        target
            The device that the records are for.
        progress
            Called with a line for each file whose incomplete last line was cut off, and for each kind of
            design space whose records are skipped.

        Raises
        ------
        RecordsError
            If the folder cannot be read or written, is for another TVM or target, or another process is
            writing to it.
        """
        folder = Path(path)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RecordsError(
                f"{folder}: cannot be written ({error.strerror})",
                hint="tune into another folder with -o",
            ) from error
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise RecordsError(
                    f"{folder}: another tuning run is writing to it",
                    hint="wait for that run, or tune into another folder",
                ) from error
            if not (folder / META).exists():
                foreign = [name for name in (WORKLOADS, RECORDS) if (folder / name).exists()]
                if foreign:
                    raise RecordsError(  # noqa: TRY301
                        f"{folder}: expected {META} beside {foreign[0]}, got none",
                        hint=f"copy {META} of the same folder beside it, or tune into another folder with -o",
                    )
                _write_meta(folder, RecordsMeta.new(target))
            for name in (WORKLOADS, RECORDS):
                if (cut := repair(folder / name)) and progress is not None:
                    progress(f"{name}: cut off an incomplete last line of {cut} bytes, left by a crash")
            records = cls._load(folder, target, lock)
        except BaseException:
            os.close(lock)
            raise
        if progress is not None:
            for line in records.notes():
                progress(line)
        return records

    @classmethod
    def _load(cls, folder: Path, target: DeviceTarget | None, lock: int | None) -> Self:
        try:
            text = (folder / META).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not text"
            raise RecordsError(
                f"{folder / META}: cannot be read ({reason})",
                hint="give a folder that `edgebundle tune -o FOLDER` wrote",
            ) from error
        meta = RecordsMeta.from_text(text, str(folder / META))
        meta.check_version(str(folder))
        if target is not None:
            meta.check_target(target, str(folder))
        workloads = []
        for number, line in read_lines(folder / WORKLOADS):
            if not isinstance(line, list) or not line:
                raise RecordsError(
                    f"{folder / WORKLOADS}:{number}: expected a list, got {str(line)[:40]}", hint=_DAMAGED
                )
            workloads.append((str(line[0]), line))
        records: list[Record] = []
        skipped: Counter[tuple[str, int]] = Counter()
        for number, line in read_lines(folder / RECORDS):
            record = _record(line, workloads, folder, number)
            if line[0] in meta.retired:
                continue
            if meta.is_current(record.key):
                records.append(record)
            else:
                operator = meta.operators.get(record.key)
                skipped[(operator.kind, operator.version) if operator else ("unknown", 0)] += 1
        for key in [key for key, operator in meta.operators.items() if not operator.is_current]:
            meta = meta.without_verdicts(key)
        return cls(folder, meta, workloads, records, lock, skipped)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock, so that others can write."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def notes(self) -> list[str]:
        """Return a line for each kind of design space whose records are skipped."""
        return [
            f"{self.path}: skipped {count} record{'s' if count != 1 else ''} of {kind}: expected version "
            f"{SPACE_VERSIONS.get(kind, 'none')} of its design space, got {version}; "
            "tune again to replace them"
            for (kind, version), count in sorted(self.skipped.items())
        ]

    @property
    def all(self) -> Sequence[Record]:
        """All records, in the order in which they were measured."""
        return self._records

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of all workloads, in the order of their first record."""
        return tuple(dict.fromkeys(record.key for record in self._records))

    def measured(self, key: str) -> dict[Decisions, float | None]:
        """Return point -> seconds per call for a workload, as measured; None for a point that did not run."""
        return {r.decisions: r.seconds for r in self._records if r.key == key}

    def best(self, key: str, count: int = 1) -> list[Record]:
        """Return the `count` fastest records of a workload, fastest first."""
        ran = [r for r in self._records if r.key == key and r.seconds is not None]
        return sorted(ran, key=lambda r: r.seconds or 0.0)[:count]

    def trace(self, record: Record) -> Trace:
        """Return a record's schedule."""
        workload = next(raw for key, raw in self._workloads if key == record.key)
        database_record = ms.database.TuningRecord.from_json(
            record.raw[1], ms.database.Workload.from_json(workload)
        )
        return database_record.trace

    def append(self, task: Task, results: Iterable[tuple[Point, Sequence[float] | None]]) -> None:
        """Add measured points of a task; they are on disk when this returns.

        Parameters
        ----------
        task
            The task.
        results
            Points, each with its seconds per call in each repeat, or None if it did not run.
        """
        workload = ms.database.Workload(task.workload)
        version = SPACE_VERSIONS[task.kind]
        operator = TunedOperator(
            task.name, task.kind, version, task.flops, task.space.values, task.space.default
        )
        index = self._line_of(task.key, operator, workload.as_json)
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
        append_lines(self.path / RECORDS, lines)
        self._records.extend(records)

    def copy(self, others: Iterable[tuple[Record, Any, TunedOperator]]) -> None:
        """Add records of other folders that are new here, each with its workload's line and its operator."""
        lines, records = [], []
        known = {(r.key, r.decisions) for r in self._records}
        for record, workload, operator in others:
            if (record.key, record.decisions) in known:
                continue
            known.add((record.key, record.decisions))
            index = self._line_of(record.key, operator, functools.partial(_same, workload))
            line = [index, record.raw[1]]
            lines.append(line)
            records.append(_record(line, self._workloads, self.path, 0))
        append_lines(self.path / RECORDS, lines)
        self._records.extend(records)

    def _line_of(self, key: str, operator: TunedOperator, line: Callable[[], Any]) -> int:
        """Return the number of a workload's line in the database; write the line if there is none.

        If there is a line whose records are of an earlier version, it is retired: its records stay in the
        file, and only those of the new line count.
        """
        numbers = [n for n, (k, _) in enumerate(self._workloads) if k == key and n not in self.meta.retired]
        if not self.meta.is_current(key):
            operators = {**self.meta.operators, key: operator}
            retired = (*self.meta.retired, *numbers)
            self.update(replace(self.meta.without_verdicts(key), operators=operators, retired=retired))
            numbers = []
        if not numbers:
            numbers = [len(self._workloads)]
            append_lines(self.path / WORKLOADS, [line()])
            self._workloads.append((key, line()))
        return numbers[0]

    def workload(self, key: str) -> Any:  # noqa: ANN401 - the database's own JSON
        """Return the database's line for a workload."""
        return next(raw for known, raw in self._workloads if known == key)

    def update(self, meta: RecordsMeta) -> None:
        """Replace `meta.json`; after a crash, it holds the old content or the new one."""
        _write_meta(self.path, meta)
        self.meta = meta

    def digest(self) -> str:
        """Return the SHA-256 of the folder, by which a bundle names the records it was compiled with."""
        whole = hashlib.sha256()
        for name in (META, RECORDS, WORKLOADS):
            path = self.path / name
            whole.update(hashlib.sha256(path.read_bytes() if path.exists() else b"").digest())
        return whole.hexdigest()


def _same(line: Any) -> Any:  # noqa: ANN401 - the database's own JSON
    return line


def _write_meta(folder: Path, meta: RecordsMeta) -> None:
    with replacing(folder / META) as file:
        file.write(meta.to_text().encode())


def _record(line: Any, workloads: Sequence[tuple[str, Any]], folder: Path, number: int) -> Record:  # noqa: ANN401
    try:
        index, (trace, seconds, *_) = line
        decisions = tuple(int(decision) for _, decision in sorted(trace[1], key=lambda d: int(d[0])))
        if not all(0 <= int(step) < len(trace[0]) for step, _ in trace[1]):
            # TVM would read beyond the steps.
            raise ValueError("a decision for a step that does not exist")  # noqa: TRY301
        key = workloads[index if index >= 0 else len(workloads)][0]
        times = sorted(float(s) for s in seconds)
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise RecordsError(
            f"{folder / RECORDS}: line {number}: expected a tuning record ({error})",
            hint="restore the file, or delete that line",
        ) from error
    middle = times[len(times) // 2] if times else FAILED_S
    return Record(key, decisions, middle if middle < FAILED_S else None, tuple(line))
