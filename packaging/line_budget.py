"""Count the lines of each room, and fail if one has more than its budget.

    packaging/line_budget.py [--write]

`line-budget.toml` has the budgets. A room is a folder of the product, with all below it: those of the agent
and the builder, and the packages that have none. With `--write`, budgets that are too large are lowered.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
BUDGET: Final = "line-budget.toml"
# Those that have rooms; what lies beside these is a room of its own.
HOUSES: Final = ("agent", "builder")
PACKAGES: Final = ("dashboard", "edgebundle", "javascript")
SUFFIXES: Final = frozenset({".py", ".c", ".h", ".map", ".js", ".ts", ".css", ".html"})


def lines_of(root: Path) -> dict[str, int]:
    """Return the lines of each room, docstrings, comments and blank lines included."""
    counts: dict[str, int] = {}
    for package in (*HOUSES, *PACKAGES):
        for path in sorted((root / package).rglob("*")):
            parts = path.relative_to(root).parts
            if path.suffix not in SUFFIXES or {"__pycache__", "node_modules"} & set(parts):
                continue
            room = "/".join(parts[:2]) if package in HOUSES and len(parts) > 2 else package
            counts[room] = counts.get(room, 0) + path.read_bytes().count(b"\n")
    return counts


def complaints(counts: dict[str, int], budgets: dict[str, int]) -> list[str]:
    """Return what is wrong, a line each."""
    found = [
        f"{room}: expected at most {budgets[room]} lines, got {count}"
        for room, count in counts.items()
        if room in budgets and count > budgets[room]
    ]
    found += [f"{room}: expected a budget, got none" for room in counts if room not in budgets]
    return found + [
        f"{room}: expected a room with a budget, got no lines" for room in budgets if room not in counts
    ]


def main() -> int:
    """Print the rooms, and return the exit status."""
    path = ROOT / BUDGET
    text = path.read_text()
    counts, budgets = lines_of(ROOT), tomllib.loads(text)["rooms"]
    for room, count in sorted(counts.items()):
        print(f"{count:7,}  {room}")
    print(f"{sum(counts.values()):7,}  in all")
    if "--write" in sys.argv[1:]:
        for room, count in counts.items():
            if count < budgets.get(room, 0):
                text = re.sub(rf'(?m)^("{room}" = )\d+', rf"\g<1>{count}", text)
        path.write_text(text)
    wrong = complaints(counts, budgets)
    for line in wrong:
        print(f"line budget: {line}", file=sys.stderr)
    if wrong:
        print(
            f"line budget: hint: remove as many, or raise it in {BUDGET} with a line that says why",
            file=sys.stderr,
        )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
