"""One line of a report on a device: what was checked, what was found, what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How serious a finding is."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was checked, and what was found.

    It is `FAIL` if the device cannot do its work, and `WARN` if it can but needs attention; both have a hint.
    """

    level: Level
    subject: str
    message: str
    hint: str | None = None

    def lines(self) -> tuple[str, ...]:
        """Return the finding as lines of text."""
        line = f"{self.level:<4}  {self.subject:<14} {self.message}"
        return (line,) if self.hint is None else (line, f"      hint: {self.hint}")

    def document(self) -> dict[str, str | None]:
        """Return the finding as a JSON object."""
        return {
            "level": self.level.value,
            "subject": self.subject,
            "message": self.message,
            "hint": self.hint,
        }


def ok(subject: str, message: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding(Level.OK, subject, message)


def warn(subject: str, message: str, hint: str) -> Finding:
    """Return a finding that needs attention."""
    return Finding(Level.WARN, subject, message, hint)


def fail(subject: str, message: str, hint: str) -> Finding:
    """Return a finding that stops the device from doing its work."""
    return Finding(Level.FAIL, subject, message, hint)


def failed(findings: Iterable[Finding]) -> bool:
    """Return whether any of them is a failure."""
    return any(finding.level is Level.FAIL for finding in findings)
