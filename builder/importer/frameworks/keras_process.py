"""Convert a model of Keras or a SavedModel, and run it.

A program of its own, for a Python that has Keras: it imports nothing of edgebundle. `process.py` starts it
in a folder and sends one JSON object a line; each is answered by one:

- `{"command": "convert", "shapes": {...}}` reads `model.keras`, `model.h5` or the folder `saved_model`. With
  TensorFlow it writes `model.tflite`, by TensorFlow's own converter; with PyTorch as Keras' backend,
  `model.onnx`;
- `{"command": "run"}` reads `inputs.npz`, computes the model, and writes `outputs.npz`: `output_0` and so on.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import resource
import runpy
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

MEMORY_BYTES: Final = 24 << 30
# Older ones run code that a file in the old format holds (CVE-2025-9905).
LEAST_KERAS: Final = (3, 11, 3)
_SAVE: Final = (
    "in the program that has its code: model.export('FOLDER') makes a SavedModel, which needs no code"
)


def beside(name: str) -> Any:
    """Import a file of this folder, which is not in the path of modules: its `keras.py` would hide Keras."""
    return SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name(f"{name}.py"))))


class _RefusalError(Exception):
    """The model cannot be taken; the arguments are the reply's `error`, `hint` and `obstacles`."""

    def __init__(self, error: str, hint: str = "", obstacles: Sequence[dict[str, Any]] = ()) -> None:
        super().__init__(error)
        self.reply = {"error": error, "hint": hint, "obstacles": list(obstacles)}


class Conversion:
    """One model, as a function of arrays in the order of its inputs."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._compute: Callable[..., Sequence[Any]] | None = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what one request says, and return the reply."""
        try:
            if request["command"] == "convert":
                return self._convert(request.get("shapes", {}))
            return self._run()
        except _RefusalError as error:
            return error.reply
        except MemoryError:
            return {"error": f"it needs more than {MEMORY_BYTES >> 30} GiB", "hint": "", "obstacles": []}
        except Exception as error:  # noqa: BLE001 - whatever the framework raises is the reply
            return {"error": _reason(error), "hint": "", "obstacles": []}

    def _convert(self, shapes: dict[str, list[int]]) -> dict[str, Any]:
        if Path("saved_model").is_dir():
            return self._convert_saved_model(shapes)
        import keras

        found = tuple(int(part) for part in re.findall(r"\d+", keras.__version__)[:3])
        if found < LEAST_KERAS:
            least = ".".join(map(str, LEAST_KERAS))
            raise _RefusalError(
                f"expected Keras {least} or newer, because older ones run the code of a model; "
                f"got Keras {keras.__version__}",
                f"{sys.executable} -m pip install --upgrade 'keras>={least}'",
            )
        model = _load()
        name = f"Keras {keras.__version__}"
        inputs = list(getattr(model, "inputs", None) or [])
        if not inputs:
            raise _RefusalError(
                "expected a model with inputs of known shapes, got one that was never called", _SAVE
            )
        self._names = _unique([tensor.name for tensor in inputs])
        fixed, notes = _fixed(self._names, [tensor.shape for tensor in inputs], shapes)
        dtypes = [keras.backend.standardize_dtype(tensor.dtype) for tensor in inputs]
        structure, made = _structures(model)

        def call(*tensors: Any) -> Any:
            given = keras.tree.pack_sequence_as(structure, list(tensors))
            return model(given, training=False)

        results = keras.tree.flatten(made)
        outputs = _output_names(made, getattr(model, "output_names", None), len(results))
        self._compute = lambda *arrays: [
            keras.ops.convert_to_numpy(tensor) for tensor in keras.tree.flatten(call(*arrays))
        ]
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            floats = _write_tflite(tf, lambda *t: keras.tree.flatten(call(*t)), self._names, fixed, dtypes)
            name = f"{name} on TensorFlow {tf.__version__}"
        else:
            self._export_onnx(model, structure, fixed, dtypes)
            floats = []
        return {
            "framework": name,
            "inputs": self._names,
            "outputs": outputs,
            "notes": notes + _note(floats),
            "floats": floats,
        }

    def _export_onnx(
        self, model: Any, structure: Any, fixed: Sequence[tuple[int, ...]], dtypes: Sequence[str]
    ) -> None:
        import keras
        import numpy as np

        zeros = [np.zeros(shape, dtype) for shape, dtype in zip(fixed, dtypes)]  # noqa: B905
        model(keras.tree.pack_sequence_as(structure, zeros), training=False)  # its export asks for one call
        specs = [
            keras.InputSpec(shape=shape, dtype=dtype, name=name)
            for shape, dtype, name in zip(fixed, dtypes, self._names)  # noqa: B905
        ]
        signature = keras.tree.pack_sequence_as(structure, specs)
        signature = signature if isinstance(signature, tuple) else [signature]  # arguments of one call
        model.export("model.onnx", format="onnx", input_signature=signature, verbose=False)

    def _convert_saved_model(self, shapes: dict[str, list[int]]) -> dict[str, Any]:
        import tensorflow as tf

        loaded = tf.saved_model.load("saved_model")
        signatures = dict(loaded.signatures)
        key = "serving_default" if "serving_default" in signatures else next(iter(signatures), None)
        if key is None:
            raise _RefusalError("expected a SavedModel with a signature, got none", _SAVE)
        signature = signatures[key]
        specs = signature.structured_input_signature[1]
        self._names = list(specs)
        results = list(signature.structured_outputs)
        fixed, notes = _fixed(
            self._names,
            [spec.shape.as_list() if spec.shape.rank is not None else None for spec in specs.values()],
            shapes,
        )
        dtypes = [spec.dtype.name for spec in specs.values()]

        def call(*tensors: Any) -> list[Any]:
            found = signature(**dict(zip(self._names, tensors)))  # noqa: B905
            return [found[name] for name in results]

        self._compute = lambda *arrays: [
            tensor.numpy()
            for tensor in call(*[tf.cast(array, kind) for array, kind in zip(arrays, dtypes)])  # noqa: B905
        ]
        floats = _write_tflite(tf, call, self._names, fixed, dtypes)
        if len(signatures) > 1:
            notes.append(f"of the signatures {', '.join(sorted(signatures))}, {key} is taken")
        self._kept = loaded  # a signature does not keep its variables alive
        return {
            "framework": f"TensorFlow {tf.__version__}",
            "inputs": self._names,
            "outputs": results if len(results) > 1 else ["output"],
            "notes": notes + _note(floats),
            "floats": floats,
        }

    def _run(self) -> dict[str, Any]:
        import numpy as np

        assert self._compute is not None
        with np.load("inputs.npz", allow_pickle=False) as given:
            arrays = [np.array(given[name]) for name in self._names]
        outputs = self._compute(*arrays)
        named: dict[str, Any] = {f"output_{at}": np.asarray(out) for at, out in enumerate(outputs)}
        for name, array in named.items():
            if array.dtype.name == "bfloat16":  # which NumPy cannot write
                named[name] = array.astype(np.float32)
        np.savez("outputs.npz", **named)
        return {"outputs": len(outputs)}


