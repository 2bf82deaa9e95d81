from __future__ import annotations

from typing import Any

import pytest

from builder.errors import RecordsError
from builder.importer import ImportedModel
from builder.records.task import Task
from builder.target.device_target import DeviceTarget
from builder.tuning.tasks.extraction import select, table


def test_each_workload_is_a_task_with_its_calls(tasks: tuple[Task, ...]) -> None:
    assert [t.index for t in tasks] == list(range(len(tasks)))
    assert len({t.key for t in tasks}) == len(tasks) >= 3
    assert {"conv2d"} <= {t.kind for t in tasks}
    assert all(t.calls >= 1 and t.flops > 0 and t.space.size > 1 for t in tasks)


def test_the_same_model_gives_the_same_keys(
    digits: ImportedModel, device: DeviceTarget, tasks: tuple[Task, ...]
) -> None:
    from builder.tuning.tasks.extraction import extract_tasks

    assert [t.key for t in extract_tasks(digits, device)] == [t.key for t in tasks]


@pytest.mark.parametrize(
    ("spec", "expected"), [("all", "all"), ("0", [0]), ("0,2", [0, 2]), ("2|0-1", [0, 1, 2]), (" 1 ", [1])]
)
def test_tasks_are_selected_by_number_and_range(tasks: tuple[Task, ...], spec: str, expected: Any) -> None:
    wanted = list(range(len(tasks))) if expected == "all" else expected
    assert [t.index for t in select(tasks, spec)] == wanted


@pytest.mark.parametrize("spec", ["", "x", "0,", "3-1", "99", "0-99", "-1", "1;2"])
def test_malformed_task_selections_are_refused(tasks: tuple[Task, ...], spec: str) -> None:
    with pytest.raises(RecordsError, match="--tasks"):
        select(tasks, spec)


def test_the_list_names_every_task(tasks: tuple[Task, ...]) -> None:
    text = table(tasks)
    assert all(t.title in text for t in tasks)


def test_a_task_is_called_after_the_models_node(tasks: tuple[Task, ...]) -> None:
    assert all(t.nodes and t.title == t.nodes[0] for t in tasks)
    assert tasks[0].title.split()[0] in ("Conv", "MatMul", "Gemm")
