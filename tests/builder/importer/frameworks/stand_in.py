"""A stand-in for a Python that has a framework: it answers as the real one was recorded, or misbehaves.

It is asked as `interpreter.py` and `process.py` ask a Python: which packages are missing, which folders it
reads, and to run a program that reads requests.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

VECTORS: Final = Path(__file__).with_name("vectors")

_SCRIPT: Final = """#!{python}
import json, os, shutil, sys, time
if "find_spec" in sys.argv[2]:
    print({missing!r})
    sys.exit()
vectors = {vectors!r}
if "sys.prefix" in sys.argv[2]:
    print(json.dumps([sys.prefix, sys.base_prefix, *filter(None, sys.path), vectors]))
    sys.exit()
for line in sys.stdin:
    request = json.loads(line)
    {before}
    if request["command"] == "convert":
        for name in ("model.onnx", "examples.npz"):
            shutil.copyfile(os.path.join(vectors, name), name)
        reply = json.load(open(os.path.join(vectors, "reply.json")))
    else:
        shutil.copyfile(os.path.join(vectors, "outputs.npz"), "outputs.npz")
        reply = {{}}
    {after}
    print(json.dumps(reply), flush=True)
"""


def stand_in(
    folder: Path, vectors: Path, *, missing: str = "", before: str = "pass", after: str = "pass"
) -> str:
    """Write the program.

    Parameters
    ----------
    folder
        Where to write it.
    vectors
        The folder of recorded answers.
    missing
        The packages that it lacks.
    before, after
        A statement that runs before each request is answered, and one that may change `reply`.

    Returns
    -------
    str
        Its path, to be used as a Python.
    """
    path = folder / "python"
    path.write_text(
        _SCRIPT.format(
            python=sys.executable, missing=missing, vectors=str(vectors), before=before, after=after
        )
    )
    path.chmod(0o755)
    return str(path)
