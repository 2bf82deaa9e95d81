"""A file of JSON lines that is appended to and survives a crash in the middle of a line.

Appended lines are on disk when `append_lines` returns. `read_lines` ignores an incomplete last line, and
`repair` cuts it off.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from agent.durable import sync_folder
from builder.errors import RecordsError
from builder.spelling import READABLE

MAX_BYTES: Final = 4 << 30  # two million records of about 2 KB


def read_lines(path: Path) -> list[tuple[int, Any]]:
    """Read the JSON lines of a file, each with its number from 1; an incomplete last line is left out.

    Raises `RecordsError` if the file cannot be read, is larger than `MAX_BYTES`, or another line is not JSON.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise RecordsError(
                f"{path}: expected at most {MAX_BYTES >> 30} GiB of records, got {path.stat().st_size} bytes",
                hint="tune into another folder with -o",
            )
        raw = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RecordsError(
            f"{path}: cannot be read ({error.strerror})",
            hint=READABLE,
        ) from error
    lines = raw.split(b"\n")
    parsed = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            parsed.append((number, json.loads(line)))
        except (ValueError, RecursionError) as error:
            if number >= len(lines) - 1:  # the last line, incomplete after a crash
                continue
            raise RecordsError(
                f"{path}: line {number}: expected JSON, got {line[:40].decode(errors='replace')!r}",
                hint="restore the file, or delete that line",
            ) from error
    return parsed


def repair(path: Path) -> int:
    """Cut off an incomplete last line; return the number of bytes removed."""
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


def append_lines(path: Path, lines: Sequence[Any]) -> None:
    """Append JSON lines; they are on disk when this returns."""
    if not lines:
        return
    data = "".join(json.dumps(line, separators=(", ", ": ")) + "\n" for line in lines).encode()
    is_new = not path.exists()
    with path.open("ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    if is_new:
        sync_folder(path.parent)
