"""Try a case: import it, compile it for this machine, and run it in the executor that devices use.

A case whose inputs hold a shape, an axis or a count is tried again with these fixed, as `--input-values`
does.
What our own comparison refuses is compiled once more without it: the table says whether it was right.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from onnx.helper import tensor_dtype_to_np_dtype

from agent.errors import EdgeError
from benchmarks.conformance.case import Array, Case
from benchmarks.conformance.unchecked import run_imported
from benchmarks.conformance.verdict import (
    APART,
    FIXED,
    REFUSED,
    REFUSED_RIGHT,
    RIGHT,
    TRACEBACK,
    WRONG,
    Verdict,
    difference,
    differing,
)
from builder import compile, load
from builder.compiling.parity import run_session, session_elsewhere
from builder.errors import BuildError, ModelError, ParityError, ShapeError, UnsupportedOperatorError
from builder.importer import ImportedModel
from builder.importer.narrow_types import decoded, encoded
from builder.running.local_run import Runner

# What `--max-iterations` is given: no loop of a case has more.
MOST_STEPS: Final = 20
# A mistake of an exporter, a rule that ONNX Runtime reads in another way, or a formula that loses all digits.
_DISPUTED: Final = "ONNX Runtime, with which we agree, does not give the source's numbers for the file either"
_INVALID: Final = "the exporter wrote types or shapes that ONNX does not allow"
_CONSTANT: Final = "constants once its inputs are fixed"


def try_case(case: Case) -> Verdict:
    """Try a case, with the inputs as they are and then with some fixed.

    Parameters
    ----------
    case
        The case.
    """
    first = _attempt(case, {})
    if first.kind != REFUSED or not case.inputs:
        return _apart(case, case.apart, first) if case.apart else first
    if case.apart:
        return _apart(case, case.apart, first)
    choices: list[tuple[dict[str, Array], int | None]] = [(fixable(case.inputs), None)]
    choices.append((dict(list(case.inputs.items())[1:]), None))
    if "--max-iterations" in first.reason:
        choices.insert(0, ({}, MOST_STEPS))
    for values, steps in choices:
        if (values and len(values) < len(case.inputs)) or steps is not None:
            again = _attempt(case, values, steps)
            if again.kind != REFUSED:
                kind = FIXED if again.kind == RIGHT else again.kind
                return Verdict(case.name, case.operator, kind, again.reason or first.reason)
    if all(_is_count(value) for value in case.inputs.values()):
        return _apart(case, _CONSTANT, first)
    return _apart(case, _INVALID, first) if _is_invalid(case.model) else first


def _apart(case: Case, why: str, verdict: Verdict) -> Verdict:
    """Count a refusal apart; what is right, wrong or raised stays so."""
    return Verdict(case.name, case.operator, APART, why) if verdict.kind in (REFUSED, WRONG) else verdict


def fixable(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return the inputs that are scalars or integer vectors: shapes, axes and counts; not all inputs."""
    found = {n: v for n, v in inputs.items() if v.ndim == 0 or _is_count(v)}
    if found and len(found) == len(inputs):
        found.pop(next(iter(inputs)))
    return found


def _is_count(value: Array) -> bool:
    return value.ndim <= 1 and value.dtype.kind in "iub"


def _attempt(case: Case, values: Mapping[str, Array], steps: int | None = None) -> Verdict:
    feeds = {name: value for name, value in case.inputs.items() if name not in values}
    try:
        compared, outputs = _run(case.model, feeds, values, steps)
    except (BuildError, EdgeError) as error:
        return Verdict(case.name, case.operator, REFUSED, reason_of(error))
    except Exception as error:  # noqa: BLE001 - the product must explain every error
        place = traceback.extract_tb(sys.exc_info()[2])[-1]
        said = f"{type(error).__name__}: {str(error)[:300]} ({Path(place.filename).name}:{place.lineno})"
        return Verdict(case.name, case.operator, TRACEBACK, said)
    if len(outputs) != len(case.outputs):
        wrong = f"expected {len(case.outputs)} outputs, got {len(outputs)}"
        return Verdict(case.name, case.operator, WRONG, wrong)
    if not compared and _is_disputed(case, outputs):
        return Verdict(case.name, case.operator, APART, _DISPUTED)
    for got, want in zip(outputs, case.outputs, strict=True):
        wrong = difference(got, want, case.rtol, case.atol)
        if wrong and compared:  # our own comparison noticed
            return Verdict(case.name, case.operator, REFUSED, f"{compared} | {wrong}")
        if wrong:
            return Verdict(case.name, case.operator, WRONG, wrong)
    return Verdict(case.name, case.operator, REFUSED_RIGHT if compared else RIGHT, compared)


