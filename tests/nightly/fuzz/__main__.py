"""Read damaged and hostile files of each format: one clear line, no crash, bounded time and memory.

Each file is read as `edgebundle check` reads it (records, labels, pictures and recordings as the verbs that
take them), in a process that reads only such files. It must be accepted, or refused by one line, in less than
30 s and 2 GiB, leave no file, and run no code. Prints a table, and what went wrong with the number that
repeats it: `--seed N --cases 1`. Files at fault are saved under `--out`.

What PyTorch, Keras and TensorFlow read themselves is left out, unless `EDGEBUNDLE_PYTHON` names a Python that
has them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from tests.nightly.fuzz.case import Case
from tests.nightly.fuzz.formats import FORMATS, Corpus, check
from tests.nightly.fuzz.verdict import Judge, Verdict

PROGRESS_EVERY_S: Final = 30.0
EXAMPLE: Final = """example:
  python -m tests.nightly.fuzz tflite lightgbm --cases 1000
  python -m tests.nightly.fuzz onnx --seed 4711 --cases 1
"""


def main() -> int:
    """Read the cases of each format, print the table, and return the exit status."""
    options = _parser().parse_args()
    console = Console(stderr=options.json, width=None if sys.stdout.isatty() else 130)
    # A Python that has every package and answers nothing: what edgebundle does before it asks is what counts.
    os.environ.setdefault("EDGEBUNDLE_PYTHON", "/bin/true")
    found: dict[str, list[Verdict]] = {}
    for name in options.formats:
        found[name] = list(
            _read_all(name, range(options.seed, options.seed + options.cases), options, console)
        )
    if options.json:
        print(json.dumps({name: [asdict(v) for v in verdicts] for name, verdicts in found.items()}))
    else:
        _print(console, found)
    return int(any(verdict.is_fault for verdicts in found.values() for verdict in verdicts))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.nightly.fuzz",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "formats", nargs="*", choices=list(FORMATS), default=list(FORMATS), metavar="FORMAT",
        help=f"what to read (default: all): {', '.join(FORMATS)}",
    )  # fmt: skip
    parser.add_argument(
        "--cases", type=int, default=10_000, help="files of each format (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="the first number (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print every verdict as JSON, not the table")
    parser.add_argument(
        "--out", type=Path, default=Path("build/fuzz"), metavar="DIR",
        help="folder for the files at fault (default: %(default)s)",
    )  # fmt: skip
    return parser


def corpus(name: str) -> Corpus:
    """Make the files of a format in another process: training leaves threads, which a fork must not meet."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(Corpus.of, name).result()


def _read_all(
    name: str, seeds: Sequence[int], options: argparse.Namespace, console: Console
) -> Iterator[Verdict]:
    cases = corpus(name)
    read: Callable[[Path], int] = FORMATS[name].read or check
    warm_up(cases.sound[0], read)
    counts: Counter[str] = Counter()
    reported_s = time.monotonic()
    with Judge(read) as judge:
        for number, seed in enumerate(seeds):
            case = cases.case(seed)
            verdict = judge.judge(seed, case)
            counts[verdict.kind] += 1
            if verdict.is_fault:
                folder = options.out / f"{name}-{seed}"
                folder.mkdir(parents=True, exist_ok=True)
                if not any(folder.iterdir()):
                    case.place(folder)
                said = f"{name} {seed}: {verdict.kind}: {verdict.detail}"
                console.print(said, markup=False, highlight=False)
            if time.monotonic() - reported_s > PROGRESS_EVERY_S:
                reported_s = time.monotonic()
                console.print(f"{name}: {number + 1} of {len(seeds)}, {dict(counts)}", highlight=False)
            yield verdict


def warm_up(case: Case, read: Callable[[Path], int]) -> None:
    """Read a sound case here, so that no child has to import the libraries or set them up."""
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        case.place(Path(folder))
        read(Path(case.main))


def _print(console: Console, found: dict[str, list[Verdict]]) -> None:
    table = Table("format", "files", "accepted", "refused", "faults", "slowest", "largest")
    for name, verdicts in found.items():
        if not verdicts:
            continue
        counts = Counter("faults" if verdict.is_fault else verdict.kind for verdict in verdicts)
        slowest = max(verdicts, key=lambda verdict: verdict.seconds)
        largest = max(verdicts, key=lambda verdict: verdict.memory_bytes)
        table.add_row(
            name, f"{len(verdicts):,}", *(f"{counts[kind]:,}" for kind in ("accepted", "refused", "faults")),
            f"{slowest.seconds:.1f} s ({slowest.seed})", f"{largest.memory_bytes >> 20} MiB ({largest.seed})",
        )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
