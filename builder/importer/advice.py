"""What to change at the export, in the words of the framework that a model came from.

Promises at most a screen of lines, and commands and calls that exist in the frameworks' current versions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from builder.errors import VALUE_HINT, ModelError, Obstacle, ShapeError, UnsupportedOperatorError

# A screen has 24 lines; the error and the hint take some.
MAX_LINES: Final = 18
_NODES: Final = 3
_LONGEST: Final = 240

_PYTORCH, _TENSORFLOW, _KERAS, _SKLEARN, _PADDLE, _RUNTIME = (
    "PyTorch",
    "TensorFlow",
    "Keras",
    "scikit-learn",
    "Paddle",
    "ONNX Runtime",
)
# Beginnings of `producer_name`, in lower case.
_PRODUCERS: Final[Mapping[str, str]] = {
    "pytorch": _PYTORCH,
    "torch": _PYTORCH,
    "ultralytics": _PYTORCH,
    "tf2onnx": _TENSORFLOW,
    "tensorflow": _TENSORFLOW,
    "keras": _KERAS,
    "skl2onnx": _SKLEARN,
    "onnxmltools": _SKLEARN,
    "paddle": _PADDLE,
    "onnxruntime": _RUNTIME,
    "onnx.quantize": _RUNTIME,
}

_SHAPES: Final[Mapping[str, str]] = {
    _PYTORCH: "torch.onnx.export(model, (example,), 'MODEL.onnx') without dynamic_axes and dynamic_shapes, "
    "with an example of the size that the device gets",
    _TENSORFLOW: "python -m tf2onnx.convert ... --inputs NAME:0[1,224,224,3], with the device's sizes",
    _KERAS: "model.export('MODEL.onnx', format='onnx', "
    "input_signature=[keras.InputSpec(shape=(1, 224, 224, 3))])",
    _SKLEARN: "to_onnx(model, X[:1]), with a row of what it was trained with",
    _PADDLE: "python -m paddle2onnx.optimize --input_model MODEL.onnx --output_model FIXED.onnx "
    "--input_shape_dict \"{'x':[1,3,224,224]}\"",
}
_VALUES: Final[Mapping[str, Mapping[str, str]]] = {
    _PYTORCH: {
        "NonZero": "x[mask] and torch.nonzero make it: use torch.where(mask, x, 0), or return x and the mask",
        "Compress": "torch.masked_select makes it: use torch.where(mask, x, 0)",
        "Unique": "torch.unique makes it: do this after the model",
        "NonMaxSuppression": "export what comes before torchvision.ops.nms: return boxes and scores",
        "If": "a tensor in `if` makes it: decide by a Python value, or use torch.where",
        "Loop": "torch.jit.script makes it: give --max-iterations N, or export a fixed number of steps with "
        "torch.onnx.export(..., dynamo=True)",
    },
    _TENSORFLOW: {
        "NonZero": "tf.where(mask) and tf.boolean_mask make it: use tf.where(mask, x, 0)",
        "Unique": "tf.unique makes it: do this after the model",
        "NonMaxSuppression": "name what tf.image.non_max_suppression reads: --outputs BOXES:0,SCORES:0",
        "If": "tf.cond on a tensor makes it: use tf.where, or a Python value",
        "Loop": "tf.while_loop makes it: give --max-iterations N, or unroll it, as "
        "keras.layers.RNN(unroll=True) does",
    },
}
# Whatever the framework.
CHANGES: Final[Mapping[str, str]] = {
    "NonZero": "select with Where instead, which keeps the shape",
    "Compress": "select with Where instead, which keeps the shape",
    "Unique": "do this after the model",
    "NonMaxSuppression": "export without it, and use a --postprocess file with a `detect` step",
    "If": "give both branches one shape, or fix the condition with --input-values NAME=VALUE",
    "Loop": "give its largest number of steps, --max-iterations N, or export it unrolled",
    "Scan": "export with a fixed number of steps, unrolled",
    "ImageDecoder": "export without it: `--preprocess imagenet` decodes pictures on the device",
    "StringNormalizer": "export only the part of the model after its tokenizer",
    "StringSplit": "export only the part of the model after its tokenizer",
    "Dropout": "call model.eval() before the export",
    "RandomNormalLike": "make the noise an input of the model, or call model.eval() before the export",
    "RandomUniformLike": "make the noise an input of the model, or call model.eval() before the export",
    "RandomNormal": "make the noise an input of the model",
    "RandomUniform": "make the noise an input of the model",
    "Multinomial": "sample after the model",
    "com.microsoft.Inverse": "export the inverse as a constant, or invert after the model",
    "com.microsoft.Sampling": "sample after the model",
    "com.microsoft.BeamSearch": "export one step of the decoder, and search after the model",
    "com.microsoft.GreedySearch": "export one step of the decoder, and search after the model",
}
_LAYOUT: Final = (
    "save it with SessionOptions.graph_optimization_level = GraphOptimizationLevel.ORT_ENABLE_EXTENDED, "
    "or compile the model from before the optimisation"
)


def framework_of(producer: str) -> str:
    """Name of the framework that wrote a model; empty if it is not known."""
    lowered = producer.lower()
    return next((name for start, name in _PRODUCERS.items() if lowered.startswith(start)), "")


def explain(error: ModelError, producer: str) -> tuple[str, ...]:
    """Explain why a model is refused, and what to change.

    Parameters
    ----------
    error
        The refusal.
    producer
        `producer_name` of the model.

    Returns
    -------
    tuple
        Lines for a terminal; empty if the message says it all.
    """
    framework = framework_of(producer)
    if isinstance(error, ShapeError):
        change = _SHAPES.get(framework)
        return () if change is None else (f"or fix the shapes in {framework}: {change}",)
    if not isinstance(error, UnsupportedOperatorError) or not error.obstacles:
        return ()
    lines: list[str] = []
    for obstacle in error.obstacles:
        lines += _paragraph(obstacle, framework)
    if len(lines) > MAX_LINES:
        kept = lines[: MAX_LINES - 1]
        rest = sum(not line.startswith(" ") for line in lines[MAX_LINES - 1 :])
        lines = [*kept, f"and {rest} more operators" if rest != 1 else "and 1 more operator"]
    return tuple(line[:_LONGEST] for line in lines)


def _paragraph(obstacle: Obstacle, framework: str) -> Sequence[str]:
    names = ", ".join(obstacle.nodes[:_NODES])
    more = f" and {len(obstacle.nodes) - _NODES} more" if len(obstacle.nodes) > _NODES else ""
    count = "1 node" if len(obstacle.nodes) == 1 else f"{len(obstacle.nodes)} nodes"
    lines = [f"{obstacle.operator}, {count}: {names}{more}", f"  why: {obstacle.reason}"]
    if change := _change(obstacle, framework):
        where = f" ({framework})" if framework and change in _own(framework) else ""
        lines.append(f"  change{where}: {change}")
    return lines


def _own(framework: str) -> frozenset[str]:
    return frozenset((*_VALUES.get(framework, {}).values(), _SHAPES.get(framework, "")))


def _change(obstacle: Obstacle, framework: str) -> str:
    if obstacle.operator.startswith(("com.microsoft.nchwc.", "com.ms.internal.")):
        return _LAYOUT
    own = _VALUES.get(framework, {}).get(obstacle.operator)
    general = own or CHANGES.get(obstacle.operator)
    if general is None and "known at run time" in obstacle.reason:
        general = _SHAPES.get(framework, VALUE_HINT)
    return general or ""
