"""What a model is compiled into, besides its target: its shapes, precision and declarations.

Promises that what needs no model is checked at once, in one order, and without loading a compiler.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from builder.errors import ModelError, ShapeError

if TYPE_CHECKING:  # which load numpy
    from numpy.typing import ArrayLike

    from builder.compiling.columns import Names
    from builder.compiling.labels import Labels
    from builder.importer.bounded_shapes import Parsed

# What `quantize` takes; all but the first are weights-only. `compile` also takes arithmetic in float16.
PRECISIONS: Final = ("int8", "weights-int8", "weights-int4", "weights-fp16")
HALVES: Final = "fp16"
Precision = Literal["int8", "weights-int8", "weights-int4", "weights-fp16", "fp16"]
_OF_INT8: Final = ("max_drop", "min_sqnr", "max_float", "metric", "activations")
_OF_BOUNDS: Final = ("buckets", "pad")
CALIBRATION_WANTED: Final = (
    "give --calibration a folder of about 100 to 300 pictures (with --preprocess), or an .npz file with an "
    "array for each input, samples along its first axis"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a model is imported, quantised and declared; each field may be a text as the command line has it.

    Attributes
    ----------
    input_shapes, input_values, max_iterations, python, trusted
        As in `builder.load`, for a model that is a path. Shapes may have bounds, such as
        `{"ids": (1, "s=1..512"), "mask": (1, "s")}`.
    buckets
        Dimension with bounds -> the sizes to compile. With None, powers of two and 1.5 times these.
    pad
        Input name -> `("constant", number)` or `("edge", 0.0)`, what it is padded with; zeros for the others.
    precision
        What the model is quantised to first, if it is not None.
    calibration, calibration_labels, activations
        As in `builder.quantize`: samples, classes of samples, and the type of activations.
    max_drop, min_sqnr, max_float, metric
        As in `builder.Limits`: what int8 may cost. With None, that class's defaults.
    preprocess, postprocess
        Presets or TOML files, see `builder.compiling.declarations`. With None, the preprocess is what the
        model's file says itself.
    labels
        The labels, a file with one label per line, or `coco` for the 80 classes of COCO, as `read_labels`
        takes them. With None, the labels that are in the model's file, unless there is a postprocess that
        has no use for them.
    states
        Outputs that are inputs of the next run, as `builder.compiling.states` takes them; added to those of
        the model's file and of an audio preset.
    columns
        Names of the columns of a table that the inputs take: the names, a text with commas between them, or
        the path of a CSV file whose first line has them. With None, the names that the model's file has.
    picture
        A picture that the postprocess, or a proposal, is tried on. With None, the sample of random pixels.
    tolerance
        Largest relative error that is allowed against the reference. With None, it is
        `builder.compiling.tolerances.PARITY`, or more if the model amplifies rounding.
    """

    input_shapes: str | Mapping[str, Sequence[int | str]] | None = None
    input_values: str | Mapping[str, ArrayLike] | None = None
    max_iterations: int | None = None
    python: str | os.PathLike[str] | None = None
    trusted: bool = False
    buckets: str | Mapping[str, Sequence[int]] | None = None
    pad: str | Mapping[str, tuple[str, float]] | None = None
    precision: Precision | None = None
    calibration: str | os.PathLike[str] | Mapping[str, ArrayLike] | None = None
    calibration_labels: str | os.PathLike[str] | None = None
    activations: Literal["uint8", "int8"] | None = None
    max_drop: float | None = None
    min_sqnr: float | None = None
    max_float: float | None = None
    metric: Literal["auto", "top1", "sqnr"] | None = None
    preprocess: str | None = None
    postprocess: str | None = None
    labels: Labels | None = None
    states: Sequence[str] = ()
    columns: Names | None = None
    picture: str | os.PathLike[str] | None = None
    tolerance: float | None = None

    def check(self) -> None:
        """Check what needs no model: that options go together, names are known and files can be read.

        Raises
        ------
        ModelError, ShapeError
            If a text is malformed, or an option cannot be used.
        """
        self._check_precision()
        if self.has_bounds:
            self._check_bounds()
        elif (given := self._given(_OF_BOUNDS)) is not None:
            from builder.importer.bounded_shapes import BOUNDS_HINT

            raise ShapeError(f"{given}: expected bounds in --input-shapes, got none", hint=BOUNDS_HINT)
        self._check_declarations()

    @property
    def has_bounds(self) -> bool:
        """Whether a dimension of `input_shapes` has bounds."""
        from builder.importer.bounded_shapes import has_bounds

        return has_bounds(self.input_shapes)

    def shapes(self) -> Parsed:
        """Return `input_shapes` with bounds; errors are those of `parse_bounded_shapes`."""
        from builder.importer.bounded_shapes import parse_bounded_shapes

        return parse_bounded_shapes(self.input_shapes or {})

    def values(self) -> dict[str, Any]:
        """Return `input_values`; errors are those of `parse_input_values`."""
        from builder.importer.input_shapes import parse_input_values

        given = self.input_values or {}
        return parse_input_values(given) if isinstance(given, str) else dict(given)

    def fixed_inputs(self, path: str | Path) -> dict[str, Any]:
        """Return the shapes and values for an import: those given, and of a preset for recordings.

        Of a preset's values, those of inputs that the file at `path` has.
        """
        from builder.compiling import audio_presets
        from builder.importer.input_shapes import parse_input_shapes

        given = self.input_shapes
        shapes = parse_input_shapes(given) if isinstance(given, str) else given
        preset = audio_presets.preset_of(self.preprocess) or audio_presets.AudioPreset({})
        values = preset.input_values
        if values:
            from builder.compiling.outline import tensor_names

            found = tensor_names(path)
            values = {name: values[name] for name in values if found is None or name in found[0]}
        return {
            "input_shapes": {**preset.input_shapes, **(shapes or {})} or None,
            "input_values": {**values, **self.values()} or None,
        }

    def import_options(self) -> dict[str, Any]:
        """Return the other arguments of `builder.load`."""
        return {"max_iterations": self.max_iterations, "python": self.python, "trusted": self.trusted}

    def _given(self, names: Sequence[str]) -> str | None:
        """Return the flag of the first of some options that is given."""
        return next((f"--{n.replace('_', '-')}" for n in names if getattr(self, n) is not None), None)

    def _check_precision(self) -> None:
        """Refuse int8 without calibration data, and options that the precision has no use for."""
        names: tuple[str, ...] = _OF_INT8
        if self.precision is None:
            names = ("calibration", "calibration_labels", *_OF_INT8)
        elif self.precision == HALVES:
            names = (*_OF_INT8, "calibration_labels")
        if self.precision != "int8" and (given := self._given(names)) is not None:
            raise ModelError(
                f"{given}: expected --precision int8 beside it, got {self.precision or 'none'}",
                hint="add --precision int8"
                if self.precision is None
                else "other precisions have no limits to set: they say what they cost",
            )
        if self.precision == "int8" and self.calibration is None:
            raise ModelError("expected calibration data to quantise with, got none", hint=CALIBRATION_WANTED)
        if self.calibration_labels is not None and self.calibration is None:
            raise ModelError(
                "expected calibration data beside the labels, got none", hint="name them with --calibration"
            )
        if isinstance(self.calibration, str | os.PathLike) and not Path(self.calibration).exists():
            hint = CALIBRATION_WANTED.replace("give --calibration", "give")
            raise ModelError(f"no such file or folder: {self.calibration}", hint=hint)

    def _check_bounds(self) -> None:
        from builder.compiling.bucket_options import parse_pads
        from builder.compiling.ladder import parse_buckets
        from builder.importer.bounded_shapes import Bounds, refuse_empty

        for name, dims in self.shapes().items():
            for dim in dims:
                if isinstance(dim, Bounds) and not self.states:
                    refuse_empty(name, dim)
        if self.states and (given := self._given(_OF_BOUNDS)) is not None:
            raise ShapeError(
                f"{given}: expected no state, whose shape is fixed, got --state",
                hint=f"leave out {given}, or --state",
            )
        if isinstance(self.buckets, str):
            parse_buckets(self.buckets)
        if isinstance(self.pad, str):
            parse_pads(self.pad)
        if self.precision == "int8":
            raise ShapeError(
                "--precision int8: expected fixed shapes, got bounds in --input-shapes: the ranges of the "
                "values are measured at one size",
                hint="--precision weights-int8 takes bounds, and so does a model that was quantised with "
                "open dimensions, by ONNX Runtime's quantize_static for example",
            )
        if self.precision == HALVES:
            raise ShapeError(
                "--precision fp16: expected fixed shapes, got bounds in --input-shapes",
                hint="--precision weights-fp16 takes bounds: weights in 16 bits, arithmetic in float32",
            )

    def _check_declarations(self) -> None:
        from builder.compiling import audio_presets, declarations
        from builder.compiling.columns import read_names
        from builder.compiling.labels import read_labels

        declarations.check_names(self.preprocess, self.postprocess)
        preset = audio_presets.preset_of(self.preprocess)
        if preset is not None and self.has_bounds:
            raise ShapeError(
                "--input-shapes: expected fixed shapes with recordings, got bounds",
                hint='give each input one shape: --input-shapes "data:[1,16000]"',
            )
        if self.labels is not None:
            read_labels(self.labels)
            if postprocess := self.postprocess or (preset.postprocess if preset is not None else None):
                declarations.check_labels_are_used(self.labels, postprocess)
        if self.columns is not None:
            read_names(self.columns)
