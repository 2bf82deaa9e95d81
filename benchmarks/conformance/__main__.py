"""Make thousands of models of other packages' tests, compile and run each, and print one table.

The cases of a source are made once, in the environment of its package. Each is then imported, compiled for
this machine and run in the executor that devices use, in a few processes; the numbers that the source ships
or computes are the judge. A run that was interrupted continues; one of a changed product begins again.
The exit status is 1 if a case is wrong, dead, slow, or refused although it is right.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from benchmarks.conformance import table
from benchmarks.conformance.case import is_written
from benchmarks.conformance.pool import try_all
from benchmarks.conformance.results import Results, fingerprint
from benchmarks.conformance.sources.makers import folder_of, not_made
from benchmarks.conformance.verdict import FAULTS, KINDS, Verdict

ROOT: Final = Path(__file__).resolve().parents[2]
# Source -> its row in the table. Each is a module of `benchmarks.conformance.sources`.
TITLES: Final = MappingProxyType(
    {
        "onnx_nodes": "ONNX's node tests",
        "scikit_learn": "scikit-learn's estimators, by skl2onnx",
        "pytorch": "PyTorch's operators (OpInfo), by both exporters",
        "keras": "Keras' layers, by TensorFlow's converter",
        "litert": "TensorFlow Lite's operators, by LiteRT",
        "random_graphs": "random graphs, by ONNX Runtime",
    }
)
_ATTEMPTS: Final = 50  # that making the cases of a source may die
EXAMPLE: Final = """example:
  python -m benchmarks.conformance onnx_nodes --filter attention
  python -m benchmarks.conformance --share 0.1 --seed 3
"""


def main() -> int:
    """Make and try the cases, print the table, and return the exit status."""
    options = _parser().parse_args()
    os.environ.setdefault("EDGEBUNDLE_PYTHON", str(options.python))  # for files of Keras
    product = None if options.keep or options.again else fingerprint(ROOT)
    again = [kind for each in options.again for kind in (FAULTS if each == "faults" else (each,))]
    found: dict[str, list[Verdict]] = {}
    for source in options.sources:
        folder = options.folder / "cases" / source
        if not options.made:
            made(source, folder, options.python)
        chosen = chosen_of(folder, options.filter, options.share, options.seed)
        results = Results(options.folder / f"{source}.jsonl", product, again)
        try_them(source, chosen, results, options.jobs)
        names = {path.name for path in chosen}
        found[source] = [v for v in results.verdicts.values() if folder_of(v.name) in names]
        lost = not_made(folder)
        if lost:
            print(f"{TITLES[source]}: {len(lost)} were not exported", file=sys.stderr)
    everything = [verdict for verdicts in found.values() for verdict in verdicts]
    text = f"{table.table(found, TITLES)}\n\n{table.reasons(everything)}"
    print(text)
    faults = [verdict for verdict in everything if verdict.is_fault]
    for verdict in faults:
        print(f"{verdict.kind}: {verdict.name}: {verdict.reason}")
    if options.write:
        table.write(options.write, text)
    return int(bool(faults))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.conformance",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "sources", nargs="*", type=_source, default=list(TITLES), metavar="SOURCE",
        help=f"where cases come from (default: all): {', '.join(TITLES)}",
    )  # fmt: skip
    parser.add_argument("--filter", default="", help="only cases whose name this regular expression finds")
    parser.add_argument("--share", type=float, default=1.0, help="try this share of the cases (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="which share (default: %(default)s)")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="how many processes try cases (default: cores)"
    )
    parser.add_argument(
        "--again", nargs="+", choices=(*KINDS, "faults"), default=(), metavar="KIND",
        help="keep the results that are there, and try these again: " + ", ".join((*KINDS, "faults")),
    )  # fmt: skip
    parser.add_argument("--keep", action="store_true", help="keep results of an earlier product")
    parser.add_argument("--made", action="store_true", help="make no cases, try those that are there")
    parser.add_argument(
        "--python", type=Path, default=ROOT / ".venv-conformance/bin/python",
        help="the Python that has the packages of the sources (default: .venv-conformance)",
    )  # fmt: skip
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build/conformance", help="for cases and results"
    )
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the table into this page")
    return parser


def _source(name: str) -> str:
    if name not in TITLES:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(TITLES)}, got {name!r}")
    return name


def made(source: str, folder: Path, python: Path) -> None:
    """Make the cases of a source that are not there yet, in its environment.

    Parameters
    ----------
    source
        The source.
    folder
        Where its cases are.
    python
        The Python that has its package.
    """
    program = [str(python), "-m", "benchmarks.conformance.sources.makers", source, str(folder)]
    print(f"{TITLES[source]}: making cases", file=sys.stderr)
    for _ in range(_ATTEMPTS):
        done = subprocess.run(
            program,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            check=False,
        )
        if done.returncode >= 0:
            return


def chosen_of(folder: Path, pattern: str, share: float, seed: int) -> list[Path]:
    """Return the folders of the cases to try, in an order that does not put slow neighbours together."""
    folders = sorted(path for path in folder.iterdir() if is_written(path))
    random.Random(seed).shuffle(folders)
    return [path for path in folders[: round(len(folders) * share)] if re.search(pattern, path.name)]


def try_them(source: str, folders: Sequence[Path], results: Results, jobs: int) -> None:
    """Try the cases that have no result yet."""
    done = {folder_of(name) for name in results.verdicts}
    waiting = [folder for folder in folders if folder.name not in done]

    def report(verdict: Verdict) -> None:
        results.add(verdict)
        if verdict.is_fault:
            print(f"{verdict.kind}: {verdict.name}: {verdict.reason}", file=sys.stderr)
        count = len(results.verdicts)
        if sys.stderr.isatty():
            print(f"\r{TITLES[source]}: {count} of {len(folders)}", end="", file=sys.stderr)

    try_all(waiting, report, jobs)


if __name__ == "__main__":
    sys.exit(main())
