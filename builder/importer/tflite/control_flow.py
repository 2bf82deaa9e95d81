"""Operators that run subgraphs or keep variables: IF, WHILE, CALL_ONCE, variables ...

A subgraph is written into the one graph, with its arguments' values as its inputs. A loop is unrolled if its
condition is known before each step. A variable that is only read has the value that CALL_ONCE gave it; one
that keeps a value from one inference to the next becomes a state, which begins with that value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from builder.errors import FIX_HINT, RefusalError
from builder.importer.tflite.operation import Operation
from builder.importer.tflite.operators import stablehlo, stablehlo_indexing
from builder.importer.tflite.schema import TfliteModel
from builder.importer.tflite.scope import Scope
from builder.importer.tflite.tensor import Tensor

# As many steps as `rewrites.loops` unrolls, and as many subgraphs in one another as ONNX models may have.
MAX_STEPS: Final = 512
MAX_DEPTH: Final = 16
# Loops in loops multiply; the largest known models have some ten thousand operators.
MAX_OPERATORS: Final = 100_000

# Of a variable's name; converters write some twenty.
_MOST_CHARACTERS: Final = 200
_UNNAMED: Final = re.compile(r"[^ -~]")

Run = Callable[[Scope], None]


@dataclass(slots=True)
class Program:
    """What all subgraphs of a model share while it is written.

    `run`: writes the operators of a scope's subgraph.
    `depth`: how many subgraphs are being written, one inside the other.
    `operators`: how many operators of subgraphs were written.
    `keeps`: variables that become states.
    `kept`: variables that turned out to keep a value from one inference to the next: all of them must be
        states.
    `variables`: name of a variable -> its value.
    `states`: name of a variable -> the input of its state.
    `handles`: scope and number of a tensor -> name of the variable that it stands for.
    `read`: variables that were read, but for those that were written before.
    `written`: variables that anything but CALL_ONCE wrote.
    `is_setting_up`: whether CALL_ONCE is being written.
    """

    model: TfliteModel
    run: Run
    keeps: frozenset[str] = frozenset()
    kept: set[str] = field(default_factory=set)
    depth: int = 0
    operators: int = 0
    variables: dict[str, str] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    handles: dict[tuple[int, int], str] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)
    is_setting_up: bool = False


def if_(op: Operation, program: Program) -> None:
    """IF: one branch, or both and a choice between their results if the condition is not known."""
    options = op.options("IfOptions")
    branches = [options.ThenSubgraphIndex(), options.ElseSubgraphIndex()]
    known = op.scope.constant(op.input(0))
    arguments = list(range(1, op.count))
    if known is not None:
        _put_all(
            op,
            _call(op, program, branches[0 if known.reshape(-1)[0] else 1], _values(op, program, arguments)),
        )
        return
    for name in program.keeps & program.variables.keys():
        _begin(op, program, name)
    before = dict(program.variables)
    results, variables = [], []
    for branch in branches:
        program.variables = dict(before)
        results.append(_call(op, program, branch, _values(op, program, arguments)))
        variables.append(program.variables)
    condition = op.reshape(op.value(0), ())
    _put_all(op, [_chosen(op, condition, a, b) for a, b in zip(*results, strict=True)])
    for name in variables[0].keys() | variables[1].keys():
        a, b = (found.get(name) for found in variables)
        if a is None or b is None:
            raise RefusalError("only one branch sets a variable, and the condition is only known at run time")
        if a == b:
            continue
        if name in before and before[name] in (a, b) and name not in program.states:
            program.kept.add(name)
        _assign(op, program, name, _chosen(op, condition, a, b))


def _chosen(op: Operation, condition: str, a: str, b: str) -> str:
    """One of two values, by a condition that is only known at run time."""
    if a.startswith(_VARIABLE) or b.startswith(_VARIABLE):
        if a == b:
            return a
        raise RefusalError("its branches give different variables")
    if op.graph.shape_of(a) != op.graph.shape_of(b) or op.graph.dtype_of(a) != op.graph.dtype_of(b):
        raise RefusalError("its branches give different shapes, and the condition is only known at run time")
    return op.where(condition, a, b)


def while_(op: Operation, program: Program) -> None:
    """WHILE: unrolled, if its condition is known before each step."""
    options = op.options("WhileOptions")
    values = _values(op, program, list(range(op.count)))
    for _ in range(MAX_STEPS + 1):
        [condition] = _call(op, program, options.CondSubgraphIndex(), values)[:1] or [""]
        known = op.graph.constant_of(condition)
        if known is None:
            raise RefusalError("its length depends on values that are only known at run time", hint=FIX_HINT)
        if not known.reshape(-1)[0]:
            _put_all(op, values)
            return
        values = _call(op, program, options.BodySubgraphIndex(), values)
        if len(values) != op.count:
            raise RefusalError(f"expected {op.count} values of each step, got {len(values)}")
    raise RefusalError(f"expected at most {MAX_STEPS} steps, got more")


def call(op: Operation, program: Program) -> None:
    """CALL of a subgraph."""
    index = op.options("CallOptions").Subgraph()
    _put_all(op, _call(op, program, index, _values(op, program, list(range(op.count)))))


def composite(op: Operation, program: Program) -> None:
    """STABLEHLO_COMPOSITE: the subgraph that defines it."""
    index = op.options("StableHLOCompositeOptions").DecompositionSubgraphIndex()
    _put_all(op, _call(op, program, index, _values(op, program, list(range(op.count)))))


def reduce_window(op: Operation, program: Program) -> None:
    """STABLEHLO_REDUCE_WINDOW by the only operator of a subgraph."""
    index = op.options("StablehloReduceWindowOptions").BodySubgraphIndex()
    stablehlo.stablehlo_reduce_window(op, _reducer(program, index))


def scatter(op: Operation, program: Program) -> None:
    """STABLEHLO_SCATTER by the only operator of a subgraph, or by one that returns the update."""
    subgraphs = program.model.subgraphs
    index = op.options("StablehloScatterOptions").UpdateComputationSubgraphIndex()
    body = subgraphs[index] if 0 <= index < len(subgraphs) else None
    is_update = body is not None and not body.operators and list(body.outputs) == list(body.inputs)[1:]
    stablehlo_indexing.scatter(op, "" if is_update else _reducer(program, index))


def _reducer(program: Program, index: int) -> str:
    """ONNX's operator for a subgraph that makes one number of two."""
    subgraphs = program.model.subgraphs
    names = [operator.name for operator in subgraphs[index].operators] if 0 <= index < len(subgraphs) else []
    found = stablehlo.REDUCERS.get(names[0]) if len(names) == 1 else None
    if found is None:
        raise RefusalError(f"expected one operator that reduces, such as ADD, got {', '.join(names[:4])}")
    return found


