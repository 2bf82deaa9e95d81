"""Every layer of Keras in several settings, as the TensorFlow Lite model that TensorFlow's converter writes.

Keras' own numbers are right. Weights are drawn, biases and statistics too. The first setting of each layer is
also saved as `.keras` or exported as a SavedModel, in turn, which `compile` converts itself.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.conformance.case import Case
from benchmarks.conformance.sources.litert import converted, drawn
from benchmarks.conformance.sources.makers import Maker

import keras  # isort: skip - after `litert`, which sets TensorFlow's environment

L: Final = keras.layers
# Settings, or the layer itself; and the inputs of each model, as `litert.drawn` reads them.
Settings = Mapping[str, Any]
Row = tuple[Sequence[Sequence[str]], Sequence[Settings | Any]]

_RTOL, _ATOL = 1e-3, 1e-4
_SEED: Final = 11
_PADDINGS: Final = ({"padding": "same"}, {"padding": "valid"})
_FIRST: Final = {"data_format": "channels_first"}
# No layers by themselves, or around code and models of other packages.
NO_LAYERS: Final = frozenset(
    {
        "FlaxLayer",
        "GRUCell",
        "InputLayer",
        "InputSpec",
        "JaxLayer",
        "LSTMCell",
        "Lambda",
        "Layer",
        "SimpleRNNCell",
        "TFSMLayer",
        "TorchModuleWrapper",
        "Wrapper",
    }
)
_ACTIVATIONS: Final = (
    "celu",
    "elu",
    "exponential",
    "gelu",
    "glu",
    "hard_shrink",
    "hard_sigmoid",
    "hard_silu",
    "hard_tanh",
    "leaky_relu",
    "linear",
    "log_sigmoid",
    "log_softmax",
    "mish",
    "relu",
    "relu6",
    "selu",
    "sigmoid",
    "silu",
    "soft_shrink",
    "softmax",
    "softplus",
    "softsign",
    "sparse_plus",
    "sparse_sigmoid",
    "sparsemax",
    "squareplus",
    "swish",
    "tanh",
    "tanh_shrink",
    "threshold",
)


def _each(*choices: Sequence[Settings]) -> list[Settings]:
    """Return all combinations of settings."""
    return [
        {key: value for each in chosen for key, value in each.items()}
        for chosen in itertools.product(*choices)
    ]


def _rows() -> dict[str, Row]:
    """Return the settings of each layer."""
    sequence, picture, volume = [["2x13x5"]], [["1x9x11x4"]], [["1x5x6x7x2"]]
    first, both = [["1x4x9x11"]], [["2x3x5", "2x3x5"]]
    rows: dict[str, Row] = {}
    for rank, shapes, large in ((1, sequence, "1x17x4"), (2, picture, "2x8x10x3"), (3, volume, "1x6x4x5x3")):
        inputs = [*shapes, [large]]
        strided = _each(
            _PADDINGS, [{"pool_size": 2}, {"pool_size": 3, "strides": 2}, {"pool_size": 2, "strides": 1}]
        )
        for kind in ("Average", "Max"):
            rows[f"{kind}Pooling{rank}D"] = inputs, strided
            rows[f"Global{kind}Pooling{rank}D"] = inputs, [{}, {"keepdims": True}]
            rows[f"Adaptive{kind}Pooling{rank}D"] = inputs, [{"output_size": 2}, {"output_size": 3}]
        rows[f"Conv{rank}D"] = (
            inputs,
            [
                *_each(
                    _PADDINGS,
                    [{"strides": 2}, {"dilation_rate": 2}, {"activation": "relu"}],
                    [{"filters": 6, "kernel_size": 3}],
                ),
                {"filters": 5, "kernel_size": 1, "use_bias": False},
            ],
        )
        rows[f"Conv{rank}DTranspose"] = (
            inputs,
            [
                *_each(
                    _PADDINGS,
                    [{"strides": 1}, {"strides": 2}, {"strides": 3}],
                    [{"filters": 4, "kernel_size": 3}],
                ),
                {"filters": 3, "kernel_size": 2, "strides": 2, "activation": "tanh", "use_bias": False},
            ],
        )
        rows[f"ConvLSTM{rank}D"] = (
            [[f"1x3x{'x'.join(['5', '6', '4'][:rank])}x2"]],
            [
                {"filters": 3, "kernel_size": 2, "padding": "same"},
                {"filters": 2, "kernel_size": 3, "padding": "same", "return_sequences": True},
            ],
        )
        rows[f"Cropping{rank}D"] = (
            inputs,
            [{"cropping": 1}, {"cropping": (1, 2) if rank == 1 else ((1, 0),) * rank}],
        )
        rows[f"UpSampling{rank}D"] = inputs, [{"size": 2}, {"size": 3}]
        rows[f"ZeroPadding{rank}D"] = (
            inputs,
            [{"padding": 2}, {"padding": (1, 2) if rank == 1 else ((1, 0),) * rank}],
        )
        rows[f"SpatialDropout{rank}D"] = shapes, [{"rate": 0.5}]
        if rank < 3:
            rows[f"DepthwiseConv{rank}D"] = (
                inputs,
                [
                    *_each(
                        _PADDINGS,
                        [{"strides": 2}, {"depth_multiplier": 2}, {"dilation_rate": 2}],
                        [{"kernel_size": 3}],
                    ),
                ],
            )
            rows[f"SeparableConv{rank}D"] = (
                inputs,
                _each(
                    _PADDINGS,
                    [{"strides": 2}, {"depth_multiplier": 2, "activation": "relu6"}],
                    [{"filters": 6, "kernel_size": 3}],
                ),
            )
    inner = {"units": 4}
    recurrent: list[Settings] = [
        inner,
        {**inner, "return_sequences": True},
        {**inner, "go_backwards": True, "return_sequences": True},
        {**inner, "return_state": True},
        {**inner, "activation": "relu", "use_bias": False},
        {**inner, "unroll": True},
    ]
    attention = [["2x3x6", "2x5x6"], ["2x3x6", "2x5x6", "2x5x6"]]
    numbers = [["2x7"], ["1x3x4x5"]]
    heads = {"num_heads": 2, "key_dim": 4}
    rows.update(
        {
            "Conv2D": (
                rows["Conv2D"][0],
                [*rows["Conv2D"][1], {"filters": 4, "kernel_size": (2, 5), "groups": 1}],
            ),
            "Activation": (numbers, [{"activation": name} for name in _ACTIVATIONS]),
            "ActivityRegularization": (numbers, [{"l2": 0.1}]),
            "AdditiveAttention": (attention, [{}, {"use_scale": False}]),
            "Attention": (attention, [{}, {"use_scale": True}, {"score_mode": "concat"}]),
            "BatchNormalization": (
                [["2x7"], *picture],
                [{}, {"scale": False, "center": False}, {"axis": 1, "epsilon": 0.1}],
            ),
            "CategoryEncoding": (
                [["index:2x4"]],
                [{"num_tokens": 3}, {"num_tokens": 3, "output_mode": "count"}],
            ),
            "CenterCrop": (
                picture,
                [{"height": 4, "width": 5}, {"height": 9, "width": 3}, {"height": 14, "width": 13}],
            ),
            "Concatenate": ([["2x3x5", "2x3x5"], ["2x3x5", "2x3x2", "2x3x1"]], [{}]),
            "Dense": (
                [["2x7"], ["1x3x7"], ["1x2x3x7"]],
                [{"units": 5}, {"units": 9, "activation": "softmax"}, {"units": 1, "use_bias": False}],
            ),
            "Discretization": (
                numbers,
                [{"bin_boundaries": [-1.0, 0.0, 0.5]}, {"bin_boundaries": [0.0], "output_mode": "one_hot"}],
            ),
            "Dot": (both, [{"axes": 2}, {"axes": 1}, {"axes": (1, 1), "normalize": True}]),
            "EinsumDense": (
                [["2x3x7"]],
                [
                    {"equation": "abc,cd->abd", "output_shape": (None, 5), "bias_axes": "d"},
                    {"equation": "abc,cde->abde", "output_shape": (None, 2, 4)},
                    {"equation": "abc,bd->adc", "output_shape": (4, 7)},
                ],
            ),
            "ELU": (numbers, [{}, {"alpha": 0.3}]),
            "Embedding": (
                [["index:2x5"], ["index:3"]],
                [{"input_dim": 4, "output_dim": 6}, {"input_dim": 4, "output_dim": 3, "mask_zero": True}],
            ),
            "Flatten": ([["2x3x4"], *picture], [{}, _FIRST]),
            "GroupNormalization": (picture, [{"groups": 2}, {"groups": -1}, {"groups": 1, "scale": False}]),
            "GroupQueryAttention": (
                attention[:1],
                [{"head_dim": 4, "num_query_heads": 4, "num_key_value_heads": 2}],
            ),
            "HashedCrossing": ([["index:2x1", "index:2x1"]], [{"num_bins": 5}]),
            "Hashing": ([["index:2x3"]], [{"num_bins": 3}]),
            "IntegerLookup": (
                [["index:2x3"]],
                [{"vocabulary": [1, 2]}, {"vocabulary": [2, 0], "output_mode": "multi_hot"}],
            ),
            "LayerNormalization": ([["2x7"], *picture], [{}, {"axis": -1, "center": False}, {"axis": 1}]),
            "LeakyReLU": (numbers, [{}, {"negative_slope": 1.5}]),
            "Masking": (sequence, [{}, {"mask_value": 0.5}]),
            "MaxNumBoundingBoxes": ([["2x3x4"]], [{"max_number": 2}]),
            "MelSpectrogram": ([["1x600"]], [{"fft_length": 64, "sequence_stride": 32, "num_mel_bins": 8}]),
            "MultiHeadAttention": (attention, [heads, {**heads, "value_dim": 3, "use_bias": False}]),
            "Normalization": (
                numbers[:1],
                [{"mean": 0.5, "variance": 2.0}, {"mean": 0.5, "variance": 2.0, "invert": True}],
            ),
            "PReLU": ([["2x7"], *picture], [{}]),
            "Permute": ([["2x3x4"]], [{"dims": (2, 1)}, {"dims": (1, 2)}]),
            "RMSNormalization": (numbers, [{}, {"axis": 1}]),
            "RepeatVector": ([["2x7"]], [{"n": 3}]),
            "Rescaling": (numbers, [{"scale": 1 / 127.5, "offset": -1.0}, {"scale": 2.0}]),
            "ReLU": (
                numbers,
                [
                    {},
                    {"max_value": 6.0},
                    {"negative_slope": 0.2, "threshold": 0.5},
                    {"max_value": 1.0, "threshold": 0.3},
                ],
            ),
            "Reshape": (
                [["2x3x4"]],
                [{"target_shape": (12,)}, {"target_shape": (2, -1)}, {"target_shape": (4, 1, 3)}],
            ),
            "Resizing": (
                [*picture, ["2x8x10x3"]],
                [
                    {"height": 5, "width": 7},
                    {"height": 16, "width": 23},
                    {"height": 5, "width": 7, "interpolation": "nearest"},
                    {"height": 6, "width": 6, "interpolation": "bicubic"},
                    {"height": 6, "width": 8, "crop_to_aspect_ratio": True},
                    {"height": 6, "width": 8, "pad_to_aspect_ratio": True},
                    {"height": 18, "width": 22, "antialias": True},
                    {"height": 6, "width": 7, "interpolation": "lanczos3"},
                ],
            ),
            "ReversibleEmbedding": ([["index:2x5"]], [{"input_dim": 4, "output_dim": 6}]),
            "Softmax": (numbers, [{}, {"axis": 1}]),
            "STFTSpectrogram": (
                [["1x600x1"], ["2x200x1"]],
                [
                    {"frame_length": 64, "frame_step": 32, "fft_length": 64},
                    {"mode": "imag", "frame_length": 50, "frame_step": 20, "fft_length": 64},
                ],
            ),
            "StringLookup": ([["index:2x3"]], [{"vocabulary": ["a", "b"], "invert": True}]),
            "TextVectorization": ([["index:2"]], [{"vocabulary": ["a", "b"]}]),
            "UnitNormalization": (numbers, [{}, {"axis": 1}]),
            "Bidirectional": (
                sequence,
                [
                    *(
                        lambda kind=kind, options=options: L.Bidirectional(
                            kind(3, return_sequences=True), **options
                        )
                        for kind in (L.LSTM, L.GRU, L.SimpleRNN)
                        for options in ({}, {"merge_mode": "sum"})
                    ),
                ],
            ),
            "RNN": (
                sequence,
                [lambda kind=kind: L.RNN(kind(4)) for kind in (L.LSTMCell, L.GRUCell, L.SimpleRNNCell)],
            ),
            "StackedRNNCells": (sequence, [lambda: L.RNN(L.StackedRNNCells([L.LSTMCell(3), L.GRUCell(4)]))]),
            "TimeDistributed": (
                [["1x3x6x6x2"]],
                [lambda: L.TimeDistributed(L.Conv2D(3, 3)), lambda: L.TimeDistributed(L.Flatten())],
            ),
            "SpectralNormalization": (picture, [lambda: L.SpectralNormalization(L.Conv2D(3, 3))]),
            "Pipeline": (picture, [lambda: L.Pipeline([L.Rescaling(0.5), L.CenterCrop(4, 4)])]),
            "LSTM": (sequence, [*recurrent, {**inner, "recurrent_activation": "hard_sigmoid"}]),
            "GRU": (sequence, [*recurrent, {**inner, "reset_after": False}]),
            "SimpleRNN": (sequence, recurrent),
            "RandomCrop": (picture, [{"height": 5, "width": 6}]),
            "UpSampling2D": (
                [*picture, ["2x8x10x3"]],
                [
                    {"size": (2, 3)},
                    {"size": 2, "interpolation": "bilinear"},
                    {"size": (1, 3), "interpolation": "bicubic"},
                ],
            ),
            "Solarization": ([["picture:1x5x6x3"]], [{}, {"threshold_factor": 0.5}]),
        }
    )
    for name in ("AlphaDropout", "Dropout", "GaussianDropout"):
        rows[name] = numbers, [{"rate": 0.5}]
    rows["GaussianNoise"] = numbers, [{"stddev": 0.5}]
    for name in ("Add", "Average", "Maximum", "Minimum", "Multiply", "Subtract"):
        rows[name] = [*both, ["2x3x5", "2x1x5"], ["i32:2x4", "i32:2x4"]], [{}]
    for name in (
        "Conv2D",
        "DepthwiseConv2D",
        "MaxPooling2D",
        "AveragePooling2D",
        "GlobalAveragePooling2D",
        "ZeroPadding2D",
        "Conv2DTranspose",
        "UpSampling2D",
        "Cropping2D",
    ):
        rows[f"{name} channels_first"] = first, [{**rows[name][1][0], **_FIRST}]
    for name in ("Conv2D", "Dense", "LSTM", "BatchNormalization", "Softmax", "MultiHeadAttention"):
        for dtype in ("float16", "mixed_float16", "float64"):
            rows[f"{name} {dtype}"] = rows[name][0][:1], [{**rows[name][1][0], "dtype": dtype}]
    return rows


def makers() -> Iterator[Maker]:
    """Return each layer with each of its settings, and one more of each kind of file."""
    rows = _rows()
    formats = itertools.cycle(("keras", "saved_model"))
    aliases: set[Any] = set()
    for name in [*sorted(set(vars(L)) - set(rows)), *rows]:
        kind = getattr(L, name.partition(" ")[0])
        if (
            name in NO_LAYERS
            or not isinstance(kind, type)
            or (name not in rows and kind.__name__ in rows)
            or kind in aliases
        ):
            continue
        if name not in rows:  # what changes pictures at random while training, and nothing afterwards
            aliases.add(kind)
        inputs, settings = rows.get(name, ([["picture:1x9x8x3"]], [{}]))
        for index, (specs, options) in enumerate(itertools.product(inputs, settings)):
            for form in ("tflite", next(formats)) if index == 0 else ("tflite",):
                label = f"{name.replace(' ', '_')}_{index}_{form}"
                yield label, functools.partial(make, label, kind, options, specs, form)


def make(
    name: str,
    kind: Any,  # noqa: ANN401
    options: Settings | Any,  # noqa: ANN401
    specs: Sequence[str],
    form: str,
    folder: Path,
) -> Case:
    """Make a case of a layer in one setting.

    Raises
    ------
    ValueError
        If no output of the layer is a tensor of numbers.
    """
    keras.utils.set_random_seed(_SEED)
    rng = np.random.default_rng(_SEED)
    layer = options() if callable(options) else kind(**options, **_needed(kind, options))
    values = [drawn(spec, rng) for spec in specs]
    tensors = [
        keras.Input(batch_shape=value.shape, dtype=value.dtype.name, name=f"x{place}")
        for place, value in enumerate(values)
    ]
    takes_several = isinstance(layer, (L.MultiHeadAttention, L.GroupQueryAttention))
    given: Any = tensors if len(tensors) > 1 else tensors[0]
    model = keras.Model(tensors, layer(*tensors) if takes_several else layer(given))
    draw_weights(model, rng)

    def call(*arrays: Any) -> list[Any]:  # noqa: ANN401
        return list(keras.tree.flatten(model(list(arrays) if len(arrays) > 1 else arrays[0], training=False)))

    outputs = [np.array(keras.ops.convert_to_numpy(each)) for each in call(*values)]
    if not outputs or any(each.dtype.kind not in "biuf" for each in outputs):
        raise ValueError("its outputs are no numbers")
    path = folder / {"tflite": "model.tflite", "keras": "model.keras", "saved_model": "model"}[form]
    if form == "tflite":
        path.write_bytes(converted(call, [values], "float"))
    elif form == "keras":
        model.save(path)
    else:
        model.export(path, verbose=False)
    named = {f"x{place}": value for place, value in enumerate(values)}
    operator = kind.__name__
    return Case("keras", name, operator, path, named, outputs, _RTOL, _ATOL)


def _needed(kind: Any, options: Settings) -> Settings:  # noqa: ANN401
    """Return what layers that change pictures must be told."""
    if not kind.__name__.startswith("Random") or options:
        return {}
    for needed in (
        {},
        {"factor": 0.2},
        {"height_factor": 0.2, "width_factor": 0.2},
        {"kernel_size": 3, "factor": 1.0},
    ):
        try:
            kind(**needed)
        except TypeError:
            continue
        return needed
    return {}


def draw_weights(model: Any, rng: np.random.Generator) -> None:  # noqa: ANN401
    """Give a model weights that none of are zero; variances and scales are positive."""
    for weight in model.weights:
        if "float" in weight.dtype:
            low, high = (0.5, 1.5) if weight.name in ("gamma", "scale", "moving_variance") else (-0.5, 0.5)
            weight.assign(rng.uniform(low, high, weight.shape))
