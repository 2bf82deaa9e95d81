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
import runpy
import sys
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

MEMORY_BYTES: Final = 24 << 30
# As `builder.importer.model_file.MAX_MODEL_BYTES`: a message of protobuf has no room for more.
MAX_WEIGHT_BYTES: Final = (1 << 31) - (1 << 20)
# Bytes that the quantising nodes of one run may return; the comparison does without further ones.
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


# Types allowed as the factory of a `defaultdict` among `forward`'s arguments and results.
_DEFAULTS: Final = {kind.__name__: kind for kind in (bool, dict, float, int, list, set, str, tuple)}


def beside(name: str) -> Any:
    """Import a file of this folder, which is not in the path of modules: its `keras.py` would hide Keras."""
    return SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name(f"{name}.py"))))


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
        naming = beside("pytorch_names")
        names = naming.output_names(program.call_spec.out_spec, len(results))
        if not any(self._inputs) or not self._outputs:
            raise _RefusalError("expected a program with a tensor as input and as output, got none")
        with torch.no_grad():
            exported = _export(program)
        model = exported.model_proto
        if len(model.graph.input) != sum(name is not None for name in self._inputs):
            raise _RefusalError("PyTorch's ONNX exporter has added or removed inputs")
        names_of_inputs = iter([value.name for value in model.graph.input])
        self._inputs = [None if name is None else next(names_of_inputs) for name in self._inputs]
        naming.name_nodes(model.graph)
        naming.name_outputs(model.graph, [names[place] for place in self._outputs])
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
        with zipfile.ZipFile("examples.npz", "w") as archive:  # `savez` takes no array called `file`
            for name, array in arrays.items():
                if array is not None:
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                        np.lib.format.write_array(member, array, allow_pickle=False)

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

    from torch.utils import _pytree

    def refuse(*_: Any, **__: Any) -> Any:
        raise _RefusalError("it has pickled objects, which may run any code when they are loaded")

    def import_module(name: str) -> Any:
        # The file names a module and what to take of it, for a defaultdict or an enumeration.
        if name == "builtins":
            return SimpleNamespace(**_DEFAULTS)
        raise _RefusalError(
            f"it would import the module {name[:80]!r}, for a class in what forward takes or returns",
            "take and return tensors, tuples or dicts in forward, and export it again",
        )

    genuine, genuine_import = pickle.loads, _pytree.importlib
    pickle.loads = refuse
    _pytree.importlib = SimpleNamespace(import_module=import_module)
    try:
        program = torch.export.load(path)
    except RuntimeError as error:
        raise _RefusalError(
            f"it cannot be read: {_reason(error)}",
            "return tensors, tuples or dicts from forward, not classes of your own, and export it again",
        ) from error
    finally:
        pickle.loads = genuine
        _pytree.importlib = genuine_import
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

    # A program that quantises nothing has not registered the operators.
    quantises = hasattr(torch.ops.quantized_decomposed, "dequantize_per_channel")
    translations = beside("pytorch_translations").translations() if quantises else {}
    options: dict[str, Any] = {"dynamo": True, "opset_version": _OPSET, "optimize": False, "verbose": False}
    try:
        return torch.onnx.export(program, (), custom_translation_table=translations, **options)
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