def call_once(op: Operation, program: Program) -> None:
    """CALL_ONCE: what it writes are the variables' first values."""
    program.is_setting_up = True
    try:
        _call(op, program, op.options("CallOnceOptions").InitSubgraphIndex(), [])
    finally:
        program.is_setting_up = False


def var_handle(op: Operation, program: Program) -> None:
    """VAR_HANDLE: the name of a variable."""
    options = op.options("VarHandleOptions")
    container, shared = (text or b"" for text in (options.Container(), options.SharedName()))
    name = f"{container.hex()[:_MOST_CHARACTERS]}/{shared[:_MOST_CHARACTERS].decode(errors='replace')}"
    program.handles[id(op.scope), op.output.index] = name


def read_variable(op: Operation, program: Program) -> None:
    """READ_VARIABLE."""
    name = _handle(op, program)
    if name not in program.variables:
        raise RefusalError("nothing sets its variable")
    if not program.is_setting_up:
        if name in program.keeps:
            _begin(op, program, name)
        if name not in program.written:
            program.read.add(name)
    op.put(program.variables[name])


def assign_variable(op: Operation, program: Program) -> None:
    """ASSIGN_VARIABLE."""
    name, value = _handle(op, program), op.value(1)
    if program.is_setting_up:
        program.variables[name] = value
    else:
        _assign(op, program, name, value)


