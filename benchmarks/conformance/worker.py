"""The process that tries cases: a line with a folder comes in, a line with a verdict goes out.

`python -m benchmarks.conformance.worker` is started by `pool`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

from benchmarks.conformance.case import read


def main() -> None:
    """Try cases until there are no more lines."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no verdict
    from benchmarks.conformance.trial import try_case

    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        verdict = try_case(read(Path(line.rstrip("\n"))))
        print(json.dumps(dataclasses.asdict(verdict)), file=answers, flush=True)


if __name__ == "__main__":
    main()