def _is_disputed(case: Case, outputs: Sequence[Array]) -> bool:
    """Whether ONNX Runtime, running the file itself, differs from the source in most places where we do.

    Then the file is the judge, with which `compile` compared ours.
    """
    pairs = list(zip(outputs, case.outputs, strict=True))
    if case.model.suffix != ".onnx" or not any(difference(*pair, case.rtol, case.atol) for pair in pairs):
        return False
    try:
        theirs = run_session(session_elsewhere(case.model, 0), None, case.inputs)
    except ModelError:
        return False
    arrays = [np.asarray(value) for value in theirs]
    known = [value.astype(str) if value.dtype.kind == "O" else value for value in arrays]
    return all(_is_excused(*each, case) for each in zip(outputs, known, case.outputs, strict=True))


def _is_excused(ours: Array, theirs: Array, source: Array, case: Case) -> bool:
    if not difference(ours, theirs):
        return True
    if not ours.shape == theirs.shape == source.shape:
        return False
    ours_wrong = differing(ours, source, case.rtol, case.atol)
    both = ours_wrong & differing(theirs, source, case.rtol, case.atol)
    return bool(np.count_nonzero(both) * 2 >= np.count_nonzero(ours_wrong))


def _is_invalid(model: Path) -> bool:
    """Whether a file breaks ONNX's rules of types and shapes, so that ONNX Runtime refuses it too."""
    if model.suffix != ".onnx":
        return False
    try:
        session_elsewhere(model, 0)
    except ModelError as error:
        return any(
            words in str(error) for words in ("INVALID_GRAPH", "ShapeInferenceError", "TypeInferenceError")
        )
    return False


def _run(
    path: Path, feeds: Mapping[str, Array], values: Mapping[str, Array], steps: int | None
) -> tuple[str, list[Array]]:
    """Return what our own comparison says against the model, and its outputs."""
    model = load(
        path,
        input_shapes={name: list(value.shape) for name, value in feeds.items()} or None,
        input_values=dict(values) or None,
        max_iterations=steps,
    )
    specs = {spec.name: spec for spec in model.inputs}
    for name in specs:
        if name not in feeds:
            raise ShapeError(f"expected a value of '{name}', an optional input, got none", hint="add it")
    given = {name: _given(model, name, feeds[name], spec.dtype) for name, spec in specs.items()}
    compared = ""
    try:
        outputs = list(Runner(compile(model, target="host"), 1)(given).outputs.values())
    except ParityError as error:
        compared = f"our own comparison: {error}"
        outputs = run_imported(model, given)
    counts = {length.count for length in model.lengths}
    names = [spec.name for spec in model.outputs if spec.name not in counts]
    named = zip(names, outputs, strict=True)
    return compared, [_texts(model, name, np.asarray(value)) for name, value in named]


def _given(model: ImportedModel, name: str, value: Array, dtype: str) -> Array:
    """Return an input as the model takes it; of texts, their places in its tables."""
    if value.dtype.kind != "U":
        kind = _narrow(model).get(name)
        return value.astype(dtype, copy=False) if kind is None else encoded(value, kind)
    columns = model.texts[name]
    places = np.full(value.shape, -1, np.int64)
    for place in np.ndindex(value.shape):
        known = columns[place[-1] if len(columns) > 1 else 0].categories
        if value[place] in known:
            places[place] = known.index(value[place])
    return places


def _narrow(model: ImportedModel) -> Mapping[str, int]:
    return {} if model.original is None else model.original.narrow


def _texts(model: ImportedModel, name: str, places: Array) -> Array:
    """Return an output: places in a table of texts as these texts, bytes of narrow numbers as the numbers."""
    if kind := _narrow(model).get(name):
        return decoded(places, kind).astype(tensor_dtype_to_np_dtype(kind))
    table = () if model.original is None else model.original.tables.get(name, ())
    return np.array(table)[places] if table else places


def reason_of(error: Exception) -> str:
    """Return why a model is refused, with the operator if there is one."""
    if isinstance(error, UnsupportedOperatorError) and error.obstacles:
        first = error.obstacles[0]
        return f"{first.operator}: {first.reason}"
    hint = getattr(error, "hint", None) or ""
    return f"{error} | {hint}" if "--max-iterations" in hint else str(error)