def _begin(op: Operation, program: Program, name: str) -> None:
    """Make a variable a state, unless it is one or has been written."""
    if name in program.states or name in program.written:
        return
    title = _UNNAMED.sub("_", name.partition("/")[2])[:_MOST_CHARACTERS] or "state"
    entry, value = op.graph.add_state(title, program.variables[name])
    program.states[name], program.variables[name] = entry, value


def _assign(op: Operation, program: Program, name: str, value: str) -> None:
    program.variables[name] = value
    program.written.add(name)
    if name in program.states:
        op.graph.set_state(program.states[name], value)
    elif name in program.read:
        program.kept.add(name)


STATIC: Final[Mapping[str, Callable[[Operation, Program], None]]] = MappingProxyType(
    {
        "ASSIGN_VARIABLE": assign_variable,
        "CALL": call,
        "CALL_ONCE": call_once,
        "IF": if_,
        "READ_VARIABLE": read_variable,
        "STABLEHLO_COMPOSITE": composite,
        "STABLEHLO_REDUCE_WINDOW": reduce_window,
        "STABLEHLO_SCATTER": scatter,
        "VAR_HANDLE": var_handle,
        "WHILE": while_,
    }
)


def _handle(op: Operation, program: Program) -> str:
    name = program.handles.get((id(op.scope), op.input(0).index))
    if name is None:
        raise RefusalError("expected a variable, got another tensor")
    return name


def _values(op: Operation, program: Program, indices: Sequence[int]) -> list[str]:
    """Values of inputs; a variable's is its name, marked."""
    values = []
    for index in indices:
        handle = program.handles.get((id(op.scope), op.input(index).index))
        values.append(op.value(index) if handle is None else f"{_VARIABLE}{handle}")
    return values


# No value's name begins with it.
_VARIABLE: Final = "\0"


def _put_all(op: Operation, values: Sequence[str]) -> None:
    if len(values) != len(op.outputs):
        raise RefusalError(f"expected {len(op.outputs)} results, got {len(values)}")
    for tensor, value in zip(op.outputs, values, strict=True):
        if not value.startswith(_VARIABLE):
            op.scope.put(tensor, value)


def _call(op: Operation, program: Program, index: int, values: Sequence[str]) -> list[str]:
    """Write a subgraph and return its results."""
    subgraphs = program.model.subgraphs
    if not 0 <= index < len(subgraphs):
        raise RefusalError(f"expected one of {len(subgraphs)} subgraphs, got {index}")
    subgraph = subgraphs[index]
    if len(subgraph.inputs) != len(values):
        raise RefusalError(f"expected {len(subgraph.inputs)} arguments, got {len(values)}")
    program.depth += 1
    program.operators += len(subgraph.operators)
    if program.depth > MAX_DEPTH or program.operators > MAX_OPERATORS:
        raise RefusalError("its subgraphs call one another too often")
    inner = Scope(op.graph, subgraph)
    for number, value in zip(subgraph.inputs, values, strict=True):
        if value.startswith(_VARIABLE):
            program.handles[id(inner), number] = value.removeprefix(_VARIABLE)
        else:
            inner.put(subgraph.tensors[number], value)
    program.run(inner)
    results = [_result(program, inner, subgraph.tensors[number]) for number in subgraph.outputs]
    for key in [key for key in program.handles if key[0] == id(inner)]:
        del program.handles[key]  # another scope may get the same id
    program.depth -= 1
    return results


def _result(program: Program, inner: Scope, tensor: Tensor) -> str:
    handle = program.handles.get((id(inner), tensor.index))
    if handle is not None:
        return f"{_VARIABLE}{handle}"
    return inner.value(tensor)
