"""A case: a model file, its inputs, and the outputs that its source says are right.

A case is a folder. The environment of a source writes it; that of the product reads it. This file needs only
numpy in both.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_FACTS: Final = "case.json"
_TENSORS: Final = "tensors.npz"
# What numpy cannot write to a file itself: as integers of that width.
_WIDTHS: Final = {1: np.uint8, 2: np.uint16}


@dataclass(frozen=True, slots=True)
class Case:
    """A case.

    Attributes
    ----------
    source
        The name of the source, such as `onnx_nodes`.
    name
        Its name there.
    operator
        What it is about: the operator, estimator or layer.
    model
        Path of the model's file.
    inputs
        Input name -> value. Inputs that are no tensors are left out.
    outputs
        The outputs that are right, in the model's order.
    rtol, atol
        Largest relative and absolute error of floats that the source allows.
    apart
        Why the case is counted apart, such as random numbers; empty if it is not.
    """

    source: str
    name: str
    operator: str
    model: Path
    inputs: Mapping[str, Array]
    outputs: Sequence[Array]
    rtol: float = 0.0
    atol: float = 0.0
    apart: str = ""


def write(folder: Path, case: Case) -> None:
    """Write a case as a folder; the model's file is moved into it.

    Parameters
    ----------
    folder
        The folder, which is made.
    case
        The case.
    """
    temporary = folder.with_name(f".{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    model = temporary / f"model{case.model.suffix}"
    shutil.move(case.model, model)
    arrays: dict[str, Array] = {}
    dtypes: dict[str, str] = {}
    for kind, values in (("input", case.inputs.values()), ("output", case.outputs)):
        for index, value in enumerate(values):
            key = f"{kind}_{index}"
            dtypes[key] = value.dtype.name if value.dtype.kind not in "OU" else "str"
            arrays[key] = _storable(value)
    with (temporary / _TENSORS).open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    facts = {
        "source": case.source, "name": case.name, "operator": case.operator, "model": model.name,
        "inputs": list(case.inputs), "outputs": len(case.outputs), "dtypes": dtypes,
        "rtol": case.rtol, "atol": case.atol, "apart": case.apart,
    }  # fmt: skip
    (temporary / _FACTS).write_text(json.dumps(facts, indent=1))
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(temporary, folder)  # noqa: PTH105 - a folder


def read(folder: Path) -> Case:
    """Read a case that `write` wrote."""
    facts = json.loads((folder / _FACTS).read_text())
    with np.load(folder / _TENSORS, allow_pickle=False) as arrays:
        values = {key: _restored(arrays[key], facts["dtypes"][key]) for key in arrays.files}
    return Case(
        facts["source"],
        facts["name"],
        facts["operator"],
        folder / facts["model"],
        {name: values[f"input_{index}"] for index, name in enumerate(facts["inputs"])},
        [values[f"output_{index}"] for index in range(facts["outputs"])],
        facts["rtol"],
        facts["atol"],
        facts["apart"],
    )


def is_written(folder: Path) -> bool:
    """Whether a folder is a case."""
    return (folder / _FACTS).is_file()


def _storable(value: Array) -> Array:
    if value.dtype.kind == "O":
        return value.astype(str)
    if value.dtype.isbuiltin == 1 or value.dtype.kind == "U":
        return value
    return value.view(_WIDTHS[value.dtype.itemsize])


def _restored(value: Array, dtype: str) -> Array:
    if dtype in ("str", value.dtype.name):
        return value
    import ml_dtypes

    return value.view(np.dtype(getattr(ml_dtypes, dtype)))
