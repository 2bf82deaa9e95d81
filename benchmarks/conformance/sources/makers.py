"""Write the cases of a source, resumable: what was begun and not ended killed the process, and is left out.

`python -m benchmarks.conformance.sources.makers SOURCE FOLDER` runs in the source's environment.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from benchmarks.conformance.case import Case, is_written, write

# A case's name, and what makes it: the model's file is written into the folder that it is given.
Maker = tuple[str, Callable[[Path], Case]]
LOG: Final = "made.jsonl"
# An exporter that takes more of a processor ends, and its process with it.
LIMIT_S: Final = 60.0


def folder_of(name: str) -> str:
    """Return the name of a case's folder."""
    return re.sub(r"[^\w.+=-]", "_", name)[:200]


def make_all(makers: Iterator[Maker], folder: Path) -> None:
    """Make the cases that are not there yet.

    Parameters
    ----------
    makers
        The cases of a source.
    folder
        Where their folders and a log are. The log says which were begun, and why some were not made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / LOG
    begun = {json.loads(line)["name"] for line in log.read_text().splitlines()} if log.exists() else set()
    with log.open("a") as file:

        def note(name: str, reason: str) -> None:
            file.write(json.dumps({"name": name, "reason": reason}) + "\n")
            file.flush()

        for name, make in makers:
            place = folder / folder_of(name)
            if name in begun or is_written(place):
                continue
            note(name, "begun")
            with tempfile.TemporaryDirectory() as temporary:
                signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
                try:
                    write(place, make(Path(temporary)))
                except Exception as error:  # noqa: BLE001 - any error of an exporter: it is no case
                    note(name, f"{type(error).__name__}: {error}".partition("\n")[0][:300])
                finally:
                    signal.setitimer(signal.ITIMER_PROF, 0)


def not_made(folder: Path) -> dict[str, str]:
    """Return the names of cases that could not be made, with the reason."""
    log = folder / LOG
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    last = {line["name"]: line["reason"] for line in lines}
    return {
        name: "the exporter's process died" if reason == "begun" else reason
        for name, reason in last.items()
        if not is_written(folder / folder_of(name))
    }


def main() -> None:
    """Make the cases of one source."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    module = importlib.import_module(f"benchmarks.conformance.sources.{arguments.source}")
    make_all(module.makers(), arguments.folder)


if __name__ == "__main__":
    main()
