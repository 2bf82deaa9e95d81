"""`compile` with dimensions that change: flags, and what the summary says about buckets."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from builder.cli.quantize import HALVES
from builder.errors import ShapeError

if TYPE_CHECKING:
    from agent.bundle.buckets import Buckets
    from builder.bundles.package import Package
    from builder.compiling.identity import Identity
    from builder.importer import ImportedModel
    from builder.quantising.weights_only import WeightsReport
    from builder.target.device_target import DeviceTarget


def add_bounds(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `compile` for dimensions with bounds."""
    bounds = parser.add_argument_group(
        "shapes that change", 'with bounds in --input-shapes, such as "ids:[1,s=1..512] mask:[1,s]"'
    )
    bounds.add_argument(
        "--buckets",
        metavar="SIZES",
        help="the sizes to compile, such as 16,64,128, or s=16,64 for one of several dimensions (default: "
        "powers of two and 1.5 times these, at most 8)",
    )
    bounds.add_argument(
        "--pad",
        metavar='"NAME=VALUE ..."',
        help="what inputs are padded with: a number, or `edge` for their last element (default: 0)",
    )


def check_bounds(args: argparse.Namespace) -> bool:
    """Check the flags, and return whether a dimension has bounds.

    Raises
    ------
    ShapeError
        If a text is malformed, or flags need bounds or cannot be combined with them.
    """
    from builder.compiling.bucket_options import parse_pads
    from builder.compiling.ladder import parse_buckets
    from builder.importer.bounded_shapes import (
        BOUNDS_HINT,
        Bounds,
        has_bounds,
        parse_bounded_shapes,
        refuse_empty,
    )

    if not has_bounds(args.input_shapes):
        for flag in ("buckets", "pad"):
            if getattr(args, flag) is not None:
                raise ShapeError(f"--{flag}: expected bounds in --input-shapes, got none", hint=BOUNDS_HINT)
        return False
    for name, dims in parse_bounded_shapes(args.input_shapes).items():
        for dim in dims:
            if isinstance(dim, Bounds) and not args.state:
                refuse_empty(name, dim)
    for flag in ("buckets", "pad"):
        if args.state and getattr(args, flag) is not None:
            raise ShapeError(
                f"--{flag}: expected no state, whose shape is fixed, got --state",
                hint=f"leave out --{flag}, or --state",
            )
    if args.buckets is not None:
        parse_buckets(args.buckets)
    if args.pad is not None:
        parse_pads(args.pad)
    if args.precision == "int8":
        raise ShapeError(
            "--precision int8: expected fixed shapes, got bounds in --input-shapes: the ranges of the values "
            "are measured at one size",
            hint="--precision weights-int8 takes bounds, and so does a model that was quantised with open "
            "dimensions, by ONNX Runtime's quantize_static for example",
        )
    if args.precision == HALVES:
        raise ShapeError(
            f"--precision {args.precision}: expected fixed shapes, got bounds in --input-shapes",
            hint="--precision weights-fp16 takes bounds: weights in 16 bits, arithmetic in float32",
        )
    return True


def load_with_states(
    args: argparse.Namespace, progress: Callable[[str], None]
) -> tuple[ImportedModel, tuple[str, ...]]:
    """Import a model whose states have bounds, and return it with its states."""
    from builder.importer import parse_input_values
    from builder.importer.bounded_shapes import parse_bounded_shapes
    from builder.importer.growing import load_growing

    if not args.model.lower().endswith(".onnx"):
        raise ShapeError(
            f"{args.model}: expected an ONNX model for a state with bounds",
            hint="export the decoder with torch.onnx.export, with its caches as inputs and outputs",
        )
    values = parse_input_values(args.input_values) if args.input_values else {}
    return load_growing(args.model, parse_bounded_shapes(args.input_shapes), args.state, values, progress)


def at_upper_bounds(model: str, text: str | None) -> str | None:
    """Return a text of `--input-shapes` with the upper bound of each dimension in place of its bounds."""
    from builder.importer.bounded_shapes import (
        declared_dims,
        has_bounds,
        parse_bounded_shapes,
        resolve_bounds,
    )

    if not has_bounds(text):
        return text
    shapes = resolve_bounds(parse_bounded_shapes(text or ""), declared_dims(model))
    largest = shapes.at([dimension.high for dimension in shapes.dimensions])
    return " ".join(f"{name}:[{','.join(map(str, shape))}]" for name, shape in largest.items())


def compile_bounded(
    args: argparse.Namespace,
    target: DeviceTarget,
    identity: Identity,
    labels: Sequence[str] | None,
    progress: Callable[[str], None],
) -> tuple[Package, WeightsReport | None]:
    """Compile the model of the arguments into buckets, and say what `--precision` cost."""
    from builder.compiling.bucket_options import parse_pads
    from builder.compiling.bucketed_compilation import compile_buckets
    from builder.compiling.ladder import parse_buckets
    from builder.importer import parse_input_values
    from builder.importer.bounded_shapes import declared_dims, parse_bounded_shapes, resolve_bounds

    quantise = None
    if args.precision is not None:
        from builder.quantising.sized_weights import SizedWeights

        quantise = SizedWeights(
            args.precision,
            calibration=args.calibration,
            # Without samples, random numbers serve: they need not look like pictures.
            preprocess=args.preprocess if args.calibration is not None else None,
            labels=args.calibration_labels,
            progress=progress,
        )
    package = compile_buckets(
        args.model,
        resolve_bounds(parse_bounded_shapes(args.input_shapes), declared_dims(args.model)),
        target,
        sizes=parse_buckets(args.buckets) if args.buckets else None,
        pads=parse_pads(args.pad) if args.pad else None,
        identity=identity,
        input_values=parse_input_values(args.input_values) if args.input_values else None,
        max_iterations=args.max_iterations,
        python=args.python,
        trusted=args.trust_model,
        quantise=quantise,
        preprocess=args.preprocess,
        postprocess=args.postprocess,
        labels=args.labels or labels,
        columns=args.columns,
        tolerance=args.tolerance,
        tuning_records=args.tuning_records,
        progress=progress,
    )
    return package, None if quantise is None else quantise.report


def bucket_lines(buckets: Buckets | None) -> list[str]:
    """Return what the summary says: each dimension, its sizes, and how its inputs are padded."""
    if buckets is None:
        return []
    lines = []
    for dimension in buckets.dimensions:
        pads = ", ".join(
            f"{axis.tensor} {'repeats its edge' if axis.pad == 'edge' else f'with {axis.value:g}'}"
            for axis in buckets.inputs
            if axis.dimension == dimension.name
        )
        every = list(dimension.sizes) == list(range(dimension.low, dimension.high + 1))
        padded = "no padding" if every else f"padded: {pads}"
        sizes = ", ".join(map(str, dimension.sizes))
        lines.append(f"{dimension}: compiled for {sizes} ({padded})")
    return lines
