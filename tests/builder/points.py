"""Points of a design space that must exist."""

from __future__ import annotations

from builder.kernels.design_space import Decisions, Point
from builder.records.task import Task


def existing_point(task: Task, decisions: Decisions | None = None) -> Point:
    """Return the point that `decisions` lead to, or without them the default point; fail if there is none."""
    found = task.space.point(task.space.default if decisions is None else decisions)
    assert found is not None
    return found
