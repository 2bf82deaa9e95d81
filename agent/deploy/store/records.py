"""How bundles did for each client in earlier runs of the agent: `records.json`.

Promises: a client that counted before a restart counts after it (`agent.deploy.trial`). Only clients with
good answers are kept, and only of bundles that can run again. If the file is lost or damaged, clients count
as if the bundles were new.
Leaves to others: when it is written, rarely, to spare an SD card.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Final

from agent.deploy.store.state_file import StateFile
from agent.deploy.trial import MIN_KNOWN, Score

RECORDS_FILE: Final = "records.json"
# As many as are counted in one run.
_MAX_CLIENTS: Final = 64
_MAX_KINDS: Final = 32


class Records:
    """The scores of bundles, by digest, before they were put into service the last time."""

    def __init__(self, root: Path) -> None:
        self._file = StateFile(root / RECORDS_FILE, mirrored=False)
        self._scores: dict[str, Score] = {}
        self._saved: dict[str, object] | None = None

    def load(self) -> None:
        """Read the file; what cannot be read is left out."""
        document = self._file.load()
        for digest, score in document.items() if isinstance(document, dict) else ():
            try:
                self._scores[digest] = Score.from_document(score)
            except (AttributeError, KeyError, TypeError, ValueError):
                continue

    def whole(self, digest: str, score: Score) -> Score:
        """Return the record of a bundle: its score since it was put into service, and what came before."""
        return score.after(self._scores.get(digest, Score()))

    def keep(self, digest: str, score: Score) -> None:
        """Take note of the whole record of a bundle that is no longer in service."""
        self._scores[digest] = score

    def document(self, scores: Mapping[str, Score], digests: Collection[str | None]) -> dict[str, object]:
        """Return what to `save`: the records of bundles in service, and of the others among `digests`."""
        self._scores = {digest: score for digest, score in self._scores.items() if digest in digests}
        whole = self._scores | {digest: self.whole(digest, score) for digest, score in scores.items()}
        return {digest: asdict(_abridged(score)) for digest, score in whole.items() if digest in digests}

    def save(self, document: dict[str, object]) -> bool:
        """Store what `document` returned; return whether anything had to be written. This blocks."""
        if document == self._saved:
            return False
        self._file.save(document)
        self._saved = document
        return True


def _abridged(score: Score) -> Score:
    """Return the clients that count, those with the most answers first, and how long their work took."""
    known = [item for item in score.clients.items() if item[1].good >= MIN_KNOWN]
    known.sort(key=lambda item: item[1].answers, reverse=True)
    times = sorted(score.times.items(), key=lambda item: item[1].answers, reverse=True)
    return Score(clients=dict(known[:_MAX_CLIENTS]), times=dict(times[:_MAX_KINDS]))