def _structures(model: Any) -> tuple[Any, Any]:
    """Return how a model nests its inputs and its outputs."""
    try:
        return model.input, model.output
    except AttributeError:  # a Sequential that was loaded and not called
        inputs, outputs = list(model.inputs), list(model.outputs)
        return (inputs[0] if len(inputs) == 1 else inputs), (outputs[0] if len(outputs) == 1 else outputs)


def _load() -> Any:
    import keras

    path = "model.keras" if Path("model.keras").exists() else "model.h5"
    try:
        return keras.saving.load_model(path, compile=False, safe_mode=True)
    except Exception as error:
        text = str(error)
        if "Could not locate class" in text or "Unknown layer" in text:
            found = re.search(r"class '([\w.>]+)'|Unknown layer: '?([\w.>]+)", text)
            name = (found[1] or found[2]) if found else "of its own"
            raise _RefusalError(f"it has the class {name}, whose code is not in the file", _SAVE) from error
        if "ambda" in text and ("unsafe" in text or "safe_mode" in text):
            raise _RefusalError(
                "it has a Lambda layer, whose code would be run when it is loaded",
                f"if you trust it, {_SAVE}",
            ) from error
        raise


def _write_tflite(
    tf: Any,
    call: Callable[..., Any],
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[str],
) -> list[str]:
    """Write a function as `model.tflite`, with its variables as constants.

    Return the floating-point types that it computes in and the file does not.
    """
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    specs = [
        tf.TensorSpec(shape, dtype, name=re.sub(r"\W", "_", name))
        for shape, dtype, name in zip(shapes, dtypes, names)  # noqa: B905
    ]
    concrete = tf.function(call, autograph=False).get_concrete_function(*specs)
    try:
        frozen = convert_variables_to_constants_v2(concrete, lower_control_flow=False)
    except ValueError as error:  # a generator's state is a variable that the model writes
        if any("Random" in operator for operator in _operators(concrete)):
            raise _RefusalError(
                "it draws random numbers, as layers that augment pictures do in training",
                "give the .keras file instead, whose layers compute what they do after training"
                if Path("saved_model").is_dir()
                else "save it without these layers",
            ) from error
        raise
    floats = beside("keras_floats")
    others: list[str] = floats.other_floats(frozen.graph.as_graph_def())
    if others == ["float64"] and _is_converted(tf, frozen):  # it may only move such numbers
        return []
    try:
        _convert(tf, floats.in_float32(tf, frozen) if others else frozen)
    except Exception as error:
        if "TensorListReserve" in str(error):
            raise _RefusalError(
                "it has a recurrent layer that TensorFlow Lite cannot take from a SavedModel",
                "give the .keras file instead; with an open batch, try keras.Input(shape, batch_size=1)",
            ) from error
        obstacles = _unknown_operators(str(error))
        if not obstacles:
            raise
        raise _RefusalError(
            "TensorFlow Lite lacks " + ", ".join(entry["operator"] for entry in obstacles),
            "write it with other operators of TensorFlow, or do it before or after the model",
            obstacles,
        ) from error
    return others


