"""The judge of a model: ONNX Runtime running it as it was given, without optimisations.

A reference that we have rewritten is no judge: what onnxslim or a rewrite of ours breaks would be broken on
both sides. So the answers of the original count wherever ONNX Runtime can run it, in the form that the
normalised model has: strings are places in a table, lists of dictionaries are tables of scores, and lengths
that are only known at run time are padded and counted. Where it cannot, the normalised model is the judge,
and the report says why.

A model that rounds to float16 or to bytes inside is normalised to one that rounds less, or in another place.
There the normalised model is the reference, and must agree with the original but for such rounding.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort

from builder.compiling import parity, tolerances
from builder.compiling.noise import compare_with_noise, noise_of
from builder.compiling.parity import Noise, run_as_defined, run_session
from builder.errors import ModelError, ParityError
from builder.importer import ImportedModel
from builder.importer.narrow_types import decoded, encoded
from builder.importer.native import FileSession
from builder.importer.onnx_graph import walk_nodes
from builder.importer.rewrites import resize

Array = npt.NDArray[Any]
Arrays = Mapping[str, npt.NDArray[np.generic]]

_INSTEAD: Final = "the normalised model is the reference instead"

# What rounds to bytes: the original and the normalised model may round in different places, and ONNX
# Runtime's own kernels round what they multiply with 4-bit weights.
_ROUNDS_TO_BYTES: Final = re.compile(r"Quantize|^QLinear|^QGemm|^QAttention|Integer|MatMulNBits|MatMulBnb4")
# Signal to noise, in decibels, of an output that was computed with other rounding.
_LEAST: Final = 20.0
# A file that answers its own inputs, moved by as little as this, with more noise is compared with that noise
# instead: one step that is rounded otherwise changes all that follow it. Below `_LEAST_EVER` it is a fault.
_NUDGE: Final = 2.0**-20
_NUDGES: Final = 3
_ALLOWED: Final = 3.0
_LEAST_EVER: Final = 10.0
_UNPRINTABLE: Final = re.compile(r"[^ -~]+")
_LONGEST_REASON: Final = 120
_NORMALISED: Final = "the normalised model"


class Judge:
    """What a model's answers are compared with."""

    def __init__(self, model: ImportedModel) -> None:
        self._model = model
        self._names = [spec.name for spec in model.outputs]
        self._session: ort.InferenceSession | FileSession | None = None
        self._rounds = any(
            _ROUNDS_TO_BYTES.search(node.op_type) or resize.is_rounded(node)
            for node in walk_nodes(model.onnx.graph)
        )
        self._runs = f"{_NORMALISED}, because its inputs or outputs are not the file's"
        original = model.original
        if original is None:
            return
        if original.excuse:
            self._runs = f"{_NORMALISED}, {original.excuse}"
            return
        self._runs = original.name
        self._rounds |= original.rounds_to_half
        try:
            threads = parity.threads_for(original.operators)
            source = (original.is_changed and original.model()) or original.source
            self._session = parity.session_elsewhere(source, threads)
        except ModelError as error:
            self._give_up(str(error))

    @property
    def compares_floats(self) -> bool:
        """Whether all rounding is that of float32, so that answers must agree to a few digits."""
        return not self._rounds

    @property
    def reference(self) -> str:
        """The reference, as reports name it."""
        return f"{parity.REFERENCE} running {self._runs}"

    def outputs(self, inputs: Arrays) -> list[Array]:
        """Return the right outputs, in the model's order and form.

        Raises `ModelError` if ONNX Runtime refuses the inputs.
        Raises `ParityError` if the model was normalised to another one.
        """
        if self._session is None:
            return run_as_defined(self._model.onnx, inputs)
        try:
            found = self._run(self._session, inputs)
        except ModelError as error:
            self._give_up(str(error))
            return run_as_defined(self._model.onnx, inputs)
        if not self._rounds:
            return found
        normalised = run_as_defined(self._model.onnx, inputs)
        self._compare_signals(inputs, normalised, found)
        return normalised

    def outputs_if_defined(self, inputs: Arrays) -> list[Array] | None:
        """Return the right outputs; None if ONNX Runtime refuses the inputs."""
        try:
            if self._session is None:
                return run_as_defined(self._model.onnx, inputs)
            return self._run(self._session, inputs)
        except ModelError:
            return None

    def noise(
        self,
        inputs: Arrays,
        outputs: Sequence[Array],
        reference: Sequence[Array],
        *,
        by_element: bool = False,
    ) -> Noise | None:
        """Compare outputs with the reference's by what rounding explains; None if that is not known."""
        noise = noise_of(self._model.onnx, inputs, run_as_defined(self._model.onnx, inputs))
        if noise is None:
            return None
        return compare_with_noise(outputs, reference, noise, tolerances.PARITY, by_element=by_element)

    def check_normalised(
        self, inputs: Arrays, reference: Sequence[Array], *, by_element: bool = False
    ) -> None:
        """Compare the normalised model with the original."""
        if self._session is None:
            return
        normalised = run_as_defined(self._model.onnx, inputs)
        try:
            agreement = parity.compare(self._names, normalised, reference, by_element=by_element)
            noise = None
            if not agreement.error <= tolerances.PARITY:
                noise = self.noise(inputs, normalised, reference, by_element=by_element)
            parity.check(agreement, tolerances.PARITY, noise)
        except ParityError as error:
            raise self._fault(inputs, str(error)) from error

    def _compare_signals(self, inputs: Arrays, normalised: Sequence[Array], found: Sequence[Array]) -> None:
        worst, own = np.inf, None
        for place, (name, ours, theirs) in enumerate(zip(self._names, normalised, found, strict=True)):
            if ours.shape != theirs.shape:
                raise self._fault(inputs, str(parity.mismatch(name, ours, theirs)))
            ratio, least = _decibels(ours, theirs), _LEAST
            if ratio < least:
                own = own or self._own_ratios(inputs, found)
                least = min(_LEAST, max(_LEAST_EVER, own[place] - _ALLOWED))
            if ratio < least:
                text = f"output {name[:80]}: expected a signal-to-noise ratio of at least {least:.3g} dB"
                raise self._fault(inputs, f"{text} against {self.reference}, got {ratio:.1f} dB")
            worst = min(worst, ratio)
        how = "equals" if np.isinf(worst) else "agrees with"
        to = "" if np.isinf(worst) else f" to {worst:.0f} dB"
        to += ", as it does with itself if its inputs move by a millionth" if own else ""
        self._runs = f"{_NORMALISED}, which {how} {self._runs}{to}"

    def _own_ratios(self, inputs: Arrays, found: Sequence[Array]) -> list[float]:
        """Return how well each output agrees with that of inputs that have moved by `_NUDGE`."""
        assert self._session is not None
        ratios = [np.inf] * len(found)
        for seed in range(_NUDGES):
            rng = np.random.default_rng(seed)
            moved = {
                name: _nudged(value, rng) if value.dtype.kind == "f" else value
                for name, value in inputs.items()
            }
            others = self._run(self._session, moved)
            ratios = [min(r, _decibels(a, b)) for r, a, b in zip(ratios, others, found, strict=True)]
        return ratios

    def _give_up(self, reason: str) -> None:
        self._session = None
        text = _UNPRINTABLE.sub(" ", reason.removeprefix("ONNX Runtime refused the model: "))
        self._runs = f"{_NORMALISED}, because it cannot run the file: {text[:_LONGEST_REASON]}"

    def _run(self, session: ort.InferenceSession | FileSession, inputs: Arrays) -> list[Array]:
        """Run the original.

        Raises `ModelError` if ONNX Runtime refuses it, or its inputs and outputs are not ours.
        """
        original = self._model.original
        assert original is not None
        feeds = {}
        for value in session.get_inputs():
            if value.name in original.values:
                feeds[value.name] = original.value(value.name, _dtype(value.type), value.shape)
            elif value.name in inputs:
                kind = original.narrow.get(value.name)
                given = inputs[value.name]
                feeds[value.name] = decoded(given, kind) if kind else self._as_texts(value.name, given)
            else:
                raise ModelError(f"it has another input, '{value.name}'", hint=_INSTEAD)
        counts = {length.count for length in self._model.lengths}
        names = [name for name in self._names if name not in counts]
        parts = {name: original.elements.get(name) for name in names}
        wanted = list(dict.fromkeys(name if part is None else part.output for name, part in parts.items()))
        results = dict(zip(wanted, run_session(session, wanted, feeds), strict=True))
        found = {
            name: self._as_array(name, results[name] if part is None else results[part.output][part.place])
            for name, part in parts.items()
        }
        return self._with_infinities(self._padded(found), inputs)

    def _with_infinities(self, found: list[Array], inputs: Arrays) -> list[Array]:
        """Put minus infinity for the least number into scores of an Attention, where we have it too."""
        masked = self._model.original.masked if self._model.original else frozenset()
        if masked.isdisjoint(self._names):
            return found
        ours = run_as_defined(self._model.onnx, inputs)
        return [
            np.where((a == -np.inf) & (b == np.finfo(b.dtype).min), a, b)
            if name in masked and a.shape == b.shape and a.dtype == b.dtype and b.dtype.kind == "f"
            else b
            for name, a, b in zip(self._names, ours, found, strict=True)
        ]

    def _as_texts(self, name: str, places: npt.NDArray[np.generic]) -> Array:
        """Return the texts whose places an input has; other inputs as they are."""
        columns = self._model.texts.get(name)
        if columns is None:
            return places
        texts = np.full(places.shape, "", object)
        for column, table in enumerate(columns):
            known = table.categories
            unknown = "?" * (1 + max(map(len, known), default=0))
            at = (..., slice(column, column + 1)) if places.ndim > 1 else ...
            own = [known[p] if 0 <= p < len(known) else unknown for p in places[at].ravel().tolist()]
            texts[at] = np.array(own, object).reshape(places[at].shape)
        return texts

    def _as_array(self, name: str, result: object) -> Array:
        original = self._model.original
        assert original is not None
        if isinstance(result, list):
            keys = original.keys.get(name)
            if keys is None:
                raise ModelError(f"output '{name}' is no tensor", hint=_INSTEAD)
            return np.array([[row[key] for key in keys] for row in result], np.float32)
        array = np.asarray(result)
        if kind := original.narrow.get(name):
            return encoded(array, kind)
        if array.dtype.kind not in "OUS":
            return array
        table = {text: place for place, text in enumerate(original.tables.get(name, ()))}
        try:
            places = [table[str(text)] for text in array.ravel()]
        except KeyError as error:
            raise ModelError(f"output '{name}' has texts that are in no table", hint=_INSTEAD) from error
        return np.array(places, np.int64).reshape(array.shape)

    def _padded(self, found: dict[str, Array]) -> list[Array]:
        """Pad what has a capacity, and add the lengths."""
        specs = {spec.name: spec for spec in self._model.outputs}
        for length in self._model.lengths:
            array = found[length.output]
            if length.axis < array.ndim:
                found.setdefault(length.count, np.array([array.shape[length.axis]], np.int64))
        for name in {length.output for length in self._model.lengths}:
            array, shape = found[name], specs[name].shape
            if array.ndim == len(shape) and all(a <= b for a, b in zip(array.shape, shape, strict=True)):
                found[name] = np.pad(array, [(0, b - a) for a, b in zip(array.shape, shape, strict=True)])
        return [found[name] for name in self._names]

    def _fault(self, inputs: Arrays, reason: str) -> ParityError:
        """Return the error of a model that was normalised to another one."""
        original = self._model.original
        assert original is not None
        model = original.model()
        if model is None:
            return ParityError("the model was changed while it was compiled", hint="compile it again")
        return ParityError(
            f"after normalising, {reason}{_first_difference(model, self._model.onnx, inputs)}",
            hint="please report it with the model: it and what the importer made of it differ",
        )


