"""What an attack ended with: its complaints, and a report."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field


@dataclass(kw_only=True)
class Outcome:
    """What every attack reports.

    Attributes
    ----------
    complaints
        What was not as promised.
    """

    complaints: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every promise was kept."""
        return not self.complaints

    def to_json(self) -> dict[str, object]:
        """Return the report's JSON document."""
        return {**asdict(self), "passed": self.passed}