def _convert(tf: Any, function: Any) -> None:
    converter = tf.lite.TFLiteConverter.from_concrete_functions([function])
    Path("model.tflite").write_bytes(converter.convert())


def _is_converted(tf: Any, function: Any) -> bool:
    from tensorflow.lite.python.convert_phase import ConverterError

    try:
        _convert(tf, function)
    except ConverterError:
        return False
    return True


def _note(floats: Sequence[str]) -> list[str]:
    if not floats:
        return []
    return [f"it computes in {', '.join(floats)}, and is imported in float32, TensorFlow Lite's only type"]


def _operators(concrete: Any) -> set[str]:
    graph = concrete.graph.as_graph_def()
    functions = [function.node_def for function in graph.library.function]
    return {node.op for nodes in (graph.node, *functions) for node in nodes}


def _unknown_operators(text: str) -> list[dict[str, Any]]:
    found: list[str] = []
    for names in re.findall(r"(?:TF Select|Custom) ops: ([\w, ]+)", text):
        found += [name.strip() for name in names.split(",") if name.strip()]
    reason = "TensorFlow Lite has no operator for it"
    return [
        {"operator": f"tf.{name}", "nodes": ["the model"], "reason": reason} for name in dict.fromkeys(found)
    ]


def _fixed(
    names: Sequence[str], shapes: Sequence[Any], given: dict[str, list[int]]
) -> tuple[list[tuple[int, ...]], list[str]]:
    """Return static shapes: those that are given, and a batch of one where it is open."""
    wrong = next((name for name in given if name not in names), None)
    if wrong is not None:
        raise _RefusalError(f"the model has no input '{wrong}'; its inputs are {', '.join(names)}")
    fixed: list[tuple[int, ...]] = []
    notes: list[str] = []
    for name, shape in zip(names, shapes):  # noqa: B905
        wanted = given.get(name)
        text = (
            f"[{','.join('?' if dim is None else str(dim) for dim in shape)}]"
            if shape is not None
            else "unknown"
        )
        if wanted is not None:
            fits = shape is None or (
                len(wanted) == len(shape) and all(dim in (None, size) for dim, size in zip(shape, wanted))  # noqa: B905
            )
            if not fits:
                raise _RefusalError(f"input '{name}': expected the shape {text}, got {list(wanted)}")
            fixed.append(tuple(wanted))
            continue
        if shape is None or any(dim is None for dim in shape[1:]):
            raise _RefusalError(
                f"input '{name}': expected a fixed shape, got {text}",
                f'give the shape that the device gets: --input-shapes "{name}:[1,...]"',
            )
        if shape and shape[0] is None:
            notes.append(
                f"input '{name}' {text}: the batch is open and is set to 1 (--input-shapes sets another)"
            )
        fixed.append((1, *shape[1:]) if shape and shape[0] is None else tuple(shape))
    return fixed, notes


def _output_names(structure: Any, names: Sequence[str] | None, count: int) -> list[str]:
    if isinstance(structure, dict):
        return [str(key) for key in sorted(structure)]
    usable = names is not None and len(names) == count and len(set(names)) == count
    if usable and not any(name.startswith("keras_tensor") for name in names or ()):
        return [str(name) for name in names or ()]
    return ["output"] if count == 1 else [f"output_{place}" for place in range(count)]


def _unique(names: Sequence[str]) -> list[str]:
    return [name if names.count(name) == 1 else f"{name}_{place}" for place, name in enumerate(names)]


def _reason(error: BaseException) -> str:
    """Return an error's reason in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason'}"[:300]


def main() -> None:
    """Answer requests until standard input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Libraries print to the standard output; only replies may go there.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    if "KERAS_BACKEND" not in os.environ:
        has_tensorflow = importlib.util.find_spec("tensorflow") is not None
        os.environ["KERAS_BACKEND"] = "tensorflow" if has_tensorflow else "torch"
    conversion = Conversion()
    for line in sys.stdin:
        replies.write(json.dumps(conversion.answer(json.loads(line))) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
