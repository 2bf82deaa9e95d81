"""The verb `check`: say whether a model can be compiled, without compiling it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Final

from agent.terminal import say, say_json
from builder.cli import SubParsers
from builder.cli.arguments import ModelFlags, json_flag, load_model, options_of
from builder.cli.early_checks import check_model_file, read_tensors
from builder.cli.flags import flag, takes
from builder.cli.progress import show_steps

if TYPE_CHECKING:
    from agent.bundle.tensor_spec import TensorSpec
    from builder.compiling.framework_parity import Agreement
    from builder.errors import InputFault
    from builder.importer import ImportedModel

EXAMPLES: Final = """examples:
  edgebundle check model.onnx
  edgebundle check model.onnx --input-shapes "data:[1,3,224,224]" --json
"""


@dataclass(frozen=True, slots=True)
class _Check(ModelFlags):
    quiet: bool = flag("-q", action="store_true", help="do not show progress")
    json: bool = json_flag()


def add_parsers(subparsers: SubParsers) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "check",
        help="say whether a model can be compiled, and if not, what to change",
        description="Import a model without compiling it. If that is impossible, name each node at fault, "
        "why, and what to change at the export.",
        epilog=EXAMPLES,
    )
    takes(parser, _Check, _check)


def _check(args: _Check) -> int:
    from builder.errors import ModelError, ParityError

    try:
        check_model_file(args.model)
        shapes = _at_upper_bounds(args.model, args.input_shapes)
        options = replace(options_of(args), input_shapes=shapes)
        read_tensors(args.model, options)
        with show_steps(quiet=args.quiet or args.json) as progress:
            progress(f"importing {args.model}")
            from builder.compiling.framework_parity import check_import
            from builder.compiling.parity import session

            model = load_model(args.model, options, progress)
            session(model.onnx)
            agreement = check_import(model)
    except (ModelError, ParityError) as error:
        if args.json:
            say_json(_refusal(args.model, error))
        raise
    if args.json:
        say_json(_document(args.model, model, agreement))
        return 0
    say(f"{args.model}: can be compiled")
    for kind, specs in zip(("input", "output"), _requested(model), strict=True):
        for spec in specs:
            say(f"  {kind} {_text(spec)}")
    given = {spec.name: spec for spec in model.inputs}
    for state in model.states:
        say(f"  state {_text(given[state.input])}, first {state.initial or 0:g}, then {state.output}")
    for note in model.notes:
        say(f"  {note}")
    if agreement is not None:
        say(f"  {agreement.text}")
    return 0


def _at_upper_bounds(model: str, text: str | None) -> str | None:
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


def _requested(model: ImportedModel) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Return the inputs and outputs without those of states."""
    from agent.bundle.state import requested

    return (
        requested(model.inputs, [state.input for state in model.states]),
        requested(model.outputs, [state.output for state in model.states]),
    )


def _text(spec: TensorSpec) -> str:
    return f"{spec.name}: {spec.datatype} [{','.join(map(str, spec.shape))}]"


def _specs(specs: tuple[TensorSpec, ...]) -> list[dict[str, object]]:
    return [{"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)} for spec in specs]


def _document(path: str, model: ImportedModel, agreement: Agreement | None) -> dict[str, object]:
    inputs, outputs = _requested(model)
    compared = {} if agreement is None else {"framework": agreement.framework, "error": agreement.error}
    return {
        "model": path,
        "accepted": True,
        "inputs": _specs(inputs),
        "outputs": _specs(outputs),
        **({"states": [asdict(state) for state in model.states]} if model.states else {}),
        "notes": list(model.notes),
        **compared,
    }


def _refusal(path: str, error: InputFault) -> dict[str, object]:
    from builder.errors import UnsupportedOperatorError

    obstacles = error.obstacles if isinstance(error, UnsupportedOperatorError) else ()
    return {
        "model": path,
        "accepted": False,
        "error": str(error),
        "hint": error.hint,
        "obstacles": [
            {"operator": o.operator, "nodes": list(o.nodes), "reason": o.reason} for o in obstacles
        ],
        "details": list(error.details),
    }
