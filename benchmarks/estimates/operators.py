"""The operators of common models: each signature once, the costliest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.architectures import generate
from benchmarks.estimates.signature import signature_for
from builder.importer import import_onnx
from builder.records.task import Task
from builder.target.device_target import DeviceTarget
from builder.tuning.tasks.extraction import extract_tasks

TOKENS: Final = (1, 128)


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator: a signature, and the kernels that have it.

    Attributes
    ----------
    signature
        As `benchmarks.estimates.signature` writes it.
    tasks
        Kernels that differ in what is fused around the anchor; the one with the most work comes first.
    models
        Models that have it.
    share
        Its share of a model's floating-point operations, summed over the models.
    """

    signature: str
    tasks: tuple[Task, ...]
    share: float
    models: tuple[str, ...]


def operators_of(models: Sequence[str], target: DeviceTarget, kinds: Sequence[str] | None) -> list[Operator]:
    """Return the operators of `models`, of the design spaces `kinds` (None for all), largest share first."""
    found: dict[str, list[Task]] = {}
    shares: dict[str, float] = {}
    origins: dict[str, list[str]] = {}
    for name in models:
        tokens = dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), TOKENS)
        imported = import_onnx(
            generate(name), input_shapes=tokens if name == "bert" else None, progress=lambda _: None
        )
        tasks = extract_tasks(imported, target)
        total = sum(task.flops * task.calls for task in tasks)
        for task in tasks:
            if kinds is not None and task.kind not in kinds:
                continue
            signature = signature_for(task.workload)
            known = found.setdefault(signature, [])
            if name not in origins.setdefault(signature, []):
                origins[signature].append(name)
            shares[signature] = shares.get(signature, 0.0) + task.flops * task.calls / total
            if all(task.key != other.key for other in known):
                known.append(task)
    order = sorted(found, key=lambda signature: -shares[signature])
    return [
        Operator(s, tuple(sorted(found[s], key=lambda t: -t.calls * t.flops)), shares[s], tuple(origins[s]))
        for s in order
    ]
