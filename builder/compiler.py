"""`compile`: from a model's file to a package for a device. Nothing is run on that device.

The steps, in order: import, at each size if shapes have bounds; quantise, if that is asked; then all that
`builder.compiling` does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from builder.bundles.package import Package
from builder.compiling.bucket_options import parse_pads
from builder.compiling.bucket_plan import plan_buckets
from builder.compiling.compilation import build
from builder.compiling.identity import Identity
from builder.compiling.ladder import parse_buckets
from builder.compiling.options import HALVES, Options
from builder.compiling.plan import Plan
from builder.compiling.sized_models import SizedModels
from builder.errors import ShapeError
from builder.importer import ImportedModel, load
from builder.importer.bounded.widening import Capacities, capacities, widened
from builder.importer.bounded_shapes import declared_dims, resolve_bounds
from builder.importer.growing import load_growing
from builder.quantising.precisions import Quantiser
from builder.records.folder import Records
from builder.target.device_target import DeviceTarget, resolve
from builder.target.half_arithmetic import require_half_arithmetic

Progress = Callable[[str], None]


def compile(
    model: ImportedModel | str | os.PathLike[str],
    target: str | Mapping[str, Any] | DeviceTarget = "host",
    options: Options | None = None,
    *,
    identity: Identity | None = None,
    tuning_records: Records | str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Package:
    """Compile a model for a device.

    Parameters
    ----------
    model
        A path, or the result of `builder.load`; only a path can be compiled for shapes with bounds.
    target
        A preset's name, a TVM target as JSON or in TVM's old command-line syntax, or a resolved target.
    options
        Shapes, precision and declarations.
    identity
        Name, version, counter and compatible devices.
    tuning_records
        The result of `builder.tune`, or its folder; its schedules replace the heuristic's where they are
        faster.
    progress
        Called with each step as it begins.

    Returns
    -------
    Package
        The package, unsigned.

    Raises
    ------
    InputFault
        If the identity, model, target, options or records cannot be used, padding changes the answer, or
        parity fails.
    BuildError
        If the builder itself fails.
    """
    progress = progress or (lambda _: None)
    options = options or Options()
    identity = identity or Identity()
    identity.check()
    options.check()
    device = target if isinstance(target, DeviceTarget) else resolve(target)
    if options.precision == HALVES:
        require_half_arithmetic(device)
    quantise = Quantiser(device, options, progress)
    if isinstance(model, ImportedModel):
        if options.has_bounds:
            raise ShapeError(
                "--input-shapes: expected a path for shapes with bounds, got an imported model",
                hint="give `compile` the path: it imports the model at each size",
            )
        plan = Plan.fixed(quantise(model))
    else:
        progress(f"importing {os.fspath(model)}")
        if not options.has_bounds:
            given = options.fixed_inputs(Path(model)) | options.import_options()
            plan = Plan.fixed(quantise(load(model, **given, progress=progress)))
        elif options.states:
            plan, states = _growing(Path(model), options, quantise, progress)
            options = replace(options, states=states)
        else:
            plan = _buckets(Path(model), options, quantise, progress)
    package = build(
        plan, device, options, identity=identity, tuning_records=tuning_records, progress=progress
    )
    return replace(package, quantisation=quantise.report)


def _growing(
    path: Path, options: Options, quantise: Quantiser, progress: Progress
) -> tuple[Plan, tuple[str, ...]]:
    """Import a model whose states have bounds, and return it with its states."""
    if path.suffix.lower() != ".onnx":
        raise ShapeError(
            f"{path}: expected an ONNX model for a state with bounds",
            hint="export the decoder with torch.onnx.export, with its caches as inputs and outputs",
        )
    model, states = load_growing(path, options.shapes(), options.states, options.values(), progress)
    return Plan.fixed(quantise(model)), states


def _buckets(path: Path, options: Options, quantise: Quantiser, progress: Progress) -> Plan:
    """Import a model at the sizes of its bounds, the largest first, and plan its buckets."""
    room: Capacities | None = None
    values, settings = options.values(), options.import_options()

    def imported(at: Mapping[str, tuple[int, ...]]) -> ImportedModel:
        model = quantise(load(path, input_shapes=at, input_values=values, **settings))
        return model if room is None else widened(model, room)

    shapes = resolve_bounds(options.shapes(), declared_dims(path))
    models = SizedModels(imported, shapes)
    first = models.at(tuple(dimension.high for dimension in shapes.dimensions))
    if first.states:
        kept = ", ".join(repr(state.input) for state in first.states)
        raise ShapeError(
            f"--input-shapes: expected fixed shapes with states ({kept:.200}), got bounds",
            hint="give each input one shape, or compile a bundle for each",
        )
    room = capacities(first)
    sizes, pads = options.buckets or {}, options.pad or {}
    buckets = plan_buckets(
        models,
        sizes=parse_buckets(sizes) if isinstance(sizes, str) else sizes,
        pads=parse_pads(pads) if isinstance(pads, str) else pads,
        tolerance=options.tolerance,
        progress=progress,
    )
    plan = Plan(models, buckets)
    for note in plan.smallest.notes:
        progress(note)
    return plan
