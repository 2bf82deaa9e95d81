"""The models of the zoo, and their export to ONNX by PyTorch with seeded random weights.

Nothing is downloaded: an architecture's code comes from torchvision or transformers, its weights from a seed,
and batch norms get statistics, so that they are not the identity. A name that ends in `_dynamo` is exported
by PyTorch's newer exporter. Needs torch, which only `.venv-bench` has:

    python -m benchmarks.zoo.models NAME FILE
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    import torch

Inputs: TypeAlias = "dict[str, torch.Tensor]"

SEED: Final = 20261123
OPSET: Final = 17
DYNAMO: Final = "_dynamo"
IMAGE, SMALL_IMAGE = 224, 256


@dataclass(frozen=True, slots=True)
class Vision:
    """A classifier of torchvision.

    Attributes
    ----------
    builder
        The function of `torchvision.models`.
    size
        Rows and columns of the image.
    options
        Further arguments of the builder.
    """

    builder: str
    size: int = IMAGE
    options: Mapping[str, Any] = field(default_factory=dict)

    def make(self) -> tuple[torch.nn.Module, Inputs]:
        """Return the module and its inputs by name."""
        import torch
        import torchvision

        module = getattr(torchvision.models, self.builder)(weights=None, **self.options)
        return module, {"data": torch.randn(1, 3, self.size, self.size)}


@dataclass(frozen=True, slots=True)
class Transformer:
    """A network of transformers.

    Attributes
    ----------
    model, config
        The classes of `transformers`.
    inputs
        Makes the inputs by name.
    output
        The field of the result that is the model's output.
    options
        Fields of the configuration that differ from its defaults.
    part
        The attribute of the network that is exported; the network itself if empty.
    """

    model: str
    config: str
    inputs: Callable[[], Inputs]
    output: str = "last_hidden_state"
    options: Mapping[str, Any] = field(default_factory=dict)
    part: str = ""

    def make(self) -> tuple[torch.nn.Module, Inputs]:
        """Return the module and its inputs by name."""
        import torch
        import transformers

        config = getattr(transformers, self.config)(**self.options)
        config._attn_implementation = "eager"  # the public argument is only of from_pretrained
        config.use_cache = False
        network = getattr(transformers, self.model)(config)
        network = getattr(network, self.part) if self.part else network
        given, output = self.inputs(), self.output

        class ByPosition(torch.nn.Module):
            """Takes inputs by position, and returns one tensor: what the exporters expect."""

            def __init__(self) -> None:
                super().__init__()
                self.network = network

            def forward(self, *values: torch.Tensor) -> torch.Tensor:
                return self.network(**dict(zip(given, values, strict=True)))[output]

        return ByPosition(), given


@dataclass(frozen=True, slots=True)
class Plain:
    """A small network of this file.

    Attributes
    ----------
    build
        Makes the module.
    shape
        The shape of its input.
    """

    build: Callable[[], torch.nn.Module]
    shape: tuple[int, ...]

    def make(self) -> tuple[torch.nn.Module, Inputs]:
        """Return the module and its inputs by name."""
        import torch

        return self.build(), {"x": torch.randn(*self.shape)}


def _load_torchvision() -> None:
    """Import torchvision; if its compiled library does not load, declare what it would register.

    A build of that library for another torch does not load. Classifiers do not need it, and transformers only
    imports it.
    """
    import torch

    with contextlib.suppress(RuntimeError):  # an operator is missing
        import torchvision  # noqa: F401
    if "torchvision" in sys.modules:
        return
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor boxes, Tensor scores, float limit) -> Tensor")


def _tokens(length: int, vocabulary: int, *, mask: bool = True, types: bool = False) -> Callable[[], Inputs]:
    def make() -> Inputs:
        import torch

        shape = (1, length)
        given = {"input_ids": torch.randint(0, vocabulary, shape)}
        if mask:
            given["attention_mask"] = torch.ones(shape, dtype=torch.int64)
        if types:
            given["token_type_ids"] = torch.zeros(shape, dtype=torch.int64)
        return given

    return make


def _numbers(name: str, *shape: int) -> Callable[[], Inputs]:
    def make() -> Inputs:
        import torch

        return {name: torch.randn(*shape)}

    return make


def _last_step(layer: torch.nn.Module, size: int) -> torch.nn.Module:
    """Return a module that classifies the last step of a recurrent layer."""
    import torch

    class LastStep(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = layer, torch.nn.Linear(size, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.layer(x)[0][:, -1])

    return LastStep()


def _lstm() -> torch.nn.Module:
    """Return two bidirectional LSTM layers over 50 steps."""
    import torch

    return _last_step(torch.nn.LSTM(40, 64, 2, batch_first=True, bidirectional=True), 128)


def _gru() -> torch.nn.Module:
    """Return a GRU over 50 steps."""
    import torch

    return _last_step(torch.nn.GRU(40, 64, batch_first=True), 64)


def _autoencoder() -> torch.nn.Module:
    """Return an autoencoder of windows of six sensors: convolutions and transposed ones in one dimension."""
    import torch

    nn = torch.nn
    return nn.Sequential(
        nn.Conv1d(6, 32, 7, stride=2, padding=3), nn.ReLU(),
        nn.Conv1d(32, 64, 5, stride=2, padding=2), nn.ReLU(),
        nn.ConvTranspose1d(64, 32, 4, stride=2, padding=1), nn.ReLU(),
        nn.ConvTranspose1d(32, 6, 4, stride=2, padding=1),
    )  # fmt: skip


def _video() -> torch.nn.Module:
    """Return a classifier of short videos: convolutions in three dimensions."""
    import torch

    nn = torch.nn
    return nn.Sequential(
        nn.Conv3d(3, 16, 3, padding=1), nn.BatchNorm3d(16), nn.ReLU(), nn.MaxPool3d(2),
        nn.Conv3d(16, 32, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


def _unet() -> torch.nn.Module:
    """Return a segmenter: dilated and transposed convolutions, instance norm, concatenation, resizing."""
    import torch

    nn = torch.nn

    class Segmenter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())
            self.deep = nn.Sequential(
                nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.BatchNorm2d(64), nn.SiLU(),
                nn.Conv2d(64, 64, 3, padding=2, dilation=2), nn.InstanceNorm2d(64), nn.LeakyReLU(0.1),
                nn.ConvTranspose2d(64, 32, 2, stride=2),
            )  # fmt: skip
            self.head = nn.Conv2d(64, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wide = self.wide(x)
            scores = self.head(torch.cat([wide, self.deep(wide)], 1))
            return nn.functional.interpolate(scores, scale_factor=2, mode="bilinear", align_corners=False)

    return Segmenter()


_NO_AUXILIARY: Final = {"aux_logits": False, "init_weights": False}
_TINY: Final = {
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "hidden_size": 192,
    "intermediate_size": 768,
}

ZOO: Final[Mapping[str, Vision | Transformer | Plain]] = {
    "squeezenet1_1": Vision("squeezenet1_1"),
    "shufflenet_v2": Vision("shufflenet_v2_x1_0"),
    "mobilenet_v2": Vision("mobilenet_v2"),
    "mobilenet_v3_small": Vision("mobilenet_v3_small"),
    "mobilenet_v3_large": Vision("mobilenet_v3_large"),
    "efficientnet_b0": Vision("efficientnet_b0"),
    "mnasnet1_0": Vision("mnasnet1_0"),
    "densenet121": Vision("densenet121"),
    "densenet169": Vision("densenet169"),
    "googlenet": Vision("googlenet", options=_NO_AUXILIARY),
    "inception_v3": Vision("inception_v3", 299, _NO_AUXILIARY),
    "vgg11": Vision("vgg11"),
    "regnet_y_400mf": Vision("regnet_y_400mf"),
    "regnet_x_1_6gf": Vision("regnet_x_1_6gf", 250),
    "resnet18": Vision("resnet18"),
    "resnet50": Vision("resnet50"),
    "resnext50": Vision("resnext50_32x4d"),
    "convnext_tiny": Vision("convnext_tiny"),
    "vit_b_16": Vision("vit_b_16"),
    "swin_t": Vision("swin_t"),
    "maxvit_t": Vision("maxvit_t"),
    "lstm2_bi": Plain(_lstm, (1, 50, 40)),
    "gru": Plain(_gru, (1, 50, 40)),
    "unet": Plain(_unet, (1, 3, 128, 128)),
    "autoencoder1d": Plain(_autoencoder, (1, 6, 256)),
    "c3d": Plain(_video, (1, 3, 8, 32, 32)),
    "bert_base": Transformer("BertModel", "BertConfig", _tokens(128, 30000, types=True)),
    "bert_mlm": Transformer(
        "BertForMaskedLM", "BertConfig", _tokens(61, 30522, types=True), "logits", {"num_hidden_layers": 2}
    ),
    "distilbert": Transformer("DistilBertModel", "DistilBertConfig", _tokens(128, 30000)),
    "minilm_l6": Transformer(
        "BertModel", "BertConfig", _tokens(128, 30000, types=True),
        options={"num_hidden_layers": 6, "hidden_size": 384, "intermediate_size": 1536},
    ),
    "gpt2_small4": Transformer("GPT2Model", "GPT2Config", _tokens(64, 30000), options={"n_layer": 4}),
    "t5_encoder": Transformer(
        "T5EncoderModel", "T5Config", _tokens(64, 30000),
        options={"num_layers": 4, "num_heads": 4, "d_model": 256, "d_kv": 64, "d_ff": 1024},
    ),
    "whisper_tiny_encoder": Transformer(
        "WhisperModel", "WhisperConfig", _numbers("input_features", 1, 80, 3000),
        options={"encoder_layers": 4, "encoder_attention_heads": 6, "d_model": 384, "encoder_ffn_dim": 1536},
        part="encoder",
    ),
    "wav2vec2_small": Transformer(
        "Wav2Vec2Model", "Wav2Vec2Config", _numbers("input_values", 1, 16000),
        options={**_TINY, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 256,
                 "intermediate_size": 512},
    ),
    "detr_like_segformer": Transformer(
        "SegformerForSemanticSegmentation", "SegformerConfig",
        _numbers("pixel_values", 1, 3, SMALL_IMAGE, SMALL_IMAGE), "logits",
    ),
    "clip_vision": Transformer(
        "CLIPVisionModel", "CLIPVisionConfig", _numbers("pixel_values", 1, 3, IMAGE, IMAGE),
        options={"num_hidden_layers": 4},
    ),
    "yolos_tiny": Transformer(
        "YolosForObjectDetection", "YolosConfig", _numbers("pixel_values", 1, 3, SMALL_IMAGE, SMALL_IMAGE),
        "logits", {**_TINY, "image_size": [SMALL_IMAGE, SMALL_IMAGE]},
    ),
    "depth_anything": Transformer(
        "DPTForDepthEstimation", "DPTConfig", _numbers("pixel_values", 1, 3, 384, 384), "predicted_depth",
        {**_TINY, "num_hidden_layers": 12, "intermediate_size": 384},
    ),
    "mobilevit": Transformer(
        "MobileViTModel", "MobileViTConfig", _numbers("pixel_values", 1, 3, SMALL_IMAGE, SMALL_IMAGE)
    ),
}  # fmt: skip
NEWER: Final = (
    "resnet18", "mobilenet_v2", "mobilenet_v3_small", "efficientnet_b0", "convnext_tiny", "vit_b_16",
    "swin_t", "minilm_l6", "gpt2_small4", "lstm2_bi",
)  # fmt: skip
NAMES: Final = (*ZOO, *(name + DYNAMO for name in NEWER))
# One of each class of architecture, and those that compile quickly.
DEFAULT: Final = (
    "squeezenet1_1", "shufflenet_v2", "mobilenet_v3_small", "regnet_y_400mf", "resnext50", "unet", "c3d",
    "autoencoder1d", "gru", "wav2vec2_small", "gpt2_small4", "minilm_l6",
)  # fmt: skip


def export(name: str, path: Path) -> None:
    """Write a model of the zoo as ONNX."""
    import torch

    _load_torchvision()
    torch.manual_seed(SEED)
    module, inputs = ZOO[name.removesuffix(DYNAMO)].make()
    for each in module.modules():
        if isinstance(each, torch.nn.modules.batchnorm._BatchNorm):
            each.running_mean.normal_(0, 0.1)
            each.running_var.uniform_(0.5, 1.5)
    module.eval()
    torch.backends.mha.set_fastpath_enabled(False)  # the older exporter does not know its operator
    arguments, names = tuple(inputs.values()), list(inputs)
    part = path.with_suffix(".part.onnx")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name.endswith(DYNAMO):
            torch.onnx.export(
                module, arguments, part, input_names=names, dynamo=True, external_data=False, verbose=False
            )
        else:
            torch.onnx.export(module, arguments, part, input_names=names, opset_version=OPSET, dynamo=False)
    part.replace(path)


if __name__ == "__main__":
    export(sys.argv[1], Path(sys.argv[2]))
