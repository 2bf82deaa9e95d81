"""Export a program of PyTorch to ONNX, and run it.

A program of its own, for a Python that has PyTorch: it imports nothing of edgebundle, and a damaged file ends
only this process. `process.py` starts it in a folder and sends one JSON object a line; each is answered by
one:

- `{"command": "convert"}` reads `model.pt2` and writes `model.onnx`, and `examples.npz` with the inputs that
  the program was exported with;
- `{"command": "run"}` reads `inputs.npz`, computes the program in PyTorch, and writes `outputs.npz`:
  `output_0` and so on, and what each quantising node made, as `step_0` and so on.

Nodes of the ONNX model are named after the modules that they come from, and outputs after their place in what
`forward` returns.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import re
import resource
import sys
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

MEMORY_BYTES: Final = 24 << 30
# As `builder.importer.model_file.MAX_MODEL_BYTES`: a message of protobuf has no room for more.
MAX_WEIGHT_BYTES: Final = (1 << 31) - (1 << 20)
# What the quantising nodes of one run may make together; the comparison does without the others.
MAX_STEP_BYTES: Final = 1 << 30
_QUANTISES: Final = "quantized_decomposed.quantize_per_"
_OPERATOR: Final = re.compile(rb'"torch\.ops\.(\w+)\.(\w+)')
# Namespace of operators -> the modules that register it. A file must not choose what is imported.
_REGISTERING: Final = {
    "quantized_decomposed": ("torchao.quantization.pt2e", "torch.ao.quantization.fx._decomposed"),
    "torchao": ("torchao",),
    "torchvision": ("torchvision",),
    "torchaudio": ("torchaudio",),
}
_OPSET: Final = 20
_OVERLOAD: Final = re.compile(r"OpOverload\(op='([\w.:]+)', overload='(\w+)'\)")


class _RefusalError(Exception):
    """The model cannot be taken; the arguments are the reply's `error`, `hint` and `obstacles`."""

    def __init__(self, error: str, hint: str = "", obstacles: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(error)
        self.reply = {"error": error, "hint": hint, "obstacles": list(obstacles)}


class Conversion:
    """One program, and what is known about its inputs and outputs."""

    def __init__(self) -> None:
        self._program: Any = None
        self._inputs: list[str | None] = []
        self._constants: list[Any] = []
        self._outputs: list[int] = []

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what one request says, and return the reply."""
        try:
            if request["command"] == "convert":
                return self._convert()
            return self._run()
        except _RefusalError as error:
            return error.reply
        except MemoryError:
            return {"error": f"it needs more than {MEMORY_BYTES >> 30} GiB", "hint": "", "obstacles": []}
        except Exception as error:  # noqa: BLE001 - whatever PyTorch raises is the reply
            return {"error": _reason(error), "hint": "", "obstacles": []}

    def _convert(self) -> dict[str, Any]:
        import torch

        program = self._program = _load(Path("model.pt2"))
        _check(program)
        specs = [spec for spec in program.graph_signature.input_specs if _kind(spec) == "USER_INPUT"]
        self._inputs = [spec.arg.name if _is_tensor(spec.arg) else None for spec in specs]
        self._constants = [getattr(spec.arg, "value", None) for spec in specs]
        results = [spec.arg for spec in program.graph_signature.output_specs if _kind(spec) == "USER_OUTPUT"]
        self._outputs = [place for place, arg in enumerate(results) if _is_tensor(arg)]
        names = _output_names(program.call_spec.out_spec, len(results))
        if not any(self._inputs) or not self._outputs:
            raise _RefusalError("expected a program with a tensor as input and as output, got none")
        with torch.no_grad():
            exported = _export(program)
        model = exported.model_proto
        if len(model.graph.input) != sum(name is not None for name in self._inputs):
            raise _RefusalError("PyTorch's ONNX exporter has added or removed inputs")
        names_of_inputs = iter([value.name for value in model.graph.input])
        self._inputs = [None if name is None else next(names_of_inputs) for name in self._inputs]
        _name_nodes(model.graph)
        _name_outputs(model.graph, [names[place] for place in self._outputs])
        self._save_examples()
        Path("model.onnx").write_bytes(model.SerializeToString())
        return {
            "framework": f"PyTorch {torch.__version__.partition('+')[0]}",
            "inputs": [name for name in self._inputs if name is not None],
            "outputs": [value.name for value in model.graph.output],
        }

    def _save_examples(self) -> None:
        """Write the inputs that the program was exported with, if it has them."""
        import numpy as np
        from torch.utils import _pytree

        if not self._program.example_inputs:
            return
        leaves = _pytree.tree_leaves(self._program.example_inputs)
        if len(leaves) != len(self._inputs):
            return
        arrays: dict[str, Any] = {}
        for name, leaf in zip(self._inputs, leaves):  # noqa: B905 - as long as each other
            if name is not None and hasattr(leaf, "detach"):
                arrays[name] = _array(leaf)
        np.savez("examples.npz", **{name: array for name, array in arrays.items() if array is not None})

    def _run(self) -> dict[str, Any]:
        import numpy as np
        import torch

        with np.load("inputs.npz", allow_pickle=False) as given:
            leaves = [
                constant if name is None else torch.from_numpy(np.array(given[name]))
                for name, constant in zip(self._inputs, self._constants)  # noqa: B905
            ]
        metadata = [node.meta.get("val") for node in self._program.graph.nodes if node.op == "placeholder"]
        halves = metadata[len(metadata) - len(leaves) :]
        leaves = [
            leaf.to(meta.dtype) if hasattr(meta, "dtype") and hasattr(leaf, "to") else leaf
            for leaf, meta in zip(leaves, halves)  # noqa: B905
        ]
        steps: list[Any] = []
        room = MAX_STEP_BYTES

        class Recorder(torch.fx.Interpreter):  # type: ignore[misc]
            def run_node(self, n: Any) -> Any:
                nonlocal room
                result = super().run_node(n)
                if n.op == "call_function" and str(n.target).startswith(_QUANTISES):
                    room -= result.numel()
                    if room >= 0:
                        steps.append(_array(result))
                return result

        with torch.no_grad():
            results = Recorder(self._program.module()).run(*leaves, enable_io_processing=False)
        flat = list(results) if isinstance(results, (list, tuple)) else [results]
        arrays = {f"output_{at}": _array(flat[place]) for at, place in enumerate(self._outputs)}
        arrays |= {f"step_{at}": step for at, step in enumerate(steps)}
        if any(array is None for array in arrays.values()):
            raise _RefusalError("an output has a datatype that NumPy lacks")
        np.savez("outputs.npz", **arrays)
        return {"outputs": len(self._outputs), "steps": len(steps)}


def _load(path: Path) -> Any:
    import torch

    _register_operators(path)

    def refuse(*_: Any, **__: Any) -> Any:
        raise _RefusalError("it has pickled objects, which may run any code when they are loaded")

    genuine = pickle.loads
    pickle.loads = refuse
    try:
        program = torch.export.load(path)
    except RuntimeError as error:
        raise _RefusalError(
            f"it cannot be read: {_reason(error)}",
            "return tensors, tuples or dicts from forward, not classes of your own, and export it again",
        ) from error
    finally:
        pickle.loads = genuine
    if hasattr(program, "_guards_code"):
        program._guards_code = []  # it would be run as Python
    return program


def _register_operators(path: Path) -> None:
    """Import what registers the operators that a program has beyond PyTorch's own."""
    import torch

    with zipfile.ZipFile(path) as archive:
        graphs = [archive.read(name) for name in archive.namelist() if name.endswith(".json")]
    if any(b"transformers.modeling_outputs." in graph for graph in graphs):
        with contextlib.suppress(ImportError):
            importlib.import_module("transformers.modeling_outputs")  # it registers what forward returns
    for namespace, name in sorted({found for graph in graphs for found in _OPERATOR.findall(graph)}):
        space, operator = namespace.decode(), name.decode()
        for module in _REGISTERING.get(space, ()):
            if not hasattr(getattr(torch.ops, space), operator):
                with contextlib.suppress(ImportError):
                    importlib.import_module(module)
        if space != "higher_order" and not hasattr(getattr(torch.ops, space), operator):
            package = _REGISTERING.get(space, ("",))[0].partition(".")[0]
            raise _RefusalError(
                f"it has the operator {space}.{operator}, which no package here registers",
                f"{sys.executable} -m pip install {package}"
                if package
                else "write it with operators of PyTorch",
            )


def _check(program: Any) -> None:
    """Refuse a program in training mode, with state, or with too many weights."""
    for node in program.graph.nodes:
        if _is_training(node):
            raise _RefusalError(
                f"expected a model in evaluation mode, got {_operator(node)} of training in {_module(node)}",
                "call model.eval() before torch.export.export(model, inputs)",
            )
    if any(_may_change_placeholder(node) for node in program.graph.nodes):
        program = program.run_decompositions({})  # its signature then says what is changed
    mutated = dict(getattr(program.graph_signature, "buffers_to_mutate", None) or {})
    if mutated:
        name = str(next(iter(mutated.values())))
        hint = "return the new state as an output and take the old one as an input"
        if name.endswith(("running_mean", "running_var", "num_batches_tracked")):
            hint = "call model.eval() before torch.export.export(model, inputs)"
        raise _RefusalError(f"expected a program without state, got one that changes its buffer {name}", hint)
    if getattr(program.graph_signature, "user_inputs_to_mutate", None):
        name = str(next(iter(program.graph_signature.user_inputs_to_mutate.values())))
        raise _RefusalError(
            f"expected a program that keeps its inputs, got one that changes its input {name}",
            "work on a copy: x = x.clone()",
        )
    tensors = [*program.state_dict.values(), *program.constants.values()]
    total = sum(t.numel() * t.element_size() for t in tensors if hasattr(t, "element_size"))
    if total > MAX_WEIGHT_BYTES:
        raise _RefusalError(f"expected at most {MAX_WEIGHT_BYTES} bytes of weights, got {total}")


def _may_change_placeholder(node: Any) -> bool:
    """Whether a node writes in place what may be memory of an input or a buffer."""
    if not _operator(node) or not node.target._schema.is_mutable:
        return False
    while node.op == "call_function" and node.args and hasattr(node.args[0], "op"):
        node = node.args[0]
    return str(node.op) == "placeholder"


def _is_training(node: Any) -> bool:
    """Whether a node drops values at random, or normalises by the batch's own statistics."""
    operator = _operator(node)
    if operator == "aten.dropout":
        return len(node.args) > 2 and node.args[2] is True and node.args[1] != 0
    if operator == "aten.batch_norm":
        return len(node.args) > 5 and node.args[5] is True
    return False


def _export(program: Any) -> Any:
    import torch

    options: dict[str, Any] = {"dynamo": True, "opset_version": _OPSET, "optimize": False, "verbose": False}
    try:
        return torch.onnx.export(program, (), custom_translation_table=_translations(), **options)
    except Exception as error:
        obstacles = _unknown_operators(program, error)
        if not obstacles:
            raise
        names = ", ".join(obstacle["operator"] for obstacle in obstacles[:6])
        raise _RefusalError(
            f"PyTorch's ONNX exporter lacks {names}",
            "write it with other operators of PyTorch, or do it before or after the model",
            obstacles,
        ) from error


def _unknown_operators(program: Any, error: BaseException) -> list[dict[str, Any]]:
    """List the operators that PyTorch's exporter cannot write, with the modules that use them."""
    named: set[str] = set()
    cause: BaseException | None = error
    while cause is not None:
        if "No ONNX function found" in str(cause) or "DispatchError" in type(cause).__name__:
            named |= {match[1].replace("::", ".") for match in _OVERLOAD.finditer(str(cause))}
        cause = cause.__cause__ or cause.__context__
    found: dict[str, list[str]] = {}
    try:
        from torch.onnx._internal.exporter import _decomp, _registration

        registry = _registration.ONNXRegistry.from_torchlib()
        program = program.run_decompositions(
            _decomp.create_onnx_friendly_decomposition_table(set(registry.functions))
        )
        named |= {
            _operator(node)
            for node in program.graph.nodes
            if _operator(node) and not registry.is_registered(node.target) and "." in _operator(node)
        }
    except Exception:  # noqa: BLE001, S110 - a private interface: without it, only the first one is named
        pass
    named = {name for name in named if not name.startswith("quantized_decomposed.") and name != "operator"}
    for node in program.graph.nodes:
        if _operator(node) in named:
            found.setdefault(_operator(node), []).append(_module(node))
    for name in named:
        found.setdefault(name, ["the model"])
    return [
        {
            "operator": name,
            "nodes": list(dict.fromkeys(modules))[:20],
            "reason": "PyTorch's ONNX exporter has no translation for it",
        }
        for name, modules in found.items()
    ]


def _translations() -> dict[Any, Callable[..., Any]]:
    """How quantising operators become ONNX: torchlib's own ignore ranges, and old ones lack some."""
    import torch

    operators = torch.ops.quantized_decomposed
    if not hasattr(operators, "dequantize_per_channel"):
        return {}
    per_tensor = operators.quantize_per_tensor
    import numpy as np
    import onnx_ir as ir
    from onnxscript import opset20 as op

    # Full ranges: torch.dtype -> smallest and largest number.
    ranges = {
        torch.uint8: (0, 255),
        torch.int8: (-128, 127),
        torch.int16: (-32768, 32767),
        torch.uint16: (0, 65535),
        torch.int32: (-(1 << 31), (1 << 31) - 1),
    }
    numpy_types = {
        torch.uint8: np.uint8,
        torch.int8: np.int8,
        torch.int16: np.int16,
        torch.uint16: np.uint16,
        torch.int32: np.int32,
    }

    def kind(dtype: Any) -> Any:
        # The exporter gives torchlib's functions ONNX's number of a type.
        wanted = {int(ir.DataType.from_numpy(np.dtype(v))): k for k, v in numpy_types.items()}
        return dtype if isinstance(dtype, torch.dtype) else wanted[int(dtype)]

    def constant(value: Any, dtype: Any) -> Any:
        return op.Constant(value=ir.tensor(np.asarray(value, dtype)))

    def is_number(value: Any) -> bool:
        return isinstance(value, (int, float))

    def per_tensor_q(
        input: Any, scale: Any, zero_point: Any, quant_min: int, quant_max: int, dtype: Any
    ) -> Any:
        dtype = kind(dtype)
        if is_number(scale) and is_number(zero_point):
            low, high = ranges[dtype]
            if quant_min > low or quant_max < high:
                # As PyTorch clamps steps; in real numbers, where other activations are clamped too.
                input = op.Clip(
                    input,
                    constant((quant_min - zero_point) * scale, np.float32),
                    constant((quant_max - zero_point) * scale, np.float32),
                )
            return op.QuantizeLinear(
                input, constant(scale, np.float32), constant(zero_point, numpy_types[dtype])
            )
        scaled = op.Round(op.Div(input, op.Cast(op.Reshape(scale, constant([], np.int64)), to=1)))
        zero = op.Cast(op.Reshape(zero_point, constant([], np.int64)), to=1)
        steps = op.Clip(
            op.Add(scaled, zero), constant(quant_min, np.float32), constant(quant_max, np.float32)
        )
        return op.Cast(steps, to=int(ir.DataType.from_numpy(np.dtype(numpy_types[dtype]))))

    def per_tensor_dq(
        input: Any,
        scale: Any,
        zero_point: Any,
        quant_min: int,
        quant_max: int,
        dtype: Any,
        out_dtype: Any = None,
    ) -> Any:
        del quant_min, quant_max, out_dtype
        dtype = kind(dtype)
        if is_number(scale) and is_number(zero_point):
            return op.DequantizeLinear(
                input, constant(scale, np.float32), constant(zero_point, numpy_types[dtype])
            )
        zero = op.Cast(op.Reshape(zero_point, constant([], np.int64)), to=1)
        return op.Mul(
            op.Sub(op.Cast(input, to=1), zero),
            op.Cast(op.Reshape(scale, constant([], np.int64)), to=1),
        )

    def zeros(zero_points: Any, dtype: Any) -> Any:
        return op.Cast(zero_points, to=int(ir.DataType.from_numpy(np.dtype(numpy_types[kind(dtype)]))))

    def per_channel_q(
        input: Any, scales: Any, zero_points: Any, axis: int, quant_min: int, quant_max: int, dtype: Any
    ) -> Any:
        steps = op.QuantizeLinear(input, op.Cast(scales, to=1), zeros(zero_points, dtype), axis=axis)
        low, high = ranges[kind(dtype)]
        if quant_min > low or quant_max < high:
            numpy_type = numpy_types[kind(dtype)]
            steps = op.Clip(steps, constant(quant_min, numpy_type), constant(quant_max, numpy_type))
        return steps

    def per_channel_dq(
        input: Any,
        scales: Any,
        zero_points: Any,
        axis: int,
        quant_min: int,
        quant_max: int,
        dtype: Any,
        out_dtype: Any = None,
    ) -> Any:
        del quant_min, quant_max, out_dtype
        scales = op.Cast(scales, to=1)
        if zero_points is None:
            return op.DequantizeLinear(input, scales, axis=axis)
        return op.DequantizeLinear(input, scales, zeros(zero_points, dtype), axis=axis)

    def choose(input: Any, quant_min: int, quant_max: int, eps: float, dtype: Any) -> Any:
        del dtype
        zero = constant(0, np.float32)
        low = op.Min(op.ReduceMin(input, keepdims=0), zero)
        high = op.Max(op.ReduceMax(input, keepdims=0), zero)
        scale = op.Max(
            op.Div(op.Sub(high, low), constant(quant_max - quant_min, np.float32)), constant(eps, np.float32)
        )
        point = op.Sub(constant(quant_min, np.float32), op.Round(op.Div(low, scale)))
        point = op.Clip(point, constant(quant_min, np.float32), constant(quant_max, np.float32))
        return op.Cast(scale, to=11), op.Cast(point, to=7)

    table = {per_tensor.default: per_tensor_q, per_tensor.tensor: per_tensor_q}
    dequantize = operators.dequantize_per_tensor
    table |= {dequantize.default: per_tensor_dq, dequantize.tensor: per_tensor_dq}
    table |= {operators.quantize_per_channel.default: per_channel_q}
    table |= {operators.dequantize_per_channel.default: per_channel_dq}
    with contextlib.suppress(AttributeError):
        table |= {operators.choose_qparams.tensor: choose}
    return table


def _name_nodes(graph: Any) -> None:
    """Name nodes after the modules that they come from.

    `layer1.0.conv1` is the only node of that module, `layer1.0/Add` one of several.
    What only prepares constants does not count. A quantised program does not know its modules: there, a node
    is named after its parameters or, without any, after its operator in PyTorch.
    """
    constants = {tensor.name for tensor in graph.initializer}
    scopes: list[str] = []
    several: Counter[str] = Counter()
    for node in graph.node:
        scope = _scope(node) or _owner(node, constants) or _fx_name(node)
        scopes.append(scope)
        first = node.input[:1] if node.op_type in ("CastLike", "Shape") else node.input
        if node.op_type in ("Constant", "Shape") or all(name in constants or not name for name in first):
            constants.update(node.output)
        else:
            several[scope] += 1
    used: Counter[str] = Counter()
    for node, scope in zip(graph.node, scopes):  # noqa: B905 - as long as each other
        is_constant = all(name in constants for name in node.output)
        is_only = several[scope] == 1 and not is_constant
        name = scope if scope and is_only else f"{scope}/{node.op_type}".strip("/")
        used[name] += 1
        node.name = name if used[name] == 1 else f"{name}_{used[name] - 1}"
        del node.metadata_props[:]
        node.doc_string = ""


def _properties(node: Any) -> dict[str, str]:
    return {entry.key: entry.value for entry in node.metadata_props}


def _scope(node: Any) -> str:
    """Return the path of the module that a node comes from; empty if it is not known, or the model itself."""
    found = re.findall(r"'([^']*)'", _properties(node).get("pkg.torch.onnx.name_scopes", ""))
    return found[-2] if len(found) > 1 else ""


def _owner(node: Any, constants: set[str]) -> str:
    """Return the path of the module whose parameters a node reads; empty if it reads none."""
    owners = [name.rpartition(".")[0] for name in node.input if name in constants and "." in name]
    return owners[0] if owners else ""


def _fx_name(node: Any) -> str:
    """Return the name that a node has in PyTorch's own graph."""
    found = re.match(r"%?(\w+)", _properties(node).get("pkg.torch.onnx.fx_node", ""))
    return found[1] if found else ""


def _name_outputs(graph: Any, names: Sequence[str]) -> None:
    """Give outputs the names of their places in what `forward` returns."""
    import onnx

    taken = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    values = {name for node in graph.node for name in (*node.input, *node.output)}
    renamed: dict[str, str] = {}
    for value, wanted in zip(graph.output, names):  # noqa: B905 - the exporter may merge equal outputs
        name = wanted
        while name in taken or (name in values and name != value.name):
            name += "_"
        taken.add(name)
        if value.name in renamed or value.name not in {o for node in graph.node for o in node.output}:
            # Twice the same value, or an input or a weight that is returned as it is.
            source = renamed.get(value.name, value.name)
            graph.node.append(onnx.helper.make_node("Identity", [source], [name], name=f"{name}/Identity"))
            value.name = name
            continue
        renamed[value.name] = name
        value.name = name
    for node in graph.node:
        for names_of in (node.input, node.output):
            for place, name in enumerate(names_of):
                names_of[place] = renamed.get(name, name)
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _rename_inside(attribute.g, renamed)
    for value in graph.value_info:
        value.name = renamed.get(value.name, value.name)


def _rename_inside(graph: Any, renamed: dict[str, str]) -> None:
    for node in graph.node:
        for place, name in enumerate(node.input):
            node.input[place] = renamed.get(name, name)
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _rename_inside(attribute.g, renamed)
    for value in graph.output:
        value.name = renamed.get(value.name, value.name)


def _output_names(spec: Any, count: int) -> list[str]:
    """Return a name for each place: `output`, `output_1`, or the keys that lead to it."""
    from torch.utils import _pytree

    if spec is None:
        return [f"output_{place}" for place in range(count)]
    paths, _ = _pytree.tree_flatten_with_path(_pytree.tree_unflatten(list(range(count)), spec))
    names = []
    for path, _place in paths:
        parts = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path]
        name = re.sub(r"[^\w.]", "_", ".".join(parts))
        names.append(f"output_{name}" if name[:1].isdigit() else name or "output")
    return names


