"""Import an ONNX file or model: read, check, normalise, convert, and explain what cannot be imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import onnx
from numpy.typing import ArrayLike
from tvm.ir import IRModule

from agent.bundle.output_length import OutputLength
from agent.bundle.processing import Preprocess
from agent.bundle.state import State
from agent.bundle.tensor_spec import TensorSpec
from builder.errors import FrontEndError, ModelError
from builder.importer import advice, native
from builder.importer.bounded.padding import bounded_outputs
from builder.importer.classic.string_inputs import Texts, replace_string_inputs
from builder.importer.classic.strings import replace_strings
from builder.importer.edge_scales import NO_SCALES, EdgeScales, fitting, onnx_scales
from builder.importer.frameworks.sample import FrameworkSample
from builder.importer.function_bodies import Operator, expand, has_body
from builder.importer.half_precision import half_types
from builder.importer.large_models import sha256
from builder.importer.model_file import ModelFile, check_message, read_model
from builder.importer.narrow_types import disagreement, narrow_edges
from builder.importer.normalise import normalise, simplify
from builder.importer.onnx_graph import walk_nodes
from builder.importer.original import (
    FILE,
    IN_MEMORY,
    REAL_LSTM,
    Original,
    has_rounded_lstm,
    is_unsorted,
    keys_of,
    masked_of,
    operators_of,
    skips_output,
)
from builder.importer.relax_module import RelaxModel, to_relax
from builder.importer.sequence_outputs import split_sequences
from builder.importer.source_nodes import SourceNodes
from builder.importer.structure import prepare
from builder.importer.ultralytics_metadata import NOTHING_SAID, Exported, from_onnx
from builder.importer.unsupported import explain, refuse_unsupported, refused_operators

_LIMITED: Final = "because --max-iterations limits its loops"


@dataclass(frozen=True, slots=True)
class ImportedModel:
    """A model in the form that the compiler takes.

    Attributes
    ----------
    mod
        Static Relax module with weights as constants. Its `main` takes the inputs in the order of `inputs`
        (parameter names are made valid identifiers and may differ) and returns one tensor, or a tuple in the
        order of `outputs`.
    inputs, outputs
        Names, datatypes and shapes; names as in the model file.
    onnx
        The normalised model, which must compute the same as the original.
    source_sha256
        SHA-256 of what was imported, in hexadecimal.
    notes
        Choices made without asking the user, such as a batch of 1; one line each.
    name
        The file's name without its suffix; for a model in memory, the graph's name.
    preprocess, labels
        What the file itself says about its pictures and classes, which counts unless the user says otherwise.
        Labels are names of classes; outputs that are strings in the file are places among them.
    exported
        What an export of Ultralytics says about itself.
    source
        The nodes of the original model, and which of them each node of `onnx` comes from. Calls in `mod` have
        spans with names of nodes of `onnx`.
    lengths
        Axes of outputs whose length is only known at run time. These outputs are padded with zeros, and their
        lengths are the last of `outputs`.
    reference
        What the model's own framework makes of one set of inputs; None if no framework was asked.
    columns
        Names of the features of its only input, if the file has them.
    states
        Outputs that are inputs of the next run, as the file itself declares them.
    texts
        Inputs that are strings in the file, and the texts of each of their columns; values are places there.
    nan_inputs
        Inputs in which NaN is a missing value, as the file's format says; others may be found in `onnx`.
    scales
        The scales of quantised inputs and outputs.
    class_counts
        Outputs that are numbers of classes -> how many classes there are, where the file says so.
    unrewritten
        One line for each node that stays as it is because its rewrite failed.
    original
        The model before it was normalised, which `builder.compiling.judge` compares it with; None if its
        inputs or outputs are others.
    """

    mod: IRModule
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    onnx: onnx.ModelProto
    source_sha256: str
    notes: tuple[str, ...]
    name: str
    source: SourceNodes
    preprocess: Preprocess | None = None
    labels: tuple[str, ...] = ()
    exported: Exported = NOTHING_SAID
    lengths: tuple[OutputLength, ...] = ()
    reference: FrameworkSample | None = None
    columns: tuple[str, ...] = ()
    nan_inputs: tuple[str, ...] = ()
    states: tuple[State, ...] = ()
    texts: Mapping[str, tuple[Texts, ...]] = field(default_factory=dict)
    scales: EdgeScales = NO_SCALES
    class_counts: Mapping[str, int] = field(default_factory=dict)
    original: Original | None = None
    unrewritten: tuple[str, ...] = ()

    @property
    def number_types(self) -> dict[str, str]:
        """Inputs and outputs of bytes that hold numbers of another type -> that type, such as `INT4`."""
        kinds = {} if self.original is None else self.original.narrow
        names = [spec.name for spec in (*self.inputs, *self.outputs) if spec.name in kinds]
        return {name: onnx.TensorProto.DataType.Name(kinds[name]) for name in names}


def import_onnx(
    source: Path | str | onnx.ModelProto,
    *,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    input_values: Mapping[str, ArrayLike] | None = None,
    max_iterations: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> ImportedModel:
    """Import an ONNX model.

    Parameters
    ----------
    source
        Path of a file, or a model in memory, which is not changed.
    input_shapes
        Input name -> shape, for each input with unknown dimensions. If only batch sizes are unknown, shapes
        are not required: those sizes become 1.
    input_values
        Inputs to turn into constants: a number fills the input, a list must have its shape.
    max_iterations
        The largest number of steps of a Loop whose number is only known at run time. Where a request needs
        more, outputs of the Loop that are floats become NaN.
    progress
        Called with each line of `ImportedModel.notes` as soon as it is known.

    Raises
    ------
    ModelError
        If the file cannot be read or is not a valid model.
    ShapeError
        If names, shapes or values do not fit the model, or some are missing.
    UnsupportedOperatorError
        If operators cannot be imported; the message names all of them with their nodes.
    """
    collected: list[str] = []
    failed: list[str] = []
    name = source.graph.name or "model" if isinstance(source, onnx.ModelProto) else Path(source).stem

    def note(text: str) -> None:
        collected.append(text)
        if progress is not None:
            progress(text)

    native.start()  # it is ready when the file has been read
    file = _in_memory(source) if isinstance(source, onnx.ModelProto) else read_model(source)
    producer, said = file.model.producer_name, from_onnx(file.model)
    try:
        model = prepare(file.model)
        source_nodes = SourceNodes.of(model)
        operators = operators_of(model)
        judge = IN_MEMORY if isinstance(source, onnx.ModelProto) else FILE
        original = Original(
            source if isinstance(source, onnx.ModelProto) else Path(source).resolve(),
            f"{judge}, {REAL_LSTM}" if has_rounded_lstm(operators) else judge,
            file.sha256,
            input_shapes or {},
            input_values or {},
            keys_of(model),
            operators=operators,
            rounds_to_half=bool(half_types(model)),
            excuse=_LIMITED if max_iterations is not None else disagreement(model),
            narrow=narrow_edges(model),
            masked=masked_of(model),
            has_open_nodes=any(skips_output(n) or is_unsorted(n) for n in walk_nodes(model.graph)),
        )
        elements = split_sequences(model)
        texts = replace_string_inputs(model)
        tables = replace_strings(model)
        model = normalise(model, input_shapes or {}, input_values or {}, note, max_iterations, failed)
        refuse_unsupported(model)
        model, relax = _convert(model, note, max_iterations, failed)
    except ModelError as error:
        error.details = advice.explain(error, producer)
        raise
    return ImportedModel(
        relax.mod,
        relax.inputs,
        relax.outputs,
        model,
        file.sha256,
        tuple(collected),
        name,
        source_nodes.normalised_as(model),
        labels=_one_table(tables) or said.labels,
        exported=said,
        texts=texts,
        lengths=bounded_outputs(model),
        scales=fitting(onnx_scales(model), relax.inputs, relax.outputs),
        original=replace(original, tables=tables, elements=elements),
        unrewritten=tuple(failed),
    )


def _one_table(tables: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the names of classes if all outputs that are strings have the same; else none."""
    distinct = set(tables.values())
    names = distinct.pop() if len(distinct) == 1 else ()
    return names if all(name.strip() for name in names) else ()


def _convert(
    model: onnx.ModelProto, progress: Callable[[str], None], max_iterations: int | None, failed: list[str]
) -> tuple[onnx.ModelProto, RelaxModel]:
    """Convert a normalised model.

    If the front end refuses operators that ONNX defines in terms of others, expand them and try again.
    """
    tried: set[Operator] = set()
    while True:
        try:
            return model, to_relax(model)
        except FrontEndError as error:
            opset = model.opset_import[0].version
            names = refused_operators(model)
            refused = {("", name) for name in names if has_body(("", name), opset)} - tried
            if not refused:
                raise explain(model, str(error)) from error
            tried |= refused
            model = simplify(expand(model, refused), progress, max_iterations, failed)
            refuse_unsupported(model)


def _in_memory(model: onnx.ModelProto) -> ModelFile:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    check_message(copy, copy.graph.name or "a model in memory")
    return ModelFile(copy, sha256(copy))