def _dtype(kind: str) -> np.dtype[Any]:
    """Return the dtype of an input of a session, such as `tensor(int64)`."""
    name = kind.removeprefix("tensor(").removesuffix(")")
    return np.dtype({"float": "float32", "double": "float64"}.get(name, name))


def _nudged(value: Array, rng: np.random.Generator) -> Array:
    return np.asarray(value * (1 + _NUDGE * rng.standard_normal(value.shape)), value.dtype)


def _decibels(ours: Array, theirs: Array) -> float:
    """Return the ratio of a signal to its noise, where both sides are finite; infinite for places and flags.

    What overflows in float16 does not overflow in float32, and the place of the largest of two almost equal
    numbers says nothing.
    """
    if theirs.dtype.kind != "f" and theirs.dtype.itemsize > 2:
        return np.inf
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    a, b = a[finite], b[finite]
    if not a.size or np.array_equal(a, b):
        return np.inf
    signal = np.square(b - (b.mean() if theirs.dtype.kind != "f" else 0)).sum()
    return float(10 * np.log10(max(signal, 1e-30) / np.square(a - b).sum()))


def _first_difference(model: onnx.ModelProto, normalised: onnx.ModelProto, inputs: Arrays) -> str:
    """Name the first node of a model whose value differs in the normalised one; empty if none is found.

    Only values that have the same name, type and shape in both are compared.
    """
    kept = {name for node in normalised.graph.node for name in node.output}
    makers = {name: node for node in model.graph.node for name in node.output if name in kept}
    names = list(makers)
    try:
        before, after = (_values(each, names, inputs) for each in (model, normalised))
    except ModelError:
        return ""
    for name, theirs, ours in zip(names, before, after, strict=True):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            continue
        if not parity.compare([name], [ours], [theirs]).error <= tolerances.PARITY:
            node = makers[name]
            return f"; the first node that differs is {node.op_type} '{(node.name or name)[:80]}'"
    return ""


def _values(model: onnx.ModelProto, names: Sequence[str], inputs: Arrays) -> list[Array]:
    tapped = onnx.ModelProto()
    tapped.CopyFrom(model)
    del tapped.graph.output[:]
    tapped.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    wanted = {value.name for value in tapped.graph.input}
    feeds = {name: array for name, array in inputs.items() if name in wanted}
    threads = parity.threads_for({node.op_type for node in walk_nodes(tapped.graph)})
    return [
        np.asarray(value) for value in run_session(parity.session_elsewhere(tapped, threads), None, feeds)
    ]