def _kind(spec: Any) -> str:
    return str(spec.kind.name)


def _is_tensor(argument: Any) -> bool:
    return type(argument).__name__ == "TensorArgument"


def _operator(node: Any) -> str:
    """Return the name of a node's operator without its overload, such as aten.relu; empty for others."""
    if node.op != "call_function" or not hasattr(node.target, "_schema"):
        return ""
    return ".".join(str(node.target).split(".")[:2])


def _module(node: Any) -> str:
    """Return the path of the module that a node comes from."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = stack[-1][0] if stack else ""
    path = re.sub(r"^L\['self'\]\.?", "", str(path))
    path = re.sub(r"^L__self___?", "", path)
    return path or "the model"


def _array(tensor: Any) -> Any:
    """Return a tensor as an array; None if NumPy lacks its datatype."""
    import torch

    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    try:
        return tensor.numpy()
    except (TypeError, RuntimeError):
        return None


def _reason(error: BaseException) -> str:
    """Return an error's reason in one line, of the innermost error that has one."""
    while error.__cause__ is not None and str(error.__cause__).strip():
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason'}"[:300]


def requests() -> Iterator[dict[str, Any]]:
    """Yield the requests of standard input."""
    for line in sys.stdin:
        yield json.loads(line)


def main() -> None:
    """Answer requests until standard input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Libraries print to the standard output; only replies may go there.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    conversion = Conversion()
    for request in requests():
        reply = conversion.answer(request)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
