"""The verdicts of a source as a file of JSON lines, which an interrupted run continues.

The first line says which product was tried: its verdicts do not hold for another.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from types import MappingProxyType
from typing import Final

from benchmarks.conformance.verdict import Verdict

# House -> its rooms that no case runs through: the import contracts of `builder.compiler` keep them out.
ELSEWHERE: Final = MappingProxyType(
    {
        "agent": frozenset({"cli.py", "config", "deploy", "provision", "service", "worker"}),
        "builder": frozenset({"cli", "fleet", "tuning"}),
    }
)


def fingerprint(root: Path) -> str:
    """Return a digest of the sources that a case runs through.

    Parameters
    ----------
    root
        The project's folder.
    """
    digest = hashlib.sha256()
    for house, elsewhere in ELSEWHERE.items():
        for path in sorted((root / house).rglob("*")):
            parts = path.relative_to(root / house).parts
            if path.is_file() and "__pycache__" not in parts and parts[0] not in elsewhere:
                digest.update(str(path.relative_to(root)).encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class Results:
    """The verdicts of a source, kept in a file.

    Parameters
    ----------
    path
        The file; it is begun again if it is of another product.
    product
        What `fingerprint` returns, or None to keep what is there.
    drop
        Kinds of verdicts that are left out of what is there.
    """

    def __init__(self, path: Path, product: str | None, drop: Iterable[str] = ()) -> None:
        self._path = path
        self.verdicts: dict[str, Verdict] = {}
        left_out = set(drop)
        if path.exists():
            head, *lines = path.read_text().splitlines() or [""]
            of = json.loads(head or "{}").get("product")
            if product is None or of == product:
                self.verdicts = {v.name: v for v in map(_parsed, lines) if v and v.kind not in left_out}
                product = of
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            file.write(json.dumps({"product": product}) + "\n")
            file.writelines(_line(verdict) for verdict in self.verdicts.values())

    def add(self, verdict: Verdict) -> None:
        """Add a verdict, and write it at once."""
        self.verdicts[verdict.name] = verdict
        with self._path.open("a") as file:
            file.write(_line(verdict))


def _line(verdict: Verdict) -> str:
    return json.dumps(dataclasses.asdict(verdict)) + "\n"


def _parsed(line: str) -> Verdict | None:
    """Read a line; None for one that an interrupted run left unfinished."""
    try:
        return Verdict(**json.loads(line))
    except (json.JSONDecodeError, TypeError):
        return None
