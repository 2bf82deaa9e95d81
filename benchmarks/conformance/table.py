"""The table of all verdicts, and why models are refused, as Markdown."""

from __future__ import annotations

import collections
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.conformance.verdict import (
    APART,
    DEAD,
    FIXED,
    REFUSED,
    REFUSED_RIGHT,
    RIGHT,
    SLOW,
    TRACEBACK,
    WRONG,
    Verdict,
)

BEGIN: Final = "<!-- written by make conformance -->"
END: Final = "<!-- end -->"
REASONS: Final = 25  # that are shown; the others are one line
_LONGEST: Final = 110
_COLUMNS: Final = (FIXED, REFUSED, REFUSED_RIGHT, WRONG, DEAD, SLOW, TRACEBACK)


def table(verdicts: Mapping[str, Sequence[Verdict]], titles: Mapping[str, str]) -> str:
    """Return one row for each source.

    Parameters
    ----------
    verdicts
        Source -> its verdicts.
    titles
        Source -> what its row is called.
    """
    head = ["source", "cases", "right", "of these with a fixed input", "refused", "refused although right"]
    head += ["wrong", "dead", "slow", "traceback", "not counted"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    rows = {titles[source]: list(found) for source, found in verdicts.items()}
    if len(rows) > 1:
        rows["all"] = [verdict for found in rows.values() for verdict in found]
    for title, found in rows.items():
        counts = collections.Counter(verdict.kind for verdict in found)
        counted = sum(counts.values()) - counts[APART]
        right = counts[RIGHT] + counts[FIXED]
        share = f" ({counts[REFUSED] / counted:.1%})" if counts[REFUSED] else ""
        numbers = [str(counts[kind]) for kind in _COLUMNS]
        numbers[1] += share
        cells = [title, str(counted), str(right), *numbers, str(counts[APART])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def reasons(verdicts: Sequence[Verdict], kind: str = REFUSED, most: int = REASONS) -> str:
    """Return the reasons of one kind, the most frequent first, without the names of values."""
    counts: collections.Counter[str] = collections.Counter()
    operators = collections.defaultdict[str, set[str]](set)
    for verdict in verdicts:
        if verdict.kind == kind:
            reason = general(verdict.reason)
            counts[reason] += 1
            operators[reason].add(verdict.operator)
    lines = [f"| {kind} | why | such as |", "|---|---|---|"]
    for reason, count in counts.most_common(most):
        lines.append(f"| {count} | {reason} | {', '.join(sorted(operators[reason])[:3])} |")
    if len(counts) > most:
        rest = sum(count for _, count in counts.most_common()[most:])
        lines.append(f"| {rest} | {len(counts) - most} other reasons | |")
    return "\n".join(lines)


def general(reason: str) -> str:
    """Return a reason without names and numbers, so that equal reasons count together."""
    short = re.sub(r"(?<!\S)/\S+", "...", reason.partition("\n")[0])  # paths of files
    short = re.sub(r"'[^']*'", "'...'", short)
    short = re.sub(r"\([^()]*\)", "", short)
    short = re.sub(r"\[[^\[\]]*\]", "[...]", short)
    short = re.sub(r"\b\d[\d.e+-]*\b", "N", short)
    short = " ".join(short.replace("|", "/").split())
    return short if len(short) <= _LONGEST else f"{short[:_LONGEST]} ..."


def write(page: Path, text: str) -> None:
    """Put a text between the two marks of a page.

    Raises
    ------
    ValueError
        If the page does not have the marks.
    """
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page}: expected the marks {BEGIN} and {END}")
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")
