"""Compile a model whose dimensions change into one bundle of buckets.

The steps are those of `builder.compiling.compilation`, for each bucket. Kernels and weights that are equal
exist once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import ArrayLike

from builder.bundles.package import Package
from builder.compiling import audio_presets
from builder.compiling.bucket_plan import plan_buckets
from builder.compiling.columns import Names
from builder.compiling.compilation import build
from builder.compiling.identity import Identity
from builder.compiling.labels import Labels
from builder.compiling.plan import Plan
from builder.compiling.sized_models import SizedModels
from builder.errors import ShapeError
from builder.importer import load
from builder.importer.bounded.widening import Capacities, capacities, widened
from builder.importer.bounded_shapes import BoundedShapes
from builder.importer.onnx_import import ImportedModel
from builder.records.folder import Records
from builder.target.device_target import DeviceTarget, resolve

Progress = Callable[[str], None]


def compile_buckets(
    path: str | os.PathLike[str],
    shapes: BoundedShapes,
    target: str | Mapping[str, Any] | DeviceTarget = "host",
    *,
    sizes: Mapping[str, Sequence[int]] | None = None,
    pads: Mapping[str, tuple[str, float]] | None = None,
    identity: Identity | None = None,
    input_values: Mapping[str, ArrayLike] | None = None,
    max_iterations: int | None = None,
    python: str | None = None,
    trusted: bool = False,
    quantise: Callable[[ImportedModel], ImportedModel] | None = None,
    preprocess: str | None = None,
    postprocess: str | None = None,
    labels: Labels | None = None,
    columns: Names | None = None,
    tolerance: float | None = None,
    tuning_records: Records | str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Package:
    """Compile a model at several sizes of its changing dimensions.

    Parameters
    ----------
    path
        The model's file.
    shapes
        The shapes of its inputs, with bounds.
    sizes
        Dimension -> sizes of its buckets, as `builder.compiling.ladder.parse_buckets` returns them; the
        default ladder for the others.
    pads
        Input name -> how it is padded, as `builder.compiling.bucket_options.parse_pads` says; the others
        are padded with zeros.
    input_values, max_iterations, python, trusted
        As in `builder.load`.
    quantise
        Called with the model at each size that is imported, the largest first; returns what is compiled
        instead.
    target, identity, preprocess, postprocess, labels, columns, tolerance, tuning_records, progress
        As in `builder.compile`.

    Returns
    -------
    Package
        The package, unsigned.

    Raises
    ------
    InputFault
        If an argument cannot be used, padding changes the answer, or parity fails.
    BuildError
        If the builder itself fails.
    """
    progress = progress or (lambda _: None)
    identity = identity or Identity()
    identity.check()
    if audio_presets.is_audio(preprocess or ""):
        raise ShapeError(
            "--input-shapes: expected fixed shapes with recordings, got bounds",
            hint='give each input one shape: --input-shapes "data:[1,16000]"',
        )
    device = target if isinstance(target, DeviceTarget) else resolve(target)

    def imported(at: Mapping[str, tuple[int, ...]]) -> ImportedModel:
        model = load(
            Path(path),
            input_shapes=at,
            input_values=input_values,
            max_iterations=max_iterations,
            python=python,
            trusted=trusted,
        )
        if quantise is not None:
            model = quantise(model)
        return model if room is None else widened(model, room)

    room: Capacities | None = None
    models = SizedModels(imported, shapes)
    first = models.at(tuple(dimension.high for dimension in shapes.dimensions))
    if first.states:
        kept = ", ".join(repr(state.input) for state in first.states)
        raise ShapeError(
            f"--input-shapes: expected fixed shapes with states ({kept:.200}), got bounds",
            hint="give each input one shape, or compile a bundle for each",
        )
    room = capacities(first)
    buckets = plan_buckets(models, sizes=sizes or {}, pads=pads or {}, tolerance=tolerance, progress=progress)
    plan = Plan(models, buckets)
    for note in plan.smallest.notes:
        progress(note)
    return build(
        plan,
        device,
        identity=identity,
        preprocess=preprocess,
        postprocess=postprocess,
        labels=labels,
        states=(),
        columns=columns,
        tolerance=tolerance,
        tuning_records=tuning_records,
        progress=progress,
    )
