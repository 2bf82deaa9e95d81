"""Writes the files that engines read: a model, its inputs, and our bundles."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx

from benchmarks.architectures import ARCHITECTURES, generate
from benchmarks.engines import OURS, UNTUNED, bundle_of, float_of, simplified_of
from benchmarks.quantised import SUFFIX, dynamically_quantised, quantised
from benchmarks.zoo.models import NAMES

PROJECT: Final = Path(__file__).parents[1]
# The demo's classifier is trained. The others are generated with seeded weights: the work of kernels does not
# depend on the values.
DIGITS: Final = PROJECT / "examples" / "digits" / "digits.onnx"
FLOATS: Final = (
    "resnet18", "resnet50", "resnet50-v2", "mobilenetv2", "mobilenetv3", "efficientnet-b0", "bert",
    "slim-320", "digits",
)  # fmt: skip
# Those of pictures are quantised with fixed ranges; the other one finds them while it runs.
INT8: Final = tuple(
    f"{name}{SUFFIX}"
    for name in ("resnet18", "resnet50", "mobilenetv2", "mobilenetv3", "efficientnet-b0", "bert")
)
MODELS: Final = (*FLOATS, *INT8)
# The same networks, compiled with `--precision fp16`: the file is the float network's.
HALVES_SUFFIX: Final = "-fp16"
HALVES: Final = tuple(f"{name}{HALVES_SUFFIX}" for name in ("resnet18", "resnet50", "mobilenetv2", "bert"))
# The geometric mean is taken over the ratios of these four, with 1 and 2 threads.
HEADLINE: Final = ("resnet18", "resnet50", "mobilenetv2", "bert")
SEQUENCE: Final = 128


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model that engines can load.

    Attributes
    ----------
    path
        The ONNX file.
    reference
        The outputs of the reference implementation.
    compile_s
        Seconds of one compilation with its import; None if a bundle was kept.
    """

    path: Path
    reference: list[np.ndarray[Any, Any]]
    compile_s: float | None


def source(name: str, target: str = "host") -> onnx.ModelProto:
    """Return a model of `MODELS` or of the zoo, or one that is read from a file.

    If it is in int8, its weights are chosen for `target`.

    Raises
    ------
    LeftOutError
        If a model of the zoo cannot be exported.
    """
    name = name.removesuffix(HALVES_SUFFIX)
    if name in INT8:
        before = generate(name.removesuffix(SUFFIX))
        return quantised(before, target) if fixed_shapes(name) is None else dynamically_quantised(before)
    if name in ARCHITECTURES:
        return generate(name)
    if name in NAMES:
        from benchmarks.zoo.comparison import export  # imports the tables, which import this module

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.onnx")
            export(name, path)
            return onnx.load(path)
    return onnx.load(DIGITS if name in MODELS else name)


def fixed_shapes(name: str) -> dict[str, list[int]] | None:
    """Return the shapes of inputs that have symbolic dimensions, None if there are none."""
    if name.removesuffix(HALVES_SUFFIX).removesuffix(SUFFIX) == "bert":
        return {key: [1, SEQUENCE] for key in ("input_ids", "attention_mask", "token_type_ids")}
    return None


def prepare(name: str, folder: Path, records: str | None = None, *, keep: bool = False) -> Prepared:
    """Write model, inputs and bundles; a model that exists already is kept.

    Parameters
    ----------
    name
        One of `MODELS`.
    folder
        The folder in which the model gets a folder.
    records
        Tuning records to use.
    keep
        Also keep bundles that exist already.
    """
    from builder import compile
    from builder.bundles.package import Package
    from builder.compiling.parity import run_as_defined
    from builder.compiling.sample_inputs import make_inputs
    from builder.importer import import_onnx

    place = folder.resolve() / name
    place.mkdir(parents=True, exist_ok=True)
    path = place / f"{name}.onnx"
    if not path.exists():
        onnx.save(source(name), path)
    if name in INT8 and not float_of(path).exists():
        before = import_onnx(source(name.removesuffix(SUFFIX)), input_shapes=fixed_shapes(name))
        onnx.save(before.onnx, float_of(path))
    start = time.perf_counter()
    model = import_onnx(path, input_shapes=fixed_shapes(name))
    compile_s = None
    if keep and bundle_of(path, OURS).exists():
        Package.load(bundle_of(path, OURS))
    else:
        tuned = compile(model, tuning_records=records)
        compile_s = time.perf_counter() - start
        tuned.save(bundle_of(path, OURS))
        bundle_of(path, UNTUNED).unlink(missing_ok=True)
        if records is not None:
            compile(model).save(bundle_of(path, UNTUNED))
    onnx.save(model.onnx, simplified_of(path))
    inputs: dict[str, Any] = make_inputs(model.inputs, model.onnx)
    np.savez(place / "inputs.npz", **inputs)
    return Prepared(path, run_as_defined(model.onnx, inputs), compile_s)
